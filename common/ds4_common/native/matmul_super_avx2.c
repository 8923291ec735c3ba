/* K, IQ and TQ types (blocks of 256), AVX2: X8, raw and aligned, few columns and many.
 *
 * Raw and aligned, few columns: one row at a time, so memory is read in order; each block is unpacked into
 * registers once and multiplied with every column. X8, one column: one lane per row. Many columns:
 * eight rows of one block are unpacked into a tile with one lane per row and multiplied with four
 * columns at a time. maddubs sums pairs, madd with the int16 sub-scales sums on into int32: the
 * sub-scale costs no instruction of its own.
 */
#if defined(__AVX2__)
#include "kernel_list.h"
#include "super_places_avx2.h"
#include "super_x8_avx2.h"

/* ---- row by row, few columns: one lane per four weights -------------------------------------- */

#define FEW 4 /* columns up to this go row by row */

/* Codes that a row by row pass comes to soon. A pair's second row finds what the first one read. */
DS4_INLINE void prefetch_block(uint32_t type, uint32_t layout, const super_places *p, int64_t r,
                               int64_t b) {
    const int bytes = layout == DS4_LAYOUT_RAW          ? super_bytes(type)
                      : layout == DS4_LAYOUT_IQ2_PLANES ? ds4_plane_bytes(type)
                                                        : 64;
    int64_t i = r * p->blocks + b;
    const uint8_t *codes = (ds4_is_aligned(layout) ? p->sections.codes : p->raw) + i * bytes;
    for (int at = 0; at < bytes; at += 64)
        _mm_prefetch((const char *)codes + DS4_PREFETCH_AHEAD + at, _MM_HINT_T0);
}

/* Broadcasts int16 number i of each lane over that lane. */
DS4_INLINE __m256i lane_scale(__m256i sc, int i) {
    return _mm256_shuffle_epi8(sc, _mm256_set1_epi16((short)((2 * i + 1) << 8 | 2 * i)));
}

/* Sums of the lanes of a (dword 0) and of b (dword 1). */
DS4_INLINE __m128i sum_lanes2(__m256i a, __m256i b) {
    __m256i pair = _mm256_hadd_epi32(a, b);
    __m128i v = _mm_add_epi32(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
    return _mm_shuffle_epi32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)), 0x08);
}

/* acc (lane 0) plus one block times one column. */
DS4_INLINE __m128 add_super(uint32_t type, const super_block *s, ds4_act256 x, int64_t b,
                            __m128 acc) {
    __m256i isum = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i p = super_pairs(type, s->q[i], load32(x.q + 256 * b + 32 * i));
        isum = _mm256_add_epi32(isum, _mm256_madd_epi16(p, lane_scale(s->sc, i)));
    }
    __m256i term = _mm256_madd_epi16(s->mn, load32(x.sums + 16 * b));
    if (!super_has_min(type)) isum = _mm256_add_epi32(isum, term);
    __m128 sums = _mm_cvtepi32_ps(sum_lanes2(isum, term)), dx = _mm_load_ss(x.d + b);
    acc = _mm_fmadd_ss(_mm_mul_ss(_mm_set_ss(s->d), dx), sums, acc);
    if (!super_has_min(type)) return acc;
    return _mm_fmadd_ss(_mm_mul_ss(_mm_set_ss(s->m), dx), _mm_movehdup_ps(sums), acc);
}

DS4_INLINE void row_few(uint32_t type, uint32_t layout, const super_places *p, int64_t r,
                        const char *acts, size_t act_stride, int columns, float *y, int64_t ldy) {
    __m128 acc[FEW];
    for (int c = 0; c < columns; c++) acc[c] = _mm_setzero_ps();
    for (int64_t b = 0; b < p->blocks; b++) {
        super_block s;
        prefetch_block(type, layout, p, r, b);
        load_block(type, layout, p, r, b, &s);
#pragma GCC unroll 1
        for (int c = 0; c < columns; c++) {
            ds4_act256 x = ds4_act256_view(acts + (size_t)c * act_stride, 256 * p->blocks);
            acc[c] = add_super(type, &s, x, b, acc[c]);
        }
    }
    for (int c = 0; c < columns; c++) y[c * ldy] = _mm_cvtss_f32(acc[c]);
}

