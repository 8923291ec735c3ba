/* Blocks of 32 weights against many columns, AVX-512 VNNI: thirty-two rows, six columns at a time.
 *
 * A stretch of blocks of thirty-two rows is unpacked once, into unsigned bytes whose lanes are rows, and
 * meets every column before the next stretch does. So unpacking costs little, weights come from the
 * first-level cache, and two vectors of rows share what is read of a column. Sums wait in memory from one
 * stretch to the next: the float order is the scalar one. The first columns meet packed weights while these
 * are unpacked: other pipes do that beside the products. Fewer columns are served by
 * matmul_legacy_avx512.c and matmul_blocks_avx512.c, which also keeps NVFP4.
 */
#if defined(__AVX512F__)
#include "kernel_list.h"
#include "legacy_raw_avx512.h"
#include "legacy_x8_avx512.h"

#define ROWS 32
#define SPAN 16  /* blocks unpacked at a time: 16 KiB */
#define TILE 6   /* columns whose sums fit the registers */
#define MOST 256 /* columns whose sums wait between stretches: 32 KiB */

/* Blocks of thirty-two rows: of each four weights a vector of the first sixteen rows and one of the others. */
typedef struct {
    uint8_t q[SPAN][8][2][64];
    __m512 d[SPAN][2], m[SPAN][2]; /* scales and minima */
} panel;

/* A stretch of blocks against columns. */
typedef struct {
    const uint8_t *const *rows; /* where the rows begin; X8: the groups of eight */
    int64_t b0, count;          /* blocks */
    const char *x;              /* quants of the first column, at block b0 */
    size_t stride;              /* from column to column */
    size_t d_at, plane;         /* from quants to scales; from these to minima, and to sums */
    float (*sums)[ROWS];        /* of each column so far */
    float *y;                   /* where they go with the last stretch, else NULL */
    int64_t ldy;
    __mmask16 mask[2]; /* rows that exist */
} stretch;

/* ---- unpacking: block i of a stretch --------------------------------------------------------- */

DS4_INLINE void fill_x8(uint32_t type, const stretch *s, int64_t i, panel *p) {
    const int bytes = DS4_X8_ROWS * block_bytes_of(type);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const uint8_t *a = s->rows[2 * h] + (s->b0 + i) * bytes;
        const uint8_t *b = s->rows[2 * h + 1] + (s->b0 + i) * bytes;
        for (int at = SPAN * bytes; at < (SPAN + 1) * bytes; at += 64) { /* the next stretch */
            _mm_prefetch((const char *)a + at, _MM_HINT_T1);
            _mm_prefetch((const char *)b + at, _MM_HINT_T1);
        }
        p->d[i][h] = two_half8(a, b);
        if (has_min(type)) p->m[i][h] = two_half8(a + 16, b + 16);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            if (type == DS4_Q8_0) {
                __m512i v = two_groups(a + 16 + 32 * j, b + 16 + 32 * j);
                _mm512_store_si512(p->q[i][j][h], _mm512_xor_si512(v, _mm512_set1_epi8(-128)));
            } else if (j < 4) {
                __m512i low, high;
                steps16(type, a, b, j, &low, &high);
                _mm512_store_si512(p->q[i][j][h], low);
                _mm512_store_si512(p->q[i][4 + j][h], high);
            }
        }
    }
}

DS4_INLINE void fill_raw(uint32_t type, const stretch *s, int64_t i, panel *p) {
    const int64_t at = raw_at(type, s->b0 + i);
    const int part = (int)((s->b0 + i) % parts_of(type));
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const uint8_t *const *rows = s->rows + 16 * h;
        if (!part && (at & 63) < block_bytes_of(type)) /* once per cache line */
            for (int r = 0; r < 16; r++)
                _mm_prefetch((const char *)rows[r] + at + 512, _MM_HINT_T1);
        __m512i q[8];
        sixteen_rows(type, rows, at, part, q);
        scales16(type, rows, at, part, &p->d[i][h], &p->m[i][h]);
        for (int j = 0; j < 8; j++) _mm512_store_si512(p->q[i][j][h], q[j]);
    }
}

/* ---- against columns ------------------------------------------------------------------------- */

/* What a stretch needs of a few columns, block by block. */
typedef struct {
    _Alignas(64) float d[TILE][SPAN], s[TILE][SPAN];
    _Alignas(64) int32_t start[TILE][SPAN]; /* takes off what the moved-up weights give too much */
} column_scales;

