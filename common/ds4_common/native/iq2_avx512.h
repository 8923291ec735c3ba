/* Two blocks of a row of IQ2_XXS or IQ2_XS, raw, aligned or planes: entries looked up by byte permutes.
 *
 * Include only from matmul_iq2_avx512.c and super_fill_iq2_avx512.c.
 *
 * Two blocks are 64 entries of eight weights. A byte of a book of thirds holds three weights of an entry, so
 * three look-ups for all 64 entries give their weights position by position: vector j has weight 8 g + j in
 * byte g.
 */
#ifndef DS4_IQ2_AVX512_H
#define DS4_IQ2_AVX512_H

#include "aligned.h"
#include "avx512.h"
#include "planes.h"
#include "super_unpack_avx2.h"

/* ---- code books ------------------------------------------------------------------------------ */

typedef struct {
    __m512i thirds[3][8];  /* 64 entries each; IQ2_XXS: four of them */
    __m512i magnitudes[3]; /* of the n-th two bits of a byte */
    __m512i signs[2];      /* seven sign bits completed */
} code_book;

DS4_INLINE __m512i counting(void) {
    const __m512i step = _mm512_setr_epi64(0, 0x0808080808080808, 0x1010101010101010,
                                           0x1818181818181818, 0x2020202020202020,
                                           0x2828282828282828, 0x3030303030303030,
                                           0x3838383838383838);
    return _mm512_add_epi8(step, _mm512_set1_epi64(0x0706050403020100));
}

DS4_INLINE void open_book(uint32_t type, code_book *book) {
    const __m512i values = _mm512_set1_epi32(0x002b1908), parity = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0));
    const uint8_t *thirds = type == DS4_IQ2_XXS ? ds4_iq2xxs_thirds : ds4_iq2xs_thirds;
    const int parts = type == DS4_IQ2_XXS ? 4 : 8;
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < parts; i++) book->thirds[t][i] = load64(thirds + 64 * (parts * t + i));
        __m512i code = _mm512_and_si512(_mm512_srli_epi16(counting(), 2 * t), _mm512_set1_epi8(3));
        book->magnitudes[t] = _mm512_shuffle_epi8(values, code);
    }
    for (int i = 0; i < 2; i++) {
        __m512i seven = _mm512_add_epi8(counting(), _mm512_set1_epi8((char)(64 * i)));
        __m512i folded = _mm512_xor_si512(seven, _mm512_srli_epi16(seven, 4));
        folded = _mm512_shuffle_epi8(parity, _mm512_and_si512(folded, _mm512_set1_epi8(15)));
        book->signs[i] = _mm512_or_si512(seven, _mm512_slli_epi16(folded, 7));
    }
}

/* One of 128, by the low seven bits. */
DS4_INLINE __m512i of_128(const __m512i *table, __m512i index) {
    return _mm512_permutex2var_epi8(table[0], index, table[1]);
}

/* One of 256, by all eight; `upper`: which have the eighth. */
DS4_INLINE __m512i of_256(const __m512i *table, __m512i index, __mmask64 upper) {
    return _mm512_mask_blend_epi8(upper, of_128(table, index), of_128(table + 2, index));
}

/* One of 512; `ninth`: which are among the upper 256. */
DS4_INLINE __m512i of_512(const __m512i *table, __m512i index, __mmask64 upper, __mmask64 ninth) {
    return _mm512_mask_blend_epi8(ninth, of_256(table, index, upper),
                                  of_256(table + 4, index, upper));
}

/* ---- two blocks of a row --------------------------------------------------------------------- */

/* From the row's first block on. */
typedef struct {
    const uint8_t *codes, *scales, *d;
} iq2_row;

DS4_INLINE int step_of(uint32_t type, uint32_t layout, int aligned) {
    if (layout == DS4_LAYOUT_IQ2_PLANES) return ds4_plane_bytes(type);
    return layout == DS4_LAYOUT_RAW ? super_bytes(type) : aligned;
}

