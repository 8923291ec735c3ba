/* Types whose activations come in blocks of 32, AVX2: X8 and raw, one column and many.
 *
 * Owns the fast paths for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 (raw and X8) and for IQ4_NL, MXFP4, NVFP4 and
 * Q1_0 (raw). A block here is 32 weights: a part of a stored one where that is larger. One lane per row
 * everywhere, so the float order is the scalar one. One column, and few of X8: weights are unpacked in
 * registers and each 4-byte activation group is broadcast to 8 rows. More columns: 16 rows of up to TILE_BLOCKS
 * blocks are unpacked once into a tile in the L1 cache and multiplied with four columns at a time.
 *
 * Sums in int16: nibbles reach 8 * 2 * 15 * 127 = 30480 in a block, five-bit values
 * 4 * 2 * 31 * 127 = 31496 in half a block, Q8_0 2 * 128 * 127 = 32512 in one step.
 */
#if defined(__AVX2__)
#include "kernel_list.h"
#include "legacy_unpack_avx2.h"

/* Sums of two products of 32 values with 32 activations, in int16. */
DS4_INLINE __m256i pairs_of(uint32_t type, __m256i values, __m256i x) {
    return is_signed(type) ? signed_pairs(values, x) : _mm256_maddubs_epi16(values, x);
}

/* How many of those add up in int16. */
DS4_INLINE int steps_of(uint32_t type) {
    if (type == DS4_Q8_0 || type == DS4_IQ4_NL) return 1;
    return is_five_bit(type) ? 4 : 8; /* MXFP4 reaches 8 * 2 * 12 * 127 = 24384 */
}

/* Stored minus true value is 8 for Q4_0 and 16 for Q5_0: isum = sum(q x) - 8 or 16 sum(x). */
DS4_INLINE __m256i remove_offset(uint32_t type, __m256i isum, const int32_t *xsum) {
    if (type != DS4_Q4_0 && type != DS4_Q5_0) return isum;
    return _mm256_sub_epi32(isum, _mm256_slli_epi32(broadcast4(xsum), type == DS4_Q4_0 ? 3 : 4));
}

DS4_INLINE __m256 finish_block(uint32_t type, __m256i isum, __m256 d, __m256 m, ds4_act32 x,
                               int64_t b, __m256 acc) {
    isum = remove_offset(type, isum, x.sum + b);
    acc = _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_broadcast_ss(x.d + b)), _mm256_cvtepi32_ps(isum),
                          acc);
    return has_min(type) ? _mm256_fmadd_ps(m, _mm256_broadcast_ss(x.s + b), acc) : acc;
}

/* ---- X8: vectors of a group ------------------------------------------------------------------ */

#define FEW_X8 4  /* columns whose sums fit the registers */
#define MOST_X8 8 /* columns up to this: a second pass over eight rows costs less than a tile */

/* Integer sums of a group with columns at x. */
DS4_INLINE void x8_dots(uint32_t type, int columns, const uint8_t *group, const int8_t *const *x,
                        __m256i *isum) {
    __m256i low_sum[FEW_X8], high_sum[FEW_X8];
    for (int c = 0; c < columns; c++)
        isum[c] = low_sum[c] = high_sum[c] = _mm256_setzero_si256();
    if (type == DS4_Q8_0) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const __m256i w = load32(group + 16 + 32 * j), magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                __m256i p = _mm256_maddubs_epi16(
                    magnitude, _mm256_sign_epi8(broadcast4(x[c] + 4 * j), w));
                isum[c] = pinned(_mm256_add_epi32(isum[c], widen_pairs(p)));
            }
        }
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m256i low, high;
        x8_steps(type, group, j, &low, &high);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            __m256i p = _mm256_maddubs_epi16(low, broadcast4(x[c] + 4 * j));
            low_sum[c] = pinned(_mm256_add_epi16(low_sum[c], p));
        }
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            __m256i p = _mm256_maddubs_epi16(high, broadcast4(x[c] + 16 + 4 * j));
            if (is_five_bit(type))
                high_sum[c] = pinned(_mm256_add_epi16(high_sum[c], p));
            else
                low_sum[c] = pinned(_mm256_add_epi16(low_sum[c], p));
        }
    }
    for (int c = 0; c < columns; c++) {
        isum[c] = widen_pairs(low_sum[c]);
        if (is_five_bit(type)) isum[c] = _mm256_add_epi32(isum[c], widen_pairs(high_sum[c]));
    }
}

