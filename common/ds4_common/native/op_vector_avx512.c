/* AVX-512 versions of op_vector.c: the same operations on the same lanes in the same order. Rows end in
 * masked vectors. What has no version here stays with AVX2. */
#include "op_vector.h"

#if defined(__AVX512F__)
#include "avx512.h"
#include "op_math.h"

DS4_INLINE __m512 exp16(__m512 x) {
    const __m512 low = _mm512_set1_ps(DS4_EXP_LOW), round = _mm512_set1_ps(DS4_ROUND);
    __m512 c = _mm512_max_ps(low, x); /* the second operand when unordered: NaN stays */
    c = _mm512_min_ps(_mm512_set1_ps(DS4_EXP_HIGH), c);
    __m512 shifted = _mm512_fmadd_ps(c, _mm512_set1_ps(DS4_LOG2E), round);
    __m512 n = _mm512_sub_ps(shifted, round);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-DS4_LN2_HIGH), c);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-DS4_LN2_LOW), r);
    __m512 p = _mm512_set1_ps(DS4_EXP_P0);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(DS4_EXP_P1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(DS4_EXP_P2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(DS4_EXP_P3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(DS4_EXP_P4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(DS4_EXP_P5));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    __m512 scaled = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power));
    scaled = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), scaled);
    return _mm512_mask_mov_ps(scaled, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
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

/* Exponentials in place, zero where there are none: adding that to their sum changes no bit. */
DS4_INLINE __m512 exp_step(float *s, __m512 top, __mmask16 some) {
    __m512 e = _mm512_maskz_mov_ps(some, exp16(_mm512_sub_ps(some16(s, some), top)));
    _mm512_mask_storeu_ps(s, some, e);
    return e;
}

static float softmax(float *s, float max, int64_t n) {
    const __m512 top = _mm512_set1_ps(max);
    __m256 sum = _mm256_setzero_ps();
    __m512 e;
#define STEP(some)                                                                                 \
    e = exp_step(s + i, top, some),                                                                \
    sum = _mm256_add_ps(_mm256_add_ps(sum, low_half(e)), high_half(e))
    EACH16(STEP);
#undef STEP
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
