/* K, IQ and TQ types (blocks of 256), AVX2: one column and few; those of IQ2_XXS and IQ2_XS are
 * served by matmul_iq2_avx2.c. Several columns are served by matmul_super_tile_avx2.c.
 *
 * Raw and aligned: one row at a time, so memory is read in order; each block is unpacked into registers once
 * and multiplied with every column. X8: one lane per row, four weights of eight rows are unpacked and meet
 * every column. maddubs sums pairs, madd with the int16 sub-scales sums on into int32: the sub-scale costs no
 * instruction of its own.
 */
#if defined(__AVX2__)
#include "kernel_list.h"
#include "super_places_avx2.h"
#include "super_x8_avx2.h"

/* ---- row by row, few columns: one lane per four weights -------------------------------------- */

#define FEW 2 /* columns up to this go row by row */

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
        prefetch_codes(type, layout, p, r * p->blocks + b, DS4_PREFETCH_AHEAD);
        load_block(type, layout, p, r, b, &s);
#pragma GCC unroll 1
        for (int c = 0; c < columns; c++) {
            ds4_act256 x = ds4_act256_view(acts + (size_t)c * act_stride, 256 * p->blocks);
            acc[c] = add_super(type, &s, x, b, acc[c]);
        }
    }
    for (int c = 0; c < columns; c++) y[c * ldy] = _mm_cvtss_f32(acc[c]);
}

/* ---- X8, one to four columns: one lane per row ----------------------------------------------- */

#define FEW_X8 4 /* columns up to this meet groups while these are unpacked */

/* minus dmin of eight rows of a group */
DS4_INLINE __m256 x8_minus_dmin(const uint8_t *group) {
    return _mm256_xor_ps(load_half8(group + 16), _mm256_set1_ps(-0.0f));
}

/* Sums of scale * w * x of a group, for columns at x. */
DS4_INLINE void x8_sums(uint32_t type, int columns, const uint8_t *group, const x8_scales *scales,
                        const ds4_act256 *x, __m256i *isum) {
    const int steps = super_steps(type);
    __m256i part[FEW_X8];
    for (int c = 0; c < columns; c++) isum[c] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        in_order();
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const __m256i w = x8_values(type, group, i, j);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                __m256i p = _mm256_maddubs_epi16(w, broadcast4(x[c].q + 32 * i + 4 * j));
                part[c] = pinned(j % steps ? _mm256_add_epi16(part[c], p) : p);
            }
            if (j % steps != steps - 1) continue;
            const __m256i scale = x8_scale(type, scales, 2 * i + j / 4);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++)
                isum[c] = pinned(_mm256_add_epi32(isum[c], _mm256_madd_epi16(part[c], scale)));
        }
    }
}

/* Sums of the integer terms times the sums of activations. Scales of 32 weights need half as many. */
DS4_INLINE void x8_terms(uint32_t type, int columns, const x8_scales *scales, const ds4_act256 *x,
                         __m256i *term) {
    const int pairs = scales_per_32(type) ? 4 : 8;
    for (int c = 0; c < columns; c++) term[c] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < pairs; i++) {
        const __m256i t = x8_term(type, scales, i);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            __m256i sums = broadcast4(x[c].sums + 2 * i);
            if (scales_per_32(type)) sums = _mm256_add_epi16(sums, broadcast4(x[c].sums + 8 + 2 * i));
            term[c] = pinned(_mm256_add_epi32(term[c], _mm256_madd_epi16(t, sums)));
        }
    }
}

/* A group against columns at x. */
DS4_INLINE void x8_block(uint32_t type, int columns, const uint8_t *group, const x8_scales *scales,
                         const ds4_act256 *x, __m256 *acc) {
    __m256i isum[FEW_X8], term[FEW_X8];
    x8_sums(type, columns, group, scales, x, isum);
    x8_terms(type, columns, scales, x, term);
    const __m256 d = load_half8(group);
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) {
        const __m256 dx = _mm256_broadcast_ss(x[c].d);
        if (!super_has_min(type)) isum[c] = _mm256_add_epi32(isum[c], term[c]);
        acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum[c]), acc[c]);
        if (super_has_min(type))
            acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(x8_minus_dmin(group), dx),
                                     _mm256_cvtepi32_ps(term[c]), acc[c]);
    }
}