/* A whole group, two or three groups ahead, in one burst: spread out it measured slower. */
DS4_INLINE void prefetch_group(uint32_t type, const uint8_t *group) {
    for (int at = 0; at < DS4_X8_ROWS * super_bytes(type); at += 64)
        _mm_prefetch((const char *)group + 4096 + at, _MM_HINT_T0);
}

/* ---- many columns: one lane per row ---------------------------------------------------------- */

#define MANY 64 /* columns whose sums wait while the next block is unpacked */

/* One block of eight rows. q[8 * i + j] holds weights 32 i + 4 j .. + 3 of each row; sc the scale
 * of each sixteen twice per lane; mn the terms in pairs of sixteens (0,2), (4,6), .., as sums. */
typedef struct {
    __m256i q[64], sc[16], mn[8];
    __m256 d, m;
} super_tile;

DS4_INLINE __m256 finish_block(uint32_t type, __m256i isum, __m256i term, __m256 d, __m256 m,
                               const float *xd, __m256 acc) {
    __m256 dx = _mm256_broadcast_ss(xd);
    if (!super_has_min(type)) isum = _mm256_add_epi32(isum, term);
    acc = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum), acc);
    if (!super_has_min(type)) return acc;
    return _mm256_fmadd_ps(_mm256_mul_ps(m, dx), _mm256_cvtepi32_ps(term), acc);
}

/* minus dmin of eight rows of a group */
DS4_INLINE __m256 x8_minus_dmin(uint32_t type, const uint8_t *group) {
    if (!super_has_min(type)) return _mm256_setzero_ps();
    return _mm256_xor_ps(load_half8(group + 16), _mm256_set1_ps(-0.0f));
}

/* Eight interleaved rows against one column. */
DS4_INLINE __m256 x8_gemv(uint32_t type, const uint8_t *group, int64_t blocks, const void *act) {
    const int steps = super_steps(type), bytes = DS4_X8_ROWS * super_bytes(type);
    ds4_act256 x = ds4_act256_view(act, 256 * blocks);
    __m256 acc = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, group += bytes, x.q += 256, x.sums += 16, x.d++) {
        __m256i isum = _mm256_setzero_si256(), term = isum, part = isum;
        open_page_ahead(group);
        x8_scales scales;
        x8_load_scales(type, group, &scales);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            in_order();
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                __m256i p = _mm256_maddubs_epi16(x8_values(type, group, i, j),
                                                 broadcast4(x.q + 32 * i + 4 * j));
                part = pinned(j % steps ? _mm256_add_epi16(part, p) : p);
                if (j % steps != steps - 1) continue;
                p = _mm256_madd_epi16(part, x8_scale(type, &scales, 2 * i + j / 4));
                isum = pinned(_mm256_add_epi32(isum, p));
            }
            __m256i pair = _mm256_madd_epi16(x8_term(type, &scales, i), broadcast4(x.sums + 2 * i));
            term = _mm256_add_epi32(term, pair);
        }
        acc = finish_block(type, isum, term, load_half8(group), x8_minus_dmin(type, group), x.d,
                           acc);
    }
    return acc;
}

DS4_INLINE void fill_tile_x8(uint32_t type, const uint8_t *group, super_tile *t) {
    x8_scales scales;
    x8_load_scales(type, group, &scales);
    t->d = load_half8(group);
    t->m = x8_minus_dmin(type, group);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) t->q[8 * i + j] = x8_values(type, group, i, j);
        t->sc[2 * i] = x8_scale(type, &scales, 2 * i);
        t->sc[2 * i + 1] = x8_scale(type, &scales, 2 * i + 1);
        t->mn[i] = x8_term(type, &scales, i);
    }
}

/* Eight rows from r on, of which `count` exist: the last one repeated, its sums are dropped. */
DS4_INLINE void fill_tile_rows(uint32_t type, uint32_t layout, const super_places *p, int64_t r,
                               int64_t count, int64_t b, super_tile *t) {
    super_block s[8];
    __m256i in[8], out[8];
    float d[8], m[8];
    for (int i = 0; i < 8; i++) {
        load_block(type, layout, p, r + (i < count ? i : count - 1), b, s + i);
        d[i] = s[i].d, m[i] = s[i].m;
    }
    t->d = _mm256_loadu_ps(d);
    t->m = _mm256_loadu_ps(m);
    for (int i = 0; i < 8; i++) {
        for (int r = 0; r < 8; r++) in[r] = s[r].q[i];
        transpose8(in, t->q + 8 * i);
    }
    for (int r = 0; r < 8; r++) in[r] = s[r].mn;
    transpose8(in, t->mn);
    /* lanes of sc: even sixteens, then odd; unpacklo takes the first four of each */
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < 8; r++)
            in[r] = half ? _mm256_unpackhi_epi16(s[r].sc, s[r].sc)
                         : _mm256_unpacklo_epi16(s[r].sc, s[r].sc);
        transpose8(in, out);
        for (int i = 0; i < 4; i++) {
            t->sc[8 * half + 2 * i] = out[i];
            t->sc[8 * half + 2 * i + 1] = out[4 + i];
        }
    }
}

