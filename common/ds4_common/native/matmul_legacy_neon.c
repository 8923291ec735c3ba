/* Types whose activations come in blocks of 32, NEON: X8 and raw, one column and many.
 *
 * Owns the fast paths for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 (X8 and raw), IQ4_NL, MXFP4, NVFP4 and Q1_0 (raw).
 * A block here is 32 weights: a part of a stored one where that is larger. Eight rows at a time, one lane
 * per row, so the float order is the scalar one: a block of eight rows is unpacked into sixteen vectors
 * once and multiplied with up to COLUMNS columns, four activations being broadcast by the dot product
 * instruction itself. Raw blocks are transposed into the same form.
 */
#if defined(__ARM_FEATURE_DOTPROD)
#include "kernel_list.h"
#include "legacy_block_neon.h"

#define COLUMNS 8 /* their sixteen sums stay in the second half of the registers */

/* ---- raw blocks ------------------------------------------------------------------------------ */

/* Part `part` of the blocks `at` bytes into eight rows. */
DS4_INLINE void fill_raw(uint32_t type, const uint8_t *const *rows, int64_t at, int part,
                         tile_block *t) {
    float d[8], m[8];
    for (int h = 0; h < 2; h++) {
        int8x16_t low[4], high[4], out[4];
        for (int i = 0; i < 4; i++) {
            const uint8_t *block = rows[4 * h + i] + at;
            raw_values(type, block, part, low + i, high + i);
            d[4 * h + i] = raw_scale(type, block, part);
            m[4 * h + i] = raw_second(type, block, part);
        }
        transpose4(low, out);
        for (int j = 0; j < 4; j++) t->w[2 * j + h] = out[j];
        transpose4(high, out);
        for (int j = 0; j < 4; j++) t->w[8 + 2 * j + h] = out[j];
        t->d[h] = vld1q_f32(d + 4 * h);
        t->m[h] = vld1q_f32(m + 4 * h);
    }
}

/* ---- one block times some columns ------------------------------------------------------------ */

DS4_INLINE void add_block(uint32_t type, const tile_block *t, ds4_act32 x, int64_t b,
                          float32x4_t *acc) {
    const int32x4_t x0 = vreinterpretq_s32_s8(vld1q_s8(x.q + 32 * b));
    const int32x4_t x1 = vreinterpretq_s32_s8(vld1q_s8(x.q + 32 * b + 16));
    const int8x16_t low = vreinterpretq_s8_s32(x0), high = vreinterpretq_s8_s32(x1);
    const float32x4_t dx = vdupq_n_f32(x.d[b]);
    for (int h = 0; h < 2; h++) {
        int32x4_t sum = vdupq_n_s32(-offset_of(type) * x.sum[b]);
        sum = vdotq_laneq_s32(sum, t->w[0 + h], low, 0);
        sum = vdotq_laneq_s32(sum, t->w[2 + h], low, 1);
        sum = vdotq_laneq_s32(sum, t->w[4 + h], low, 2);
        sum = vdotq_laneq_s32(sum, t->w[6 + h], low, 3);
        if (two_scales(type)) {
            acc[h] = vfmaq_f32(acc[h], vmulq_f32(t->d[h], dx), vcvtq_f32_s32(sum));
            sum = vdupq_n_s32(0);
        }
        sum = vdotq_laneq_s32(sum, t->w[8 + h], high, 0);
        sum = vdotq_laneq_s32(sum, t->w[10 + h], high, 1);
        sum = vdotq_laneq_s32(sum, t->w[12 + h], high, 2);
        sum = vdotq_laneq_s32(sum, t->w[14 + h], high, 3);
        const float32x4_t d = two_scales(type) ? t->m[h] : t->d[h];
        acc[h] = vfmaq_f32(acc[h], vmulq_f32(d, dx), vcvtq_f32_s32(sum));
        if (has_min(type)) acc[h] = vfmaq_f32(acc[h], t->m[h], vdupq_n_f32(x.s[b]));
    }
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void eight_rows(uint32_t type, int x8, const ds4_weight *w, int64_t r, int64_t count,
                           const char *acts, size_t act_stride, int columns, float *y,
                           int64_t ldy) {
    const int bytes = block_bytes_of(type), parts = parts_of(type);
    const int64_t blocks = w->cols / 32, row_bytes = blocks / parts * bytes;
    const uint8_t *data = (const uint8_t *)w->data + r * row_bytes, *rows[8];
    for (int64_t i = 0; i < 8; i++) rows[i] = data + (i < count ? i : count - 1) * row_bytes;
    float32x4_t acc[2 * COLUMNS];
    ds4_act32 x[COLUMNS];
    for (int c = 0; c < columns; c++) {
        acc[2 * c] = acc[2 * c + 1] = vdupq_n_f32(0.0f);
        x[c] = ds4_act32_view(acts + (size_t)c * act_stride, w->cols);
    }
    for (int64_t b = 0; b < blocks; b++) {
        tile_block t;
        if (x8) {
            __builtin_prefetch(data + (b + 4) * DS4_X8_ROWS * bytes);
            load_x8(type, data + b * DS4_X8_ROWS * bytes, &t);
        } else
            fill_raw(type, rows, b / parts * bytes, (int)(b % parts), &t);
        for (int c = 0; c < columns; c++) add_block(type, &t, x[c], b, acc + 2 * c);
    }
    for (int c = 0; c < columns; c++) {
        float out[8];
        vst1q_f32(out, acc[2 * c]);
        vst1q_f32(out + 4, acc[2 * c + 1]);
        memcpy(y + c * ldy, out, (size_t)count * sizeof(float));
    }
}

DS4_INLINE void rectangle(uint32_t type, int x8, const ds4_weight *w, int64_t row0, int64_t row1,
                          const void *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    for (int64_t r = row0; r < row1; r += 8) {
        int64_t count = row1 - r < 8 ? row1 - r : 8, c = 0;
        const char *x = acts;
        for (; c + COLUMNS <= n; c += COLUMNS) /* constant counts keep the sums in registers */
            eight_rows(type, x8, w, r, count, x + (size_t)c * act_stride, act_stride, COLUMNS,
                       y + c * ldy + r, ldy);
#pragma GCC unroll 3
        for (int few = COLUMNS / 2; few; few /= 2) { /* the bits of what is left */
            if (!((n - c) & few)) continue;
            eight_rows(type, x8, w, r, count, x + (size_t)c * act_stride, act_stride, few,
                       y + c * ldy + r, ldy);
            c += few;
        }
    }
}

DS4_KERNELS(ds4_matmul_neon_legacy, DS4_BLOCKS_ALL, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_legacy_neon_is_for_arm;
#endif
