/* AVX-512 versions of kv.c for caches of Q8_0. Sixteen positions or dims to a vector, or the eight
 * chains of two query rows; each lane has the chain of the definition. Scores of few rows whose
 * lanes are dims, and storing, stay with AVX2. */
#include "kv.h"

#if defined(__AVX512F__)
#include "avx512.h"

enum { BLOCK = DS4_KV_BLOCK, PAIRS = DS4_SCORE_ROWS / 2, ALONG_TOKENS = 4 };

/* Sixteen codes as floats; lanes outside the mask are not read. */
DS4_INLINE __m512 codes16(const int8_t *codes, __mmask16 lanes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, codes)));
}

DS4_INLINE __m512 scales16(const uint16_t *scales, __mmask16 lanes) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, scales));
}

/* ---- keys, a lane is a position -------------------------------------------------------------- */

/* One block of rows x 16*vectors scores, which joins those of the blocks before it. `lanes`: of the
 * last vector. */
DS4_INLINE void score_block(const float *q, const int rows, int64_t dim, const int8_t *codes,
                            const int8_t *next, const uint16_t *scales, int64_t page_tokens,
                            const int vectors, __mmask16 lanes, int first, float *scores,
                            int64_t ld) {
    __m512 sum[DS4_SCORE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sum[r][j] = _mm512_setzero_ps();
    for (int64_t d = 0; d < BLOCK; d++) {
        __m512 key[4];
        _mm_prefetch((const char *)next + d * page_tokens, _MM_HINT_T0);
        for (int j = 0; j < vectors; j++)
            key[j] = codes16(codes + d * page_tokens + 16 * j,
                             j + 1 < vectors ? (__mmask16)0xffff : lanes);
        for (int r = 0; r < rows; r++) {
            __m512 query = _mm512_set1_ps(q[r * dim + d]);
            for (int j = 0; j < vectors; j++) sum[r][j] = _mm512_fmadd_ps(query, key[j], sum[r][j]);
        }
    }
    for (int j = 0; j < vectors; j++) {
        const __mmask16 real = j + 1 < vectors ? (__mmask16)0xffff : lanes;
        __m512 scale = scales16(scales + 16 * j, real);
        for (int r = 0; r < rows; r++) {
            float *to = scores + r * ld + 16 * j;
            __m512 before = first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(real, to);
            _mm512_mask_storeu_ps(to, real, _mm512_fmadd_ps(scale, sum[r][j], before));
        }
    }
}

DS4_INLINE void score_lanes(const float *q, const int rows, int64_t dim, const void *k,
                            const void *next, int64_t page_tokens, int64_t t, const int vectors,
                            __mmask16 lanes, float *scores, int64_t ld) {
    for (int64_t b = 0; b < dim / BLOCK; b++)
        score_block(q + b * BLOCK, rows, dim, ds4_kv_codes(k, b, page_tokens) + t,
                    ds4_kv_codes(next, b, page_tokens) + t, ds4_kv_scales(k, b, page_tokens) + t,
                    page_tokens, vectors, lanes, b == 0, scores + t, ld);
}

DS4_INLINE void score_rows(const float *q, const int rows, int64_t dim, const void *k,
                           const void *next, int64_t page_tokens, int64_t tokens8, float *scores,
                           int64_t ld) {
    int64_t t = 0;
    for (; t + 64 <= tokens8; t += 64)
        score_lanes(q, rows, dim, k, next, page_tokens, t, 4, 0xffff, scores, ld);
    for (; t + 32 <= tokens8; t += 32)
        score_lanes(q, rows, dim, k, next, page_tokens, t, 2, 0xffff, scores, ld);
    for (; t < tokens8; t += 16)
        score_lanes(q, rows, dim, k, next, page_tokens, t, 1, first_of_16(tokens8 - t), scores, ld);
}

/* ---- keys, a lane is a dim ------------------------------------------------------------------- */

/* Eight codes as floats, twice. */
DS4_INLINE __m512 twice8(const int8_t *codes) {
    int64_t eight;
    memcpy(&eight, codes, 8);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_set1_epi64x(eight)));
}

