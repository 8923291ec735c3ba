/* K, IQ and TQ types (blocks of 256) with many columns, AVX-VNNI: matmul_super_tile_avx512.c with half the vector.
 *
 * A block of 32 rows is unpacked once, to the first-level cache, and all columns of the rectangle pass over it, six
 * at a time and sixteen rows at a time: twelve sums, two vectors of weights and a dword of activations are what
 * sixteen registers hold. Accumulators wait in memory meanwhile.
 */
#if defined(__AVXVNNI__)
#include "super_panel_avxvnni.h"

#define MANY 128 /* columns whose accumulators wait while the next block is unpacked */
#define GROUP 6  /* columns whose sums fit the registers */

/* ---- activations ----------------------------------------------------------------------------- */

/* Of one block of a column: where its sums begin, or int16 pairs that meet the stored minima. */
typedef struct {
    _Alignas(32) int32_t dwords[16];
} column_block;

DS4_INLINE void prepare_column(const int scales, const int minima, int minus_offset,
                               const char *sums, column_block *out) {
    const __m256i times = _mm256_set1_epi32(minus_offset);
    __m256i *to = (__m256i *)(void *)out;
    if (minima == 8) {
        _mm256_store_si256(to, load32(sums));
    } else if (minima == 4) {
        _mm_store_si128((__m128i *)(void *)out, sums_of_32(sums));
    } else if (scales == 16) {
        const __m256i v = load32(sums);
        __m256i low = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(v));
        __m256i high = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(v, 1));
        _mm256_store_si256(to, _mm256_mullo_epi32(low, times));
        _mm256_store_si256(to + 1, _mm256_mullo_epi32(high, times));
    } else if (scales == 8) {
        __m256i v = _mm256_cvtepi16_epi32(sums_of_32(sums));
        _mm256_store_si256(to, _mm256_mullo_epi32(v, times));
    } else {
        out->dwords[0] = sum_of_block(sums, minus_offset);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* The float step: scales of rows times scale of column times sum. */
DS4_INLINE void add_sums(const int columns, const __m256 *d, int v, __m256i (*sum)[2],
                         const char *dx, size_t act_stride, __m256 (*acc)[VECTORS]) {
#pragma GCC unroll 6
    for (int c = 0; c < columns; c++, dx += act_stride) {
        __m256 scale = _mm256_broadcast_ss((const float *)(const void *)dx);
        for (int h = 0; h < 2; h++)
            acc[c][v + h] = _mm256_fmadd_ps(_mm256_mul_ps(d[v + h], scale),
                                            _mm256_cvtepi32_ps(sum[c][h]), acc[c][v + h]);
    }
}

/* Vectors v and v + 1 of a panel against up to six columns. minima: pairs of stored minima, 0 without. */
DS4_INLINE void add_sixteen(const int scales, const int minima, const int columns, const super_panel *t,
                            int v, const column_block *own, const char *const *q, const char *dx,
                            size_t act_stride, __m256 (*acc)[VECTORS]) {
    const int steps = 64 / scales;
    __m256i isum[GROUP][2];
#pragma GCC unroll 6
    for (int c = 0; c < columns; c++) isum[c][0] = isum[c][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int i = 0; i < scales; i++) {
        __m256i sub[GROUP][2];
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++)
            sub[c][0] = sub[c][1] = minima ? _mm256_setzero_si256()
                                           : broadcast4(own[c].dwords + start_place(scales, i));
#pragma GCC unroll 8
        for (int j = 0; j < steps; j++) {
            const int k = i * steps + j;
            const __m256i w0 = t->q[v][k], w1 = t->q[v + 1][k];
#pragma GCC unroll 6
            for (int c = 0; c < columns; c++) {
                __m256i four = broadcast4(q[c] + 4 * k);
                sub[c][0] = dot4(sub[c][0], w0, four);
                sub[c][1] = dot4(sub[c][1], w1, four);
            }
        }
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++)
            for (int h = 0; h < 2; h++)
                isum[c][h] = scales == 1 ? sub[c][h]
                                         : _mm256_add_epi32(isum[c][h], _mm256_mullo_epi32(
                                                                            sub[c][h], t->scale[i][v + h]));
    }
    add_sums(columns, t->d, v, isum, dx, act_stride, acc);
    if (!minima) return;
#pragma GCC unroll 6
    for (int c = 0; c < columns; c++) isum[c][0] = isum[c][1] = _mm256_setzero_si256();