DS4_INLINE iq2_row row_of(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t r) {
    const int64_t i = r * (w->cols / DS4_SUPER);
    if (layout == DS4_LAYOUT_IQ2_PLANES) {
        const uint8_t *row = (const uint8_t *)w->data + i * ds4_plane_bytes(type);
        return (iq2_row){row, row, row};
    }
    if (layout == DS4_LAYOUT_RAW) {
        const uint8_t *row = (const uint8_t *)w->data + i * super_bytes(type);
        return (iq2_row){row + 2, row + 66, row};
    }
    ds4_sections s = ds4_sections_of(w);
    return (iq2_row){s.codes + 64 * i, s.extra + 8 * i, s.scales + 2 * i};
}

typedef struct {
    __m512i thirds[3]; /* of 64 entries */
    __m512i signs;     /* a byte per entry */
    __m512i scale;     /* IQ2_XXS: of 32 weights per lane; IQ2_XS: of 16 per half of a lane */
} iq2_pair;

DS4_INLINE void split_xxs(const code_book *book, __m512i c0, __m512i c1, iq2_pair *p) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i fields = _mm512_set1_epi64(0x352e2720150e0700); /* seven bits each, two tails */
    __m512i index = _mm512_permutex2var_epi32(c0, even, c1);
    __m512i tails = _mm512_permutex2var_epi32(c0, _mm512_add_epi32(even, _mm512_set1_epi32(1)), c1);
    __mmask64 upper = _mm512_movepi8_mask(index);
    for (int t = 0; t < 3; t++) p->thirds[t] = of_256(book->thirds[t], index, upper);
    p->signs = of_128(book->signs, _mm512_multishift_epi64_epi8(fields, tails));
    p->scale = _mm512_or_si512(_mm512_srli_epi32(tails, 27), _mm512_set1_epi32(1));
}

DS4_INLINE __m512i scales_of_nibbles(__m128i bytes) {
    __m512i v = _mm512_cvtepu8_epi32(bytes);
    v = _mm512_or_si512(_mm512_and_si512(v, _mm512_set1_epi32(0x0f)),
                        _mm512_slli_epi32(_mm512_and_si512(v, _mm512_set1_epi32(0xf0)), 12));
    return _mm512_or_si512(_mm512_add_epi32(v, v), _mm512_set1_epi32(0x00010001));
}

DS4_INLINE void split_xs(const code_book *book, __m512i c0, __m512i c1, __m128i scales, iq2_pair *p) {
    const __m512i low_bytes = _mm512_add_epi8(counting(), counting());
    __m512i index = _mm512_permutex2var_epi8(c0, low_bytes, c1);
    __m512i high = _mm512_permutex2var_epi8(c0, _mm512_or_si512(low_bytes, _mm512_set1_epi8(1)), c1);
    __mmask64 upper = _mm512_movepi8_mask(index);
    __mmask64 ninth = _mm512_test_epi8_mask(high, _mm512_set1_epi8(1));
    for (int t = 0; t < 3; t++) p->thirds[t] = of_512(book->thirds[t], index, upper, ninth);
    p->signs = of_128(book->signs, _mm512_srli_epi16(high, 1));
    p->scale = scales_of_nibbles(scales);
}

/* 32 bytes of each of two blocks; without the second one zeros. */
DS4_INLINE __m512i of_both(const uint8_t *a, const uint8_t *b, int second) {
    return second ? two_groups(a, b) : _mm512_zextsi256_si512(load32(a));
}

DS4_INLINE __m128i scales_of_both(const uint8_t *a, const uint8_t *b, int second) {
    __m128i s0 = _mm_loadl_epi64((const __m128i *)(const void *)a), s1 = _mm_setzero_si128();
    if (second) s1 = _mm_loadl_epi64((const __m128i *)(const void *)b);
    return _mm_unpacklo_epi64(s0, s1);
}

DS4_INLINE void split_planes(uint32_t type, const code_book *book, const uint8_t *a, const uint8_t *b,
                             int second, iq2_pair *p) {
    const ds4_planes v = ds4_planes_of(type, a), w = ds4_planes_of(type, second ? b : a);
    __m512i index = of_both(v.index, w.index, second);
    __mmask64 upper = _mm512_movepi8_mask(index), ninth = v.ninth;
    __m128i scales = scales_of_both(v.scales, w.scales, second);
    p->signs = of_both(v.signs, w.signs, second);
    if (type == DS4_IQ2_XXS) {
        for (int t = 0; t < 3; t++) p->thirds[t] = of_256(book->thirds[t], index, upper);
        p->scale = _mm512_cvtepu8_epi32(scales);
        return;
    }
    if (second) ninth |= (__mmask64)w.ninth << 32;
    for (int t = 0; t < 3; t++) p->thirds[t] = of_512(book->thirds[t], index, upper, ninth);
    p->scale = scales_of_nibbles(scales);
}

