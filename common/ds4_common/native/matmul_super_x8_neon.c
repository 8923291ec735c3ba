/* Q2_K .. Q6_K in X8 groups, NEON: one column and many.
 *
 * Eight rows at a time, one lane per row, four activations being broadcast by the dot product
 * instruction itself. One column multiplies values straight from the group. More of them share an
 * unpacked block; there Q2_K and Q3_K are multiplied with their sub-scales, which fits a byte, so a
 * column's products need no scaling. All of a block's sums are exact integers; one fmaf per block and
 * term follows, in block order.
 */
#if defined(__ARM_FEATURE_DOTPROD)
#include "super_x8_neon.h"

#define MANY 64 /* columns whose float sums wait while a block is unpacked */

/* The float step of four rows. sums: where the type has minima, of sub-minima times activations. */
DS4_INLINE float32x4_t finish(uint32_t type, const uint8_t *group, int h, float dx, int32x4_t isum,
                              int32x4_t minsum, float32x4_t acc) {
    acc = vfmaq_f32(acc, vmulq_n_f32(neon_half4(group + 8 * h), dx), vcvtq_f32_s32(isum));
    if (!has_minima(type)) return acc;
    float32x4_t m = vmulq_n_f32(vnegq_f32(neon_half4(group + 16 + 8 * h)), dx);
    return vfmaq_f32(acc, m, vcvtq_f32_s32(minsum));
}

/* ---- one column ------------------------------------------------------------------------------ */

/* `parts` runs of 32 weights share their bytes: the quarters of a half, or the nibbles of 64. */
DS4_INLINE int parts_of(uint32_t type) { return scales_per_32(type) ? 2 : 4; }

/* Products of weights 32 i + 16 odd .. + 15 for every i of a chunk, added to dot[part]. */
DS4_INLINE void add_sixteens(uint32_t type, const uint8_t *group, int chunk, int odd, int h,
                             const int8_t *q, int32x4_t *dot) {
    const int parts = parts_of(type);
    int8x16_t x[4];
#pragma GCC unroll 4
    for (int part = 0; part < parts; part++)
        x[part] = vld1q_s8(q + 32 * (parts * chunk + part) + 16 * odd);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            int8x16_t w = x8_values(type, group, parts * chunk + part, 4 * odd + j, h);
            dot[part] = dot_lane(dot[part], w, x[part], j);
        }
}

/* A block's integer sum of four rows. */
DS4_INLINE int32x4_t block_sum(uint32_t type, const uint8_t *group, int h, const x8_scales *scales,
                               const int8_t *q, split_sums sums) {
    const int parts = parts_of(type), per_32 = scales_per_32(type);
    int32x4_t isum = vdupq_n_s32(0);
    if (stored_offset(type))
        isum = vmulq_n_s32(times_sums(type, scales->s, sums), -stored_offset(type));
#pragma GCC unroll 4
    for (int chunk = 0; chunk < 8 / parts; chunk++) {
        int32x4_t dot[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            in_order();
            add_sixteens(type, group, chunk, odd, h, q, dot);
            if (per_32 && !odd) continue; /* the other sixteen has the same scale */
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) {
                const int sub = 2 * (parts * chunk + part) + odd;
                isum = vmlaq_s32(isum, dot[part], x8_scale(type, scales, sub));
                dot[part] = vdupq_n_s32(0);
            }
        }
    }
    return isum;
}

DS4_INLINE void one_column(uint32_t type, const uint8_t *group, int64_t blocks, const char *act,
                           float *y) {
    const ds4_act256 x = ds4_act256_view(act, DS4_SUPER * blocks);
    float32x4_t acc[2] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    for (int64_t b = 0; b < blocks; b++, group += DS4_X8_ROWS * x8_block_bytes(type)) {
        const split_sums sums = load_sums(type, x.sums + 16 * b);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const x8_scales scales = x8_load_scales(type, group, h);
            int32x4_t isum = block_sum(type, group, h, &scales, x.q + 256 * b, sums);
            int32x4_t minsum = isum;
            if (has_minima(type)) minsum = times_sums(type, scales.m, sums);
            acc[h] = finish(type, group, h, x.d[b], isum, minsum, acc[h]);
        }
    }
    vst1q_f32(y, acc[0]);
    vst1q_f32(y + 4, acc[1]);
}

/* ---- more columns ---------------------------------------------------------------------------- */

/* One block of eight rows: w[8 i + j][h] holds weights 32 i + 4 j .. + 3 of rows 4 h .. 4 h + 3. */
typedef struct {
    int8x16_t w[64][2];
    int32x4_t scale[16][2]; /* of the sixteen, or, every other, of the thirty-two */
    x8_scales bytes[2];
    const uint8_t *group;
} super_panel;

