/* Activation quantizer, NEON: same bits as act.c (tests compare them). */
#if defined(__ARM_FEATURE_DOTPROD)
#include "neon.h"

/* Bits of the largest |x| of n values; they order like the numbers, NaN above infinity. */
DS4_INLINE uint32_t top_bits(const float *x, int n) {
    uint32x4_t top = vdupq_n_u32(0);
    for (int i = 0; i < n; i += 4)
        top = vmaxq_u32(top, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
    return vmaxvq_u32(top);
}

/* Scale of a block and the factor it is multiplied with; factor 0 for a zero or broken block. */
DS4_INLINE float block_scale(uint32_t top, float *factor) {
    float amax;
    memcpy(&amax, &top, 4);
    *factor = 0.0f;
    if (top >= 0x7f800000u) return __builtin_nanf("");
    if (amax < DS4_ACT_TINY) return 0.0f;
    *factor = 127.0f / amax;
    return amax / 127.0f;
}

/* Sixteen floats to int8, ties to even; zeros for factor 0, whatever the floats are. */
DS4_INLINE int8x16_t quantize16(const float *x, float factor) {
    int16x4_t part[4];
    if (factor == 0.0f) return vdupq_n_s8(0);
    for (int i = 0; i < 4; i++)
        part[i] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4 * i), factor)));
    return vcombine_s8(vmovn_s16(vcombine_s16(part[0], part[1])),
                       vmovn_s16(vcombine_s16(part[2], part[3])));
}

static void quantize_q8_32(const float *x, int64_t cols, void *out) {
    ds4_act32 view = ds4_act32_view(out, cols);
    float *d = (float *)view.d, *s = (float *)view.s;
    int32_t *sums = (int32_t *)view.sum;
    int8_t *q = out;
    for (int64_t b = 0; b < cols / 32; b++, x += 32, q += 32) {
        float factor;
        d[b] = block_scale(top_bits(x, 32), &factor);
        int8x16_t low = quantize16(x, factor), high = quantize16(x + 16, factor);
        vst1q_s8(q, low);
        vst1q_s8(q + 16, high);
        sums[b] = vaddlvq_s8(low) + vaddlvq_s8(high);
        s[b] = d[b] * (float)sums[b];
    }
}

static void quantize_q8_256(const float *x, int64_t cols, void *out) {
    ds4_act256 view = ds4_act256_view(out, cols);
    int16_t *sums = (int16_t *)view.sums;
    float *d = (float *)view.d;
    int8_t *q = out;
    for (int64_t b = 0; b < cols / DS4_SUPER; b++) {
        float factor;
        d[b] = block_scale(top_bits(x, DS4_SUPER), &factor);
        for (int sub = 0; sub < 16; sub++, x += 16, q += 16) {
            int8x16_t values = quantize16(x, factor);
            vst1q_s8(q, values);
            sums[16 * b + ds4_sum_place(sub)] = vaddlvq_s8(values);
        }
    }
}

void ds4_act_quantize_neon(int format, const float *x, int64_t cols, void *out) {
    if (format == DS4_ACT_Q8_32)
        quantize_q8_32(x, cols, out);
    else
        quantize_q8_256(x, cols, out);
}
#else
typedef int ds4_act_neon_is_for_arm;
#endif