/* The places of block b of a row. */
DS4_INLINE iq2_row block_of(uint32_t type, uint32_t layout, const iq2_row *row, int64_t b) {
    return (iq2_row){row->codes + b * step_of(type, layout, 64),
                     row->scales + b * step_of(type, layout, 8), row->d + b * step_of(type, layout, 2)};
}

/* Blocks at a and, if there is a second one, at b. */
DS4_INLINE void load_two(uint32_t type, uint32_t layout, const code_book *book, const iq2_row *a,
                         const iq2_row *b, int second, iq2_pair *p) {
    if (layout == DS4_LAYOUT_IQ2_PLANES) {
        split_planes(type, book, a->codes, b->codes, second, p);
        return;
    }
    __m512i c0 = load64(a->codes), c1 = _mm512_setzero_si512();
    if (second) c1 = load64(b->codes);
    if (type == DS4_IQ2_XXS)
        split_xxs(book, c0, c1, p);
    else
        split_xs(book, c0, c1, scales_of_both(a->scales, b->scales, second), p);
}

/* Blocks b and, if there is one, b + 1 of a row: `second`. */
DS4_INLINE void load_pair(uint32_t type, uint32_t layout, const code_book *book, const iq2_row *row,
                          int64_t b, int second, iq2_pair *p) {
    const iq2_row first = block_of(type, layout, row, b), next = block_of(type, layout, row, b + 1);
    load_two(type, layout, book, &first, &next, second, p);
}

/* Weights at position j of all entries, and where they are negative. */
DS4_INLINE __m512i weights_at(const code_book *book, const iq2_pair *p, int j) {
    return _mm512_permutexvar_epi8(p->thirds[j / 3], book->magnitudes[j % 3]);
}

DS4_INLINE __mmask64 minus_at(const iq2_pair *p, int j) {
    return _mm512_test_epi8_mask(p->signs, _mm512_set1_epi8((char)(1 << j)));
}

DS4_INLINE __m512i with_signs(__m512i x, __mmask64 minus) {
    return _mm512_mask_sub_epi8(x, minus, _mm512_setzero_si512(), x);
}

/* Sums of 32 weights with their scale, the first block in the lower eight lanes. `part` collects
 * IQ2_XS's sixteens: three products of pairs, 2 * 43 * 127 each, fit 16 bits. */
typedef struct {
    __m512i isum, part;
} pair_sum;

DS4_INLINE void add_position(uint32_t type, __m512i q, __m512i x, __m512i scale, int j, pair_sum *s) {
    if (type == DS4_IQ2_XXS) {
        s->isum = _mm512_dpbusd_epi32(s->isum, q, x);
        if (j == 7) s->isum = _mm512_mullo_epi32(s->isum, scale);
        return;
    }
    __m512i p = _mm512_maddubs_epi16(q, x);
    s->part = j % 3 ? _mm512_add_epi16(s->part, p) : p;
    if (j % 3 == 2 || j == 7) s->isum = _mm512_dpwssd_epi32(s->isum, s->part, scale);
}

/* Four such sums: lane i of out[k] is block k of sum i. */
DS4_INLINE void sum_blocks(const __m512i *v, __m128i *out) {
    __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    __m512i u = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    __m256i first = _mm512_castsi512_si256(u), second = _mm512_extracti64x4_epi64(u, 1);
    out[0] = _mm_add_epi32(_mm256_castsi256_si128(first), _mm256_extracti128_si256(first, 1));
    out[1] = _mm_add_epi32(_mm256_castsi256_si128(second), _mm256_extracti128_si256(second, 1));
}

DS4_INLINE __m128 add_blocks(__m128 d, __m128 dx, __m128i sums, __m128 acc) {
    d = _mm_mul_ps(_mm_set1_ps(0.125f), d);
    return _mm_fmadd_ps(_mm_mul_ps(d, dx), _mm_cvtepi32_ps(sums), acc);
}

#endif