/* Two rows for each of `pairs` times `tokens` scores. */
DS4_INLINE void along_block(const float *q, const int pairs, int64_t dim, const void *k,
                            const void *next, int64_t page_tokens, int64_t t, const int tokens,
                            float *scores, int64_t ld) {
    __m512 total[PAIRS][ALONG_TOKENS];
    for (int r = 0; r < pairs; r++)
        for (int j = 0; j < tokens; j++) total[r][j] = _mm512_setzero_ps();
    for (int64_t b = 0; b < dim / BLOCK; b++) {
        const int8_t *codes = ds4_kv_codes(k, b, page_tokens) + t * BLOCK;
        const uint16_t *scales = ds4_kv_scales(k, b, page_tokens) + t;
        const char *ahead = (const char *)ds4_kv_codes(next, b, page_tokens) + t * BLOCK;
        __m512 sum[PAIRS][ALONG_TOKENS];
        for (int r = 0; r < pairs; r++)
            for (int j = 0; j < tokens; j++) sum[r][j] = _mm512_setzero_ps();
        for (int j = 0; j < tokens; j += 2) _mm_prefetch(ahead + j * BLOCK, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int64_t d = 0; d < BLOCK; d += 8) {
            const float *at = q + b * BLOCK + d;
            __m512 query[PAIRS];
            for (int r = 0; r < pairs; r++)
                query[r] = two_float8(at + 2 * r * dim, at + (2 * r + 1) * dim);
            for (int j = 0; j < tokens; j++) {
                __m512 key = twice8(codes + j * BLOCK + d);
                for (int r = 0; r < pairs; r++)
                    sum[r][j] = _mm512_fmadd_ps(query[r], key, sum[r][j]);
            }
        }
        for (int j = 0; j < tokens; j++) {
            __m512 scale = _mm512_set1_ps(ds4_f16_to_f32(scales[j]));
            for (int r = 0; r < pairs; r++)
                total[r][j] = _mm512_fmadd_ps(scale, sum[r][j], total[r][j]);
        }
    }
    for (int r = 0; r < pairs; r++)
        for (int j = 0; j < tokens; j++) {
            __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(total[r][j]), 1);
            scores[2 * r * ld + t + j] = fold8(_mm512_castps512_ps256(total[r][j]));
            scores[(2 * r + 1) * ld + t + j] = fold8(_mm256_castpd_ps(high));
        }
}

DS4_INLINE void along_rows(const float *q, const int pairs, int64_t dim, const void *k,
                           const void *next, int64_t page_tokens, int64_t tokens, float *scores,
                           int64_t ld) {
    int64_t t = 0;
    for (; t + ALONG_TOKENS <= tokens; t += ALONG_TOKENS)
        along_block(q, pairs, dim, k, next, page_tokens, t, ALONG_TOKENS, scores, ld);
    for (; t < tokens; t++)
        along_block(q, pairs, dim, k, next, page_tokens, t, 1, scores, ld);
}

/* ---- values ---------------------------------------------------------------------------------- */