DS4_INLINE void fill(uint32_t type, const uint8_t *group, super_panel *p) {
    const int8x16_t offset = vdupq_n_s8((int8_t)stored_offset(type));
    p->group = group;
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        p->bytes[h] = x8_load_scales(type, group, h);
#pragma GCC unroll 16
        for (int sub = 0; sub < 16; sub++) {
            int8x16_t scale = x8_scale_bytes(type, &p->bytes[h], sub);
            if (type == DS4_Q3_K) scale = vnegq_s8(scale);
            if (!scaled_bytes(type)) p->scale[sub][h] = x8_scale(type, &p->bytes[h], sub);
#pragma GCC unroll 4
            for (int j = 4 * (sub % 2); j < 4 * (sub % 2) + 4; j++) {
                int8x16_t v = x8_values(type, group, sub / 2, j, h);
                if (stored_offset(type)) v = vsubq_s8(v, offset);
                p->w[8 * (sub / 2) + j][h] = scaled_bytes(type) ? vmulq_s8(v, scale) : v;
            }
        }
    }
}

/* Block b of eight rows times `columns` columns. */
DS4_INLINE void add_columns(uint32_t type, const super_panel *p, int columns, const char *acts,
                            size_t act_stride, int64_t blocks, int64_t b, float32x4_t (*acc)[2]) {
    const int steps = scaled_bytes(type) ? 16 : scales_per_32(type) ? 2 : 1; /* sixteens per scale */
    int32x4_t isum[4][2];
    for (int c = 0; c < columns; c++) isum[c][0] = isum[c][1] = vdupq_n_s32(0);
    for (int sub = 0; sub < 16; sub += steps) {
        int32x4_t dot[4][2];
        for (int c = 0; c < columns; c++)
            for (int h = 0; h < 2; h++) dot[c][h] = scaled_bytes(type) ? isum[c][h] : vdupq_n_s32(0);
        for (int s = sub; s < sub + steps; s++)
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                const int8_t *q = (const int8_t *)acts + (size_t)c * act_stride + 256 * b;
                const int8x16_t x = vld1q_s8(q + 16 * s);
                const int8x16_t(*w)[2] = p->w + 4 * s;
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++)
                    dot[c][h] = dot4(dot[c][h], w[0][h], w[1][h], w[2][h], w[3][h], x);
            }
        for (int c = 0; c < columns; c++)
            for (int h = 0; h < 2; h++)
                isum[c][h] = scaled_bytes(type) ? dot[c][h]
                                                : vmlaq_s32(isum[c][h], dot[c][h], p->scale[sub][h]);
    }
    for (int c = 0; c < columns; c++) {
        const ds4_act256 x = ds4_act256_view(acts + (size_t)c * act_stride, DS4_SUPER * blocks);
        const split_sums sums = load_sums(type, x.sums + 16 * b);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            int32x4_t minsum = isum[c][h];
            if (has_minima(type)) minsum = times_sums(type, p->bytes[h].m, sums);
            if (type == DS4_Q3_K) isum[c][h] = vnegq_s32(isum[c][h]);
            acc[c][h] = finish(type, p->group, h, x.d[b], isum[c][h], minsum, acc[c][h]);
        }
    }
}

DS4_INLINE void more_columns(uint32_t type, const uint8_t *group, int64_t blocks, const char *acts,
                             size_t act_stride, int64_t n, float *y, int64_t ldy) {
    super_panel panel;
    float32x4_t acc[MANY][2];
    for (int64_t c = 0; c < n; c++) acc[c][0] = acc[c][1] = vdupq_n_f32(0.0f);
    for (int64_t b = 0; b < blocks; b++, group += DS4_X8_ROWS * x8_block_bytes(type)) {
        fill(type, group, &panel);
        int64_t c = 0;
        const char *x = acts; /* constant column counts keep the sums in registers */
        for (; c + 4 <= n; c += 4, x += 4 * act_stride)
            add_columns(type, &panel, 4, x, act_stride, blocks, b, acc + c);
        for (; c + 2 <= n; c += 2, x += 2 * act_stride)
            add_columns(type, &panel, 2, x, act_stride, blocks, b, acc + c);
        if (c < n) add_columns(type, &panel, 1, x, act_stride, blocks, b, acc + c);
    }
    for (int64_t c = 0; c < n; c++) {
        vst1q_f32(y + c * ldy, acc[c][0]);
        vst1q_f32(y + c * ldy + 4, acc[c][1]);
    }
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void rectangle(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                          const void *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const int64_t blocks = w->cols / DS4_SUPER, row_bytes = blocks * x8_block_bytes(type);
    for (int64_t r = row0; r < row1; r += DS4_X8_ROWS) {
        const uint8_t *group = (const uint8_t *)w->data + r * row_bytes;
        for (int64_t c = 0, count; c < n; c += count) {
            const char *x = (const char *)acts + (size_t)c * act_stride;
            count = n - c < MANY ? n - c : MANY;
            if (count == 1)
                one_column(type, group, blocks, x, y + c * ldy + r);
            else
                more_columns(type, group, blocks, x, act_stride, count, y + c * ldy + r, ldy);
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

ds4_matmul_fn ds4_matmul_neon_super_x8(uint32_t type) {
    switch (type) {
    case DS4_Q2_K: return q2_k;
    case DS4_Q3_K: return q3_k;
    case DS4_Q4_K: return q4_k;
    case DS4_Q5_K: return q5_k;
    case DS4_Q6_K: return q6_k;
    default: return NULL;
    }
}
#else
typedef int ds4_matmul_super_x8_neon_is_for_arm;
#endif
