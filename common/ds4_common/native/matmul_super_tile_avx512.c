/* K, IQ and TQ types (blocks of 256) with many columns, AVX-512: every layout, 32 rows at a time.
 *
 * A block of 32 rows is unpacked once, to the first-level cache, and all columns of the rectangle pass over it,
 * six at a time: two vectors of weights and six dwords of activations make twelve products, as many as loads
 * can keep up with. Accumulators wait in memory meanwhile. vpdpbusd and vpmulld share their units, so a block
 * is multiplied with as few sub-scales as its type allows (super_sums_avx2.h). Types without a stored minimum
 * begin their sums at -offset times the sum of the activations: that costs no multiplication per row.
 * Fewer columns, or half a panel of rows, go to the kernels that read rows once.
 */
#if defined(__AVX512F__)
#include "super_panel_avx512.h"

#define LEAST_X8 17 /* columns from which it pays, from DRAM too */
#define LEAST_ROWS 5 /* groups are never smaller than three then */
#define MANY 256 /* columns whose accumulators wait while the next block is unpacked */
#define GROUP 6  /* columns whose sums fit the registers */

/* ---- activations ----------------------------------------------------------------------------- */

/* Of one block of a column: where its sums begin, or int16 pairs that meet the stored minima. */
typedef struct {
    _Alignas(64) int32_t dwords[16];
} column_block;

DS4_INLINE void prepare_column(const int scales, const int minima, int minus_offset,
                               const char *sums, column_block *out) {
    if (minima == 8) {
        _mm256_store_si256((__m256i *)(void *)out, load32(sums));
    } else if (minima == 4) {
        _mm_store_si128((__m128i *)(void *)out, sums_of_32(sums));
    } else if (scales == 16) {
        __m512i v = _mm512_cvtepi16_epi32(load32(sums));
        _mm512_store_si512(out, _mm512_mullo_epi32(v, _mm512_set1_epi32(minus_offset)));
    } else if (scales == 8) {
        __m256i v = _mm256_cvtepi16_epi32(sums_of_32(sums));
        v = _mm256_mullo_epi32(v, _mm256_set1_epi32(minus_offset));
        _mm256_store_si256((__m256i *)(void *)out, v);
    } else {
        out->dwords[0] = sum_of_block(sums, minus_offset);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* The float step: scales of rows times scale of column times sum. */
DS4_INLINE void add_sums(const int columns, const __m512 *d, __m512i (*sum)[2], const char *dx,
                         size_t act_stride, __m512 (*acc)[2]) {
#pragma GCC unroll 6
    for (int c = 0; c < columns; c++, dx += act_stride) {
        __m512 scale = _mm512_set1_ps(*(const float *)(const void *)dx);
        for (int v = 0; v < 2; v++)
            acc[c][v] = _mm512_fmadd_ps(_mm512_mul_ps(d[v], scale), _mm512_cvtepi32_ps(sum[c][v]),
                                        acc[c][v]);
    }
}

/* Block b of a panel against up to six columns from x on. minima: pairs of stored minima, 0 without. */
DS4_INLINE void add_columns(const int scales, const int minima, const int columns, const super_panel *t,
                            int minus_offset, int64_t blocks, int64_t b, const char *x,
                            size_t act_stride, __m512 (*acc)[2]) {
    const int steps = 64 / scales;
    const char *q[GROUP], *dx = x + 288 * blocks + 4 * b;
    column_block own[GROUP];
    __m512i isum[GROUP][2];
#pragma GCC unroll 6
    for (int c = 0; c < columns; c++) {
        q[c] = x + (size_t)c * act_stride + 256 * b;
        prepare_column(scales, minima, minus_offset, x + (size_t)c * act_stride + 256 * blocks + 32 * b,
                       own + c);
        isum[c][0] = isum[c][1] = _mm512_setzero_si512();
    }
#pragma GCC unroll 1
    for (int i = 0; i < scales; i++) {
        __m512i sub[GROUP][2];
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++)
            sub[c][0] = sub[c][1] = minima ? _mm512_setzero_si512()
                                           : broadcast4_16(own[c].dwords + start_place(scales, i));
#pragma GCC unroll 8
        for (int j = 0; j < steps; j++) {
            const int k = i * steps + j;
            __m512i w0 = _mm512_load_si512(t->q[0][k]), w1 = _mm512_load_si512(t->q[1][k]);
#pragma GCC unroll 6
            for (int c = 0; c < columns; c++) {
                __m512i four = broadcast4_16(q[c] + 4 * k);
                sub[c][0] = _mm512_dpbusd_epi32(sub[c][0], w0, four);
                sub[c][1] = _mm512_dpbusd_epi32(sub[c][1], w1, four);
            }
        }
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++)
            for (int v = 0; v < 2; v++)
                isum[c][v] = scales == 1 ? sub[c][v]
                                         : _mm512_add_epi32(isum[c][v], _mm512_mullo_epi32(
                                                                            sub[c][v], t->scale[i][v]));
    }
    add_sums(columns, t->d, isum, dx, act_stride, acc);
    if (!minima) return;
#pragma GCC unroll 6
    for (int c = 0; c < columns; c++) isum[c][0] = isum[c][1] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int i = 0; i < minima; i++) {
        __m512i m0 = t->mn[i][0], m1 = t->mn[i][1];
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++) {
            __m512i pair = broadcast4_16(own[c].dwords + i);
            isum[c][0] = _mm512_dpwssd_epi32(isum[c][0], m0, pair);
            isum[c][1] = _mm512_dpwssd_epi32(isum[c][1], m1, pair);
        }
    }
    add_sums(columns, t->m, isum, dx, act_stride, acc);
}