DS4_INLINE void tile_columns(uint32_t type, int columns, const super_tile *t, const ds4_act256 *x,
                             __m256 *acc) {
    const int steps = super_steps(type);
    __m256i isum[4], part[4], term[4];
    for (int c = 0; c < columns; c++) isum[c] = term[c] = _mm256_setzero_si256();
    for (int sub = 0; sub < 16; sub++) {
        const __m256i *w = t->q + 4 * sub;
        __m256i scale = t->sc[sub];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m256i q = w[j];
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                __m256i p = super_pairs(type, q, broadcast4(x[c].q + 16 * sub + 4 * j));
                part[c] = pinned(j % steps ? _mm256_add_epi16(part[c], p) : p);
                if (j % steps != steps - 1) continue;
                isum[c] = pinned(_mm256_add_epi32(isum[c], _mm256_madd_epi16(part[c], scale)));
            }
        }
    }
    for (int i = 0; i < 8; i++) {
        __m256i mn = t->mn[i];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            term[c] = _mm256_add_epi32(term[c],
                                       _mm256_madd_epi16(mn, broadcast4(x[c].sums + 2 * i)));
    }
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++)
        acc[c] = finish_block(type, isum[c], term[c], t->d, t->m, x[c].d, acc[c]);
}

DS4_INLINE void tile_block(uint32_t type, const super_tile *t, int64_t cols, int64_t b,
                           const char *acts, size_t act_stride, int64_t n, __m256 *acc) {
    for (int64_t c = 0; c < n; c += 4) {
        int columns = n - c < 4 ? (int)(n - c) : 4;
        ds4_act256 x[4];
        for (int i = 0; i < columns; i++) {
            x[i] = ds4_act256_view(acts + (size_t)(c + i) * act_stride, cols);
            x[i].q += 256 * b, x[i].sums += 16 * b, x[i].d += b;
        }
        switch (columns) {
        case 1: tile_columns(type, 1, t, x, acc + c); break;
        case 2: tile_columns(type, 2, t, x, acc + c); break;
        case 3: tile_columns(type, 3, t, x, acc + c); break;
        default: tile_columns(type, 4, t, x, acc + c); break;
        }
    }
}

