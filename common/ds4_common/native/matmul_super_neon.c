/* K, IQ and TQ types (blocks of 256), NEON, from raw and aligned blocks.
 *
 * One row at a time, so memory is read in order; each block is unpacked to signed bytes once and
 * multiplied with up to COLUMNS columns. All of a block's sums are exact integers; one fmaf per block and
 * term follows, in block order.
 */
#if defined(__ARM_FEATURE_DOTPROD)
#include <math.h>

#include "super_block_neon.h"

#define COLUMNS 64 /* that share an unpacked block */

/* ---- one block times one column -------------------------------------------------------------- */

DS4_INLINE int32x4_t scaled_lane(int32x4_t acc, int32x4_t v, int32x4_t scales, int lane) {
    switch (lane) {
    case 0: return vmlaq_laneq_s32(acc, v, scales, 0);
    case 1: return vmlaq_laneq_s32(acc, v, scales, 1);
    case 2: return vmlaq_laneq_s32(acc, v, scales, 2);
    default: return vmlaq_laneq_s32(acc, v, scales, 3);
    }
}

/* The scales of a block as int32. */
DS4_INLINE void widen_scales(const super_block *s, int32x4_t *scales) {
    const int16x8_t low = vld1q_s16(s->sc), high = vld1q_s16(s->sc + 8);
    scales[0] = vmovl_s16(vget_low_s16(low));
    scales[1] = vmovl_high_s16(low);
    scales[2] = vmovl_s16(vget_low_s16(high));
    scales[3] = vmovl_high_s16(high);
}

DS4_INLINE float add_block(uint32_t type, const super_block *s, const int32x4_t *scales,
                           ds4_act256 x, int64_t b, float acc) {
    const int8_t *q = x.q + 256 * b;
    int32x4_t isum = vdupq_n_s32(0);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        int32x4_t dot = vdotq_s32(vdupq_n_s32(0), s->w[i], vld1q_s8(q + 16 * i));
        isum = scaled_lane(isum, dot, scales[i / 4], i % 4);
    }
    acc = fmaf(s->d * x.d[b], (float)vaddvq_s32(isum), acc);
    if (!has_minima(type)) return acc;
    const int16x8_t m0 = vld1q_s16(s->mn), m1 = vld1q_s16(s->mn + 8);
    const int16x8_t v0 = vld1q_s16(x.sums + 16 * b), v1 = vld1q_s16(x.sums + 16 * b + 8);
    int32x4_t minsum = vmull_s16(vget_low_s16(m0), vget_low_s16(v0));
    minsum = vmlal_high_s16(minsum, m0, v0);
    minsum = vmlal_s16(minsum, vget_low_s16(m1), vget_low_s16(v1));
    minsum = vmlal_high_s16(minsum, m1, v1);
    return fmaf(s->m * x.d[b], (float)vaddvq_s32(minsum), acc);
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void one_row(uint32_t type, const ds4_quant *quant, const ds4_weight *w, int64_t r,
                        const char *acts, size_t act_stride, int columns, float *y, int64_t ldy) {
    const int64_t blocks = w->cols / DS4_SUPER;
    float acc[COLUMNS];
    for (int c = 0; c < columns; c++) acc[c] = 0.0f;
    for (int64_t b = 0; b < blocks; b++) {
        super_block s;
        int32x4_t scales[4];
        load_block(type, quant, w, r, b, &s);
        widen_scales(&s, scales);
        for (int c = 0; c < columns; c++) {
            ds4_act256 x = ds4_act256_view(acts + (size_t)c * act_stride, DS4_SUPER * blocks);
            acc[c] = add_block(type, &s, scales, x, b, acc[c]);
        }
    }
    for (int c = 0; c < columns; c++) y[c * ldy] = acc[c];
}

DS4_INLINE void rectangle(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                          const void *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const ds4_quant *quant = ds4_quant_find(w->type);
    for (int64_t r = row0; r < row1; r++) {
        for (int64_t c = 0; c < n; c += COLUMNS) {
            int columns = n - c < COLUMNS ? (int)(n - c) : COLUMNS;
            one_row(type, quant, w, r, (const char *)acts + (size_t)c * act_stride, act_stride,
                    columns, y + c * ldy + r, ldy);
        }
    }
}

#define KERNEL(name, type)                                                                         \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,           \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                       \
        rectangle(type, w, row0, row1, acts, act_stride, n, y, ldy);                              \
    }

KERNEL(q2_k, DS4_Q2_K)
KERNEL(q3_k, DS4_Q3_K)
KERNEL(q4_k, DS4_Q4_K)
KERNEL(q5_k, DS4_Q5_K)
KERNEL(q6_k, DS4_Q6_K)
KERNEL(iq4_xs, DS4_IQ4_XS)
KERNEL(iq2_xxs, DS4_IQ2_XXS)
KERNEL(iq2_xs, DS4_IQ2_XS)
KERNEL(iq2_s, DS4_IQ2_S)
KERNEL(iq3_xxs, DS4_IQ3_XXS)
KERNEL(iq3_s, DS4_IQ3_S)
KERNEL(iq1_s, DS4_IQ1_S)
KERNEL(iq1_m, DS4_IQ1_M)
KERNEL(tq1_0, DS4_TQ1_0)
KERNEL(tq2_0, DS4_TQ2_0)

ds4_matmul_fn ds4_matmul_neon_super(uint32_t type, uint32_t layout) {
    if (layout == DS4_LAYOUT_X8) return ds4_matmul_neon_super_x8(type);
    switch (type) {
    case DS4_Q2_K: return q2_k;
    case DS4_Q3_K: return q3_k;
    case DS4_Q4_K: return q4_k;
    case DS4_Q5_K: return q5_k;
    case DS4_Q6_K: return q6_k;
    case DS4_IQ4_XS: return iq4_xs;
    case DS4_IQ2_XXS: return iq2_xxs;
    case DS4_IQ2_XS: return iq2_xs;
    case DS4_IQ2_S: return iq2_s;
    case DS4_IQ3_XXS: return iq3_xxs;
    case DS4_IQ3_S: return iq3_s;
    case DS4_IQ1_S: return iq1_s;
    case DS4_IQ1_M: return iq1_m;
    case DS4_TQ1_0: return tq1_0;
    case DS4_TQ2_0: return tq2_0;
    default: return NULL;
    }
}
#else
typedef int ds4_matmul_super_neon_is_for_arm;
#endif
