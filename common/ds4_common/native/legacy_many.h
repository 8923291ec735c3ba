/* Blocks of 32 weights against many columns: two vectors of rows, six columns at a time.
 *
 * A stretch of blocks of so many rows is unpacked once, into unsigned bytes whose lanes are rows, and
 * meets every column before the next stretch does. So unpacking costs little, weights come from the
 * first-level cache, and two vectors of rows share what is read of a column. Sums wait in memory from one
 * stretch to the next: the float order is the scalar one. The first columns meet packed weights while these
 * are unpacked: other pipes do that beside the products.
 *
 * The including file says what a vector is: the types ints, floats and mask, LANES, and the functions
 * called here that no header above has, of which each is an instruction or two. Include only from
 * matmul_many_*.c.
 */
#ifndef DS4_LEGACY_MANY_H
#define DS4_LEGACY_MANY_H

#include "kernel_list.h"
#include "legacy_unpack_avx2.h"

#define ROWS (2 * LANES)
#define SPAN (256 / LANES) /* blocks unpacked at a time: 16 KiB */
#define TILE 6   /* columns whose sums fit the registers */
#define MOST 256 /* columns whose sums wait between stretches */

/* Blocks of all rows: of each four weights a vector of the first half of them and one of the others. */
typedef struct {
    ints q[SPAN][8][2];
    floats d[SPAN][2], m[SPAN][2]; /* scales and minima */
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
    mask there[2]; /* rows that exist */
} stretch;

/* ---- unpacking: block i of a stretch --------------------------------------------------------- */

DS4_INLINE void fill_x8(uint32_t type, const stretch *s, int64_t i, panel *p) {
    enum { GROUPS = LANES / DS4_X8_ROWS };
    const int bytes = DS4_X8_ROWS * block_bytes_of(type);
    const int64_t at = (s->b0 + i) * bytes;
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const uint8_t *const *groups = s->rows + GROUPS * h;
        for (int g = 0; g < GROUPS; g++) /* the next stretch */
            for (int line = SPAN * bytes; line < (SPAN + 1) * bytes; line += 64)
                _mm_prefetch((const char *)groups[g] + at + line, _MM_HINT_T1);
        p->d[i][h] = group_halves(groups, at);
        if (has_min(type)) p->m[i][h] = group_halves(groups, at + 16);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            if (type == DS4_Q8_0)
                p->q[i][j][h] = moved_up(group_bytes(groups, at + 16 + 32 * j));
            else if (j < 4)
                group_steps(type, groups, at, j, &p->q[i][j][h], &p->q[i][4 + j][h]);
        }
    }
}

DS4_INLINE void fill_raw(uint32_t type, const stretch *s, int64_t i, panel *p) {
    const int64_t at = raw_at(type, s->b0 + i);
    const int part = (int)((s->b0 + i) % parts_of(type));
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const uint8_t *const *rows = s->rows + LANES * h;
        if (!part && (at & 63) < block_bytes_of(type)) /* once per cache line */
            for (int r = 0; r < LANES; r++)
                _mm_prefetch((const char *)rows[r] + at + 512, _MM_HINT_T1);
        ints q[8];
        unpacked_rows(type, rows, at, part, q);
        scales_of_rows(type, rows, at, part, &p->d[i][h], &p->m[i][h]);
        for (int j = 0; j < 8; j++) p->q[i][j][h] = q[j];
    }
}

/* ---- against columns ------------------------------------------------------------------------- */

/* What a stretch needs of a few columns, block by block. */
typedef struct {
    _Alignas(64) float d[TILE][SPAN], s[TILE][SPAN];
    _Alignas(64) int32_t start[TILE][SPAN]; /* takes off what the moved-up weights give too much */
} column_scales;

DS4_INLINE void take_scales(const int columns, const stretch *s, int shift, column_scales *to) {
#pragma GCC unroll 2
    for (int k = 0; k < SPAN; k += LANES) {
        const mask there = first_rows(s->count - k);
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++) {
            const char *d = s->x + (size_t)c * s->stride + s->d_at + 4 * k;
            store_ints(to->d[c] + k, load_there(there, d));
            if (shift < 0)
                store_ints(to->s[c] + k, load_there(there, d + s->plane));
            else
                store_ints(to->start[c] + k, minus_shifted(load_there(there, d + 2 * s->plane), shift));
        }
    }
}

/* Integer sums of a block of weights times those of columns, three from x on and three from x3 on. */
DS4_INLINE void add_block(const int columns, const ints (*q)[2], const char *x, const char *x3,
                          size_t stride, ints (*isum)[2]) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const ints low = held(q[j][0]), high = held(q[j][1]);
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++) {
            const char *column = (c < 3 ? x : x3) + (size_t)(c % 3) * stride;
            const ints b = held(all_dwords(column + 4 * j));
            isum[c][0] = dot4(isum[c][0], low, b);
            isum[c][1] = dot4(isum[c][1], high, b);
        }
    }
}

/* A stretch against some columns. With a type: unpacks it on the way. shift: see shift_of. */
DS4_INLINE void tile(const int columns, const uint32_t unpack, int shift, const int has_minima,
                     const stretch *s, panel *p) {
    column_scales scales;
    floats acc[TILE][2];
    take_scales(columns, s, has_minima ? -1 : shift, &scales);
#pragma GCC unroll 12
    for (int k = 0; k < 2 * columns; k++)
        acc[k / 2][k % 2] = s->b0 ? load_floats(s->sums[k / 2] + LANES * (k % 2)) : no_floats();
    const char *x = s->x, *x3 = x + 3 * s->stride;
    for (int64_t i = 0; i < s->count; i++, x += 32, x3 += 32) {
        ints isum[TILE][2];
        if (unpack != DS4_F32) {
            fill_x8(unpack, s, i, p);
            in_order();
        }
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++)
            isum[c][0] = isum[c][1] = has_minima ? no_ints() : all_dwords(&scales.start[c][i]);
        add_block(columns, p->q[i], x, x3, s->stride, isum);
#pragma GCC unroll 12
        for (int k = 0; k < 2 * columns; k++) {
            const int c = k / 2, h = k % 2;
            const floats d = product(p->d[i][h], all_floats(&scales.d[c][i]));
            acc[c][h] = add_product(d, to_floats(isum[c][h]), acc[c][h]);
            if (has_minima)
                acc[c][h] = add_product(p->m[i][h], all_floats(&scales.s[c][i]), acc[c][h]);
        }
    }
#pragma GCC unroll 12
    for (int k = 0; k < 2 * columns; k++) {
        const int c = k / 2, h = k % 2;
        if (s->y)
            store_there(s->y + c * s->ldy + LANES * h, s->there[h], acc[c][h]);
        else
            store_floats(s->sums[c] + LANES * h, acc[c][h]);
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

/* ROWS rows from row r on; those from row1 on are a repeated one, and dropped. */
DS4_INLINE void panel_rows(uint32_t type, int x8, const ds4_weight *w, int64_t r, int64_t row1,
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
    for (int h = 0; h < 2; h++) s.there[h] = first_rows(row1 - r - LANES * h);
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
        panel_rows(type, x8, w, r, row1, acts, act_stride, n, y, ldy);
}

#endif