/* Left to itself GCC reads it again with each use. */
DS4_INLINE __m512i held(__m512i v) {
    __asm__("" : "+v"(v));
    return v;
}

DS4_INLINE void take_scales(const int columns, const stretch *s, int shift, column_scales *to) {
    const __mmask16 there = (__mmask16)((1u << s->count) - 1);
#pragma GCC unroll 6
    for (int c = 0; c < columns; c++) {
        const char *d = s->x + (size_t)c * s->stride + s->d_at;
        _mm512_store_ps(to->d[c], _mm512_maskz_loadu_ps(there, d));
        if (shift < 0) {
            _mm512_store_ps(to->s[c], _mm512_maskz_loadu_ps(there, d + s->plane));
        } else {
            __m512i sum = _mm512_maskz_loadu_epi32(there, d + 2 * s->plane);
            sum = _mm512_sll_epi32(sum, _mm_cvtsi32_si128(shift));
            _mm512_store_si512(to->start[c], _mm512_sub_epi32(_mm512_setzero_si512(), sum));
        }
    }
}

/* Integer sums of a block of weights times those of columns, three from x on and three from x3 on. */
DS4_INLINE void add_block(const int columns, const uint8_t (*q)[2][64], const char *x,
                          const char *x3, size_t stride, __m512i (*isum)[2]) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const __m512i low = held(_mm512_load_si512(q[j][0]));
        const __m512i high = held(_mm512_load_si512(q[j][1]));
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++) {
            const char *column = (c < 3 ? x : x3) + (size_t)(c % 3) * stride;
            const __m512i b = held(broadcast4_16(column + 4 * j));
            isum[c][0] = _mm512_dpbusd_epi32(isum[c][0], low, b);
            isum[c][1] = _mm512_dpbusd_epi32(isum[c][1], high, b);
        }
    }
}

/* A stretch against some columns. With a type: unpacks it on the way. shift: see shift_of. */
DS4_INLINE void tile(const int columns, const uint32_t unpack, int shift, const int has_minima,
                     const stretch *s, panel *p) {
    column_scales scales;
    __m512 acc[TILE][2];
    take_scales(columns, s, has_minima ? -1 : shift, &scales);
#pragma GCC unroll 12
    for (int k = 0; k < 2 * columns; k++)
        acc[k / 2][k % 2] = s->b0 ? _mm512_load_ps(s->sums[k / 2] + 16 * (k % 2))
                                  : _mm512_setzero_ps();
    const char *x = s->x, *x3 = x + 3 * s->stride;
    for (int64_t i = 0; i < s->count; i++, x += 32, x3 += 32) {
        __m512i isum[TILE][2];
        if (unpack != DS4_F32) {
            fill_x8(unpack, s, i, p);
            in_order();
        }
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++)
            isum[c][0] = isum[c][1] = has_minima ? _mm512_setzero_si512()
                                                 : _mm512_set1_epi32(scales.start[c][i]);
        add_block(columns, p->q[i], x, x3, s->stride, isum);
#pragma GCC unroll 12
        for (int k = 0; k < 2 * columns; k++) {
            const int c = k / 2, h = k % 2;
            const __m512 d = _mm512_mul_ps(p->d[i][h], _mm512_set1_ps(scales.d[c][i]));
            acc[c][h] = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(isum[c][h]), acc[c][h]);
            if (has_minima)
                acc[c][h] = _mm512_fmadd_ps(p->m[i][h], _mm512_set1_ps(scales.s[c][i]), acc[c][h]);
        }
    }
#pragma GCC unroll 12
    for (int k = 0; k < 2 * columns; k++) {
        const int c = k / 2, h = k % 2;
        if (s->y)
            _mm512_mask_storeu_ps(s->y + c * s->ldy + 16 * h, s->mask[h], acc[c][h]);
        else
            _mm512_store_ps(s->sums[c] + 16 * h, acc[c][h]);
    }
}

/* A constant column count keeps the sums in registers. */
#define TILES(name, has_minima)                                                                    \
    static void name(int columns, int shift, const stretch *s, panel *p) {                         \
        switch (columns) {                                                                         \
        case 1: tile(1, DS4_F32, shift, has_minima, s, p); break;                                  \
        case 2: tile(2, DS4_F32, shift, has_minima, s, p); break;                                  \
        case 3: tile(3, DS4_F32, shift, has_minima, s, p); break;                                  \
        case 4: tile(4, DS4_F32, shift, has_minima, s, p); break;                                  \
        case 5: tile(5, DS4_F32, shift, has_minima, s, p); break;                                  \
        default: tile(6, DS4_F32, shift, has_minima, s, p);                                        \
        }                                                                                          \
    }

