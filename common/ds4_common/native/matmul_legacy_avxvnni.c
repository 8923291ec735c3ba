/* Types whose activations come in blocks of 32, AVX-VNNI: up to eight columns of X8, one of raw blocks.
 *
 * One lane per row, as in the AVX2 kernels, so the float order is the scalar one. Two groups of eight rows,
 * two runs of memory that are asked for ahead, share what is read of a column; one column, and two of Q8_0,
 * are fastest along one run. Weights are unpacked in registers and meet four columns at a time: unpacking a
 * block again for the others costs less than keeping it. All else goes to matmul_many_avxvnni.c, but for
 * NVFP4, four columns of which meet a block of eight rows.
 */
#if defined(__AVXVNNI__)
#include "kernel_list.h"
#include "legacy_avxvnni.h"

#define MOST 8 /* columns; more are faster with matmul_many_avxvnni.c */
#define FOUR 4 /* columns whose sums fit the registers */

/* Columns, whose planes lie behind their quants. */
typedef struct {
    const char *x; /* quants of the first one */
    size_t stride; /* from column to column */
    size_t d_at, s_at, sum_at;
} columns;

/* Where the integer sums of a block begin: takes off what the moved-up weights give too much. */
DS4_INLINE ints start_of(uint32_t type, const char *sum) {
    return shift_of(type) < 0 ? no_ints()
                              : _mm256_set1_epi32(-(int)(ds4_load_u32(sum) << shift_of(type)));
}

/* Adds a step's weights times those of n columns. */
DS4_INLINE void add_step(const int groups, const int n, const ints *w, const char *x, size_t stride,
                         ints (*isum)[2]) {
#pragma GCC unroll 4
    for (int c = 0; c < n; c++) {
        const ints b = held(all_dwords(x + (size_t)c * stride));
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) isum[c][g] = dot4(isum[c][g], w[g], b);
    }
}

/* Adds block i of one or two groups times those of n columns. */
DS4_INLINE void add_block(uint32_t type, const int groups, const int n, const uint8_t *const *group,
                          const columns *from, int64_t i, floats (*acc)[2]) {
    const char *x = from->x + 32 * i, *d_at = from->x + from->d_at + 4 * i;
    const char *s_at = from->x + from->s_at + 4 * i, *sum_at = from->x + from->sum_at + 4 * i;
    ints isum[FOUR][2];
#pragma GCC unroll 4
    for (int c = 0; c < n; c++)
        isum[c][0] = isum[c][1] = start_of(type, sum_at + (size_t)c * from->stride);
#pragma GCC unroll 8
    for (int j = 0; j < (type == DS4_Q8_0 ? 8 : 4); j++) {
        ints low[2], high[2];
        in_order();
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
            if (type == DS4_Q8_0)
                low[g] = moved_up(load32(group[g] + 16 + 32 * j));
            else
                x8_steps(type, group[g], j, low + g, high + g);
        add_step(groups, n, low, x + 4 * j, from->stride, isum);
        if (type != DS4_Q8_0) add_step(groups, n, high, x + 16 + 4 * j, from->stride, isum);
    }
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++) {
        const floats d = load_half8(group[g]);
#pragma GCC unroll 4
        for (int c = 0; c < n; c++) {
            const floats scale = product(d, all_floats(d_at + (size_t)c * from->stride));
            acc[c][g] = add_product(scale, to_floats(isum[c][g]), acc[c][g]);
            if (has_min(type))
                acc[c][g] = add_product(load_half8(group[g] + 16),
                                        all_floats(s_at + (size_t)c * from->stride), acc[c][g]);
        }
    }
}

/* Eight or sixteen rows, whose blocks are at `a` and `b`, against n columns. */
DS4_INLINE void rows(uint32_t type, const int groups, const int n, const uint8_t *a,
                     const uint8_t *b, int64_t blocks, const columns *from, float *y, int64_t ldy,
                     const mask *there) {
    const int bytes = DS4_X8_ROWS * block_bytes_of(type);
    floats acc[MOST][2];
    for (int c = 0; c < n; c++) acc[c][0] = acc[c][1] = no_floats();
    group_stream next = stream_ahead(a, 2, blocks, bytes);
    for (int64_t i = 0; i < blocks; i++, a += bytes, b += bytes) {
        const uint8_t *const group[2] = {a, b};
        columns four = *from;
        if (groups == 1) { /* one run of memory */
            prefetch_bytes(a, bytes, DS4_AHEAD_FAR);
        } else {
            ask_part(&next, 2, blocks, bytes, 0, 1);
            step_ahead(&next, 2, blocks, bytes);
        }
#pragma GCC unroll 2
        for (int c = 0; c < n; c += FOUR, four.x += FOUR * four.stride)
            add_block(type, groups, n - c < FOUR ? n - c : FOUR, group, &four, i, acc + c);
    }
#pragma GCC unroll 8
    for (int c = 0; c < n; c++)
        for (int g = 0; g < groups; g++) store_there(y + c * ldy + 8 * g, there[g], acc[c][g]);
}

