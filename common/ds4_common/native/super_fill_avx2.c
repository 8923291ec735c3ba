/* Unpacking 32 rows of a block into a panel, AVX2: X8, and rows that lie one after the other. */
#if defined(__AVX2__)
#include "kernel_list.h"
#include "super_panel_avx2.h"
#include "super_places_avx2.h"
#include "super_x8_avx2.h"

/* ---- X8 ---------------------------------------------------------------------------------------- */

/* A group of eight rows into vector v of half h. */
DS4_INLINE void fill_group(uint32_t type, const uint8_t *group, int h, int v, super_panel *t) {
    x8_scales scales;
    x8_load_scales(type, group, &scales);
    t->d[h][v] = load_half8(group);
    if (super_has_min(type)) {
        t->m[h][v] = _mm256_xor_ps(load_half8(group + 16), _mm256_set1_ps(-0.0f));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) t->mn[h][i][v] = x8_term(type, &scales, i);
    }
#pragma GCC unroll 16
    for (int sub = 0; sub < 16; sub++) t->scale[h][sub][v] = x8_scale(type, &scales, sub);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) { /* thirty-twos that share bytes go together */
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            if (i % 4 == 0) in_order();
            t->q[h][8 * i + j][v] = x8_values(type, group, i, j);
        }
    }
}

DS4_INLINE void fill_x8(uint32_t type, const ds4_weight *w, int64_t r, int64_t row1, int64_t b,
                        super_panel *t) {
    const int64_t blocks = w->cols / DS4_SUPER, bytes = DS4_X8_ROWS * super_bytes(type);
    for (int i = 0; i < PANEL / 8; i++) {
        const int64_t first = r + 8 * i < row1 ? r + 8 * i : r;
        const uint8_t *group = (const uint8_t *)w->data + (first / 8 * blocks + b) * bytes;
        /* a whole group in one burst: spread out it measured slower */
        prefetch_bytes(group + blocks_ahead(b, blocks, 2, PANEL / 8) * bytes, (int)bytes, 0);
        fill_group(type, group, i / 2, i % 2, t);
    }
}

/* ---- rows one after the other ------------------------------------------------------------------ */

/* Turns vector number `at` of eight blocks; out[0], out[stride], .. get dword 0, 1, .. of each. */
DS4_INLINE void turn(const __m256i *in, __m256i *out) {
    __m256i turned[8];
    transpose8(in, turned);
    for (int j = 0; j < 8; j++) out[2 * j] = turned[j];
}

/* Eight rows from `first` on into vector v of half h. */
DS4_INLINE void fill_eight(uint32_t type, uint32_t layout, const super_places *p, int64_t first,
                           int64_t row1, int64_t b, int h, int v, super_panel *t) {
    super_block s[8];
    __m256i in[8], pairs[8];
    float d[8], m[8];
    for (int i = 0; i < 8; i++) {
        const int64_t r = first + i < row1 ? first + i : row1 - 1;
        prefetch_codes(type, layout, p, r * p->blocks + b + blocks_ahead(b, p->blocks, 2, PANEL), 0);
        load_block(type, layout, p, r, b, s + i);
        d[i] = s[i].d, m[i] = s[i].m;
    }
    t->d[h][v] = _mm256_loadu_ps(d);
    t->m[h][v] = _mm256_loadu_ps(m);
    for (int i = 0; i < 8; i++) {
        for (int r = 0; r < 8; r++) in[r] = s[r].q[i];
        turn(in, &t->q[h][8 * i][v]);
    }
    for (int r = 0; r < 8; r++) in[r] = s[r].mn;
    if (super_has_min(type)) turn(in, &t->mn[h][0][v]);
    for (int r = 0; r < 8; r++) in[r] = s[r].sc;
    transpose8(in, pairs);
    for (int place = 0; place < 16; place++) { /* two int16 of a lane: one of them in both halves */
        const int sub = place < 8 ? 2 * place : 2 * (place - 8) + 1;
        __m256i pair = pairs[place / 2];
        __m256i low = _mm256_and_si256(pair, _mm256_set1_epi32(0xffff));
        t->scale[h][sub][v] = place % 2 ? _mm256_blend_epi16(_mm256_srli_epi32(pair, 16), pair, 0xaa)
                                        : _mm256_or_si256(low, _mm256_slli_epi32(low, 16));
    }
}

DS4_INLINE void fill(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t r, int64_t row1,
                     int64_t b, super_panel *t) {
    if (layout == DS4_LAYOUT_X8) {
        fill_x8(type, w, r, row1, b, t);
        return;
    }
    const super_places p = places_of(layout, w);
#pragma GCC unroll 1
    for (int i = 0; i < PANEL / 8; i++)
        fill_eight(type, layout, &p, r + 8 * i, row1, b, i / 2, i % 2, t);
}

DS4_FILLS(ds4_super_fill_avx2, DS4_SUPER_ALL)
#else
typedef int ds4_super_fill_avx2_is_for_x86;
#endif
