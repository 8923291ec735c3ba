/* Unpacking 32 rows of a block into a panel, AVX-512: X8, and rows that lie one after the other. */
#if defined(__AVX512F__)
#include "kernel_list.h"
#include "super_panel_avx512.h"
#include "super_places_avx2.h"
#include "super_x8_avx512.h"

/* ---- weights that are bytes together with their sub-scale ------------------------------------- */

/* with_scale of super_sums_avx2.h. */
DS4_INLINE __m512i with_scale16(uint32_t type, __m512i q, __m512i scale) {
    __m512i v = _mm512_mullo_epi16(q, scale);
    if (type != DS4_Q3_K) return v;
    __m512i above = _mm512_sub_epi16(_mm512_set1_epi16(124), _mm512_slli_epi16(scale, 2));
    return _mm512_add_epi16(v, _mm512_add_epi16(above, _mm512_slli_epi16(above, 8)));
}

/* ---- X8 ---------------------------------------------------------------------------------------- */

/* Groups of eight rows at a and b into half v. */
DS4_INLINE void fill_groups(uint32_t type, const uint8_t *a, const uint8_t *b, int v, super_panel *t) {
    x8_scales16 scales;
    x8_load_scales16(type, a, b, &scales);
    t->d[v] = two_half8(a, b);
    if (super_has_min(type)) {
        t->m[v] = _mm512_xor_ps(two_half8(a + 16, b + 16), _mm512_set1_ps(-0.0f));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) t->mn[i][v] = x8_term16(type, &scales, i);
    }
    const int parts = super_scales(type);
#pragma GCC unroll 16
    for (int i = 0; parts > 1 && i < parts; i++)
        t->scale[i][v] = _mm512_srai_epi32(
            _mm512_slli_epi32(scales.s[i / 4], (unsigned)(24 - 8 * (i % 4))), 24);
    /* thirty-twos that share bytes go together: those are read once */
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const int i = 4 * (k / 2), first = 4 * (k % 2);
        __m512i scale[4];
        for (int part = 0; part < 4; part++)
            scale[part] = byte_pair16(scales.s[(2 * (i + part) + k % 2) / 4],
                                      (2 * part + k % 2) % 4, (2 * part + k % 2) % 4);
#pragma GCC unroll 4
        for (int j = first; j < first + 4; j++) {
            __m512i q[4];
            in_order();
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) q[part] = x8_values16(type, a, b, i + part, j);
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) {
                if (in_one_byte(type)) q[part] = with_scale16(type, q[part], scale[part]);
                _mm512_store_si512(t->q[v][8 * (i + part) + j], q[part]);
            }
        }
    }
}

DS4_INLINE void fill_x8(uint32_t type, const ds4_weight *w, int64_t r, int64_t row1, int64_t b,
                        super_panel *t) {
    const int64_t blocks = w->cols / DS4_SUPER, bytes = DS4_X8_ROWS * super_bytes(type);
    const int64_t ahead = blocks_ahead(b, blocks, 2, PANEL / 8) * bytes;
    const uint8_t *groups[PANEL / 8];
    for (int i = 0; i < PANEL / 8; i++) {
        const int64_t first = r + 8 * i < row1 ? r + 8 * i : r;
        groups[i] = (const uint8_t *)w->data + (first / 8 * blocks + b) * bytes;
        t->ahead.at[i] = groups[i] + ahead;
    }
    t->ahead.left = PANEL / 8;
    t->ahead.bytes = (int)bytes;
    t->ahead.done = 0;
    for (int v = 0; v < 2; v++) fill_groups(type, groups[2 * v], groups[2 * v + 1], v, t);
}

/* ---- rows one after the other ------------------------------------------------------------------ */

/* The sub-scales of weights 64 k .. 64 k + 63, each in all its int16. */
DS4_INLINE __m512i scales_of_64(__m256i sc, int k) {
    const __m512i places = _mm512_set_epi64(0x0009000900090009, 0x0009000900090009, 0x0001000100010001,
                                            0x0001000100010001, 0x0008000800080008,
                                            0x0008000800080008, 0, 0);
    return _mm512_permutexvar_epi16(_mm512_add_epi16(places, _mm512_set1_epi16((short)(2 * k))),
                                    _mm512_castsi256_si512(sc));
}

