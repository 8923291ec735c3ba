/* Products of 2 x 8 by 8 x 2 signed bytes: what both I8MM kernels share. Include only from *_i8mm.c.
 *
 * vmmlaq_s32 adds to acc[i][j] the product of row i of its second operand and row j of its third, eight
 * bytes each. Here rows i are two activation columns, rows j two rows of weights; so a vector of sums is
 * column 0 of rows 0 and 1, then column 1 of them. Eight rows of weights are four such pairs.
 */
#ifndef DS4_I8MM_H
#define DS4_I8MM_H

#include "neon.h"

#define PAIRS 4   /* of rows */
#define MANY 128  /* columns whose float sums wait while the next weights are unpacked */

/* Columns from which pairs of them pay: fewer go to the NEON kernel, which takes fewer instructions. */
DS4_INLINE int least_columns(int x8) { return x8 ? 10 : 3; }

DS4_INLINE int8x16_t zip1_dwords(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

DS4_INLINE int8x16_t zip2_dwords(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

/* First halves of both, and second halves. */
DS4_INLINE int8x16_t zip1_halves(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

DS4_INLINE int8x16_t zip2_halves(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

/* The columns of a tile: two for each pair; one past the end repeats the last one. */
DS4_INLINE void tile_columns(int pairs, const char *acts, size_t act_stride, int64_t n,
                             const char **x) {
    for (int c = 0; c < 2 * pairs; c++) x[c] = acts + (size_t)(c < n ? c : n - 1) * act_stride;
}

/* Sixteen weights of eight rows times sixteen activations of each pair of columns. */
DS4_INLINE void add_sixteen(int pairs, const int8x16_t (*w)[PAIRS], const char *const *x, int64_t at,
                            int32x4_t (*sum)[PAIRS]) {
#pragma GCC unroll 4
    for (int c = 0; c < pairs; c++) {
        const int8x16_t a = vld1q_s8((const int8_t *)x[2 * c] + at);
        const int8x16_t b = vld1q_s8((const int8_t *)x[2 * c + 1] + at);
        const int8x16_t first = zip1_halves(a, b), second = zip2_halves(a, b);
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; p++)
            sum[c][p] = vmmlaq_s32(vmmlaq_s32(sum[c][p], first, w[0][p]), second, w[1][p]);
    }
}

/* A number of each of two columns, beside their sums. */
DS4_INLINE float32x4_t of_columns(const float *a, const float *b) {
    return vcombine_f32(vld1_dup_f32(a), vld1_dup_f32(b));
}

/* Numbers of four rows, beside the sums of both pairs of them. */
DS4_INLINE void of_rows(float32x4_t rows, float32x4_t *pair) {
    const float64x2_t v = vreinterpretq_f64_f32(rows);
    pair[0] = vreinterpretq_f32_f64(vzip1q_f64(v, v));
    pair[1] = vreinterpretq_f32_f64(vzip2q_f64(v, v));
}

/* Results of `count` rows and n columns. */
DS4_INLINE void store_columns(const float32x4_t (*acc)[PAIRS], int64_t count, int64_t n, float *y,
                              int64_t ldy) {
    for (int64_t c = 0; c < n; c++) {
        float out[8];
        for (int p = 0; p < PAIRS; p++) {
            const float32x4_t v = acc[c / 2][p];
            vst1_f32(out + 2 * p, c % 2 ? vget_high_f32(v) : vget_low_f32(v));
        }
        memcpy(y + c * ldy, out, (size_t)count * sizeof(float));
    }
}

#endif
