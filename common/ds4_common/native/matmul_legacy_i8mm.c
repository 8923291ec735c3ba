/* Types whose activations come in blocks of 32, I8MM: X8 and raw, from a few columns on.
 *
 * Eight rows at a time; a run of blocks is unpacked into pairs of rows once and multiplied with all
 * columns, two by two. Sums of a block are exact, the float step is the one of every kernel. Fewer
 * columns go to the NEON kernel.
 */
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "i8mm.h"
#include "kernel_list.h"
#include "legacy_block_neon.h"

#define RUN 8 /* blocks unpacked together */

/* w[b][i][p]: weights 8 i .. 8 i + 7 of block b of the rows of pair p; d and m, as in tile_block, beside
 * their sums. A block here is 32 weights: a part of a stored one where that is larger. */
typedef struct {
    int8x16_t w[RUN][4][PAIRS];
    float32x4_t d[RUN][PAIRS], m[RUN][PAIRS];
} legacy_panel;

/* ---- unpacking ------------------------------------------------------------------------------- */

DS4_INLINE void fill_x8(uint32_t type, const uint8_t *group, int b, legacy_panel *t) {
    const int8x16_t offset = vdupq_n_s8((int8_t)offset_of(type));
    tile_block block;
    load_x8(type, group, &block);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            int8x16_t v = block.w[4 * i + h], next = block.w[4 * i + 2 + h];
            if (offset_of(type)) v = vsubq_s8(v, offset), next = vsubq_s8(next, offset);
            t->w[b][i][2 * h] = zip1_dwords(v, next);
            t->w[b][i][2 * h + 1] = zip2_dwords(v, next);
        }
        of_rows(block.d[h], t->d[b] + 2 * h);
        if (has_min(type)) of_rows(block.m[h], t->m[b] + 2 * h);
    }
}

