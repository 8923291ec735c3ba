/* Unpacking 32 rows of a block of IQ2_XXS or IQ2_XS into a panel, AVX-512: raw, aligned and planes.
 *
 * The 64 entries that are looked up at a time are those of two rows (iq2_avx512.h). Their weights come position by
 * position, and two steps of interleaving make them dwords; what is left is to turn pairs of rows into lanes.
 */
#if defined(__AVX512F__)
#include "iq2_avx512.h"
#include "kernel_list.h"
#include "super_panel_avx512.h"

/* Row of sixteen that is in the lower half of pair i; the upper one is four rows on. So turning ends in order. */
DS4_INLINE int row_of_pair_low(int i) { return i < 4 ? i : i + 4; }

/* Eight pairs of rows with eight dwords each: lane i of out[4 l + t] is dword t of 128-bit lane l of row i. */
DS4_INLINE void turn_pairs(const __m512i *in, __m512i *out) {
    __m512i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++) {
        out[t] = _mm512_shuffle_i32x4(b[t], b[4 + t], 0x88);
        out[4 + t] = _mm512_shuffle_i32x4(b[t], b[4 + t], 0xdd);
    }
}

/* 64 entries as dwords, moved up to be positive: lane l of out[h][u] has weights 4 h .. 4 h + 3 of entries
 * 16 l + 4 u .. + 3. */
DS4_INLINE void to_dwords(const code_book *book, const iq2_pair *p, __m512i (*out)[4]) {
    const __m512i above = _mm512_set1_epi8(43);
    __m512i q[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m512i v = weights_at(book, p, j);
        q[j] = _mm512_mask_sub_epi8(_mm512_add_epi8(above, v), minus_at(p, j), above, v);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const __m512i *four = q + 4 * h;
        __m512i low01 = _mm512_unpacklo_epi8(four[0], four[1]);
        __m512i low23 = _mm512_unpacklo_epi8(four[2], four[3]);
        __m512i high01 = _mm512_unpackhi_epi8(four[0], four[1]);
        __m512i high23 = _mm512_unpackhi_epi8(four[2], four[3]);
        out[h][0] = _mm512_unpacklo_epi16(low01, low23);
        out[h][1] = _mm512_unpackhi_epi16(low01, low23);
        out[h][2] = _mm512_unpacklo_epi16(high01, high23);
        out[h][3] = _mm512_unpackhi_epi16(high01, high23);
    }
}

/* Sub-scales of 32 weights, or two of sixteen, of eight pairs. */
DS4_INLINE void spread_scales(uint32_t type, const __m512i *scales, int v, super_panel *t) {
    __m512i turned[8];
    turn_pairs(scales, turned);
    for (int i = 0; i < 8; i++) {
        if (type == DS4_IQ2_XXS) {
            t->scale[i][v] = turned[i];
            continue;
        }
        t->scale[2 * i][v] = _mm512_and_si512(turned[i], _mm512_set1_epi32(0xffff));
        t->scale[2 * i + 1][v] = _mm512_srli_epi32(turned[i], 16);
    }
}

/* Sixteen rows from row `first` on into half v. */
DS4_INLINE void fill_sixteen(uint32_t type, uint32_t layout, const code_book *book, const ds4_weight *w,
                             int64_t first, int64_t row1, int64_t b, int v, super_panel *t) {
    const int step = step_of(type, layout, 64);
    const int64_t ahead = blocks_ahead(b, w->cols / DS4_SUPER, 2, PANEL) * step;
    __m512i dwords[2][4][8], scales[8], turned[8];
    uint16_t d[16];
    for (int i = 0; i < 8; i++) {
        iq2_row rows[2], places[2];
        iq2_pair p;
        __m512i own[2][4];
        for (int k = 0; k < 2; k++) {
            const int row = row_of_pair_low(i) + 4 * k;
            rows[k] = row_of(type, layout, w, first + row < row1 ? first + row : row1 - 1);
            places[k] = block_of(type, layout, rows + k, b);
            d[row] = ds4_load_u16(places[k].d);
            prefetch_bytes(places[k].codes + ahead, step - 2, 0); /* two of 66 come with the next */
        }
        load_two(type, layout, book, places, places + 1, 1, &p);
        scales[i] = p.scale;
        to_dwords(book, &p, own);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) dwords[k / 4][k % 4][i] = own[k / 4][k % 4];
    }
    for (int h = 0; h < 2; h++)
        for (int u = 0; u < 4; u++) {
            turn_pairs(dwords[h][u], turned);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) /* entry 16 (k / 4) + 4 u + k % 4 */
                _mm512_store_si512(t->q[v][2 * (16 * (k / 4) + 4 * u + k % 4) + h], turned[k]);
        }
    spread_scales(type, scales, v, t);
    t->d[v] = _mm512_mul_ps(_mm512_set1_ps(0.125f), two_half8((uint8_t *)d, (uint8_t *)(d + 8)));
}

DS4_INLINE void fill(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t r, int64_t row1,
                     int64_t b, super_panel *t) {
    code_book book;
    open_book(type, &book);
    for (int v = 0; v < 2; v++) fill_sixteen(type, layout, &book, w, r + 16 * v, row1, b, v, t);
}

DS4_FILLS(ds4_super_fill_iq2_avx512, DS4_IQ2)
#else
typedef int ds4_super_fill_iq2_avx512_is_for_x86;
#endif
