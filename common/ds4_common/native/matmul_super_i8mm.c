/* K, IQ and TQ types (blocks of 256), I8MM: X8, raw and aligned, from a few columns on.
 *
 * Eight rows at a time; a block is unpacked into pairs of rows once and multiplied with all columns, two
 * by two. Q2_K and Q3_K are unpacked multiplied with their sub-scales, which fits a byte; sums of the
 * other types meet their scale after sixteen or thirty-two weights. Minima are one more product, with
 * sums of activations. Fewer columns go to the NEON kernel.
 */
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "i8mm.h"
#include "kernel_list.h"
#include "super_block_neon.h"

/* w[2 s + i][p]: weights 16 s + 8 i .. + 7 of the rows of pair p, mn[i][p]: minima 8 i .. 8 i + 7 of
 * them; scale, d and m beside the sums. */
typedef struct {
    int8x16_t w[32][PAIRS], mn[2][PAIRS];
    int32x4_t scale[16][PAIRS];
    float32x4_t d[PAIRS], m[PAIRS];
} super_panel;

/* Sixteens of weights under one scale. */
DS4_INLINE int sixteens_per_scale(uint32_t type) {
    switch (type) {
    case DS4_Q2_K: /* multiplied already, or all scales being one */
    case DS4_Q3_K:
    case DS4_TQ1_0:
    case DS4_TQ2_0: return 16;
    case DS4_Q4_K:
    case DS4_Q5_K:
    case DS4_IQ4_XS:
    case DS4_IQ2_XXS:
    case DS4_IQ3_XXS:
    case DS4_IQ3_S:
    case DS4_IQ1_S: return 2;
    default: return 1;
    }
}

/* Whether a block's products need no scaling. */
DS4_INLINE int unscaled(uint32_t type) { return sixteens_per_scale(type) == 16; }

/* ---- unpacking ------------------------------------------------------------------------------- */

DS4_INLINE void fill_x8_weights(uint32_t type, const uint8_t *group, int h, const x8_scales *scales,
                                super_panel *t) {
    const int8x16_t offset = vdupq_n_s8((int8_t)stored_offset(type));
#pragma GCC unroll 16
    for (int sub = 0; sub < 16; sub++) {
        int8x16_t scale = x8_scale_bytes(type, scales, sub), v[4];
        if (type == DS4_Q3_K) scale = vnegq_s8(scale);
        in_order();
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            v[j] = x8_values(type, group, sub / 2, 4 * (sub % 2) + j, h);
            if (stored_offset(type)) v[j] = vsubq_s8(v[j], offset);
            if (scaled_bytes(type)) v[j] = vmulq_s8(v[j], scale);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            t->w[2 * sub + i][2 * h] = zip1_dwords(v[2 * i], v[2 * i + 1]);
            t->w[2 * sub + i][2 * h + 1] = zip2_dwords(v[2 * i], v[2 * i + 1]);
        }
        if (scaled_bytes(type)) continue;
        const int8x16_t wide = vreinterpretq_s8_s32(x8_scale(type, scales, sub));
        t->scale[sub][2 * h] = vreinterpretq_s32_s8(zip1_halves(wide, wide));
        t->scale[sub][2 * h + 1] = vreinterpretq_s32_s8(zip2_halves(wide, wide));
    }
}

DS4_INLINE void fill_x8(uint32_t type, const uint8_t *group, super_panel *t) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const x8_scales scales = x8_load_scales(type, group, h);
        fill_x8_weights(type, group, h, &scales, t);
        of_rows(neon_half4(group + 8 * h), t->d + 2 * h);
        if (!has_minima(type)) continue;
        of_rows(vnegq_f32(neon_half4(group + 16 + 8 * h)), t->m + 2 * h);
        for (int i = 0; i < (scales_per_32(type) ? 1 : 2); i++) {
            t->mn[i][2 * h] = zip1_dwords(scales.m[2 * i], scales.m[2 * i + 1]);
            t->mn[i][2 * h + 1] = zip2_dwords(scales.m[2 * i], scales.m[2 * i + 1]);
        }
    }
}