/* Where outputs of a panel go after its last block. */
typedef struct {
    float *y; /* NULL before */
    int64_t ldy;
    __mmask16 mask[2]; /* rows that exist */
} panel_out;

/* Columns that are done, at once: their lines come while the next ones are multiplied. */
DS4_INLINE void store_columns(panel_out *out, int64_t count, const __m512 (*acc)[2]) {
    for (int64_t c = 0; c < count; c++, out->y += out->ldy)
        for (int v = 0; v < 2; v++)
            if (out->mask[v]) _mm512_mask_storeu_ps(out->y + 16 * v, out->mask[v], acc[c][v]);
}

/* Block b of a panel against n >= 3 columns, shared out evenly among groups: three to six. */
DS4_INLINE void add_block(const int scales, const int minima, super_panel *t, int offset,
                          int64_t blocks, int64_t b, const char *x, size_t act_stride, int64_t n,
                          __m512 (*acc)[2], panel_out out) {
    int64_t groups = (n + GROUP - 1) / GROUP;
    const int lines = lines_ahead(&t->ahead) / (int)groups + 1;
    for (int64_t count; groups; groups--, n -= count) {
        count = (n + groups - 1) / groups;
        ask_lines(&t->ahead, lines);
        switch (count) { /* constants keep the sums in registers */
        case 6: add_columns(scales, minima, 6, t, -offset, blocks, b, x, act_stride, acc); break;
        case 5: add_columns(scales, minima, 5, t, -offset, blocks, b, x, act_stride, acc); break;
        case 4: add_columns(scales, minima, 4, t, -offset, blocks, b, x, act_stride, acc); break;
        default: add_columns(scales, minima, 3, t, -offset, blocks, b, x, act_stride, acc);
        }
        if (out.y) store_columns(&out, count, (const __m512(*)[2])acc);
        x += (size_t)count * act_stride;
        acc += count;
    }
}

typedef void (*block_fn)(super_panel *t, int offset, int64_t blocks, int64_t b, const char *x,
                         size_t act_stride, int64_t n, __m512 (*acc)[2], panel_out out);

#define PRODUCTS(name, scales, minima)                                                             \
    static void name(super_panel *t, int offset, int64_t blocks, int64_t b, const char *x,         \
                     size_t act_stride, int64_t n, __m512 (*acc)[2], panel_out out) {               \
        add_block(scales, minima, t, offset, blocks, b, x, act_stride, n, acc, out);                \
    }

PRODUCTS(once, 1, 0)
PRODUCTS(once_minima, 1, 8)
PRODUCTS(per_32, 8, 0)
PRODUCTS(per_32_minima, 8, 4)
PRODUCTS(per_16, 16, 0)

static block_fn products_of(uint32_t type) {
    switch (super_scales(type)) {
    case 1: return super_has_min(type) ? once_minima : once;
    case 8: return super_has_min(type) ? per_32_minima : per_32;
    default: return per_16;
    }
}

/* ---- rectangles ------------------------------------------------------------------------------ */

/* Rows [r, r + PANEL), of which those below row1 exist, against n <= MANY columns; y at row r. */
static void panel_rows(const ds4_weight *w, int64_t r, int64_t row1, const char *acts,
                       size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const block_fn products = products_of(w->type);
    const super_fill fill = ds4_super_fill_avx512(w->type, w->layout);
    const int offset = super_offset(w->type);
    const int64_t blocks = w->cols / DS4_SUPER;
    const __mmask16 second = row1 - r > 16 ? first_of_16(row1 - r - 16) : 0;
    panel_out out = {NULL, ldy, {first_of_16(row1 - r), second}};
    super_panel panel;
    panel.ahead.left = panel.ahead.bytes = 0;
    __m512 acc[MANY][2];
    for (int64_t c = 0; c < n; c++) acc[c][0] = acc[c][1] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        fill(w, r, row1, b, &panel);
        if (b + 1 == blocks) out.y = y;
        products(&panel, offset, blocks, b, acts, act_stride, n, acc, out);
    }
}

/* Columns from which unpacking into a panel pays. */
static int64_t least_columns(const ds4_weight *w) {
    return w->layout == DS4_LAYOUT_X8 ? LEAST_X8 : LEAST_ROWS;
}

static void many(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                 size_t act_stride, int64_t n, float *y, int64_t ldy) {
    if (n < least_columns(w) || row1 - row0 <= PANEL / 2) {
        ds4_matmul_fn few = ds4_matmul_avx512_few(w->type, w->layout);
        if (!few) few = ds4_matmul_avx2_super(w->type, w->layout);
        few(w, row0, row1, acts, act_stride, n, y, ldy);
        return;
    }
    for (int64_t c = 0, chunks = (n + MANY - 1) / MANY, count; chunks; chunks--, c += count) {
        count = (n - c + chunks - 1) / chunks;
        for (int64_t r = row0; r < row1; r += PANEL)
            panel_rows(w, r, row1, (const char *)acts + (size_t)c * act_stride, act_stride, count,
                       y + c * ldy + r, ldy);
    }
}

/* NULL for float types. */
ds4_matmul_fn ds4_matmul_avx512_super(uint32_t type, uint32_t layout) {
    return ds4_super_fill_avx512(type, layout) ? many : NULL;
}
#else
typedef int ds4_matmul_super_tile_avx512_is_for_x86;
#endif