/* Weights of one row as the panel has them. */
DS4_INLINE void store_row(uint32_t type, const super_block *s, uint8_t *q) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(s->q[2 * k]), s->q[2 * k + 1], 1);
        if (in_one_byte(type)) v = with_scale16(type, v, scales_of_64(s->sc, k));
        if (super_signed(type)) v = _mm512_xor_si512(v, _mm512_set1_epi8((char)0x80));
        _mm512_store_si512(q + 64 * k, v);
    }
}

/* Turned sub-scales of sixteen rows (int16 in the order of super_block), then their minima. */
DS4_INLINE void spread_scales(uint32_t type, const uint8_t (*turned)[64], int v, super_panel *t) {
    const int parts = super_scales(type);
    for (int i = 0; parts > 1 && i < parts; i++) {
        const int place = parts == 16 ? ds4_sum_place(i) : i;
        __m512i pair = load64(turned[place / 2]);
        if (place % 2 == 0) pair = _mm512_slli_epi32(pair, 16);
        t->scale[i][v] = _mm512_srai_epi32(pair, 16);
    }
    for (int i = 0; super_has_min(type) && i < 8; i++) t->mn[i][v] = load64(turned[8 + i]);
}

/* What is read next but one of that row; of a pair, the half of its codes. */
DS4_INLINE void prefetch_next(uint32_t type, uint32_t layout, const super_places *p, int64_t r,
                              int64_t b) {
    const int64_t ahead = b + blocks_ahead(b, p->blocks, 2, layout == DS4_LAYOUT_RAW ? PANEL : PANEL / 2);
    if (layout == DS4_LAYOUT_RAW)
        prefetch_bytes(p->raw + (r * p->blocks + ahead) * super_bytes(type), super_bytes(type), 0);
    else
        prefetch_bytes(p->sections.codes + (r / 2 * p->blocks + ahead) * 128 + r % 2 * 64, 64, 0);
}

/* Sixteen rows from row `first` on into half v. */
DS4_INLINE void fill_sixteen(uint32_t type, uint32_t layout, const super_places *p, int64_t first,
                             int64_t row1, int64_t b, int v, super_panel *t) {
    _Alignas(64) uint8_t q[16][256], pairs[16][64], turned[16][64];
    float d[16], m[16];
    for (int i = 0; i < 16; i++) {
        const int64_t row = first + i < row1 ? first + i : row1 - 1;
        super_block s;
        load_block(type, layout, p, row, b, &s);
        prefetch_next(type, layout, p, row, b);
        store_row(type, &s, q[i]);
        _mm256_store_si256((__m256i *)(void *)pairs[i], s.sc);
        _mm256_store_si256((__m256i *)(void *)(pairs[i] + 32), s.mn);
        d[i] = s.d, m[i] = s.m;
    }
    for (int k = 0; k < 4; k++) transpose16(q[0] + 64 * k, 256, t->q[v][16 * k]);
    transpose16(pairs[0], 64, turned[0]);
    spread_scales(type, turned, v, t);
    t->d[v] = _mm512_loadu_ps(d);
    t->m[v] = _mm512_loadu_ps(m);
}

DS4_INLINE void fill(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t r, int64_t row1,
                     int64_t b, super_panel *t) {
    if (layout == DS4_LAYOUT_X8) {
        fill_x8(type, w, r, row1, b, t);
        return;
    }
    const super_places p = places_of(layout, w);
    for (int v = 0; v < 2; v++) fill_sixteen(type, layout, &p, r + 16 * v, row1, b, v, t);
}

static super_fill own(uint32_t type, uint32_t layout); /* found in the list */

DS4_FILLS(own, DS4_SUPER_BUT_IQ2)

super_fill ds4_super_fill_avx512(uint32_t type, uint32_t layout) {
    const int by_book = type == DS4_IQ2_XXS || type == DS4_IQ2_XS;
    return by_book ? ds4_super_fill_iq2_avx512(type, layout) : own(type, layout);
}
#else
typedef int ds4_super_fill_avx512_is_for_x86;
#endif
