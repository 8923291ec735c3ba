/* The artifacts that compute: row-group norms and dequantized copies of Q8_0 tensors. */
#include <math.h>
#include <string.h>

#include "quants.h" /* half precision */
#include "repack.h"

/* ---- half precision ------------------------------------------------------------------------ */

/* Nearest half, ties to even; overflow gives infinity. All three cases are computed and one is
 * masked in, so that the loop over a block vectorizes. */
static uint16_t float_to_half(float value) {
    int32_t bits, sum; /* signed: SSE2 compares no unsigned integers */
    memcpy(&bits, &value, 4);
    int32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f; /* below 2^-14: the sum rounds to a multiple of 2^-24, a half's last bit */
    memcpy(&sum, &magnitude, 4);
    int32_t subnormal = sum - 0x3f000000;
    int32_t normal = (bits + 0xfff + ((bits >> 13) & 1) - 0x38000000) >> 13;
    int32_t special = 0x7c00 | (-(bits > 0x7f800000) & 0x200); /* 65520 and more, or a NaN */
    int32_t tiny = -(bits < 0x38800000), large = -(bits >= 0x477ff000);
    return (uint16_t)(sign | (tiny & subnormal) | (large & special) | (~tiny & ~large & normal));
}

static float block_scale(const uint8_t *block) { return ds4_f16_to_f32(ds4_load_u16(block)); }

/* ---- kinds ---------------------------------------------------------------------------------- */

/* Sum of squares of columns [from, to) of a row: exact integers inside a block, then one double
 * per block, in block order. */
static double square_sum(const uint8_t *row, int64_t from, int64_t to) {
    double sum = 0;
    while (from < to) {
        const uint8_t *block = row + from / 32 * 34;
        int64_t end = (from / 32 + 1) * 32 < to ? 32 : to - from / 32 * 32;
        int32_t squares = 0;
        for (int64_t k = from % 32; k < end; k++) {
            int32_t q = (int8_t)block[2 + k];
            squares += q * q;
        }
        double scale = block_scale(block);
        sum += scale * scale * squares;
        from = from / 32 * 32 + end;
    }
    return sum;
}

/* L2 norm over columns [g K / G, (g + 1) K / G) of each row. */
void ds4_q8_row_group_norms(const ds4_repack_shape *s, const uint8_t *src, int64_t first,
                            int64_t count, uint8_t *dst) {
    int64_t row_bytes = s->in_dim / 32 * 34;
    for (int64_t r = first; r < first + count; r++, src += row_bytes)
        for (int64_t g = 0; g < s->groups; g++) {
            int64_t from = g * s->in_dim / s->groups, to = (g + 1) * s->in_dim / s->groups;
            float norm = (float)sqrt(square_sum(src, from, to));
            memcpy(dst + 4 * (r * s->groups + g), &norm, 4);
        }
}

void ds4_q8_to_f16(const ds4_repack_shape *s, const uint8_t *src, int64_t first, int64_t count,
                   uint8_t *dst) {
    int64_t per_row = s->in_dim / 32;
    for (int64_t b = first * per_row; b < (first + count) * per_row; b++, src += 34) {
        float scale = block_scale(src);
        uint16_t out[32];
        for (int i = 0; i < 32; i++) out[i] = float_to_half(scale * (int8_t)src[2 + i]);
        memcpy(dst + 64 * b, out, 64);
    }
}

void ds4_q8_to_f32(const ds4_repack_shape *s, const uint8_t *src, int64_t first, int64_t count,
                   uint8_t *dst) {
    int64_t per_row = s->in_dim / 32;
    for (int64_t b = first * per_row; b < (first + count) * per_row; b++, src += 34) {
        float scale = block_scale(src), out[32];
        for (int i = 0; i < 32; i++) out[i] = scale * (int8_t)src[2 + i];
        memcpy(dst + 128 * b, out, 128);
    }
}