/* Eight interleaved rows against up to FEW_X8 columns: one run of memory. */
DS4_INLINE void x8_few(uint32_t type, int columns, const uint8_t *group, int64_t blocks,
                       const char *acts, size_t act_stride, float *y, int64_t ldy) {
    const int bytes = DS4_X8_ROWS * block_bytes_of(type);
    ds4_act32 x[FEW_X8];
    __m256 acc[FEW_X8];
    for (int c = 0; c < columns; c++) {
        x[c] = ds4_act32_view(acts + (size_t)c * act_stride, 32 * blocks);
        acc[c] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < blocks; b++, group += bytes) {
        const int8_t *q[FEW_X8];
        __m256i isum[FEW_X8];
        /* every line: left to a CPU's own prefetching one column had three quarters of the rate */
        prefetch_bytes(group, bytes, DS4_AHEAD_FAR);
        for (int c = 0; c < columns; c++) q[c] = x[c].q + 32 * b;
        x8_dots(type, columns, group, q, isum);
        const __m256 d = load_half8(group);
        const __m256 m = has_min(type) ? load_half8(group + 16) : _mm256_setzero_ps();
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) acc[c] = finish_block(type, isum[c], d, m, x[c], b, acc[c]);
    }
    for (int c = 0; c < columns; c++) _mm256_storeu_ps(y + c * ldy, acc[c]);
}

/* ---- raw blocks ------------------------------------------------------------------------------ */

/* Eight rows (pointers) against one column. */
DS4_INLINE __m256 raw_gemv(uint32_t type, const uint8_t *const *rows, int64_t blocks,
                           const void *act) {
    const int64_t row_bytes = raw_at(type, blocks);
    ds4_act32 x = ds4_act32_view(act, 32 * blocks);
    __m256 acc = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = raw_at(type, b);
        const int part = (int)(b % parts_of(type));
        __m256i xq = load32(x.q + 32 * b), p[8];
        if (!part && (at & 63) < block_bytes_of(type)) { /* once per cache line */
            const int64_t next = at + 2048 < row_bytes ? 0 : 7 * row_bytes; /* the next eight rows */
            for (int i = 0; i < 8; i++)
                _mm_prefetch((const char *)rows[i] + at + 2048 + next, _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            p[i] = widen_pairs(pairs_of(type, raw_values(type, rows[i] + at, part), xq));
        if (type == DS4_NVFP4) { /* two scales: the lanes of the sums stay apart */
            __m256i sums[2];
            sum_lanes4(p, sums);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                acc = finish_block(type, sums[half], raw_scales(type, rows, at, 2 * part + half),
                                   acc, x, b, acc);
            continue;
        }
        __m256 m = has_min(type) ? raw_halves(rows, at + 2) : _mm256_setzero_ps();
        acc = finish_block(type, sum_lanes8(p), raw_scales(type, rows, at, 0), m, x, b, acc);
    }
    return acc;
}

/* ---- tiles: several columns ------------------------------------------------------------------ */

#define TILE_BLOCKS 24 /* 2 * 24 * 320 bytes: half of a 32 KiB L1 cache */
#define SPAN_FEW 12    /* blocks of a tile for four columns or less */

/* One block of eight rows: q[j] holds weights 4j..4j+3 of each row. */
typedef struct {
    __m256i q[8];
    __m256 d, m;
} tile_block;

DS4_INLINE void fill_x8(uint32_t type, const uint8_t *group, tile_block *t) {
    t->d = load_half8(group);
    if (has_min(type)) t->m = load_half8(group + 16);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) x8_steps(type, group, j, t->q + j, t->q + 4 + j);
}

