/* Unpacking 32 rows of a block into a panel, AVX-VNNI: X8, and rows that lie one after the other. */
#if defined(__AVXVNNI__)
#include "kernel_list.h"
#include "super_panel_avxvnni.h"
#include "super_places_avx2.h"
#include "super_x8_avx2.h"

/* Every int16 number `half` (0 or 1) of a dword, as int32. */
DS4_INLINE __m256i half_of(__m256i pairs, int half) {
    return _mm256_srai_epi32(half ? pairs : _mm256_slli_epi32(pairs, 16), 16);
}

/* ---- X8 ---------------------------------------------------------------------------------------- */

DS4_INLINE void fill_group(uint32_t type, const uint8_t *group, int v, super_panel *t) {
    const int parts = super_scales(type);
    x8_scales scales;
    x8_load_scales(type, group, &scales);
    t->d[v] = load_half8(group);
    if (super_has_min(type)) {
        t->m[v] = _mm256_xor_ps(load_half8(group + 16), _mm256_set1_ps(-0.0f));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) t->mn[i][v] = x8_term(type, &scales, i);
    }
#pragma GCC unroll 16
    for (int i = 0; parts > 1 && i < parts; i++) t->scale[i][v] = x8_wide_scale(&scales, i);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            __m256i q = x8_values(type, group, i, j);
            if (in_one_byte(type)) q = with_scale(type, q, x8_scale(type, &scales, 2 * i + j / 4));
            t->q[v][8 * i + j] = q;
        }
}

DS4_INLINE void fill_x8(uint32_t type, const ds4_weight *w, int64_t r, int64_t row1, int64_t b,
                        super_panel *t) {
    const int64_t blocks = w->cols / DS4_SUPER, bytes = DS4_X8_ROWS * super_bytes(type);
    const int64_t ahead = blocks_ahead(b, blocks, 2, VECTORS) * bytes;
    for (int v = 0; v < t->vectors; v++) {
        const int64_t first = r + 8 * v < row1 ? r + 8 * v : r;
        const uint8_t *group = (const uint8_t *)w->data + (first / 8 * blocks + b) * bytes;
        prefetch_bytes(group, (int)bytes, (int)ahead);
        fill_group(type, group, v, t);
    }
}

/* ---- rows one after the other ------------------------------------------------------------------ */

/* Eight rows from row `first` on, those from row1 on repeating the one before. */
DS4_INLINE void fill_eight(uint32_t type, uint32_t layout, const super_places *p, int64_t first,
                           int64_t row1, int64_t b, int v, super_panel *t) {
    const int parts = super_scales(type);
    super_block s[8];
    __m256i in[8], out[8];
    float d[8], m[8];
    for (int i = 0; i < 8; i++) {
        const int64_t row = first + i < row1 ? first + i : row1 - 1;
        load_block(type, layout, p, row, b, s + i);
        prefetch_codes(type, layout, p, row * p->blocks + b + blocks_ahead(b, p->blocks, 2, PANEL), 0);
        d[i] = s[i].d, m[i] = s[i].m;
    }
    t->d[v] = _mm256_loadu_ps(d);
    t->m[v] = _mm256_loadu_ps(m);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        for (int r = 0; r < 8; r++) {
            in[r] = s[r].q[i];
            if (in_one_byte(type)) in[r] = with_scale(type, in[r], lane_scale(s[r].sc, i));
            if (super_signed(type)) in[r] = _mm256_xor_si256(in[r], _mm256_set1_epi8((char)0x80));
        }
        transpose8(in, t->q[v] + 8 * i);
    }
    if (super_has_min(type)) {
        for (int r = 0; r < 8; r++) in[r] = s[r].mn;
        transpose8(in, out);
        for (int i = 0; i < 8; i++) t->mn[i][v] = out[i];
    }
    if (parts == 1) return;
    for (int r = 0; r < 8; r++) in[r] = s[r].sc;
    transpose8(in, out); /* pairs in the order of super_block */
    for (int i = 0; i < parts; i++)
        t->scale[i][v] = half_of(out[start_place(parts, i) / 2], start_place(parts, i) % 2);
}

DS4_INLINE void fill(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t r, int64_t row1,
                     int64_t b, super_panel *t) {
    if (layout == DS4_LAYOUT_X8) {
        fill_x8(type, w, r, row1, b, t);
        return;
    }
    const super_places p = places_of(layout, w);
    for (int v = 0; v < t->vectors; v++) fill_eight(type, layout, &p, r + 8 * v, row1, b, v, t);
}

DS4_FILLS(ds4_super_fill_avxvnni, DS4_SUPER_ALL)
#else
typedef int ds4_super_fill_avxvnni_is_for_x86;
#endif
