/* AVX-512 versions of kv.c for caches of f16, bf16 and f32: sixteen positions or dims to a vector, each
 * lane with the chain of the definition. Keys whose lane is a dim have the eight chains of two query rows
 * in a vector. Q8_0 is in kv_q8_avx512.c; storing stays with AVX2. */
#include "kv.h"

#if defined(__AVX512F__)
#include "avx512.h"

/* Values i .. i + 15 of a tile; lanes outside the mask are not read. */
DS4_INLINE __m512 cached16(const int type, const void *tile, int64_t i, __mmask16 lanes) {
    if (type == DS4_KV_F32) return _mm512_maskz_loadu_ps(lanes, (const float *)tile + i);
    __m256i half = _mm256_maskz_loadu_epi16(lanes, (const uint16_t *)tile + i);
    if (type == DS4_KV_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Asks for the line of the next tile at the place just read here: half a page of work ahead. Into the
 * second-level cache: lines on their way to the first one are few, and twice as slow from memory. */
DS4_INLINE void prefetch_like(const int type, const char *next, int64_t i) {
    _mm_prefetch(next + ds4_kv_code_bytes(type) * i, _MM_HINT_T2);
}

/* rows x 16*vectors sums: one accumulator each, so that chains hide the latency of the FMA. `lanes`: of
 * the last vector. */
DS4_INLINE void score_block(const int type, const float *q, const int rows, int64_t dim,
                            const void *k, const char *next, int64_t page_tokens, int64_t t,
                            const int vectors, __mmask16 lanes, float *scores, int64_t ld) {
    __m512 sum[DS4_SCORE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sum[r][j] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d++) {
        __m512 key[4];
        prefetch_like(type, next, d * page_tokens + t);
        if (vectors > 2) prefetch_like(type, next, d * page_tokens + t + 32);
        for (int j = 0; j < vectors; j++)
            key[j] = cached16(type, k, d * page_tokens + t + 16 * j,
                              j + 1 < vectors ? (__mmask16)0xffff : lanes);
        for (int r = 0; r < rows; r++) {
            __m512 query = _mm512_set1_ps(q[r * dim + d]);
            for (int j = 0; j < vectors; j++) sum[r][j] = _mm512_fmadd_ps(query, key[j], sum[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++)
            _mm512_mask_storeu_ps(scores + r * ld + t + 16 * j,
                                  j + 1 < vectors ? (__mmask16)0xffff : lanes, sum[r][j]);
}

DS4_INLINE void score_rows(const int type, const float *q, const int rows, int64_t dim,
                           const void *k, const char *next, int64_t page_tokens, int64_t tokens8,
                           float *scores, int64_t ld) {
    int64_t t = 0;
    for (; t + 64 <= tokens8; t += 64)
        score_block(type, q, rows, dim, k, next, page_tokens, t, 4, 0xffff, scores, ld);
    for (; t + 32 <= tokens8; t += 32)
        score_block(type, q, rows, dim, k, next, page_tokens, t, 2, 0xffff, scores, ld);
    for (; t < tokens8; t += 16)
        score_block(type, q, rows, dim, k, next, page_tokens, t, 1, first_of_16(tokens8 - t),
                    scores, ld);
}

/* ---- keys, a lane is a dim ---------------------------------------------------------------------------- */

/* Values i .. i + 7, twice. */
DS4_INLINE __m512 twice8(const int type, const void *tile, int64_t i) {
    if (type == DS4_KV_F32)
        return _mm512_castpd_ps(_mm512_broadcast_f64x4(
            _mm256_castps_pd(_mm256_loadu_ps((const float *)tile + i))));
    __m256i half = _mm256_broadcastsi128_si256(
        _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)tile + i)));
    if (type == DS4_KV_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

enum { PAIRS = DS4_SCORE_ROWS / 2, ALONG_TOKENS = 8 };

/* Two rows for each of `pairs` times `tokens` scores; dim is a multiple of 8. */
DS4_INLINE void along_block(const int type, const float *q, const int pairs, int64_t dim,
                            const void *k, const char *next, int64_t width, int64_t t,
                            const int tokens, float *scores, int64_t ld) {
    __m512 sum[PAIRS][ALONG_TOKENS];
    for (int r = 0; r < pairs; r++)
        for (int j = 0; j < tokens; j++) sum[r][j] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 8) {
        __m512 query[PAIRS];
        for (int r = 0; r < pairs; r++)
            query[r] = two_float8(q + 2 * r * dim + d, q + (2 * r + 1) * dim + d);
        for (int j = 0; j < tokens; j++) {
            int64_t at = (t + j) * width + d;
            __m512 key = twice8(type, k, at);
            if (d % 32 == 0) prefetch_like(type, next, at);
            for (int r = 0; r < pairs; r++) sum[r][j] = _mm512_fmadd_ps(query[r], key, sum[r][j]);
        }
    }
    for (int r = 0; r < pairs; r++)
        for (int j = 0; j < tokens; j++) {
            __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(sum[r][j]), 1);
            scores[2 * r * ld + t + j] = fold8(_mm512_castps512_ps256(sum[r][j]));
            scores[(2 * r + 1) * ld + t + j] = fold8(_mm256_castpd_ps(high));
        }
}

DS4_INLINE void along_rows(const int type, const float *q, const int pairs, int64_t dim,
                           const void *k, const char *next, int64_t width, int64_t tokens,
                           float *scores, int64_t ld) {
    int64_t t = 0;
    for (; t + ALONG_TOKENS <= tokens; t += ALONG_TOKENS)
        along_block(type, q, pairs, dim, k, next, width, t, ALONG_TOKENS, scores, ld);
    for (; t < tokens; t++)
        along_block(type, q, pairs, dim, k, next, width, t, 1, scores, ld);
}

DS4_INLINE void score_along(const int type, const float *q, int rows, int64_t dim, const void *k,
                            const char *next, int64_t page_tokens, int64_t width, int64_t tokens,
                            float *scores, int64_t ld) {
    int done = dim % 8 ? 0 : rows / 2 * 2;
    if (done == 6) along_rows(type, q, 3, dim, k, next, width, tokens, scores, ld);
    if (done == 4) along_rows(type, q, 2, dim, k, next, width, tokens, scores, ld);
    if (done == 2) along_rows(type, q, 1, dim, k, next, width, tokens, scores, ld);
    if (rows > done)
        ds4_kv_avx2[type].score_along(q + done * dim, rows - done, dim, k, next, page_tokens, width,
                                      tokens, scores + done * ld, ld);
}

/* ---- values -------------------------------------------------------------------------------------------- */

/* 16*vectors dims of `tokens` rows that lie `step` values apart; out is where they go. */
DS4_INLINE void value_block(const int type, const float *p, int64_t ld, const int rows,
                            int64_t tokens, const void *v, const char *next, int64_t step,
                            const int vectors, __mmask16 lanes, int64_t vdim, float *out) {
    __m512 sum[DS4_VALUE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++)
            sum[r][j] = _mm512_maskz_loadu_ps(lanes, out + r * vdim + 16 * j);
    for (int64_t t = 0; t < tokens; t++) {
        __m512 weight[DS4_VALUE_ROWS];
        prefetch_like(type, next, t * step);
        if (vectors > 2) prefetch_like(type, next, t * step + 32);
        for (int r = 0; r < rows; r++) weight[r] = _mm512_set1_ps(p[r * ld + t]);
        for (int j = 0; j < vectors; j++) {
            __m512 value = cached16(type, v, t * step + 16 * j, lanes);
            for (int r = 0; r < rows; r++) sum[r][j] = _mm512_fmadd_ps(weight[r], value, sum[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++)
            _mm512_mask_storeu_ps(out + r * vdim + 16 * j, lanes, sum[r][j]);
}

DS4_INLINE void value_rows(const int type, const float *p, int64_t ld, const int rows, int64_t from,
                           int64_t tokens, const void *v, const char *next, int64_t width,
                           int64_t vdim, float *out) {
    int64_t d = 0, size = ds4_kv_code_bytes(type);
    const char *at = (const char *)v + from * width * size;
    next += from * width * size;
    for (; d + 64 <= vdim; d += 64)
        value_block(type, p, ld, rows, tokens, at + d * size, next + d * size, width, 4, 0xffff,
                    vdim, out + d);
    for (; d < vdim; d += 16)
        value_block(type, p, ld, rows, tokens, at + d * size, next + d * size, width, 1,
                    first_of_16(vdim - d), vdim, out + d);
}

#define ROWS_CASE(call, n) \
    case n: call; break

#define KERNELS(name, number)                                                                        \
    static void encode_##name(const float *x, int64_t n, void *codes, uint16_t *scales) {            \
        ds4_kv_avx2[number].encode(x, n, codes, scales);                                             \
    }                                                                                                \
    static void score_along_##name(const float *q, int rows, int64_t dim, const void *k,             \
                                   const void *next, int64_t page_tokens, int64_t width,             \
                                   int64_t tokens, float *scores, int64_t ld) {                      \
        score_along(number, q, rows, dim, k, next, page_tokens, width, tokens, scores, ld);          \
    }                                                                                                \
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
    static void accumulate_##name(const float *p, int64_t ld, int rows, int64_t from,                \
                                  int64_t tokens, const void *v, const void *next,                   \
                                  int64_t page_tokens, int64_t width, int64_t vdim, float *out) {    \
        (void)page_tokens;                                                                           \
        switch (rows) {                                                                              \
            ROWS_CASE(value_rows(number, p, ld, 1, from, tokens, v, next, width, vdim, out), 1);     \
            ROWS_CASE(value_rows(number, p, ld, 2, from, tokens, v, next, width, vdim, out), 2);     \
            ROWS_CASE(value_rows(number, p, ld, 3, from, tokens, v, next, width, vdim, out), 3);     \
            ROWS_CASE(value_rows(number, p, ld, 4, from, tokens, v, next, width, vdim, out), 4);     \
            ROWS_CASE(value_rows(number, p, ld, 5, from, tokens, v, next, width, vdim, out), 5);     \
            ROWS_CASE(value_rows(number, p, ld, 6, from, tokens, v, next, width, vdim, out), 6);     \
        }                                                                                            \
    }
KERNELS(f16, DS4_KV_F16)
KERNELS(f32, DS4_KV_F32)
KERNELS(bf16, DS4_KV_BF16)

const ds4_kv ds4_kv_avx512[DS4_KV_Q8_0] = {
    {DS4_KV_F16, encode_f16, score_f16, score_along_f16, accumulate_f16},
    {DS4_KV_F32, encode_f32, score_f32, score_along_f32, accumulate_f32},
    {DS4_KV_BF16, encode_bf16, score_bf16, score_along_bf16, accumulate_bf16},
};
#else
typedef int ds4_kv_avx512_is_for_x86;
#endif