DS4_INLINE void fill_raw(uint32_t type, const uint8_t *const *rows, int64_t b, int64_t row_bytes,
                         tile_block *t) {
    const int64_t at = raw_at(type, b);
    if ((at & 63) < block_bytes_of(type)) { /* once per cache line */
        const int64_t next = at + 1024 < row_bytes ? 0 : 15 * row_bytes; /* the next sixteen rows */
        for (int i = 0; i < 8; i++)
            _mm_prefetch((const char *)rows[i] + at + 1024 + next, _MM_HINT_T0);
    }
    __m256i q[8];
    t->d = raw_scales(type, rows, at, 0);
    if (has_min(type)) t->m = raw_halves(rows, at + 2);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        q[i] = raw_values(type, rows[i] + at, (int)(b % parts_of(type)));
    transpose8(q, t->q);
}

/* int32 sums of one tile block with `columns` columns, `groups` groups: the inner product loop. */
DS4_INLINE void tile_dot(uint32_t type, int groups, int columns, const tile_block *t,
                         const int8_t *const *x, __m256i isum[2][4]) {
    const int widen = steps_of(type);
    __m256i part[2][4];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256i w[2];
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) w[g] = t[g * TILE_BLOCKS].q[j];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            __m256i xb = broadcast4(x[c] + 4 * j);
#pragma GCC unroll 2
            for (int g = 0; g < groups; g++) {
                __m256i p = pairs_of(type, w[g], xb);
                part[g][c] = pinned(j % widen ? _mm256_add_epi16(part[g][c], p) : p);
                if (j % widen != widen - 1) continue;
                __m256i wide = widen_pairs(part[g][c]);
                isum[g][c] = pinned(j < widen ? wide : _mm256_add_epi32(isum[g][c], wide));
            }
        }
    }
}

/* Adds `blocks` tile blocks to the outputs of `columns` columns; `mask` selects the real rows. */
DS4_INLINE void tile_columns(uint32_t type, int groups, int columns, const tile_block *tile,
                             int64_t blocks, const ds4_act32 *x, int first, float *y, int64_t ldy,
                             const __m256i *mask) {
    __m256 acc[2][4];
    for (int c = 0; c < columns; c++)
        for (int g = 0; g < groups; g++)
            acc[g][c] = first ? _mm256_setzero_ps()
                              : _mm256_maskload_ps(y + c * ldy + 8 * g, mask[g]);
    for (int64_t b = 0; b < blocks; b++) {
        const int8_t *q[4];
        __m256i isum[2][4];
        for (int c = 0; c < columns; c++) q[c] = x[c].q + 32 * b;
        tile_dot(type, groups, columns, tile + b, q, isum);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
#pragma GCC unroll 2
            for (int g = 0; g < groups; g++) {
                const tile_block *t = tile + g * TILE_BLOCKS + b;
                acc[g][c] = finish_block(type, isum[g][c], t->d, t->m, x[c], b, acc[g][c]);
            }
    }
    for (int c = 0; c < columns; c++)
        for (int g = 0; g < groups; g++)
            _mm256_maskstore_ps(y + c * ldy + 8 * g, mask[g], acc[g][c]);
}

