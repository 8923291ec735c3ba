/* AVX2 + FMA + F16C versions of kv.c: the same operations on the same lanes in the same order. */
#include "kv.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <math.h>

#include "avx2.h"
#include "op_vector.h"

DS4_INLINE __m256 cached8(const int type, const void *tile, int64_t i) {
    if (type == DS4_KV_F32) return _mm256_loadu_ps((const float *)tile + i);
    if (type == DS4_KV_F16) return load_half8((const uint16_t *)tile + i);
    if (type == DS4_KV_BF16) {
        __m128i half = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)tile + i));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)((const int8_t *)tile + i));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

/* Asks for the line of the next tile at the place just read here: half a page of work ahead. Into the
 * second-level cache: lines on their way to the first one are few, and twice as slow from memory. */
DS4_INLINE void prefetch_like(const int type, const char *next, int64_t i) {
    _mm_prefetch(next + ds4_kv_code_bytes(type) * i, _MM_HINT_T2);
}

enum { FEW_ROWS = 3 };

/* sum[r][j] += x[r * stride] * vector j of the tile from `at` on. Beside 12 sums there are four registers: of
 * few rows for their factors and a vector, of many for two vectors and a factor. */
DS4_INLINE void add_products(const int type, const float *x, int64_t stride, const int rows,
                             const void *tile, int64_t at, const int vectors,
                             __m256 sum[DS4_SCORE_ROWS][4]) {
    if (rows > FEW_ROWS) {
        __m256 value[2];
        for (int j = 0; j < vectors; j++) value[j] = cached8(type, tile, at + 8 * j);
        for (int r = 0; r < rows; r++) {
            __m256 factor = _mm256_broadcast_ss(x + r * stride);
            for (int j = 0; j < vectors; j++) sum[r][j] = _mm256_fmadd_ps(factor, value[j], sum[r][j]);
        }
    } else {
        __m256 factor[FEW_ROWS];
        for (int r = 0; r < rows; r++) factor[r] = _mm256_broadcast_ss(x + r * stride);
        for (int j = 0; j < vectors; j++) {
            __m256 value = cached8(type, tile, at + 8 * j);
            for (int r = 0; r < rows; r++) sum[r][j] = _mm256_fmadd_ps(factor[r], value, sum[r][j]);
        }
    }
}

/* Vectors of sums that so many rows have beside each other. */
DS4_INLINE int vectors_of(const int rows) { return rows > FEW_ROWS ? 2 : 4; }

/* ---- keys, a lane is a position ----------------------------------------------------------------------- */

/* rows x 8*vectors sums over `count` dims: one accumulator each, so that chains hide the latency of the
 * FMA. `scales`, of Q8_0, and `first`, its first block: the sums join the scores. */