/* One block of 32 dims of `tokens` rows: weights times scales first, then the sums. */
DS4_INLINE void value_block(const float *p, int64_t ld, const int rows, int64_t tokens,
                            const uint16_t *scales, const int8_t *codes, const int8_t *next,
                            int64_t vdim, float *out) {
    float weights[DS4_VALUE_ROWS * DS4_SCALED_TOKENS];
    __m512 sum[DS4_VALUE_ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) sum[r][j] = _mm512_loadu_ps(out + r * vdim + 16 * j);
    for (int64_t first = 0; first < tokens; first += DS4_SCALED_TOKENS) {
        int64_t left = tokens - first, count = left < DS4_SCALED_TOKENS ? left : DS4_SCALED_TOKENS;
        for (int64_t t = 0; t < count; t += 16) {
            const __mmask16 real = first_of_16(count - t);
            const __m512 scale = scales16(scales + first + t, real);
            for (int r = 0; r < rows; r++) {
                __m512 weight = _mm512_maskz_loadu_ps(real, p + r * ld + first + t);
                _mm512_storeu_ps(weights + r * DS4_SCALED_TOKENS + t, _mm512_mul_ps(weight, scale));
            }
        }
        for (int64_t t = 0; t < count; t++) {
            const int8_t *row = codes + (first + t) * BLOCK;
            _mm_prefetch((const char *)next + (first + t) * BLOCK, _MM_HINT_T2);
            const __m512 low = codes16(row, 0xffff), high = codes16(row + 16, 0xffff);
            for (int r = 0; r < rows; r++) {
                __m512 weight = _mm512_set1_ps(weights[r * DS4_SCALED_TOKENS + t]);
                sum[r][0] = _mm512_fmadd_ps(weight, low, sum[r][0]);
                sum[r][1] = _mm512_fmadd_ps(weight, high, sum[r][1]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) _mm512_storeu_ps(out + r * vdim + 16 * j, sum[r][j]);
}

DS4_INLINE void value_rows(const float *p, int64_t ld, const int rows, int64_t from, int64_t tokens,
                           const void *v, const void *next, int64_t page_tokens, int64_t vdim,
                           float *out) {
    for (int64_t b = 0; b < vdim / BLOCK; b++)
        value_block(p, ld, rows, tokens, ds4_kv_scales(v, b, page_tokens) + from,
                    ds4_kv_codes(v, b, page_tokens) + from * BLOCK,
                    ds4_kv_codes(next, b, page_tokens) + from * BLOCK, vdim, out + b * BLOCK);
}

/* ---- the table's entry ----------------------------------------------------------------------- */

static void encode(const float *x, int64_t n, void *codes, uint16_t *scales) {
    ds4_kv_avx2[DS4_KV_Q8_0].encode(x, n, codes, scales);
}

#define CASE(n, call) \
    case n: call; break

static void score(const float *q, int rows, int64_t dim, const void *k, const void *next,
                  int64_t page_tokens, int64_t tokens8, float *scores, int64_t ld) {
    switch (rows) { /* a constant count of rows keeps the sums in registers */
        CASE(1, score_rows(q, 1, dim, k, next, page_tokens, tokens8, scores, ld));
        CASE(2, score_rows(q, 2, dim, k, next, page_tokens, tokens8, scores, ld));
        CASE(3, score_rows(q, 3, dim, k, next, page_tokens, tokens8, scores, ld));
        CASE(4, score_rows(q, 4, dim, k, next, page_tokens, tokens8, scores, ld));
        CASE(5, score_rows(q, 5, dim, k, next, page_tokens, tokens8, scores, ld));
        CASE(6, score_rows(q, 6, dim, k, next, page_tokens, tokens8, scores, ld));
    }
}

static void score_along(const float *q, int rows, int64_t dim, const void *k, const void *next,
                        int64_t page_tokens, int64_t width, int64_t tokens, float *scores,
                        int64_t ld) {
    const int done = rows < 4 ? 0 : rows / 2 * 2;
    switch (done) {
        CASE(4, along_rows(q, 2, dim, k, next, page_tokens, tokens, scores, ld));
        CASE(6, along_rows(q, 3, dim, k, next, page_tokens, tokens, scores, ld));
    }
    if (rows > done)
        ds4_kv_avx2[DS4_KV_Q8_0].score_along(q + done * dim, rows - done, dim, k, next, page_tokens,
                                             width, tokens, scores + done * ld, ld);
}

static void accumulate(const float *p, int64_t ld, int rows, int64_t from, int64_t tokens,
                       const void *v, const void *next, int64_t page_tokens, int64_t width,
                       int64_t vdim, float *out) {
    (void)width;
    switch (rows) {
        CASE(1, value_rows(p, ld, 1, from, tokens, v, next, page_tokens, vdim, out));
        CASE(2, value_rows(p, ld, 2, from, tokens, v, next, page_tokens, vdim, out));
        CASE(3, value_rows(p, ld, 3, from, tokens, v, next, page_tokens, vdim, out));
        CASE(4, value_rows(p, ld, 4, from, tokens, v, next, page_tokens, vdim, out));
        CASE(5, value_rows(p, ld, 5, from, tokens, v, next, page_tokens, vdim, out));
        CASE(6, value_rows(p, ld, 6, from, tokens, v, next, page_tokens, vdim, out));
    }
}

const ds4_kv ds4_kv_avx512_q8 = {DS4_KV_Q8_0, encode, score, score_along, accumulate};
#else
typedef int ds4_kv_q8_avx512_is_for_x86;
#endif
