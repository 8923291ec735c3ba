/* Blocks of 256 weights against several columns, AVX2: 32 rows of a block are unpacked once, and meet up to four
 * columns at a time, sixteen rows of them together.
 *
 * super_fill_avx2.c unpacks a block, these are the products. Their shape follows from how many products fit
 * int16 (super_panel_avx2.h): int16 sums and what they are made of fill the registers, int32 sums wait in
 * memory. Sums of columns wait there too while the next block is unpacked. Few columns go elsewhere: one or two,
 * of X8 up to four, to matmul_super_avx2.c; of IQ2_XXS and IQ2_XS up to four, of planes up to eight, to
 * matmul_iq2_avx2.c.
 */
#if defined(__AVX2__)
#include "super_panel_avx2.h"

#define MANY 64 /* columns whose accumulators wait while the next block is unpacked */
#define GROUP 4 /* columns whose int16 sums fit the registers */

/* ---- activations ------------------------------------------------------------------------------- */

/* Of one block of a column: where its int16 sums begin, or int16 pairs that meet the stored minima. */
typedef struct {
    _Alignas(32) int32_t dwords[32];
} column_block;

/* Sums of pairs of 32 activations. */
DS4_INLINE __m256i pair_sums(const char *x) {
    return _mm256_maddubs_epi16(_mm256_set1_epi8(1), load32(x));
}

/* Per lane: sums of dwords 0 and 1 and of 2 and 3, of a and then of b. */
DS4_INLINE __m256i join_dwords(__m256i a, __m256i b) {
    const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return _mm256_add_epi16(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)),
                            _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
}

/* Starts of folds of 2, 4 or 8 dwords: minus the offset times the sums of the pairs that meet in an int16. */
DS4_INLINE void prepare_starts(const int steps, __m256i minus_offset, const char *x, column_block *out) {
    __m256i v[4];
    for (int i = 0; i < 4; i++) {
        v[i] = join_dwords(pair_sums(x + 64 * i), pair_sums(x + 64 * i + 32));
        if (steps == 2)
            _mm256_store_si256((__m256i *)(void *)out->dwords + i,
                               _mm256_mullo_epi16(v[i], minus_offset));
    }
    for (int i = 0; steps > 2 && i < 2; i++) { /* low lane: the even sixteens of 128 weights; then the odd */
        __m256i sums = _mm256_mullo_epi16(join_dwords(v[2 * i], v[2 * i + 1]), minus_offset);
        if (steps == 4)
            _mm256_store_si256((__m256i *)(void *)out->dwords + i, sums);
        else
            _mm_store_si128((__m128i *)(void *)out->dwords + i,
                            _mm_add_epi16(_mm256_castsi256_si128(sums),
                                          _mm256_extracti128_si256(sums, 1)));
    }
}

/* Where prepare_starts left that of fold f of weights 32 i on. */
DS4_INLINE int fold_place(const int steps, int i, int f) {
    if (steps == 2) return 8 * (i / 2) + 2 * (i % 2) + 4 * (f / 2) + f % 2;
    return steps == 4 ? 8 * (i / 4) + i % 4 + 4 * f : i;
}

DS4_INLINE void prepare_column(const int steps, const int minima, __m256i minus_offset, const char *x,
                               const char *sums, column_block *out) {
    if (!minima) {
        if (steps > 1) prepare_starts(steps, minus_offset, x, out);
    } else {
        __m256i v = load32(sums); /* even sixteens, then odd ones */
        if (minima == 4)
            v = _mm256_add_epi16(v, _mm256_permute2x128_si256(v, v, 1));
        _mm256_store_si256((__m256i *)(void *)out->dwords, v);
    }
}

/* ---- products ---------------------------------------------------------------------------------- */

/* Columns of a block: quants of the first, those of the fourth, and how far the next is. */
typedef struct {
    const char *x, *x3;
    size_t stride;
} block_columns;

DS4_INLINE __m256i four_of(const block_columns *a, int c, int at) {
    return broadcast4((c < 3 ? a->x + (size_t)c * a->stride : a->x3) + at);
}

/* The float step: scales of rows times scale of column times sum. */
DS4_INLINE void add_sums(const int columns, const __m256 *d, __m256i (*sum)[2], const char *dx,
                         size_t act_stride, int h, __m256 (*acc)[4]) {
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++, dx += act_stride) {
        __m256 scale = _mm256_broadcast_ss((const float *)(const void *)dx);
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
            acc[c][2 * h + v] = _mm256_fmadd_ps(_mm256_mul_ps(d[v], scale),
                                                _mm256_cvtepi32_ps(sum[c][v]), acc[c][2 * h + v]);
    }
}

