/* AVX-512 versions of op_vector.c: the same operations on the same lanes in the same order. Rows end in
 * masked vectors. What has no version here stays with AVX2. */
#include "op_vector.h"

#if defined(__AVX512F__)
#include "avx512.h"
#include "op_math.h"

enum { TOGETHER = 4 };

/* exp of `count` vectors, step by step: the steps of a single one wait for each other, and there are too many
 * for a CPU to hold those of several. */
DS4_INLINE void exps16(const __m512 *x, const int count, __m512 *y) {
    const __m512 low = _mm512_set1_ps(DS4_EXP_LOW), round = _mm512_set1_ps(DS4_ROUND);
    static const float factor[] = {DS4_EXP_P1, DS4_EXP_P2, DS4_EXP_P3, DS4_EXP_P4, DS4_EXP_P5};
    __m512 c[TOGETHER], shifted[TOGETHER], n[TOGETHER], r[TOGETHER], p[TOGETHER];
#define EACH for (int j = 0; j < count; j++)
    EACH c[j] = _mm512_min_ps(_mm512_set1_ps(DS4_EXP_HIGH), x[j]); /* NaN, the second one, stays */
    EACH shifted[j] = _mm512_fmadd_ps(c[j], _mm512_set1_ps(DS4_LOG2E), round);
    EACH n[j] = _mm512_sub_ps(shifted[j], round);
    EACH r[j] = _mm512_fmadd_ps(n[j], _mm512_set1_ps(-DS4_LN2_HIGH), c[j]);
    EACH r[j] = _mm512_fmadd_ps(n[j], _mm512_set1_ps(-DS4_LN2_LOW), r[j]);
    EACH p[j] = _mm512_set1_ps(DS4_EXP_P0);
    for (int i = 0; i < 5; i++)
        EACH p[j] = _mm512_fmadd_ps(p[j], r[j], _mm512_set1_ps(factor[i]));
    EACH p[j] = _mm512_fmadd_ps(p[j], _mm512_mul_ps(r[j], r[j]), r[j]);
    EACH p[j] = _mm512_add_ps(p[j], _mm512_set1_ps(1.0f));
    EACH { /* times 2^n: exact from the least argument on, and NaN stays what it is */
        const __mmask16 some = _mm512_cmp_ps_mask(x[j], low, _CMP_NLT_UQ);
        y[j] = _mm512_maskz_scalef_ps(some, p[j], n[j]);
    }
#undef EACH
}

DS4_INLINE __m512 exp16(__m512 x) {
    exps16(&x, 1, &x);
    return x;
}

DS4_INLINE __m256 low_half(__m512 v) { return _mm512_castps512_ps256(v); }
DS4_INLINE __m256 high_half(__m512 v) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}

/* Sixteen values at a time; the last ones under a mask, from which a CPU forwards nothing to loads. */
#define EACH16(step)                                                                               \
    int64_t i = 0;                                                                                 \
    for (; i + 16 <= n; i += 16) step(0xffff);                                                     \
    if (i < n) step(first_of_16(n - i))

DS4_INLINE __m512 some16(const float *x, __mmask16 some) { return _mm512_maskz_loadu_ps(some, x); }

static void scale_by(float *y, const float *x, const float *w, float scale, int64_t n) {
    const __m512 factor = _mm512_set1_ps(scale);
#define STEP(some)                                                                                 \
    _mm512_mask_storeu_ps(y + i, some,                                                             \
                          _mm512_mul_ps(_mm512_mul_ps(some16(x + i, some), factor), some16(w + i, some)))
    EACH16(STEP);
#undef STEP
}

static void add(float *y, const float *a, const float *b, int64_t n) {
#define STEP(some)                                                                                 \
    _mm512_mask_storeu_ps(y + i, some, _mm512_add_ps(some16(a + i, some), some16(b + i, some)))
    EACH16(STEP);
#undef STEP
}

