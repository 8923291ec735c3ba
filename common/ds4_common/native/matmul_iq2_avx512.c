/* IQ2_XXS and IQ2_XS with few columns, raw, aligned and planes, AVX-512: code books looked up by byte permutes, not by
 * gathers.
 *
 * Two blocks are 64 entries of eight weights, looked up position by position: vector j has weight 8 g + j in
 * byte g (iq2_avx512.h). Activations are laid out the same way, a chunk of columns at a time, and sign bit j of
 * all entries is one mask on them. Sums are exact integers; what is left of a block is one FMA, in block order.
 */
#if defined(__AVX512F__)
#include "iq2_avx512.h"
#include "kernel_list.h"

#define PAIR 512     /* weights of two blocks */
#define WIDTH 4      /* columns that share what was unpacked */
#define SCRATCH 16384 /* bytes of activations laid out at a time: half of a first-level cache */
#define CHUNK_FLOATS (SCRATCH / 256)

/* ---- activations ----------------------------------------------------------------------------- */

/* A chunk of up to `width` columns: of pair p of column c position j at q[((p * width) + c) * 512 + 64 j],
 * scale of block b at d[b * width + c]. */
typedef struct {
    _Alignas(64) int8_t q[SCRATCH];
    float d[CHUNK_FLOATS];
} iq2_acts;

/* 64 entries of eight values, position by position; without the second block zeros in its place. */
DS4_INLINE void by_position(const int8_t *q, int second, int8_t *out) {
    const __m512i turn = _mm512_add_epi8(
        _mm512_set1_epi64(0x3830282018100800),
        _mm512_setr_epi64(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303,
                          0x0404040404040404, 0x0505050505050505, 0x0606060606060606,
                          0x0707070707070707));
    __m512i v[8], pairs[2][4];
    for (int i = 0; i < 8; i++) {
        v[i] = i < 4 || second ? load64(q + 64 * i) : _mm512_setzero_si512();
        v[i] = _mm512_permutexvar_epi8(turn, v[i]);
    }
    for (int i = 0; i < 4; i++) {
        pairs[0][i] = _mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]);
        pairs[1][i] = _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]);
    }
    for (int odd = 0; odd < 2; odd++) {
        const __m512i *p = pairs[odd];
        __m512i a = _mm512_shuffle_i64x2(p[0], p[1], 0x44), b = _mm512_shuffle_i64x2(p[2], p[3], 0x44);
        __m512i c = _mm512_shuffle_i64x2(p[0], p[1], 0xee), d = _mm512_shuffle_i64x2(p[2], p[3], 0xee);
        _mm512_store_si512(out + 64 * odd, _mm512_shuffle_i64x2(a, b, 0x88));
        _mm512_store_si512(out + 64 * (2 + odd), _mm512_shuffle_i64x2(a, b, 0xdd));
        _mm512_store_si512(out + 64 * (4 + odd), _mm512_shuffle_i64x2(c, d, 0x88));
        _mm512_store_si512(out + 64 * (6 + odd), _mm512_shuffle_i64x2(c, d, 0xdd));
    }
}

/* Blocks [b0, b0 + count) of `columns` columns. */
DS4_INLINE void lay_out(const char *acts, size_t act_stride, int64_t cols, int columns, int width,
                        int64_t b0, int64_t count, iq2_acts *out) {
    for (int c = 0; c < columns; c++) {
        ds4_act256 x = ds4_act256_view(acts + (size_t)c * act_stride, cols);
        for (int64_t b = 0; b < count; b++) out->d[b * width + c] = x.d[b0 + b];
        for (int64_t b = 0; b < count; b += 2)
            by_position(x.q + DS4_SUPER * (b0 + b), b + 1 < count,
                        out->q + (b / 2 * width + c) * PAIR);
    }
}

/* ---- one column: four rows at a time --------------------------------------------------------- */

/* Rows past `count` repeat the last one and are not stored. */
DS4_INLINE void four_rows(uint32_t type, uint32_t layout, const code_book *book, const ds4_weight *w,
                          int64_t r, int64_t count, int64_t b0, int64_t blocks, const iq2_acts *x,
                          float *y) {
    const __mmask8 kept = (__mmask8)((1u << count) - 1);
    const int step = step_of(type, layout, 64), d_step = step_of(type, layout, 2);
    const int64_t ahead = 4 * step * (w->cols / DS4_SUPER); /* the rows that come next */
    iq2_row rows[4];
    for (int i = 0; i < 4; i++) rows[i] = row_of(type, layout, w, r + (i < count ? i : count - 1));
    __m128 acc = b0 ? _mm_maskz_loadu_ps(kept, y) : _mm_setzero_ps();
    for (int64_t b = 0; b < blocks; b += 2) {
        const int second = b + 1 < blocks;
        const int8_t *q = x->q + b / 2 * PAIR;
        __m512i sums[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            iq2_pair p;
            pair_sum s = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            prefetch_bytes(rows[i].codes + (b0 + b) * step, 128, (int)ahead);
            load_pair(type, layout, book, rows + i, b0 + b, second, &p);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                add_position(type, weights_at(book, &p, j),
                             with_signs(load64(q + 64 * j), minus_at(&p, j)), p.scale, j, &s);
            sums[i] = s.isum;
        }
        __m128i block[2];
        sum_blocks(sums, block);
        for (int k = 0; k <= second; k++) {
            __m128i d = _mm_setzero_si128();
            int64_t at = (b0 + b + k) * d_step;
            d = _mm_insert_epi16(d, ds4_load_u16(rows[0].d + at), 0);
            d = _mm_insert_epi16(d, ds4_load_u16(rows[1].d + at), 1);
            d = _mm_insert_epi16(d, ds4_load_u16(rows[2].d + at), 2);
            d = _mm_insert_epi16(d, ds4_load_u16(rows[3].d + at), 3);
            acc = add_blocks(_mm_cvtph_ps(d), _mm_set1_ps(x->d[b + k]), block[k], acc);
        }
    }
    _mm_mask_storeu_ps(y, kept, acc);
}