/* Products of weights 32 i on, summed in int16 and times their sub-scales added to isum. */
DS4_INLINE void add_folds(const int steps, const int minima, const int columns, const __m256i (*q)[2],
                          const __m256i (*scale)[2], const block_columns *a, const column_block *own,
                          int i, __m256i (*isum)[2]) {
#pragma GCC unroll 4
    for (int f = 0; f < 8 / steps; f++) {
        __m256i part[GROUP][2];
#pragma GCC unroll 8
        for (int j = 0; j < steps; j++) {
            const int k = f * steps + j;
            const __m256i w0 = pinned(q[k][0]), w1 = pinned(q[k][1]);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                const __m256i four = pinned(four_of(a, c, 4 * k));
                __m256i p0 = _mm256_maddubs_epi16(w0, four), p1 = _mm256_maddubs_epi16(w1, four);
                if (!j && !minima)
                    part[c][0] = part[c][1] = broadcast4(own[c].dwords + fold_place(steps, i, f));
                part[c][0] = pinned(j || !minima ? _mm256_add_epi16(part[c][0], p0) : p0);
                part[c][1] = pinned(j || !minima ? _mm256_add_epi16(part[c][1], p1) : p1);
            }
        }
        const int sub = f * steps / 4;
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++)
                isum[c][v] = _mm256_add_epi32(isum[c][v], _mm256_madd_epi16(part[c][v], scale[sub][v]));
        in_order();
    }
}

/* Signed weights, whose products fill an int16 each. */
DS4_INLINE void add_signed(const int columns, const __m256i (*q)[2], const __m256i (*scale)[2],
                           const block_columns *a, __m256i (*isum)[2]) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        const __m256i w0 = q[k][0], w1 = q[k][1];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            const __m256i four = pinned(four_of(a, c, 4 * k));
            __m256i p0 = _mm256_madd_epi16(signed_pairs(w0, four), scale[0][0]);
            __m256i p1 = _mm256_madd_epi16(signed_pairs(w1, four), scale[0][1]);
            isum[c][0] = pinned(_mm256_add_epi32(isum[c][0], p0));
            isum[c][1] = pinned(_mm256_add_epi32(isum[c][1], p1));
        }
    }
}

/* Block b of half h of a panel against up to four columns from x on; own: what was prepared of them. */
DS4_INLINE void add_columns(const int steps, const int minima, const int columns, const super_panel *t,
                            int h, int64_t blocks, int64_t b, const char *x, size_t act_stride,
                            const column_block *own, __m256 (*acc)[4]) {
    const char *q = x + 256 * b, *dx = x + 288 * blocks + 4 * b;
    block_columns a = {q, q + 3 * act_stride, act_stride};
    __m256i isum[GROUP][2];
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) isum[c][0] = isum[c][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int i = 0; i < 8; i++, a.x += 32, a.x3 += 32) {
        if (steps == 1)
            add_signed(columns, t->q[h] + 8 * i, t->scale[h] + 2 * i, &a, isum);
        else
            add_folds(steps, minima, columns, t->q[h] + 8 * i, t->scale[h] + 2 * i, &a, own, i, isum);
    }
    add_sums(columns, t->d[h], isum, dx, act_stride, h, acc);
    if (!minima) return;
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) isum[c][0] = isum[c][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < minima; i++) {
        const __m256i m0 = t->mn[h][i][0], m1 = t->mn[h][i][1];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            __m256i pair = broadcast4(own[c].dwords + i);
            isum[c][0] = pinned(_mm256_add_epi32(isum[c][0], _mm256_madd_epi16(m0, pair)));
            isum[c][1] = pinned(_mm256_add_epi32(isum[c][1], _mm256_madd_epi16(m1, pair)));
        }
    }
    add_sums(columns, t->m[h], isum, dx, act_stride, h, acc);
}

/* Block b of a panel against up to four columns. */
DS4_INLINE void add_group(const int steps, const int minima, const int columns, const super_panel *t,
                          int halves, int offset, int64_t blocks, int64_t b, const char *x,
                          size_t act_stride, __m256 (*acc)[4]) {
    const __m256i minus = _mm256_set1_epi16((short)-offset);
    column_block own[GROUP];
    for (int c = 0; c < columns; c++) {
        const char *column = x + (size_t)c * act_stride;
        prepare_column(steps, minima, minus, column + 256 * b, column + 256 * blocks + 32 * b, own + c);
    }
#pragma GCC unroll 1
    for (int h = 0; h < halves; h++)
        add_columns(steps, minima, columns, t, h, blocks, b, x, act_stride, own, acc);
}