/* ---- raw blocks, one column ------------------------------------------------------------------ */

/* Sum of the first sixteen of a block of activations. */
DS4_INLINE int32_t first_half(const char *x) {
    __m128i v = _mm_dpbusd_avx_epi32(_mm_setzero_si128(), _mm_set1_epi8(1),
                                     _mm_loadu_si128((const __m128i *)(const void *)x));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}

/* Eight rows, whose lanes of integer sums meet at the end of a block. */
DS4_INLINE floats raw_rows8(uint32_t type, const uint8_t *const *row, int64_t blocks,
                            const void *act) {
    const ds4_act32 x = ds4_act32_view(act, 32 * blocks);
    const int shift = shift_of(type);
    floats acc = no_floats();
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = raw_at(type, b);
        const int part = (int)(b % parts_of(type));
        const ints xq = load32(x.q + 32 * b);
        ints start = no_ints(), p[8]; /* what a row's lanes add up to begins there */
        if (type == DS4_NVFP4) {
            const int32_t half = first_half((const char *)x.q + 32 * b);
            start = _mm256_setr_epi32(-(half * 16), 0, 0, 0, (half - x.sum[b]) * 16, 0, 0, 0);
        } else if (shift >= 0) {
            const uint32_t sum = (uint32_t)x.sum[b];
            start = _mm256_zextsi128_si256(_mm_cvtsi32_si128(-(int)(sum << shift)));
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            _mm_prefetch((const char *)row[r] + at + 512, _MM_HINT_T1);
            p[r] = dot4(start, moved_values(type, row[r] + at, part), xq);
        }
        if (type == DS4_NVFP4) { /* two scales: the lanes of the sums stay apart */
            ints sums[2];
            sum_lanes4(p, sums);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const floats d = raw_scales(type, row, at, 2 * part + half);
                acc = add_product(product(d, all_floats(x.d + b)), to_floats(sums[half]), acc);
            }
            continue;
        }
        const floats d = product(raw_scales(type, row, at, 0), all_floats(x.d + b));
        acc = add_product(d, to_floats(sum_lanes8(p)), acc);
        if (has_min(type)) acc = add_product(raw_halves(row, at + 2), all_floats(x.s + b), acc);
    }
    return acc;
}

DS4_INLINE void raw_column(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                           const void *act, float *y) {
    const int64_t blocks = w->cols / 32, row_bytes = raw_at(type, blocks);
    for (int64_t r = row0; r < row1; r += 8) {
        const uint8_t *row[8];
        raw_rows(w, r, row1, row_bytes, row);
        store_there(y + r, first_rows(row1 - r), raw_rows8(type, row, blocks, act));
    }
}

/* ---- NVFP4, whose scales hold for sixteen weights: several columns --------------------------- */

/* Eight rows against n columns: a block is unpacked once, its lanes are rows. */
DS4_INLINE void nvfp4_rows8(const int n, const uint8_t *const *row, int64_t blocks,
                            const char *acts, size_t stride, float *y, int64_t ldy, mask there) {
    const size_t d_at = ds4_round64((size_t)(32 * blocks)), sum_at = d_at + 8 * (size_t)blocks;
    floats acc[FOUR];
    for (int c = 0; c < n; c++) acc[c] = no_floats();
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = raw_at(DS4_NVFP4, b);
        const int part = (int)(b % parts_of(DS4_NVFP4));
        ints q[8];
        for (int r = 0; r < 8; r++) _mm_prefetch((const char *)row[r] + at + 512, _MM_HINT_T1);
        unpacked_rows(DS4_NVFP4, row, at, part, q);
        const floats d[2] = {raw_scales(DS4_NVFP4, row, at, 2 * part),
                             raw_scales(DS4_NVFP4, row, at, 2 * part + 1)};
#pragma GCC unroll 4
        for (int c = 0; c < n; c++) {
            const char *column = acts + (size_t)c * stride, *x = column + 32 * b;
            const int32_t first = first_half(x), sum = (int32_t)ds4_load_u32(column + sum_at + 4 * b);
            const floats dx = all_floats(column + d_at + 4 * b);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                ints isum = _mm256_set1_epi32((h ? first - sum : -first) * 16);
#pragma GCC unroll 4
                for (int j = 4 * h; j < 4 * h + 4; j++)
                    isum = dot4(isum, q[j], all_dwords(x + 4 * j));
                acc[c] = add_product(product(d[h], dx), to_floats(isum), acc[c]);
            }
        }
    }
    for (int c = 0; c < n; c++) store_there(y + c * ldy, there, acc[c]);
}

