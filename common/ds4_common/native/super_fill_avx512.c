/* Unpacking 32 rows of a block into a panel, AVX-512: X8, and rows that lie one after the other. */
#if defined(__AVX512F__)
#include "super_panel_avx512.h"
#include "super_places_avx2.h"
#include "super_x8_avx512.h"

/* ---- weights that are bytes together with their sub-scale ------------------------------------- */

/* Pairs of weights times a sub-scale in every int16: (q0 + 256 q1) s = q0 s + 256 (q1 s), where neither
 * product leaves its byte. Q3_K's are moved up until they are positive: (q - 4) s + 124. */
DS4_INLINE __m512i with_scale(uint32_t type, __m512i q, __m512i scale) {
    __m512i v = _mm512_mullo_epi16(q, scale);
    if (type != DS4_Q3_K) return v;
    __m512i above = _mm512_sub_epi16(_mm512_set1_epi16(124), _mm512_slli_epi16(scale, 2));
    return _mm512_add_epi16(v, _mm512_add_epi16(above, _mm512_slli_epi16(above, 8)));
}

DS4_INLINE int in_one_byte(uint32_t type) { return type == DS4_Q2_K || type == DS4_Q3_K; }

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
                if (in_one_byte(type)) q[part] = with_scale(type, q[part], scale[part]);
                _mm512_store_si512(t->q[v][8 * (i + part) + j], q[part]);
            }
        }
    }
}

DS4_INLINE void fill_x8(uint32_t type, const ds4_weight *w, int64_t r, int64_t row1, int64_t b,
                        super_panel *t) {
    const int64_t blocks = w->cols / DS4_SUPER, bytes = DS4_X8_ROWS * super_bytes(type);
    const uint8_t *groups[PANEL / 8];
    for (int i = 0; i < PANEL / 8; i++) {
        const int64_t first = r + 8 * i < row1 ? r + 8 * i : r;
        groups[i] = (const uint8_t *)w->data + (first / 8 * blocks + b) * bytes;
        prefetch_bytes(groups[i] + bytes, (int)bytes, 0);
    }
    for (int v = 0; v < 2; v++) fill_groups(type, groups[2 * v], groups[2 * v + 1], v, t);
}

#define X8(name, type)                                                                             \
    static void name(const ds4_weight *w, int64_t r, int64_t row1, int64_t b, super_panel *t) {    \
        fill_x8(type, w, r, row1, b, t);                                                            \
    }

X8(q2_k_x8, DS4_Q2_K)
X8(q3_k_x8, DS4_Q3_K)
X8(q4_k_x8, DS4_Q4_K)
X8(q5_k_x8, DS4_Q5_K)
X8(q6_k_x8, DS4_Q6_K)

static super_fill x8_fill(uint32_t type) {
    switch (type) {
    case DS4_Q2_K: return q2_k_x8;
    case DS4_Q3_K: return q3_k_x8;
    case DS4_Q4_K: return q4_k_x8;
    case DS4_Q5_K: return q5_k_x8;
    case DS4_Q6_K: return q6_k_x8;
    default: return NULL;
    }
}

/* NULL for float types and blocks of 32. */
super_fill ds4_super_fill_avx512(uint32_t type, uint32_t layout) {
    if (layout == DS4_LAYOUT_X8) return x8_fill(type);
    return NULL;
}
#else
typedef int ds4_super_fill_avx512_is_for_x86;
#endif