/* Block b of a panel against n columns, shared out evenly among groups of up to four. */
DS4_INLINE void add_block(const int steps, const int minima, const super_panel *t, int halves, int offset,
                          int64_t blocks, int64_t b, const char *x, size_t act_stride, int64_t n,
                          __m256 (*acc)[4]) {
    for (int64_t groups = (n + GROUP - 1) / GROUP, count; groups; groups--, n -= count) {
        count = (n + groups - 1) / groups;
        switch (count) { /* constants keep the sums in registers */
        case 4: add_group(steps, minima, 4, t, halves, offset, blocks, b, x, act_stride, acc); break;
        case 3: add_group(steps, minima, 3, t, halves, offset, blocks, b, x, act_stride, acc); break;
        case 2: add_group(steps, minima, 2, t, halves, offset, blocks, b, x, act_stride, acc); break;
        default: add_group(steps, minima, 1, t, halves, offset, blocks, b, x, act_stride, acc);
        }
        x += (size_t)count * act_stride;
        acc += count;
    }
}

typedef void (*block_fn)(const super_panel *t, int halves, int offset, int64_t blocks, int64_t b,
                         const char *x, size_t act_stride, int64_t n, __m256 (*acc)[4]);

#define PRODUCTS(name, steps, minima)                                                              \
    static void name(const super_panel *t, int halves, int offset, int64_t blocks, int64_t b,      \
                     const char *x, size_t act_stride, int64_t n, __m256 (*acc)[4]) {              \
        add_block(steps, minima, t, halves, offset, blocks, b, x, act_stride, n, acc);             \
    }

PRODUCTS(each_signed, 1, 0)
PRODUCTS(twos, 2, 0)
PRODUCTS(fours, 4, 0)
PRODUCTS(eights, 8, 0)
PRODUCTS(fours_minima_of_16, 4, 8)
PRODUCTS(fours_minima_of_32, 4, 4)
PRODUCTS(eights_minima_of_32, 8, 4)

static block_fn products_of(uint32_t type) {
    switch (panel_steps(type)) {
    case 1: return each_signed;
    case 2: return twos;
    case 4: return type == DS4_Q2_K ? fours_minima_of_16 : type == DS4_Q5_K ? fours_minima_of_32 : fours;
    default: return super_has_min(type) ? eights_minima_of_32 : eights;
    }
}

/* ---- rectangles -------------------------------------------------------------------------------- */

/* Rows [r, r + PANEL), of which those below row1 exist, against n <= MANY columns; y at row r. */
static void panel_rows(const ds4_weight *w, int64_t r, int64_t row1, const char *acts,
                       size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const block_fn products = products_of(w->type);
    const super_fill fill = ds4_super_fill_avx2(w->type, w->layout);
    const int offset = panel_offset(w->type), halves = row1 - r > PANEL / 2 ? 2 : 1;
    const int64_t blocks = w->cols / DS4_SUPER;
    super_panel panel;
    __m256 acc[MANY][4];
    for (int64_t c = 0; c < n; c++)
        for (int v = 0; v < 4; v++) acc[c][v] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        fill(w, r, row1, b, &panel);
        products(&panel, halves, offset, blocks, b, acts, act_stride, n, acc);
    }
    for (int v = 0; v < 4 && r + 8 * v < row1; v++)
        for (int64_t c = 0; c < n; c++)
            _mm256_maskstore_ps(y + c * ldy + 8 * v, first_lanes(row1 - r - 8 * v), acc[c][v]);
}

static void many(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                 size_t act_stride, int64_t n, float *y, int64_t ldy) {
    for (int64_t c = 0, chunks = (n + MANY - 1) / MANY, count; chunks; chunks--, c += count) {
        count = (n - c + chunks - 1) / chunks;
        for (int64_t r = row0; r < row1; r += PANEL)
            panel_rows(w, r, row1, (const char *)acts + (size_t)c * act_stride, act_stride, count,
                       y + c * ldy + r, ldy);
    }
}

/* Several columns; NULL for float types. */
ds4_matmul_fn ds4_matmul_avx2_super_many(uint32_t type, uint32_t layout) {
    return ds4_super_fill_avx2(type, layout) ? many : NULL;
}
#else
typedef int ds4_matmul_super_tile_avx2_is_for_x86;
#endif