/* Eight interleaved rows against one column. */
DS4_INLINE __m256 x8_gemv(uint32_t type, const uint8_t *group, int64_t blocks, const void *act) {
    const int bytes = DS4_X8_ROWS * super_bytes(type);
    ds4_act256 x = ds4_act256_view(act, 256 * blocks);
    __m256 acc = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, group += bytes, x.q += 256, x.sums += 16, x.d++) {
        /* in one burst: spread out it measured slower, and so did 4 KiB ahead */
        prefetch_bytes(group, bytes, DS4_AHEAD_FAR);
        x8_scales scales;
        x8_load_scales(type, group, &scales);
        x8_block(type, 1, group, &scales, &x, &acc);
    }
    return acc;
}

/* What several columns need again is read again: held in registers it would crowd out sums. */
DS4_INLINE void keep_in_memory(const void *p) { __asm__ volatile("" : : "r"(p) : "memory"); }

/* Eight interleaved rows against n columns, two to four. */
DS4_INLINE void x8_few(uint32_t type, const uint8_t *group, int64_t blocks, const char *acts,
                       size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const int bytes = DS4_X8_ROWS * super_bytes(type);
    ds4_act256 x[FEW_X8];
    __m256 acc[FEW_X8];
    for (int64_t c = 0; c < n; c++) {
        x[c] = ds4_act256_view(acts + (size_t)c * act_stride, 256 * blocks);
        acc[c] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < blocks; b++, group += bytes) {
        prefetch_bytes(group, bytes, DS4_AHEAD_FAR);
        x8_scales scales;
        x8_load_scales(type, group, &scales);
        keep_in_memory(&scales);
        switch (n) { /* constants keep the sums in registers */
        case 2: x8_block(type, 2, group, &scales, x, acc); break;
        case 3: x8_block(type, 3, group, &scales, x, acc); break;
        default: x8_block(type, 4, group, &scales, x, acc);
        }
        for (int64_t c = 0; c < n; c++) x[c].q += 256, x[c].sums += 16, x[c].d++;
    }
    for (int64_t c = 0; c < n; c++) _mm256_storeu_ps(y + c * ldy, acc[c]);
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
    const uint8_t *data = w->data;
    if (n > (layout == DS4_LAYOUT_X8 ? FEW_X8 : FEW)) {
        ds4_matmul_avx2_super_many(type, layout)(w, row0, row1, acts, act_stride, n, y, ldy);
    } else if (layout == DS4_LAYOUT_X8 && n == 1) {
        for (int64_t r = row0; r < row1; r += 8)
            _mm256_storeu_ps(y + r, x8_gemv(type, data + r * row_bytes, blocks, acts));
    } else if (layout == DS4_LAYOUT_X8) {
        for (int64_t r = row0; r < row1; r += 8)
            x8_few(type, data + r * row_bytes, blocks, acts, act_stride, n, y + r, ldy);
    } else {
        rectangle_few(type, layout, w, row0, row1, acts, act_stride, (int)n, y, ldy);
    }
}

static ds4_matmul_fn few(uint32_t type, uint32_t layout); /* defined by the list */

DS4_KERNELS(few, DS4_SUPER_BUT_IQ2, (int)layout)

ds4_matmul_fn ds4_matmul_avx2_super(uint32_t type, uint32_t layout) {
    const int by_book = type == DS4_IQ2_XXS || type == DS4_IQ2_XS;
    return by_book ? ds4_matmul_avx2_iq2(type, layout) : few(type, layout);
}
#else
typedef int ds4_matmul_super_avx2_is_for_x86;
#endif
