/* Activation columns: sizes, the scalar quantizer, and the choice of instruction set.
 *
 * Owns: the exact rounding of an activation block. Per block of 32 or 256: amax = max |x|,
 * d = amax / 127, q = round-to-nearest-even(x * (127 / amax)), so |q| <= 127. A block with a NaN or
 * an infinity gets d = NaN and q = 0: the damage shows in every output instead of hiding.
 */
#include <math.h>

#include "quants.h"

size_t ds4_act_bytes(int format, int64_t cols) {
    if (cols <= 0) return 0;
    size_t n = (size_t)cols;
    switch (format) {
    case DS4_ACT_F32: return ds4_round64(4 * n);
    case DS4_ACT_Q8_32: return n % 32 ? 0 : ds4_round64(ds4_round64(n) + 12 * (n / 32));
    case DS4_ACT_Q8_256: return n % 256 ? 0 : ds4_round64(n + 36 * (n / 256));
    default: return 0;
    }
}

int ds4_act_format(uint32_t type) {
    const ds4_quant *quant = ds4_quant_find(type);
    return quant ? quant->act : -1;
}

/* Nearest-even without the library: |v| <= 127 is far below 2^22. */
static int8_t round_even(float v) { return (int8_t)(int32_t)((v + 0x1.8p23f) - 0x1.8p23f); }

/* Quantizes n values; returns the scale. Bits of |x| order like the numbers, NaN above infinity. */
static float quantize_block(const float *x, int n, int8_t *q) {
    uint32_t top = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        if (bits > top) top = bits;
    }
    float amax;
    memcpy(&amax, &top, 4);
    if (top >= 0x7f800000u || amax < DS4_ACT_TINY) {
        for (int i = 0; i < n; i++) q[i] = 0;
        return top >= 0x7f800000u ? NAN : 0.0f;
    }
    float inverse = 127.0f / amax;
    for (int i = 0; i < n; i++) q[i] = round_even(x[i] * inverse);
    return amax / 127.0f;
}

void ds4_act_quantize_scalar(int format, const float *x, int64_t cols, void *out) {
    int8_t *q = out;
    if (format == DS4_ACT_F32) {
        size_t used = 4 * (size_t)cols;
        memmove(out, x, used); /* slots of a damaged image may overlap */
        memset((char *)out + used, 0, ds4_round64(used) - used);
    } else if (format == DS4_ACT_Q8_32) {
        ds4_act32 view = ds4_act32_view(out, cols);
        float *d = (float *)view.d, *s = (float *)view.s;
        int32_t *sums = (int32_t *)view.sum;
        for (int64_t b = 0; b < cols / 32; b++) {
            d[b] = quantize_block(x + 32 * b, 32, q + 32 * b);
            sums[b] = 0;
            for (int i = 0; i < 32; i++) sums[b] += q[32 * b + i];
            s[b] = d[b] * (float)sums[b];
        }
    } else if (format == DS4_ACT_Q8_256) {
        ds4_act256 view = ds4_act256_view(out, cols);
        int16_t *sums = (int16_t *)view.sums;
        float *d = (float *)view.d;
        for (int64_t b = 0; b < cols / 256; b++) {
            d[b] = quantize_block(x + 256 * b, 256, q + 256 * b);
            for (int sub = 0; sub < 16; sub++) {
                int sum = 0;
                for (int i = 0; i < 16; i++) sum += q[256 * b + 16 * sub + i];
                sums[16 * b + ds4_sum_place(sub)] = (int16_t)sum;
            }
        }
    }
}

void ds4_act_quantize(int format, const float *x, int64_t cols, void *out, int isa) {
#if defined(__x86_64__)
    if (isa != DS4_ISA_SCALAR && format != DS4_ACT_F32) {
        ds4_act_quantize_avx2(format, x, cols, out);
        return;
    }
#elif defined(__aarch64__)
    if (isa != DS4_ISA_SCALAR && format != DS4_ACT_F32) {
        ds4_act_quantize_neon(format, x, cols, out);
        return;
    }
#endif
    (void)isa;
    ds4_act_quantize_scalar(format, x, cols, out);
}