/* The scales of a pair of rows as int32, beside the sums of two columns. */
DS4_INLINE void pair_scales(const super_block *s, int p, super_panel *t) {
#pragma GCC unroll 2
    for (int i = 0; i < 16; i += 8) {
        const int16x8_t a = vld1q_s16(s[0].sc + i), b = vld1q_s16(s[1].sc + i);
        const int16x8_t both[2] = {vzip1q_s16(a, b), vzip2q_s16(a, b)};
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) { /* scales i + 2 k and i + 2 k + 1 of both rows */
            const int16x8_t v = both[k / 2];
            const int8x16_t two = vreinterpretq_s8_s32(
                vmovl_s16(k % 2 ? vget_high_s16(v) : vget_low_s16(v)));
            t->scale[i + 2 * k][p] = vreinterpretq_s32_s8(zip1_halves(two, two));
            t->scale[i + 2 * k + 1][p] = vreinterpretq_s32_s8(zip2_halves(two, two));
        }
    }
}

DS4_INLINE void pair_minima(uint32_t type, const super_block *s, int p, super_panel *t) {
    int8x16_t mn[2];
    for (int i = 0; i < 2; i++) { /* in order; where there are eight, both halves are the same */
        int16x8_t first = vld1q_s16(s[i].mn), second = vld1q_s16(s[i].mn + 8);
        if (!scales_per_32(type)) {
            const int16x8_t odd = second;
            second = vzip2q_s16(first, odd);
            first = vzip1q_s16(first, odd);
        }
        mn[i] = vcombine_s8(vmovn_s16(first), vmovn_s16(second));
    }
    t->mn[0][p] = zip1_halves(mn[0], mn[1]);
    t->mn[1][p] = zip2_halves(mn[0], mn[1]);
    const float32x2_t m = {s[0].m, s[1].m};
    t->m[p] = vcombine_f32(m, m);
}