/* ---- up to four columns: one row at a time -------------------------------------------------- */

DS4_INLINE void one_row(uint32_t type, uint32_t layout, const code_book *book, const ds4_weight *w,
                        int64_t r, int64_t b0, int64_t blocks, const iq2_acts *x, const int columns,
                        float *y, int64_t ldy) {
    const int d_step = step_of(type, layout, 2);
    const iq2_row row = row_of(type, layout, w, r);
    _Alignas(16) float out[WIDTH] = {0};
    for (int c = 0; b0 && c < columns; c++) out[c] = y[c * ldy];
    __m128 acc = _mm_load_ps(out);
    for (int64_t b = 0; b < blocks; b += 2) {
        const int second = b + 1 < blocks;
        const int8_t *xq = x->q + b / 2 * WIDTH * PAIR;
        iq2_pair p;
        __m512i q[8], sums[WIDTH];
        __mmask64 minus[8];
        pair_sum s[WIDTH];
        load_pair(type, layout, book, &row, b0 + b, second, &p);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) q[j] = weights_at(book, &p, j), minus[j] = minus_at(&p, j);
        for (int i = 0; i < WIDTH; i++) s[i].isum = s[i].part = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
#pragma GCC unroll 4
            for (int i = 0; i < columns; i++)
                add_position(type, q[j], with_signs(load64(xq + PAIR * i + 64 * j), minus[j]),
                             p.scale, j, s + i);
        for (int i = 0; i < WIDTH; i++) sums[i] = s[i].isum;
        __m128i block[2];
        sum_blocks(sums, block);
        for (int k = 0; k <= second; k++)
            acc = add_blocks(_mm_set1_ps(half_at(row.d + (b0 + b + k) * d_step)),
                             _mm_loadu_ps(x->d + (b + k) * WIDTH), block[k], acc);
    }
    _mm_store_ps(out, acc);
    for (int c = 0; c < columns; c++) y[c * ldy] = out[c];
}

/* ---- rectangles ------------------------------------------------------------------------------ */

/* One column, or up to four. */
DS4_INLINE void columns_of(uint32_t type, uint32_t layout, const code_book *book, const ds4_weight *w,
                           int64_t row0, int64_t row1, const char *acts, size_t act_stride,
                           const int columns, float *y, int64_t ldy) {
    const int width = columns == 1 ? 1 : WIDTH;
    const int64_t blocks = w->cols / DS4_SUPER, chunk = CHUNK_FLOATS / width;
    iq2_acts x;
    for (int i = 0; i < CHUNK_FLOATS; i++) x.d[i] = 0.0f; /* also of columns that do not exist */
    for (int64_t b0 = 0; b0 < blocks; b0 += chunk) {
        int64_t count = blocks - b0 < chunk ? blocks - b0 : chunk;
        lay_out(acts, act_stride, w->cols, columns, width, b0, count, &x);
        if (columns == 1)
            for (int64_t r = row0; r < row1; r += 4)
                four_rows(type, layout, book, w, r, row1 - r < 4 ? row1 - r : 4, b0, count, &x, y + r);
        else
            for (int64_t r = row0; r < row1; r++)
                one_row(type, layout, book, w, r, b0, count, &x, columns, y + r, ldy);
    }
}

DS4_INLINE void rectangle(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t row0,
                          int64_t row1, const char *acts, size_t act_stride, int64_t n, float *y,
                          int64_t ldy) {
    code_book book;
    open_book(type, &book);
    for (int64_t left = n, count; left; left -= count) {
        count = left < WIDTH ? left : WIDTH;
        switch (count) { /* constants keep the sums in registers */
        case 1: columns_of(type, layout, &book, w, row0, row1, acts, act_stride, 1, y, ldy); break;
        case 2: columns_of(type, layout, &book, w, row0, row1, acts, act_stride, 2, y, ldy); break;
        case 3: columns_of(type, layout, &book, w, row0, row1, acts, act_stride, 3, y, ldy); break;
        default: columns_of(type, layout, &book, w, row0, row1, acts, act_stride, 4, y, ldy);
        }
        acts += (size_t)count * act_stride;
        y += count * ldy;
    }
}

/* NULL for other types. */
DS4_KERNELS(ds4_matmul_avx512_iq2, DS4_IQ2, layout)
#else
typedef int ds4_matmul_iq2_avx512_is_for_x86;
#endif