/* Part `part` of the blocks `at` bytes into eight rows, as block b. */
DS4_INLINE void fill_raw(uint32_t type, const uint8_t *const *rows, int64_t at, int part, int b,
                         legacy_panel *t) {
    const int8x16_t offset = vdupq_n_s8((int8_t)offset_of(type));
    float d[8], m[8];
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++) {
        int8x16_t low[2], high[2];
        for (int i = 0; i < 2; i++) {
            const uint8_t *block = rows[2 * p + i] + at;
            raw_values(type, block, part, low + i, high + i);
            if (offset_of(type)) low[i] = vsubq_s8(low[i], offset), high[i] = vsubq_s8(high[i], offset);
            d[2 * p + i] = raw_scale(type, block, part);
            m[2 * p + i] = raw_second(type, block, part);
        }
        t->w[b][0][p] = zip1_halves(low[0], low[1]);
        t->w[b][1][p] = zip2_halves(low[0], low[1]);
        t->w[b][2][p] = zip1_halves(high[0], high[1]);
        t->w[b][3][p] = zip2_halves(high[0], high[1]);
    }
    for (int h = 0; h < 2; h++) {
        of_rows(vld1q_f32(d + 4 * h), t->d[b] + 2 * h);
        if (has_min(type) || two_scales(type)) of_rows(vld1q_f32(m + 4 * h), t->m[b] + 2 * h);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* Blocks first .. first + run - 1 of eight rows times n columns, at most two for each pair. */
DS4_INLINE void add_run(uint32_t type, const legacy_panel *t, int pairs, int64_t cols, int64_t first,
                        int64_t run, const char *acts, size_t act_stride, int64_t n,
                        float32x4_t (*sums)[PAIRS]) {
    const char *x[4];
    ds4_act32 view[4];
    float32x4_t acc[2][PAIRS];
    tile_columns(pairs, acts, act_stride, n, x);
    for (int c = 0; c < 2 * pairs; c++) view[c] = ds4_act32_view(x[c], cols);
    for (int c = 0; c < pairs; c++)
        for (int p = 0; p < PAIRS; p++) acc[c][p] = sums[c][p];
    for (int64_t b = 0; b < run; b++) {
        const int64_t at = first + b;
        int32x4_t dot[2][PAIRS], second[2][PAIRS];
        for (int c = 0; c < pairs; c++)
            for (int p = 0; p < PAIRS; p++) dot[c][p] = second[c][p] = vdupq_n_s32(0);
        add_sixteen(pairs, t->w[b], x, 32 * at, dot);
        add_sixteen(pairs, t->w[b] + 2, x, 32 * at + 16, two_scales(type) ? second : dot);
#pragma GCC unroll 2
        for (int c = 0; c < pairs; c++) {
            const ds4_act32 *v = view + 2 * c;
            const float32x4_t dx = of_columns(v[0].d + at, v[1].d + at);
            const float32x4_t s = of_columns(v[0].s + at, v[1].s + at);
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; p++) {
                const float32x4_t d = vmulq_f32(t->d[b][p], dx);
                acc[c][p] = vfmaq_f32(acc[c][p], d, vcvtq_f32_s32(dot[c][p]));
                if (two_scales(type))
                    acc[c][p] = vfmaq_f32(acc[c][p], vmulq_f32(t->m[b][p], dx),
                                          vcvtq_f32_s32(second[c][p]));
                if (has_min(type)) acc[c][p] = vfmaq_f32(acc[c][p], t->m[b][p], s);
            }
        }
    }
    for (int c = 0; c < pairs; c++)
        for (int p = 0; p < PAIRS; p++) sums[c][p] = acc[c][p];
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void eight_rows(uint32_t type, int x8, const ds4_weight *w, int64_t r, int64_t count,
                           const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const int bytes = block_bytes_of(type), parts = parts_of(type);
    const int64_t blocks = w->cols / 32, row_bytes = blocks / parts * bytes;
    const uint8_t *data = (const uint8_t *)w->data + r * row_bytes, *rows[8];
    for (int64_t i = 0; i < 8; i++) rows[i] = data + (i < count ? i : count - 1) * row_bytes;
    legacy_panel panel;
    float32x4_t acc[MANY / 2][PAIRS];
    for (int64_t c = 0; c < (n + 1) / 2; c++)
        for (int p = 0; p < PAIRS; p++) acc[c][p] = vdupq_n_f32(0.0f);
    for (int64_t first = 0, run; first < blocks; first += run) {
        run = blocks - first < RUN ? blocks - first : RUN;
        for (int b = 0; b < run; b++) {
            if (x8)
                fill_x8(type, data + (first + b) * DS4_X8_ROWS * bytes, b, &panel);
            else
                fill_raw(type, rows, (first + b) / parts * bytes, (int)((first + b) % parts), b,
                         &panel);
        }
        int64_t c = 0;
        const char *x = acts;
        for (; c + 2 < n; c += 4, x += 4 * act_stride)
            add_run(type, &panel, 2, w->cols, first, run, x, act_stride, n - c, acc + c / 2);
        if (c < n) add_run(type, &panel, 1, w->cols, first, run, x, act_stride, n - c, acc + c / 2);
    }
    store_columns(acc, count, n, y, ldy);
}

DS4_INLINE void rectangle(uint32_t type, int x8, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    for (int64_t c = 0, count; c < n; c += count) {
        const char *x = acts + (size_t)c * act_stride;
        count = n - c < MANY ? n - c : MANY;
        if (count < least_columns(x8)) {
            ds4_matmul_fn few = ds4_matmul_neon_legacy(type, w->layout);
            few(w, row0, row1, x, act_stride, count, y + c * ldy, ldy);
            continue;
        }
        for (int64_t r = row0; r < row1; r += 8)
            eight_rows(type, x8, w, r, row1 - r < 8 ? row1 - r : 8, x, act_stride, count,
                       y + c * ldy + r, ldy);
    }
}

DS4_KERNELS(ds4_matmul_i8mm_legacy, DS4_BLOCKS_ALL, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_legacy_i8mm_is_for_arm;
#endif