#pragma GCC unroll 2
    for (int i = 0; i < minima; i++) {
        const __m256i m0 = t->mn[i][v], m1 = t->mn[i][v + 1];
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++) {
            __m256i pair = broadcast4(own[c].dwords + i);
            isum[c][0] = dot2(isum[c][0], m0, pair);
            isum[c][1] = dot2(isum[c][1], m1, pair);
        }
    }
    add_sums(columns, t->m, v, isum, dx, act_stride, acc);
}

/* Block b of a panel against up to six columns from x on. */
DS4_INLINE void add_columns(const int scales, const int minima, const int columns, const super_panel *t,
                            int offset, int64_t blocks, int64_t b, const char *x, size_t act_stride,
                            __m256 (*acc)[VECTORS]) {
    const char *q[GROUP], *dx = x + 288 * blocks + 4 * b;
    column_block own[GROUP];
#pragma GCC unroll 6
    for (int c = 0; c < columns; c++) {
        q[c] = x + (size_t)c * act_stride + 256 * b;
        prepare_column(scales, minima, -offset, x + (size_t)c * act_stride + 256 * blocks + 32 * b,
                       own + c);
    }
#pragma GCC unroll 1
    for (int v = 0; v < t->vectors; v += 2)
        add_sixteen(scales, minima, columns, t, v, own, q, dx, act_stride, acc);
}

/* Block b of a panel against n columns, shared out evenly among groups of up to six. */
DS4_INLINE void add_block(const int scales, const int minima, const super_panel *t, int offset,
                          int64_t blocks, int64_t b, const char *x, size_t act_stride, int64_t n,
                          __m256 (*acc)[VECTORS]) {
    for (int64_t groups = (n + GROUP - 1) / GROUP, count; groups; groups--, n -= count) {
        count = (n + groups - 1) / groups;
        switch (count) { /* constants keep the sums in registers */
        case 6: add_columns(scales, minima, 6, t, offset, blocks, b, x, act_stride, acc); break;
        case 5: add_columns(scales, minima, 5, t, offset, blocks, b, x, act_stride, acc); break;
        case 4: add_columns(scales, minima, 4, t, offset, blocks, b, x, act_stride, acc); break;
        case 3: add_columns(scales, minima, 3, t, offset, blocks, b, x, act_stride, acc); break;
        case 2: add_columns(scales, minima, 2, t, offset, blocks, b, x, act_stride, acc); break;
        default: add_columns(scales, minima, 1, t, offset, blocks, b, x, act_stride, acc);
        }
        x += (size_t)count * act_stride;
        acc += count;
    }
}

typedef void (*block_fn)(const super_panel *t, int offset, int64_t blocks, int64_t b, const char *x,
                         size_t act_stride, int64_t n, __m256 (*acc)[VECTORS]);

#define PRODUCTS(name, scales, minima)                                                             \
    static void name(const super_panel *t, int offset, int64_t blocks, int64_t b, const char *x,   \
                     size_t act_stride, int64_t n, __m256 (*acc)[VECTORS]) {                       \
        add_block(scales, minima, t, offset, blocks, b, x, act_stride, n, acc);                    \
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
    const super_fill fill = ds4_super_fill_avxvnni(w->type, w->layout);
    const int offset = super_offset(w->type);
    const int64_t blocks = w->cols / DS4_SUPER;
    super_panel panel;
    __m256 acc[MANY][VECTORS];
    panel.vectors = row1 - r > PANEL / 2 ? VECTORS : VECTORS / 2;
    memset(acc, 0, (size_t)n * sizeof *acc);
    for (int64_t b = 0; b < blocks; b++) {
        fill(w, r, row1, b, &panel);
        products(&panel, offset, blocks, b, acts, act_stride, n, acc);
    }
    for (int v = 0; v < VECTORS && r + 8 * v < row1; v++)
        for (int64_t c = 0; c < n; c++)
            _mm256_maskstore_ps(y + c * ldy + 8 * v, first_lanes(row1 - r - 8 * v), acc[c][v]);
}

void ds4_matmul_avxvnni_super_many(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                                   size_t act_stride, int64_t n, float *y, int64_t ldy) {
    for (int64_t c = 0, chunks = (n + MANY - 1) / MANY, count; chunks; chunks--, c += count) {
        count = (n - c + chunks - 1) / chunks;
        for (int64_t r = row0; r < row1; r += PANEL)
            panel_rows(w, r, row1, (const char *)acts + (size_t)c * act_stride, act_stride, count,
                       y + c * ldy + r, ldy);
    }
}
#else
typedef int ds4_matmul_super_tile_avxvnni_is_for_x86;
#endif
