/* K, IQ and TQ types (blocks of 256) in int8 tiles: X8 and raw, from a dozen columns or two.
 *
 * A weight times its sub-scale is an integer below 2^13 in magnitude: 128 high + low, two signed bytes.
 * Tiles sum products of each over the whole block, exactly; the float step is the one of every kernel.
 * Where the product is a byte already (Q2_K, TQ) there is no high part. Fewer columns go to the AVX-512 kernel.
 */
#if defined(__AMX_INT8__)
#include "amx.h"
#include "kernel_list.h"
#include "super_x8_avx512.h"

/* Columns from which unpacking into tiles pays; raw blocks have to be turned, too. */
#define LEAST_TILED_X8 12
#define LEAST_TILED_RAW 24
#define MANY 256 /* columns whose accumulators wait while the next block is unpacked */

/* One block of sixteen rows: four tiles of 64 weights, low and high parts. mn: the stored minima in
 * pairs, in the order of the activations' sums. */
typedef struct {
    _Alignas(64) uint8_t low[4][16][64], high[4][16][64];
    __m512i mn[8];
    __m512 d, m;
} super_tile;

DS4_INLINE int parts_of(uint32_t type) {
    return type == DS4_Q2_K || type == DS4_TQ1_0 || type == DS4_TQ2_0 ? 1 : 2;
}

/* ---- unpacking ------------------------------------------------------------------------------- */

/* The even and the odd bytes' products as bytes: low seven bits, or what is above them. */
DS4_INLINE __m512i low_part(__m512i even, __m512i odd) {
    const __m512i seven = _mm512_set1_epi16(127);
    odd = _mm512_slli_epi16(_mm512_and_si512(odd, seven), 8);
    return _mm512_or_si512(_mm512_and_si512(even, seven), odd);
}

DS4_INLINE __m512i high_part(__m512i even, __m512i odd) {
    const __m512i byte = _mm512_set1_epi16(255);
    odd = _mm512_slli_epi16(_mm512_srai_epi16(odd, 7), 8);
    return _mm512_or_si512(_mm512_and_si512(_mm512_srai_epi16(even, 7), byte), odd);
}

DS4_INLINE void fill_x8(uint32_t type, const uint8_t *a, const uint8_t *b, super_tile *t) {
    const __m512i byte = _mm512_set1_epi16(255);
    x8_scales16 scales;
    x8_load_scales16(type, a, b, &scales);
    t->d = two_half8(a, b);
    if (super_has_min(type)) {
        t->m = _mm512_xor_ps(two_half8(a + 16, b + 16), _mm512_set1_ps(-0.0f));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) t->mn[i] = x8_term16(type, &scales, i);
    }
#pragma GCC unroll 16
    for (int sub = 0; sub < 16; sub++) {
        const int place = scales_per_32(type) ? sub / 2 : sub, i = sub / 2;
        __m512i scale = byte_pair16(scales.s[place / 4], place % 4, place % 4);
        /* Q3_K stores its values plus 4, Q6_K plus 32 */
        __m512i offset = _mm512_slli_epi16(scale, type == DS4_Q3_K ? 2 : 5);
#pragma GCC unroll 4
        for (int j = 4 * (sub % 2); j < 4 * (sub % 2) + 4; j++) {
            __m512i q = x8_values16(type, a, b, i, j);
            __m512i even = _mm512_mullo_epi16(_mm512_and_si512(q, byte), scale);
            __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(q, 8), scale);
            if (!super_has_min(type)) {
                even = _mm512_sub_epi16(even, offset);
                odd = _mm512_sub_epi16(odd, offset);
            }
            const int row = 8 * (i % 2) + j;
            _mm512_store_si512(t->low[i / 2][row], low_part(even, odd));
            if (parts_of(type) > 1) _mm512_store_si512(t->high[i / 2][row], high_part(even, odd));
        }
    }
}

/* int16 number i and i + 8 of sixteen in the lower and upper half. */
DS4_INLINE __m512i halves_of(const int16_t *v, int i) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi16(v[i])),
                              _mm256_set1_epi16(v[i + 8]), 1);
}