TILES(moved_tile, 0)
TILES(minima_tile, 1)

DS4_INLINE void next_columns(stretch *s, int64_t columns) {
    s->x += (size_t)columns * s->stride;
    s->sums += columns;
    if (s->y) s->y += columns * s->ldy;
}

/* A stretch against n columns. */
DS4_INLINE void against(uint32_t type, int x8, stretch s, int64_t n, panel *p) {
    const int shift = shift_of(type);
    if (x8 && n >= TILE) {
        tile(TILE, type, shift, has_min(type), &s, p);
        next_columns(&s, TILE);
        n -= TILE;
    } else {
        for (int64_t i = 0; i < s.count; i++)
            if (x8)
                fill_x8(type, &s, i, p);
            else
                fill_raw(type, &s, i, p);
    }
    for (int64_t tiles = (n + TILE - 1) / TILE; tiles; tiles--) {
        const int columns = (int)(n / tiles);
        (has_min(type) ? minima_tile : moved_tile)(columns, shift, &s, p);
        next_columns(&s, columns);
        n -= columns;
    }
}

/* Thirty-two rows from row r on; those from row1 on are a repeated one, and dropped. */
DS4_INLINE void rows32(uint32_t type, int x8, const ds4_weight *w, int64_t r, int64_t row1,
                       const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    panel p;
    _Alignas(64) float sums[MOST][ROWS];
    const uint8_t *rows[ROWS];
    const int64_t blocks = w->cols / 32, row_bytes = raw_at(type, blocks);
    for (int64_t i = 0; i < ROWS; i += x8 ? 8 : 1) {
        const int64_t row = r + i < row1 ? r + i : x8 ? r : row1 - 1;
        rows[x8 ? i / 8 : i] = (const uint8_t *)w->data + row * row_bytes;
    }
    stretch s = {.rows = rows, .stride = act_stride, .plane = 4 * (size_t)blocks, .ldy = ldy};
    s.mask[0] = first_of_16(row1 - r);
    s.mask[1] = first_of_16(row1 - r < 16 ? 0 : row1 - r - 16);
    for (int64_t c = 0, columns, shares = (n + MOST - 1) / MOST; c < n; c += columns, shares--) {
        columns = (n - c) / shares;
        int64_t stretches = (blocks + SPAN - 1) / SPAN;
        for (s.b0 = 0; s.b0 < blocks; s.b0 += s.count, stretches--) {
            s.count = (blocks - s.b0) / stretches;
            s.x = acts + (size_t)c * act_stride + 32 * s.b0;
            s.d_at = ds4_round64((size_t)(32 * blocks)) - 28 * (size_t)s.b0;
            s.sums = sums;
            s.y = stretches == 1 ? y + c * ldy + r : NULL;
            against(type, x8, s, columns, &p);
        }
    }
}

DS4_INLINE void rectangle(uint32_t type, int x8, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    for (int64_t r = row0; r < row1; r += ROWS)
        rows32(type, x8, w, r, row1, acts, act_stride, n, y, ldy);
}

#define KERNELS(each)                                                                              \
    each(q4_0_raw, DS4_Q4_0, 0)                                                                    \
    each(q4_1_raw, DS4_Q4_1, 0)                                                                    \
    each(q5_0_raw, DS4_Q5_0, 0)                                                                    \
    each(q5_1_raw, DS4_Q5_1, 0)                                                                    \
    each(q8_0_raw, DS4_Q8_0, 0)                                                                    \
    each(q1_0_raw, DS4_Q1_0, 0)                                                                    \
    each(iq4_nl_raw, DS4_IQ4_NL, 0)                                                                \
    each(mxfp4_raw, DS4_MXFP4, 0)                                                                  \
    each(q4_0_x8, DS4_Q4_0, 1)                                                                     \
    each(q4_1_x8, DS4_Q4_1, 1)                                                                     \
    each(q5_0_x8, DS4_Q5_0, 1)                                                                     \
    each(q5_1_x8, DS4_Q5_1, 1)                                                                     \
    each(q8_0_x8, DS4_Q8_0, 1)

/* NULL where another kernel serves. */
DS4_KERNELS(ds4_matmul_avx512_many, KERNELS, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_many_avx512_is_for_x86;
#endif