DS4_INLINE void tile_matmul(uint32_t type, int groups, const tile_block *tile, int64_t block0,
                            int64_t blocks, const ds4_weight *w, const void *acts,
                            size_t act_stride, int64_t n, float *y, int64_t ldy,
                            const __m256i *mask) {
    for (int64_t c = 0; c < n; c += 4) {
        int columns = n - c < 4 ? (int)(n - c) : 4;
        ds4_act32 x[4];
        for (int i = 0; i < columns; i++) {
            x[i] = ds4_act32_view((const char *)acts + (size_t)(c + i) * act_stride, w->cols);
            x[i].q += 32 * block0, x[i].d += block0, x[i].s += block0, x[i].sum += block0;
        }
        float *out = y + c * ldy;
        switch (columns) { /* a constant column count keeps the accumulators in registers */
        case 1: tile_columns(type, groups, 1, tile, blocks, x, !block0, out, ldy, mask); break;
        case 2: tile_columns(type, groups, 2, tile, blocks, x, !block0, out, ldy, mask); break;
        case 3: tile_columns(type, groups, 3, tile, blocks, x, !block0, out, ldy, mask); break;
        default: tile_columns(type, groups, 4, tile, blocks, x, !block0, out, ldy, mask); break;
        }
    }
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void rectangle_x8(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                             const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const int64_t blocks = w->cols / 32, row_bytes = raw_at(type, blocks);
    for (int64_t r = row0; r < row1; r += 8) {
        const uint8_t *group = (const uint8_t *)w->data + r * row_bytes;
        int64_t c = 0, count;
        for (int64_t passes = (n + FEW_X8 - 1) / FEW_X8; passes; passes--, c += count) {
            const char *x = acts + (size_t)c * act_stride;
            float *out = y + c * ldy + r;
            count = (n - c + passes - 1) / passes;
            switch (count) { /* a constant column count keeps the sums in registers */
            case 1: x8_few(type, 1, group, blocks, x, act_stride, out, ldy); break;
            case 2: x8_few(type, 2, group, blocks, x, act_stride, out, ldy); break;
            case 3: x8_few(type, 3, group, blocks, x, act_stride, out, ldy); break;
            default: x8_few(type, 4, group, blocks, x, act_stride, out, ldy);
            }
        }
    }
}

DS4_INLINE void rectangle_gemv(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                               const void *act, float *y) {
    const int64_t blocks = w->cols / 32, row_bytes = raw_at(type, blocks);
    for (int64_t r = row0; r < row1; r += 8) {
        const uint8_t *rows[8];
        raw_rows(w, r, row1, row_bytes, rows);
        _mm256_maskstore_ps(y + r, first_lanes(row1 - r), raw_gemv(type, rows, blocks, act));
    }
}

DS4_INLINE void rectangle(uint32_t type, int x8, const ds4_weight *w, int64_t row0, int64_t row1,
                          const void *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    if (x8 && (n <= MOST_X8 || type == DS4_Q8_0)) { /* Q8_0 has nothing that a tile would save */
        rectangle_x8(type, w, row0, row1, acts, act_stride, n, y, ldy);
        return;
    }
    if (n == 1 || type == DS4_NVFP4) { /* tiles hold one scale per 32 weights */
        for (int64_t c = 0; c < n; c++)
            rectangle_gemv(type, w, row0, row1, (const char *)acts + (size_t)c * act_stride,
                           y + c * ldy);
        return;
    }
    const int group_bytes = DS4_X8_ROWS * block_bytes_of(type);
    int64_t blocks = w->cols / 32, row_bytes = raw_at(type, blocks);
    /* Few columns are bound by memory: short tiles let prefetches run beside the arithmetic. */
    const int64_t span = n <= 4 ? SPAN_FEW : TILE_BLOCKS;
    tile_block tile[2 * TILE_BLOCKS];
    for (int64_t r = row0; r < row1; r += 16) {
        int groups = row1 - r > 8 ? 2 : 1;
        __m256i mask[2] = {first_lanes(row1 - r), first_lanes(groups > 1 ? row1 - r - 8 : 8)};
        for (int64_t b0 = 0; b0 < blocks; b0 += span) {
            int64_t count = blocks - b0 < span ? blocks - b0 : span;
            /* from these blocks to those that are unpacked next, while columns pass */
            const int64_t ahead = b0 + span < blocks ? span * group_bytes
                                                     : 16 * row_bytes - b0 * group_bytes;
            for (int g = 0; g < groups; g++) {
                const uint8_t *rows[8];
                const uint8_t *data = (const uint8_t *)w->data + (r + 8 * g) * row_bytes;
                if (!x8) raw_rows(w, r + 8 * g, row1, row_bytes, rows);
                for (int64_t b = 0; b < count; b++) {
                    tile_block *t = tile + g * TILE_BLOCKS + b;
                    const uint8_t *group = data + (b0 + b) * group_bytes;
                    if (x8) {
                        prefetch_bytes(group + ahead, group_bytes, 0);
                        fill_x8(type, group, t);
                    } else
                        fill_raw(type, rows, b0 + b, row_bytes, t);
                }
            }
            if (groups == 2)
                tile_matmul(type, 2, tile, b0, count, w, acts, act_stride, n, y + r, ldy, mask);
            else
                tile_matmul(type, 1, tile, b0, count, w, acts, act_stride, n, y + r, ldy, mask);
        }
    }
}

DS4_KERNELS(ds4_matmul_avx2_legacy, DS4_BLOCKS_ALL, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_legacy_avx2_is_for_x86;
#endif