/* Block b of rows r .. r + 7, of which `count` exist: the last one is repeated. */
DS4_INLINE void fill_raw(uint32_t type, const ds4_quant *quant, const ds4_weight *w, int64_t r,
                         int64_t count, int64_t b, super_panel *t) {
    for (int p = 0; p < PAIRS; p++) {
        super_block s[2];
        for (int i = 0; i < 2; i++)
            load_block(type, quant, w, r + (2 * p + i < count ? 2 * p + i : count - 1), b, s + i);
#pragma GCC unroll 16
        for (int sub = 0; sub < 16; sub++) {
            int8x16_t v[2] = {s[0].w[sub], s[1].w[sub]};
            for (int i = 0; scaled_bytes(type) && i < 2; i++) {
                const int scale = type == DS4_Q3_K ? -s[i].sc[sub] : s[i].sc[sub];
                v[i] = vmulq_s8(v[i], vdupq_n_s8((int8_t)scale));
            }
            t->w[2 * sub][p] = zip1_halves(v[0], v[1]);
            t->w[2 * sub + 1][p] = zip2_halves(v[0], v[1]);
        }
        const float32x2_t d = {s[0].d, s[1].d};
        t->d[p] = vcombine_f32(d, d);
        if (!unscaled(type)) pair_scales(s, p, t);
        if (has_minima(type)) pair_minima(type, s, p, t);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* The sums of sub-minima times activations of a pair of columns. */
DS4_INLINE void min_sums(uint32_t type, const super_panel *t, const int16_t *a, const int16_t *b,
                         int32x4_t *out) {
    const split_sums x = load_sums(type, a), y = load_sums(type, b);
    const int8x16_t low = zip1_halves(x.low, y.low), high = zip1_halves(x.high, y.high);
    const int8x16_t low2 = zip2_halves(x.low, y.low), high2 = zip2_halves(x.high, y.high);
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++) {
        int32x4_t above = vmmlaq_s32(vdupq_n_s32(0), high, t->mn[0][p]);
        if (!scales_per_32(type)) above = vmmlaq_s32(above, high2, t->mn[1][p]);
        out[p] = vmmlaq_s32(vshlq_n_s32(above, 7), low, t->mn[0][p]);
        if (!scales_per_32(type)) out[p] = vmmlaq_s32(out[p], low2, t->mn[1][p]);
    }
}

/* Block b of eight rows times n columns, at most two for each pair. */
DS4_INLINE void add_columns(uint32_t type, const super_panel *t, int pairs, int64_t cols, int64_t b,
                            const char *acts, size_t act_stride, int64_t n,
                            float32x4_t (*acc)[PAIRS]) {
    const int steps = sixteens_per_scale(type);
    const char *x[8];
    int32x4_t isum[4][PAIRS];
    tile_columns(pairs, acts, act_stride, n, x);
    for (int c = 0; c < pairs; c++)
        for (int p = 0; p < PAIRS; p++) isum[c][p] = vdupq_n_s32(0);
    for (int sub = 0; sub < 16; sub += steps) {
        if (unscaled(type)) {
            for (int s = 0; s < 16; s++) add_sixteen(pairs, t->w + 2 * s, x, 256 * b + 16 * s, isum);
            continue;
        }
        int32x4_t dot[4][PAIRS];
        for (int c = 0; c < pairs; c++)
            for (int p = 0; p < PAIRS; p++) dot[c][p] = vdupq_n_s32(0);
        for (int s = sub; s < sub + steps; s++)
            add_sixteen(pairs, t->w + 2 * s, x, 256 * b + 16 * s, dot);
        for (int c = 0; c < pairs; c++)
            for (int p = 0; p < PAIRS; p++)
                isum[c][p] = vmlaq_s32(isum[c][p], dot[c][p], t->scale[sub][p]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < pairs; c++) {
        const ds4_act256 v = ds4_act256_view(x[2 * c], cols), v1 = ds4_act256_view(x[2 * c + 1], cols);
        const float32x4_t dx = of_columns(v.d + b, v1.d + b);
        int32x4_t mins[PAIRS];
        if (has_minima(type)) min_sums(type, t, v.sums + 16 * b, v1.sums + 16 * b, mins);
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; p++) {
            if (type == DS4_Q3_K) isum[c][p] = vnegq_s32(isum[c][p]);
            acc[c][p] = vfmaq_f32(acc[c][p], vmulq_f32(t->d[p], dx), vcvtq_f32_s32(isum[c][p]));
            if (has_minima(type))
                acc[c][p] = vfmaq_f32(acc[c][p], vmulq_f32(t->m[p], dx), vcvtq_f32_s32(mins[p]));
        }
    }
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void eight_rows(uint32_t type, int x8, const ds4_quant *quant, const ds4_weight *w,
                           int64_t r, int64_t count, const char *acts, size_t act_stride, int64_t n,
                           float *y, int64_t ldy) {
    const int64_t blocks = w->cols / DS4_SUPER;
    const uint8_t *group = (const uint8_t *)w->data + r * blocks * x8_block_bytes(type);
    super_panel panel;
    float32x4_t acc[MANY / 2][PAIRS];
    for (int64_t c = 0; c < (n + 1) / 2; c++)
        for (int p = 0; p < PAIRS; p++) acc[c][p] = vdupq_n_f32(0.0f);
    for (int64_t b = 0; b < blocks; b++) {
        if (x8)
            fill_x8(type, group + b * DS4_X8_ROWS * x8_block_bytes(type), &panel);
        else
            fill_raw(type, quant, w, r, count, b, &panel);
        int64_t c = 0;
        const char *x = acts; /* constant numbers of pairs keep the sums in registers */
        for (; unscaled(type) && c + 6 < n; c += 8, x += 8 * act_stride)
            add_columns(type, &panel, 4, w->cols, b, x, act_stride, n - c, acc + c / 2);
        for (; c + 2 < n; c += 4, x += 4 * act_stride)
            add_columns(type, &panel, 2, w->cols, b, x, act_stride, n - c, acc + c / 2);
        if (c < n) add_columns(type, &panel, 1, w->cols, b, x, act_stride, n - c, acc + c / 2);
    }
    store_columns(acc, count, n, y, ldy);
}

DS4_INLINE void rectangle(uint32_t type, int x8, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const ds4_quant *quant = ds4_quant_find(w->type);
    for (int64_t c = 0, count; c < n; c += count) {
        const char *x = acts + (size_t)c * act_stride;
        count = n - c < MANY ? n - c : MANY;
        if (count < least_columns(x8)) {
            ds4_matmul_fn few = ds4_matmul_neon_super(w->type, w->layout);
            few(w, row0, row1, x, act_stride, count, y + c * ldy, ldy);
            continue;
        }
        for (int64_t r = row0; r < row1; r += 8)
            eight_rows(type, x8, quant, w, r, row1 - r < 8 ? row1 - r : 8, x, act_stride, count,
                       y + c * ldy + r, ldy);
    }
}

/* NULL for float types. */
DS4_KERNELS(ds4_matmul_i8mm_super, DS4_SUPER_RAW_AND_X8, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_super_i8mm_is_for_arm;
#endif