/* One row's block: 256 bytes of each part. */
DS4_INLINE void split_row(uint32_t type, const super_block *s, uint8_t *low, uint8_t *high) {
    int16_t sc[16], mn[16];
    _mm256_storeu_si256((__m256i *)(void *)sc, s->sc);
    _mm256_storeu_si256((__m256i *)(void *)mn, s->mn);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i q = super_signed(type) ? _mm512_cvtepi8_epi16(s->q[i])
                                       : _mm512_cvtepu8_epi16(s->q[i]);
        __m512i p = _mm512_mullo_epi16(q, halves_of(sc, i));
        if (!super_has_min(type)) p = _mm512_add_epi16(p, halves_of(mn, i));
        __m512i seven = _mm512_and_si512(p, _mm512_set1_epi16(127));
        if (parts_of(type) == 1) seven = p;
        _mm256_storeu_si256((__m256i *)(void *)(low + 32 * i), _mm512_cvtepi16_epi8(seven));
        if (parts_of(type) > 1)
            _mm256_storeu_si256((__m256i *)(void *)(high + 32 * i),
                                _mm512_cvtepi16_epi8(_mm512_srai_epi16(p, 7)));
    }
}

DS4_INLINE void fill_raw(uint32_t type, const uint8_t *const *rows, int64_t at, super_tile *t) {
    _Alignas(64) uint8_t low[TILE][256], high[TILE][256];
    _Alignas(64) int32_t mn[8][TILE];
    float d[TILE], m[TILE];
    for (int r = 0; r < TILE; r++) {
        super_block s;
        load_super(type, rows[r] + at, &s);
        d[r] = s.d, m[r] = s.m;
        split_row(type, &s, low[r], high[r]);
        int32_t pairs[8];
        _mm256_storeu_si256((__m256i *)(void *)pairs, s.mn);
        for (int i = 0; super_has_min(type) && i < 8; i++) mn[i][r] = pairs[i];
    }
    t->d = _mm512_loadu_ps(d);
    t->m = _mm512_loadu_ps(m);
    for (int i = 0; super_has_min(type) && i < 8; i++) t->mn[i] = load64(mn[i]);
    for (int k = 0; k < 4; k++) {
        transpose16(low[0] + 64 * k, 256, t->low[k][0]);
        if (parts_of(type) > 1) transpose16(high[0] + 64 * k, 256, t->high[k][0]);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

typedef struct {
    _Alignas(64) int32_t low[TILE][16], high[TILE][16];
} tile_sums;

/* The float step of one block for `columns` columns from x on, whose block's scales are at dx. */
DS4_INLINE void finish_columns(uint32_t type, int columns, const super_tile *t,
                               const tile_sums *sums, const char *mins, const char *dx,
                               size_t act_stride, __m512 *acc) {
    for (int c = 0; c < columns; c++, mins += act_stride, dx += act_stride) {
        __m512 scale = _mm512_set1_ps(*(const float *)(const void *)dx);
        __m512i isum = load64(sums->low[c]);
        if (parts_of(type) > 1)
            isum = _mm512_add_epi32(isum, _mm512_slli_epi32(load64(sums->high[c]), 7));
        __m512 to = _mm512_fmadd_ps(_mm512_mul_ps(t->d, scale), _mm512_cvtepi32_ps(isum), acc[c]);
        if (super_has_min(type)) {
            __m512i term = _mm512_setzero_si512(), more = term;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                term = _mm512_dpwssd_epi32(term, t->mn[i], broadcast4_16(mins + 4 * i));
                more = _mm512_dpwssd_epi32(more, t->mn[4 + i], broadcast4_16(mins + 16 + 4 * i));
            }
            term = _mm512_add_epi32(term, more);
            to = _mm512_fmadd_ps(_mm512_mul_ps(t->m, scale), _mm512_cvtepi32_ps(term), to);
        }
        acc[c] = to;
    }
}

/* Products of one tile of columns, or of two at once. */
DS4_INLINE void multiply(uint32_t type, const int two, const super_tile *t, const char *q0,
                         const char *q1, size_t act_stride, tile_sums *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < 4; k++) {
        _tile_loadd(4, q0 + 64 * k, act_stride);
        _tile_loadd(6, t->low[k], 64);
        _tile_dpbssd(0, 4, 6);
        if (parts_of(type) > 1) {
            _tile_loadd(7, t->high[k], 64);
            _tile_dpbssd(1, 4, 7);
        }
        if (!two) continue;
        _tile_loadd(5, q1 + 64 * k, act_stride);
        _tile_dpbssd(2, 5, 6);
        if (parts_of(type) > 1) _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0].low, 64);
    if (parts_of(type) > 1) _tile_stored(1, sums[0].high, 64);
    if (two) {
        _tile_stored(2, sums[1].low, 64);
        if (parts_of(type) > 1) _tile_stored(3, sums[1].high, 64);
    }
    tiles_see_memory();
}