DS4_INLINE void score_block(const int type, const float *q, const int rows, int64_t dim,
                            int64_t count, const void *k, const char *next, int64_t page_tokens,
                            int64_t t, const int vectors, const uint16_t *scales, int first,
                            float *scores, int64_t ld) {
    __m256 sum[DS4_SCORE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sum[r][j] = _mm256_setzero_ps();
    for (int64_t d = 0; d < count; d++) {
        prefetch_like(type, next, d * page_tokens + t);
        add_products(type, q + d, dim, rows, k, d * page_tokens + t, vectors, sum);
    }
    for (int j = 0; j < vectors; j++) {
        __m256 scale = _mm256_setzero_ps();
        if (type == DS4_KV_Q8_0) scale = load_half8(scales + t + 8 * j);
        for (int r = 0; r < rows; r++) {
            float *to = scores + r * ld + t + 8 * j;
            if (type == DS4_KV_Q8_0) {
                __m256 before = first ? _mm256_setzero_ps() : _mm256_loadu_ps(to);
                sum[r][j] = _mm256_fmadd_ps(scale, sum[r][j], before);
            }
            _mm256_storeu_ps(to, sum[r][j]);
        }
    }
}

/* All dims of 8*vectors positions. */
DS4_INLINE void score_lanes(const int type, const float *q, const int rows, int64_t dim,
                            const void *k, const char *next, int64_t page_tokens, int64_t t,
                            const int vectors, float *scores, int64_t ld) {
    if (type != DS4_KV_Q8_0) {
        score_block(type, q, rows, dim, dim, k, next, page_tokens, t, vectors, NULL, 0, scores, ld);
        return;
    }
    for (int64_t b = 0; b < dim / DS4_KV_BLOCK; b++)
        score_block(type, q + b * DS4_KV_BLOCK, rows, dim, DS4_KV_BLOCK,
                    ds4_kv_codes(k, b, page_tokens),
                    (const char *)ds4_kv_codes(next, b, page_tokens), page_tokens, t, vectors,
                    ds4_kv_scales(k, b, page_tokens), b == 0, scores, ld);
}

DS4_INLINE void score_rows(const int type, const float *q, const int rows, int64_t dim,
                           const void *k, const char *next, int64_t page_tokens, int64_t tokens8,
                           float *scores, int64_t ld) {
    int64_t t = 0;
    for (; vectors_of(rows) == 4 && t + 32 <= tokens8; t += 32)
        score_lanes(type, q, rows, dim, k, next, page_tokens, t, 4, scores, ld);
    for (; t + 16 <= tokens8; t += 16)
        score_lanes(type, q, rows, dim, k, next, page_tokens, t, 2, scores, ld);
    if (t < tokens8) score_lanes(type, q, rows, dim, k, next, page_tokens, t, 1, scores, ld);
}

/* ---- keys, a lane is a dim ---------------------------------------------------------------------------- */

/* The dims of a float row that fill no vector. */
DS4_INLINE float fold_tail(const int type, __m256 v, const float *q, const void *k, int64_t at,
                           int64_t dim) {
    float lane[8], rest[8] = {0};
    _mm256_storeu_ps(lane, v);
    _mm256_storeu_ps(rest, cached8(type, k, at + dim / 8 * 8)); /* rows are padded to 8 */
    for (int64_t i = 0; i < dim % 8; i++) lane[i] = fmaf(q[dim / 8 * 8 + i], rest[i], lane[i]);
    return ds4_fold(lane, 8);
}

/* rows x tokens scores. */
DS4_INLINE void along_block(const int type, const float *q, const int rows, int64_t dim,
                            const void *k, const char *next, int64_t page_tokens, int64_t width,
                            int64_t t, const int tokens, float *scores, int64_t ld) {
    __m256 total[FEW_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < tokens; j++) total[r][j] = _mm256_setzero_ps();
    int64_t block = type == DS4_KV_Q8_0 ? DS4_KV_BLOCK : dim / 8 * 8;
    int64_t step = type == DS4_KV_Q8_0 ? DS4_KV_BLOCK : width;
    for (int64_t first = 0; first + block <= dim && block; first += block) {
        __m256 sum[FEW_ROWS][4];
        const void *codes = k;
        const char *ahead = next;
        if (type == DS4_KV_Q8_0) {
            codes = ds4_kv_codes(k, first / block, page_tokens);
            ahead = (const char *)ds4_kv_codes(next, first / block, page_tokens);
        }
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < tokens; j++) sum[r][j] = _mm256_setzero_ps();
        for (int64_t d = 0; d < block; d += 8) {
            __m256 key[4];
            for (int j = 0; j < tokens; j++) {
                int64_t at = (t + j) * step + d;
                key[j] = cached8(type, codes, at);
                if (d % 32 == 0) prefetch_like(type, ahead, at);
            }
            for (int r = 0; r < rows; r++) {
                __m256 query = _mm256_loadu_ps(q + r * dim + first + d);
                for (int j = 0; j < tokens; j++)
                    sum[r][j] = _mm256_fmadd_ps(query, key[j], sum[r][j]);
            }
        }
        for (int j = 0; j < tokens; j++) {
            if (type != DS4_KV_Q8_0) {
                for (int r = 0; r < rows; r++) total[r][j] = sum[r][j];
                continue;
            }
            float scale = ds4_f16_to_f32(ds4_kv_scales(k, first / block, page_tokens)[t + j]);
            for (int r = 0; r < rows; r++)
                total[r][j] = _mm256_fmadd_ps(_mm256_set1_ps(scale), sum[r][j], total[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < tokens; j++) {
            float *to = scores + r * ld + t + j;
            if (type != DS4_KV_Q8_0 && dim % 8)
                *to = fold_tail(type, total[r][j], q + r * dim, k, (t + j) * width, dim);
            else
                *to = fold8(total[r][j]);
        }
}

DS4_INLINE void along_rows(const int type, const float *q, const int rows, int64_t dim,
                           const void *k, const char *next, int64_t page_tokens, int64_t width,
                           int64_t tokens, float *scores, int64_t ld) {
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4)
        along_block(type, q, rows, dim, k, next, page_tokens, width, t, 4, scores, ld);
    for (; t < tokens; t++)
        along_block(type, q, rows, dim, k, next, page_tokens, width, t, 1, scores, ld);
}

DS4_INLINE void score_along(const int type, const float *q, int rows, int64_t dim, const void *k,
                            const char *next, int64_t page_tokens, int64_t width, int64_t tokens,
                            float *scores, int64_t ld) {
    for (; rows >= 3; rows -= 3, q += 3 * dim, scores += 3 * ld)
        along_rows(type, q, 3, dim, k, next, page_tokens, width, tokens, scores, ld);
    if (rows == 2) along_rows(type, q, 2, dim, k, next, page_tokens, width, tokens, scores, ld);
    if (rows == 1) along_rows(type, q, 1, dim, k, next, page_tokens, width, tokens, scores, ld);
}

/* ---- values -------------------------------------------------------------------------------------------- */

/* 8*vectors dims of `tokens` rows that lie `step` values apart; out is where they go. */
DS4_INLINE void value_block(const int type, const float *p, int64_t ld, const int rows,
                            int64_t tokens, const void *v, const char *next, int64_t step,
                            const int vectors, int64_t vdim, float *out) {
    __m256 sum[DS4_VALUE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sum[r][j] = _mm256_loadu_ps(out + r * vdim + 8 * j);
    for (int64_t t = 0; t < tokens; t++) {
        prefetch_like(type, next, t * step);
        add_products(type, p + t, ld, rows, v, t * step, vectors, sum);
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) _mm256_storeu_ps(out + r * vdim + 8 * j, sum[r][j]);
}

/* One block of Q8_0: weights times scales first, then as above. */
DS4_INLINE void scaled_block(const float *p, int64_t ld, const int rows, int64_t from,
                             int64_t tokens, const uint16_t *scales, const int8_t *codes,
                             const int8_t *next, int64_t vdim, float *out) {
    float weights[DS4_VALUE_ROWS * DS4_SCALED_TOKENS];
    for (int64_t first = 0; first < tokens; first += DS4_SCALED_TOKENS) {
        int64_t left = tokens - first, count = left < DS4_SCALED_TOKENS ? left : DS4_SCALED_TOKENS;
        const uint16_t *scale = scales + from + first;
        int64_t t = 0, at = (from + first) * DS4_KV_BLOCK;
        for (; t + 8 <= count; t += 8)
            for (int r = 0; r < rows; r++)
                _mm256_storeu_ps(weights + r * DS4_SCALED_TOKENS + t,
                                 _mm256_mul_ps(_mm256_loadu_ps(p + r * ld + first + t),
                                               load_half8(scale + t)));
        for (; t < count; t++)
            for (int r = 0; r < rows; r++)
                weights[r * DS4_SCALED_TOKENS + t] =
                    p[r * ld + first + t] * ds4_f16_to_f32(scale[t]);
        const int vectors = vectors_of(rows);
        for (int d = 0; d < DS4_KV_BLOCK; d += 8 * vectors)
            value_block(DS4_KV_Q8_0, weights, DS4_SCALED_TOKENS, rows, count, codes + at + d,
                        (const char *)next + at + d, DS4_KV_BLOCK, vectors, vdim, out + d);
    }
}

DS4_INLINE void value_rows(const int type, const float *p, int64_t ld, const int rows, int64_t from,
                           int64_t tokens, const void *v, const char *next, int64_t page_tokens,
                           int64_t width, int64_t vdim, float *out) {
    int64_t d = 0, size = ds4_kv_code_bytes(type);
    if (type == DS4_KV_Q8_0) {
        for (int64_t b = 0; b < vdim / DS4_KV_BLOCK; b++)
            scaled_block(p, ld, rows, from, tokens, ds4_kv_scales(v, b, page_tokens),
                         ds4_kv_codes(v, b, page_tokens), ds4_kv_codes(next, b, page_tokens), vdim,
                         out + b * DS4_KV_BLOCK);
        return;
    }
    const char *at = (const char *)v + from * width * size;
    next += from * width * size;
    const int vectors = vectors_of(rows);
    for (; d + 8 * vectors <= vdim; d += 8 * vectors)
        value_block(type, p, ld, rows, tokens, at + d * size, next + d * size, width, vectors, vdim,
                    out + d);
    for (; d < vdim; d += 8)
        value_block(type, p, ld, rows, tokens, at + d * size, next + d * size, width, 1, vdim, out + d);
}

/* ---- encoding ------------------------------------------------------------------------------------------ */

static void encode_f16(const float *x, int64_t n, void *codes, uint16_t *scales) {
    uint16_t *y = codes;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(y + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    ds4_kv_scalar[DS4_KV_F16].encode(x + i, n - i, y + i, scales);
}

static void encode_q8(const float *x, int64_t n, void *codes, uint16_t *scales) {
    ds4_kv_encode_q8(x, n, codes, scales, DS4_ISA_AVX2);
}

static void encode_f32(const float *x, int64_t n, void *codes, uint16_t *scales) {
    ds4_kv_scalar[DS4_KV_F32].encode(x, n, codes, scales);
}

static void encode_bf16(const float *x, int64_t n, void *codes, uint16_t *scales) {
    ds4_kv_scalar[DS4_KV_BF16].encode(x, n, codes, scales);
}

#define ROWS_CASE(call, n) \
    case n: call; break

#define KERNELS(name, number)                                                                        \
    static void score_##name(const float *q, int rows, int64_t dim, const void *k, const void *next, \
                             int64_t page_tokens, int64_t tokens8, float *scores, int64_t ld) {      \
        switch (rows) {                                                                              \
            ROWS_CASE(score_rows(number, q, 1, dim, k, next, page_tokens, tokens8, scores, ld), 1);  \
            ROWS_CASE(score_rows(number, q, 2, dim, k, next, page_tokens, tokens8, scores, ld), 2);  \
            ROWS_CASE(score_rows(number, q, 3, dim, k, next, page_tokens, tokens8, scores, ld), 3);  \
            ROWS_CASE(score_rows(number, q, 4, dim, k, next, page_tokens, tokens8, scores, ld), 4);  \
            ROWS_CASE(score_rows(number, q, 5, dim, k, next, page_tokens, tokens8, scores, ld), 5);  \
            ROWS_CASE(score_rows(number, q, 6, dim, k, next, page_tokens, tokens8, scores, ld), 6);  \
        }                                                                                            \
    }                                                                                                \
    static void score_along_##name(const float *q, int rows, int64_t dim, const void *k,             \
                                   const void *next, int64_t page_tokens, int64_t width,             \
                                   int64_t tokens, float *scores, int64_t ld) {                      \
        score_along(number, q, rows, dim, k, next, page_tokens, width, tokens, scores, ld);          \
    }                                                                                                \
    static void accumulate_##name(const float *p, int64_t ld, int rows, int64_t from,                \
                                  int64_t tokens, const void *v, const void *next,                   \
                                  int64_t page_tokens, int64_t width, int64_t vdim, float *out) {    \
        switch (rows) {                                                                              \
            ROWS_CASE(value_rows(number, p, ld, 1, from, tokens, v, next, page_tokens, width,        \
                                 vdim, out), 1);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 2, from, tokens, v, next, page_tokens, width,        \
                                 vdim, out), 2);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 3, from, tokens, v, next, page_tokens, width,        \
                                 vdim, out), 3);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 4, from, tokens, v, next, page_tokens, width,        \
                                 vdim, out), 4);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 5, from, tokens, v, next, page_tokens, width,        \
                                 vdim, out), 5);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 6, from, tokens, v, next, page_tokens, width,        \
                                 vdim, out), 6);                                                     \
        }                                                                                            \
    }
KERNELS(f16, DS4_KV_F16)
KERNELS(f32, DS4_KV_F32)
KERNELS(bf16, DS4_KV_BF16)
KERNELS(q8, DS4_KV_Q8_0)

const ds4_kv ds4_kv_avx2[DS4_KV_TYPES] = {
    {DS4_KV_F16, encode_f16, score_f16, score_along_f16, accumulate_f16},
    {DS4_KV_F32, encode_f32, score_f32, score_along_f32, accumulate_f32},
    {DS4_KV_BF16, encode_bf16, score_bf16, score_along_bf16, accumulate_bf16},
    {DS4_KV_Q8_0, encode_q8, score_q8, score_along_q8, accumulate_q8},
};
#endif
