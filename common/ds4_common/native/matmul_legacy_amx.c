/* Types whose activations come in blocks of 32, in int8 tiles: X8 and raw, from a dozen columns.
 *
 * A product of a tile is one block: its sums are exact, and leave the tile for the one float FMA per
 * block and output that every kernel makes. So the bits are those of the scalar kernel. Fewer columns go
 * to the AVX-512 or AVX2 kernel. NVFP4 has two scales in a block and stays there altogether.
 */
#if defined(__AMX_INT8__)
#include "amx.h"
#include "kernel_list.h"
#include "legacy_x8_avx512.h"

#define LEAST_TILED 12 /* columns from which unpacking into tiles pays */
#define SPAN 32        /* blocks unpacked at a time: 16 KiB */

/* Blocks of sixteen rows; q[b] is a tile of weights. */
typedef struct {
    _Alignas(64) uint8_t q[SPAN][8][64];
    __m512 d[SPAN], m[SPAN];
} tile_span;

/* What the unpacked values of a type exceed the true ones by, where tiles take them signed. */
DS4_INLINE __m512i signed_values(uint32_t type, __m512i v) {
    if (type == DS4_Q4_0) return _mm512_sub_epi8(v, _mm512_set1_epi8(8));
    if (type == DS4_Q5_0) return _mm512_sub_epi8(v, _mm512_set1_epi8(16));
    return v;
}

DS4_INLINE void fill_x8(uint32_t type, const uint8_t *a, const uint8_t *b, int64_t count,
                        tile_span *s) {
    const int bytes = DS4_X8_ROWS * block_bytes_of(type);
    for (int64_t i = 0; i < count; i++, a += bytes, b += bytes) {
        prefetch_bytes(a, bytes, DS4_PREFETCH_AHEAD);
        prefetch_bytes(b, bytes, DS4_PREFETCH_AHEAD);
        s->d[i] = two_half8(a, b);
        if (has_min(type)) s->m[i] = two_half8(a + 16, b + 16);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            if (type == DS4_Q8_0) {
                __m512i v = two_groups(a + 16 + 32 * j, b + 16 + 32 * j);
                _mm512_storeu_si512(s->q[i][j], v);
            } else if (j < 4) {
                __m512i low, high;
                steps16(type, a, b, j, &low, &high);
                _mm512_storeu_si512(s->q[i][j], signed_values(type, low));
                _mm512_storeu_si512(s->q[i][4 + j], signed_values(type, high));
            }
        }
    }
}

DS4_INLINE void fill_raw(uint32_t type, const uint8_t *const *rows, int64_t b0, int64_t count,
                         tile_span *s) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = raw_at(type, b0 + i);
        const int part = (int)((b0 + i) % parts_of(type));
        __m256 d[2], m[2];
        for (int half = 0; half < 2; half++) {
            const uint8_t *const *eight = rows + 8 * half;
            __m256i in[8], out[8];
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) in[r] = raw_values(type, eight[r] + at, part);
            transpose8(in, out);
            for (int j = 0; j < 8; j++)
                _mm256_storeu_si256((__m256i *)(void *)(s->q[i][j] + 32 * half), out[j]);
            d[half] = raw_scales(type, eight, at, 0);
            m[half] = has_min(type) ? raw_halves(eight, at + 2) : d[half];
        }
        for (int j = 0; j < 8; j++)
            _mm512_storeu_si512(s->q[i][j], signed_values(type, load64(s->q[i][j])));
        s->d[i] = _mm512_insertf32x8(_mm512_castps256_ps512(d[0]), d[1], 1);
        s->m[i] = _mm512_insertf32x8(_mm512_castps256_ps512(m[0]), m[1], 1);
    }
}

/* The float step of one block for the sums of up to sixteen columns. x: scales of the first column
 * at this block; minima lie `plane` bytes further. */
DS4_INLINE void finish_block(uint32_t type, const int columns, const int32_t (*sums)[16], __m512 d,
                             __m512 m, const char *x, size_t act_stride, size_t plane,
                             __m512 *acc) {
#pragma GCC unroll 16
    for (int c = 0; c < columns; c++, x += act_stride) {
        __m512 isum = _mm512_cvtepi32_ps(load64(sums[c]));
        const float *dx = (const float *)(const void *)x;
        acc[c] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(*dx)), isum, acc[c]);
        if (!has_min(type)) continue;
        const float *sx = (const float *)(const void *)(x + plane);
        acc[c] = _mm512_fmadd_ps(m, _mm512_set1_ps(*sx), acc[c]);
    }
}

/* Blocks b0 .. b0 + count of a tile of columns, added to acc. Products run two blocks ahead of the
 * float steps that use them. */