/* Block b of sixteen rows against n columns; a last tile that overlaps has accumulators after those of
 * all columns. */
DS4_INLINE void tile_block(uint32_t type, const super_tile *t, int64_t blocks, int64_t b,
                           const char *acts, size_t act_stride, int64_t n, __m512 *acc) {
    tile_sums sums[2];
    const int64_t tiles = (n + TILE - 1) / TILE;
    const int columns = n < TILE ? (int)n : TILE;
    tiles_see_memory();
    for (int64_t i = 0; i < tiles; i += 2) {
        const int two = i + 1 < tiles;
        const char *x0 = acts + (size_t)tile_start(i, n) * act_stride;
        const char *x1 = two ? acts + (size_t)tile_start(i + 1, n) * act_stride : x0;
        multiply(type, two, t, x0 + 256 * b, x1 + 256 * b, act_stride, sums);
        for (int j = 0; j <= two; j++) {
            const char *x = j ? x1 : x0;
            finish_columns(type, columns, t, sums + j, x + 256 * blocks + 32 * b,
                           x + 288 * blocks + 4 * b, act_stride, acc + TILE * (i + j));
        }
    }
}

/* Sixteen rows from row r on, of which those below row1 exist, against n <= MANY columns. */
DS4_INLINE void rows_many(uint32_t type, int x8, const ds4_weight *w, int64_t r, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const int bytes = super_bytes(type);
    int64_t blocks = w->cols / DS4_SUPER, row_bytes = blocks * bytes;
    const uint8_t *rows[TILE]; /* rows past the end repeat the last one; their sums are dropped */
    for (int64_t i = 0; i < TILE; i++)
        rows[i] = (const uint8_t *)w->data + (r + i < row1 ? r + i : row1 - 1) * row_bytes;
    const uint8_t *a = rows[0], *second = r + 8 < row1 ? rows[8] : a;
    super_tile tile;
    __m512 acc[MANY + TILE];
    for (int64_t c = 0; c < n + TILE; c++) acc[c] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        if (x8)
            fill_x8(type, a + b * DS4_X8_ROWS * bytes, second + b * DS4_X8_ROWS * bytes, &tile);
        else
            fill_raw(type, rows, b * bytes, &tile);
        tile_block(type, &tile, blocks, b, acts, act_stride, n, acc);
    }
    __mmask16 mask = first_of_16(row1 - r);
    for (int64_t t = 0; t * TILE < n; t++)
        for (int64_t c = 0, first = tile_start(t, n); c < TILE && c < n; c++)
            _mm512_mask_storeu_ps(y + (first + c) * ldy, mask, acc[TILE * t + c]);
}

DS4_INLINE void rectangle(uint32_t type, int x8, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    for (int64_t c = 0, count; c < n; c += count) {
        const char *x = acts + (size_t)c * act_stride;
        count = n - c < MANY ? n - c : MANY;
        if (count < (x8 ? LEAST_TILED_X8 : LEAST_TILED_RAW)) {
            ds4_matmul_avx512_super(type, w->layout)(w, row0, row1, x, act_stride, count,
                                                     y + c * ldy, ldy);
            continue;
        }
        configure_tiles(count < TILE ? (int)count : TILE, 64);
        for (int64_t r = row0; r < row1; r += TILE)
            rows_many(type, x8, w, r, row1, x, act_stride, count, y + c * ldy + r, ldy);
        _tile_release();
    }
}

/* NULL for float types. */
DS4_KERNELS(ds4_matmul_amx_super, DS4_SUPER_RAW_AND_X8, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_super_amx_is_for_x86;
#endif