static void add_scaled(float *y, const float *x, float w, int64_t n) {
    const __m512 factor = _mm512_set1_ps(w);
#define STEP(some)                                                                                 \
    _mm512_mask_storeu_ps(y + i, some,                                                             \
                          _mm512_fmadd_ps(factor, some16(x + i, some), some16(y + i, some)))
    EACH16(STEP);
#undef STEP
}

static void join(float *y, const float *x, float keep, float take, int64_t n) {
    const __m512 old = _mm512_set1_ps(keep), fresh = _mm512_set1_ps(take);
#define STEP(some)                                                                                 \
    _mm512_mask_storeu_ps(y + i, some,                                                             \
                          _mm512_add_ps(_mm512_mul_ps(some16(y + i, some), old),                   \
                                        _mm512_mul_ps(some16(x + i, some), fresh)))
    EACH16(STEP);
#undef STEP
}

DS4_INLINE __m512 silu16(__m512 g, __m512 up) {
    __m512 e = exp16(_mm512_xor_ps(g, _mm512_set1_ps(-0.0f)));
    return _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e)), up);
}

static void silu_mul(float *y, const float *gate, const float *up, int64_t n) {
#define STEP(some)                                                                                 \
    _mm512_mask_storeu_ps(y + i, some, silu16(some16(gate + i, some), some16(up + i, some)))
    EACH16(STEP);
#undef STEP
}

static void exp_scaled(float *y, const float *x, float max, float scale, int64_t n) {
    const __m512 top = _mm512_set1_ps(max), factor = _mm512_set1_ps(scale);
#define STEP(some)                                                                                 \
    _mm512_mask_storeu_ps(y + i, some,                                                             \
                          exp16(_mm512_mul_ps(_mm512_sub_ps(some16(x + i, some), top), factor)))
    EACH16(STEP);
#undef STEP
}

static float softmax(float *s, float max, int64_t n) {
    const __m512 top = _mm512_set1_ps(max);
    __m256 sum = _mm256_setzero_ps();
    __m512 e[TOGETHER];
    int64_t i = 0;
    for (; i + 16 * TOGETHER <= n; i += 16 * TOGETHER) {
        for (int j = 0; j < TOGETHER; j++)
            e[j] = _mm512_sub_ps(_mm512_loadu_ps(s + i + 16 * j), top);
        exps16(e, TOGETHER, e);
        for (int j = 0; j < TOGETHER; j++) {
            _mm512_storeu_ps(s + i + 16 * j, e[j]);
            sum = _mm256_add_ps(_mm256_add_ps(sum, low_half(e[j])), high_half(e[j]));
        }
    }
    for (; i < n; i += 16) { /* zero where there are none: adding that to the sum changes no bit */
        const __mmask16 some = first_of_16(n - i);
        e[0] = _mm512_maskz_mov_ps(some, exp16(_mm512_sub_ps(some16(s + i, some), top)));
        _mm512_mask_storeu_ps(s + i, some, e[0]);
        sum = _mm256_add_ps(_mm256_add_ps(sum, low_half(e[0])), high_half(e[0]));
    }
    return fold8(sum);
}

static float max_of(const float *x, int64_t n) {
    const __m512 least = _mm512_set1_ps(-INFINITY);
    __m512 best = least;
    for (int64_t i = 0; i < n; i += 16) /* the second operand when unordered: NaN never wins */
        best = _mm512_max_ps(_mm512_mask_loadu_ps(least, first_of_16(n - i), x + i), best);
    return _mm512_reduce_max_ps(best);
}

const ds4_vector ds4_vector_avx512 = {
    .sum_squares = ds4_avx2_sum_squares,
    .scale_by = scale_by,
    .add = add,
    .silu_mul = silu_mul,
    .gated_mul = ds4_avx2_gated_mul,
    .soft_cap = ds4_avx2_soft_cap,
    .add_scaled = add_scaled,
    .max_finite = ds4_avx2_max_finite,
    .exp_scaled = exp_scaled,
    .running_softmax = ds4_avx2_running_softmax,
    .softmax = softmax,
    .max = max_of,
    .join = join,
};
#else
typedef int ds4_op_vector_avx512_is_for_x86;
#endif