DS4_INLINE void tile_blocks(uint32_t type, const int columns, const tile_span *s, int64_t b0,
                            int64_t count, int64_t blocks, const char *x, size_t act_stride,
                            __m512 *acc) {
    _Alignas(64) int32_t sums[2][TILE][16];
    const size_t plane = 4 * (size_t)blocks;
    const char *dx = x + ds4_round64((size_t)(32 * blocks)) + 4 * b0;
    const char *q = x + 32 * b0;
    for (int64_t i = 0; i < count + 1; i++, dx += 4) {
        if (i < count) {
            if (i & 1) {
                _tile_zero(1);
                _tile_loadd(5, q + 32 * i, act_stride);
                _tile_loadd(7, s->q[i], 64);
                _tile_dpbssd(1, 5, 7);
                _tile_stored(1, sums[1], 64);
            } else {
                _tile_zero(0);
                _tile_loadd(4, q + 32 * i, act_stride);
                _tile_loadd(6, s->q[i], 64);
                _tile_dpbssd(0, 4, 6);
                _tile_stored(0, sums[0], 64);
            }
        }
        tiles_see_memory();
        if (i)
            finish_block(type, columns, sums[(i - 1) & 1], s->d[i - 1], s->m[i - 1], dx - 4,
                         act_stride, plane, acc);
    }
}

/* One tile of columns; `tail` keeps the sums of an overlapping last tile between spans. */
DS4_INLINE void tile_columns(uint32_t type, const int columns, const tile_span *s, int64_t b0,
                             int64_t count, int64_t blocks, const char *x, size_t act_stride,
                             float *y, int64_t ldy, __m512 *tail, __mmask16 rows) {
    __m512 acc[TILE];
#pragma GCC unroll 16
    for (int c = 0; c < columns; c++)
        acc[c] = !b0    ? _mm512_setzero_ps()
                 : tail ? tail[c]
                        : _mm512_maskz_loadu_ps(rows, y + c * ldy);
    tile_blocks(type, columns, s, b0, count, blocks, x, act_stride, acc);
    const int last = b0 + count == blocks;
#pragma GCC unroll 16
    for (int c = 0; c < columns; c++) {
        if (tail) tail[c] = acc[c];
        if (!tail || last) _mm512_mask_storeu_ps(y + c * ldy, rows, acc[c]);
    }
}

DS4_INLINE void rows16(uint32_t type, int x8, const ds4_weight *w, int64_t r, int64_t row1,
                       const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const int bytes = DS4_X8_ROWS * block_bytes_of(type);
    int64_t blocks = w->cols / 32, row_bytes = raw_at(type, blocks);
    __mmask16 mask = first_of_16(row1 - r);
    const uint8_t *rows[TILE], *a = (const uint8_t *)w->data + r * row_bytes;
    const uint8_t *b = r + 8 < row1 ? a + 8 * row_bytes : a; /* its sums are dropped */
    if (!x8) {
        raw_rows(w, r, row1, row_bytes, rows);
        raw_rows(w, r + 8 < row1 ? r + 8 : r, row1, row_bytes, rows + 8);
    }
    tile_span span;
    __m512 tail[TILE];
    for (int64_t b0 = 0; b0 < blocks; b0 += SPAN) {
        int64_t count = blocks - b0 < SPAN ? blocks - b0 : SPAN;
        if (x8)
            fill_x8(type, a + b0 * bytes, b + b0 * bytes, count, &span);
        else
            fill_raw(type, rows, b0, count, &span);
        for (int64_t t = 0; t * TILE < n; t++) {
            int64_t c = tile_start(t, n);
            const char *x = acts + (size_t)c * act_stride;
            float *out = y + c * ldy + r;
            if (n < TILE) /* one short tile; its missing columns are read as rubbish and dropped */
                tile_columns(type, (int)n, &span, b0, count, blocks, x, act_stride, out, ldy, NULL,
                             mask);
            else
                tile_columns(type, TILE, &span, b0, count, blocks, x, act_stride, out, ldy,
                             c == t * TILE ? NULL : tail, mask);
        }
    }
}

DS4_INLINE void rectangle(uint32_t type, int x8, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    if (n < LEAST_TILED) {
        ds4_matmul_fn few = ds4_matmul_avx512_legacy(type, w->layout);
        if (!few) few = ds4_matmul_avx2_legacy(type, w->layout);
        few(w, row0, row1, acts, act_stride, n, y, ldy);
        return;
    }
    configure_tiles(n < TILE ? (int)n : TILE, 32);
    for (int64_t r = row0; r < row1; r += TILE)
        rows16(type, x8, w, r, row1, acts, act_stride, n, y, ldy);
    _tile_release();
}

/* NULL where another kernel serves. */
DS4_KERNELS(ds4_matmul_amx_legacy, DS4_BLOCKS_BUT_NVFP4, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_legacy_amx_is_for_x86;
#endif