DS4_INLINE void nvfp4_columns(const ds4_weight *w, int64_t row0, int64_t row1, const char *acts,
                              size_t stride, int64_t n, float *y, int64_t ldy) {
    const int64_t blocks = w->cols / 32, row_bytes = raw_at(DS4_NVFP4, blocks);
    for (int64_t r = row0; r < row1; r += 8) {
        const uint8_t *row[8];
        const mask there = first_rows(row1 - r);
        raw_rows(w, r, row1, row_bytes, row);
        for (int64_t c = 0; c < n; c += FOUR) {
            const char *x = acts + (size_t)c * stride;
            float *out = y + c * ldy + r;
            switch (n - c) { /* a constant column count keeps the sums in registers */
            case 1: nvfp4_rows8(1, row, blocks, x, stride, out, ldy, there); break;
            case 2: nvfp4_rows8(2, row, blocks, x, stride, out, ldy, there); break;
            case 3: nvfp4_rows8(3, row, blocks, x, stride, out, ldy, there); break;
            default: nvfp4_rows8(4, row, blocks, x, stride, out, ldy, there);
            }
        }
    }
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void rectangle(uint32_t type, int x8, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    if (!x8 && n == 1) {
        raw_column(type, w, row0, row1, acts, y);
        return;
    }
    if (type == DS4_NVFP4) {
        nvfp4_columns(w, row0, row1, acts, act_stride, n, y, ldy);
        return;
    }
    if (!x8 || n > MOST) {
        ds4_matmul_avxvnni_many(type, w->layout)(w, row0, row1, acts, act_stride, n, y, ldy);
        return;
    }
    const int64_t blocks = w->cols / 32, row_bytes = raw_at(type, blocks);
    const size_t d_at = ds4_round64((size_t)w->cols), plane = 4 * (size_t)blocks;
    const columns from = {acts, act_stride, d_at, d_at + plane, d_at + 2 * plane};
    const mask all = first_rows(8);
    const uint8_t *a = (const uint8_t *)w->data + row0 * row_bytes;
    if (n == 1 || (n == 2 && type == DS4_Q8_0)) { /* bound by memory */
        for (int64_t r = row0; r < row1; r += 8, a += 8 * row_bytes)
            if (n == 1)
                rows(type, 1, 1, a, a, blocks, &from, y + r, ldy, &all);
            else
                rows(type, 1, 2, a, a, blocks, &from, y + r, ldy, &all);
        return;
    }
    for (int64_t r = row0; r < row1; r += 16, a += 16 * row_bytes) {
        const uint8_t *b = r + 8 < row1 ? a + 8 * row_bytes : a; /* its sums are dropped */
        const mask there[2] = {all, first_rows(row1 - r - 8)};
        switch (n) { /* a constant column count keeps the sums in registers */
        case 2: rows(type, 2, 2, a, b, blocks, &from, y + r, ldy, there); break;
        case 3: rows(type, 2, 3, a, b, blocks, &from, y + r, ldy, there); break;
        case 4: rows(type, 2, 4, a, b, blocks, &from, y + r, ldy, there); break;
        case 5: rows(type, 2, 5, a, b, blocks, &from, y + r, ldy, there); break;
        case 6: rows(type, 2, 6, a, b, blocks, &from, y + r, ldy, there); break;
        case 7: rows(type, 2, 7, a, b, blocks, &from, y + r, ldy, there); break;
        default: rows(type, 2, 8, a, b, blocks, &from, y + r, ldy, there);
        }
    }
}

/* NULL where the AVX2 kernel serves. */
DS4_KERNELS(ds4_matmul_avxvnni_legacy, DS4_BLOCKS_ALL, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_legacy_avxvnni_is_for_x86;
#endif