/* Eight rows from row r on, of which `count` exist, against n <= MANY columns. */
DS4_INLINE void rows_many(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t r,
                          int64_t count, const char *acts, size_t act_stride, int64_t n, float *y,
                          int64_t ldy) {
    const super_places p = places_of(layout, w);
    super_tile tile;
    __m256 acc[MANY];
    for (int64_t c = 0; c < n; c++) acc[c] = _mm256_setzero_ps();
    for (int64_t b = 0; b < p.blocks; b++) {
        if (layout == DS4_LAYOUT_X8) {
            const uint8_t *group = p.raw + (r * p.blocks + b * DS4_X8_ROWS) * super_bytes(type);
            prefetch_group(type, group);
            fill_tile_x8(type, group, &tile);
        } else
            fill_tile_rows(type, layout, &p, r, count, b, &tile);
        tile_block(type, &tile, w->cols, b, acts, act_stride, n, acc);
    }
    for (int64_t c = 0; c < n; c++) _mm256_maskstore_ps(y + c * ldy, first_lanes(count), acc[c]);
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void rectangle_few(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t row0,
                              int64_t row1, const char *acts, size_t act_stride, int n, float *y,
                              int64_t ldy) {
    const super_places p = places_of(layout, w);
    for (int64_t r = row0; r < row1; r++) {
        if (n == 1) /* a constant: accumulator and block stay in registers */
            row_few(type, layout, &p, r, acts, act_stride, 1, y + r, ldy);
        else
            row_few(type, layout, &p, r, acts, act_stride, n, y + r, ldy);
    }
}

DS4_INLINE void rectangle(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t row0,
                          int64_t row1, const char *acts, size_t act_stride, int64_t n, float *y,
                          int64_t ldy) {
    int64_t blocks = w->cols / DS4_SUPER, row_bytes = blocks * super_bytes(type);
    if (layout == DS4_LAYOUT_X8 && n == 1) {
        for (int64_t r = row0; r < row1; r += 8)
            _mm256_storeu_ps(y + r, x8_gemv(type, (const uint8_t *)w->data + r * row_bytes, blocks,
                                            acts));
    } else if (layout != DS4_LAYOUT_X8 && n <= FEW) {
        rectangle_few(type, layout, w, row0, row1, acts, act_stride, (int)n, y, ldy);
    } else {
        for (int64_t r = row0; r < row1; r += 8)
            for (int64_t c = 0; c < n; c += MANY)
                rows_many(type, layout, w, r, row1 - r < 8 ? row1 - r : 8,
                          acts + (size_t)c * act_stride, act_stride, n - c < MANY ? n - c : MANY,
                          y + c * ldy + r, ldy);
    }
}

#define KERNELS(each)                                                                              \
    each(q2_k_raw, DS4_Q2_K, DS4_LAYOUT_RAW)                                                       \
    each(q3_k_raw, DS4_Q3_K, DS4_LAYOUT_RAW)                                                       \
    each(q4_k_raw, DS4_Q4_K, DS4_LAYOUT_RAW)                                                       \
    each(q5_k_raw, DS4_Q5_K, DS4_LAYOUT_RAW)                                                       \
    each(q6_k_raw, DS4_Q6_K, DS4_LAYOUT_RAW)                                                       \
    each(iq1_s_raw, DS4_IQ1_S, DS4_LAYOUT_RAW)                                                     \
    each(iq1_m_raw, DS4_IQ1_M, DS4_LAYOUT_RAW)                                                     \
    each(iq2_xxs_raw, DS4_IQ2_XXS, DS4_LAYOUT_RAW)                                                 \
    each(iq2_xs_raw, DS4_IQ2_XS, DS4_LAYOUT_RAW)                                                   \
    each(iq2_s_raw, DS4_IQ2_S, DS4_LAYOUT_RAW)                                                     \
    each(iq3_xxs_raw, DS4_IQ3_XXS, DS4_LAYOUT_RAW)                                                 \
    each(iq3_s_raw, DS4_IQ3_S, DS4_LAYOUT_RAW)                                                     \
    each(iq4_xs_raw, DS4_IQ4_XS, DS4_LAYOUT_RAW)                                                   \
    each(tq1_0_raw, DS4_TQ1_0, DS4_LAYOUT_RAW)                                                     \
    each(tq2_0_raw, DS4_TQ2_0, DS4_LAYOUT_RAW)                                                     \
    each(q2_k_x8, DS4_Q2_K, DS4_LAYOUT_X8)                                                         \
    each(q3_k_x8, DS4_Q3_K, DS4_LAYOUT_X8)                                                         \
    each(q4_k_x8, DS4_Q4_K, DS4_LAYOUT_X8)                                                         \
    each(q5_k_x8, DS4_Q5_K, DS4_LAYOUT_X8)                                                         \
    each(q6_k_x8, DS4_Q6_K, DS4_LAYOUT_X8)                                                         \
    each(iq2_xxs_aligned, DS4_IQ2_XXS, DS4_LAYOUT_IQ2_XXS_ALIGNED)                                 \
    each(iq2_xs_aligned, DS4_IQ2_XS, DS4_LAYOUT_IQ2_XS_ALIGNED)                                    \
    each(q2_k_aligned, DS4_Q2_K, DS4_LAYOUT_Q2_K_ALIGNED)                                          \
    each(iq2_xxs_planes, DS4_IQ2_XXS, DS4_LAYOUT_IQ2_PLANES)                                       \
    each(iq2_xs_planes, DS4_IQ2_XS, DS4_LAYOUT_IQ2_PLANES)

DS4_KERNELS(ds4_matmul_avx2_super, KERNELS, (int)layout)
#else
typedef int ds4_matmul_super_avx2_is_for_x86;
#endif
