/* AVX2 + FMA + F16C versions of op_vector.c: the same operations on the same lanes in the same order. */
#include "op_vector.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include "op_math.h"
#include "quants.h"

enum { TOGETHER = 4 };

/* exp of `count` vectors, step by step: the steps of a single one wait for each other, and there are too many
 * for a CPU to hold those of several. */
DS4_INLINE void exps8(const __m256 *x, const int count, __m256 *y) {
    const __m256 low = _mm256_set1_ps(DS4_EXP_LOW), round = _mm256_set1_ps(DS4_ROUND);
    static const float factor[] = {DS4_EXP_P1, DS4_EXP_P2, DS4_EXP_P3, DS4_EXP_P4, DS4_EXP_P5};
    __m256 c[TOGETHER], shifted[TOGETHER], n[TOGETHER], r[TOGETHER], p[TOGETHER];
#define EACH for (int j = 0; j < count; j++)
    EACH c[j] = _mm256_min_ps(_mm256_set1_ps(DS4_EXP_HIGH), x[j]); /* NaN, the second one, stays */
    EACH shifted[j] = _mm256_fmadd_ps(c[j], _mm256_set1_ps(DS4_LOG2E), round);
    EACH n[j] = _mm256_sub_ps(shifted[j], round);
    EACH r[j] = _mm256_fmadd_ps(n[j], _mm256_set1_ps(-DS4_LN2_HIGH), c[j]);
    EACH r[j] = _mm256_fmadd_ps(n[j], _mm256_set1_ps(-DS4_LN2_LOW), r[j]);
    EACH p[j] = _mm256_set1_ps(DS4_EXP_P0);
    for (int i = 0; i < 5; i++)
        EACH p[j] = _mm256_fmadd_ps(p[j], r[j], _mm256_set1_ps(factor[i]));
    EACH p[j] = _mm256_fmadd_ps(p[j], _mm256_mul_ps(r[j], r[j]), r[j]);
    EACH p[j] = _mm256_add_ps(p[j], _mm256_set1_ps(1.0f));
    EACH {
        __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted[j]), 23);
        __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p[j]), power));
        scaled = _mm256_andnot_ps(_mm256_cmp_ps(x[j], low, _CMP_LT_OQ), scaled);
        y[j] = _mm256_blendv_ps(scaled, x[j], _mm256_cmp_ps(x[j], x[j], _CMP_UNORD_Q));
    }
#undef EACH
}

DS4_INLINE __m256 exp8(__m256 x) {
    exps8(&x, 1, &x);
    return x;
}

float ds4_avx2_sum_squares(const float *x, int64_t n) {
    __m256 sum[4];
    for (int j = 0; j < 4; j++) sum[j] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + DS4_SUM_LANES <= n; i += DS4_SUM_LANES)
        for (int j = 0; j < 4; j++) {
            __m256 v = _mm256_loadu_ps(x + i + 8 * j);
            sum[j] = _mm256_fmadd_ps(v, v, sum[j]);
        }
    float lane[DS4_SUM_LANES];
    for (int j = 0; j < 4; j++) _mm256_storeu_ps(lane + 8 * j, sum[j]);
    for (; i < n; i++) lane[i % DS4_SUM_LANES] = fmaf(x[i], x[i], lane[i % DS4_SUM_LANES]);
    return ds4_fold(lane, DS4_SUM_LANES);
}

static void scale_by(float *y, const float *x, const float *w, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
}

static void add(float *y, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

static void silu_mul(float *y, const float *gate, const float *up, int64_t n) {
    __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 g = _mm256_loadu_ps(gate + i);
        __m256 e = exp8(_mm256_xor_ps(g, sign));
        __m256 s = _mm256_div_ps(g, _mm256_add_ps(one, e));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(s, _mm256_loadu_ps(up + i)));
    }
    for (; i < n; i++) y[i] = ds4_silu(gate[i]) * up[i];
}

DS4_INLINE __m256 gate_argument8(int mode, __m256 x, float alpha) {
    if (mode == DS4_GLU_GELU) {
        __m256 slope = _mm256_fmadd_ps(_mm256_set1_ps(DS4_GELU_CUBIC), _mm256_mul_ps(x, x),
                                       _mm256_set1_ps(DS4_GELU_LINEAR));
        return _mm256_mul_ps(x, slope);
    }
    return mode == DS4_GLU_SHIFTED ? _mm256_mul_ps(x, _mm256_set1_ps(alpha)) : x;
}

void ds4_avx2_gated_mul(float *y, const float *gate, const float *up, int mode, float limit,
                      float alpha, int64_t n) {
    __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    __m256 high = _mm256_set1_ps(limit), low = _mm256_set1_ps(-limit);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 g = _mm256_loadu_ps(gate + i), u = _mm256_loadu_ps(up + i);
        if (limit != 0.0f) { /* the second operand when unordered: a NaN passes */
            g = _mm256_min_ps(high, g);
            u = _mm256_max_ps(low, _mm256_min_ps(high, u));
        }
        __m256 e = exp8(_mm256_xor_ps(gate_argument8(mode, g, alpha), sign));
        if (mode == DS4_GLU_SHIFTED) u = _mm256_add_ps(u, one);
        __m256 s = _mm256_div_ps(g, _mm256_add_ps(one, e));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(s, u));
    }
    ds4_vector_scalar.gated_mul(y + i, gate + i, up + i, mode, limit, alpha, n - i);
}

void ds4_avx2_soft_cap(float *y, const float *x, float cap, int64_t n) {
    __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f), most = _mm256_set1_ps(cap);
    __m256 factor = _mm256_set1_ps(-2.0f / cap);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i), e = exp8(_mm256_mul_ps(_mm256_andnot_ps(sign, v), factor));
        __m256 t = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
        t = _mm256_andnot_ps(sign, _mm256_mul_ps(most, t));
        _mm256_storeu_ps(y + i, _mm256_or_ps(t, _mm256_and_ps(sign, v)));
    }
    ds4_vector_scalar.soft_cap(y + i, x + i, cap, n - i);
}

static void add_scaled(float *y, const float *x, float w, int64_t n) {
    __m256 factor = _mm256_set1_ps(w);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_fmadd_ps(factor, _mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    for (; i < n; i++) y[i] = fmaf(w, x[i], y[i]);
}

float ds4_avx2_max_finite(const float *x, int64_t n, int *finite) {
    __m256 infinity = _mm256_set1_ps(INFINITY), best = _mm256_set1_ps(-INFINITY);
    __m256 fine = _mm256_cmp_ps(best, best, _CMP_EQ_OQ);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        fine = _mm256_and_ps(fine, _mm256_cmp_ps(v, infinity, _CMP_LT_OQ));
        best = _mm256_max_ps(v, best);
    }
    if (_mm256_movemask_ps(fine) != 0xff) *finite = 0;
    float lane[8], top = -INFINITY;
    _mm256_storeu_ps(lane, best);
    for (int j = 0; j < 8; j++) top = lane[j] > top ? lane[j] : top;
    for (; i < n; i++) {
        if (!(x[i] < INFINITY)) *finite = 0;
        if (x[i] > top) top = x[i];
    }
    return top;
}

static void exp_scaled(float *y, const float *x, float max, float scale, int64_t n) {
    __m256 top = _mm256_set1_ps(max), factor = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_sub_ps(_mm256_loadu_ps(x + i), top);
        _mm256_storeu_ps(y + i, exp8(_mm256_mul_ps(v, factor)));
    }
    for (; i < n; i++) y[i] = ds4_exp((x[i] - max) * scale);
}

void ds4_avx2_running_softmax(float *max, float *sum, float *weighted, const float *k,
                            const float *gate, const float *bias, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 s = _mm256_add_ps(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(bias + i));
        __m256 old = _mm256_loadu_ps(max + i);
        __m256 top = _mm256_max_ps(s, old); /* the second operand when unordered */
        __m256 keep = exp8(_mm256_sub_ps(old, top)), taken = exp8(_mm256_sub_ps(s, top));
        __m256 share = _mm256_mul_ps(taken, _mm256_loadu_ps(k + i));
        _mm256_storeu_ps(sum + i, _mm256_fmadd_ps(_mm256_loadu_ps(sum + i), keep, taken));
        _mm256_storeu_ps(weighted + i, _mm256_fmadd_ps(_mm256_loadu_ps(weighted + i), keep, share));
        _mm256_storeu_ps(max + i, top);
    }
    ds4_vector_scalar.running_softmax(max + i, sum + i, weighted + i, k + i, gate + i, bias + i, n - i);
}

static float softmax(float *s, float max, int64_t n) {
    __m256 top = _mm256_set1_ps(max), sum = _mm256_setzero_ps();
    int64_t t = 0;
    for (; t + 8 * TOGETHER <= n; t += 8 * TOGETHER) {
        __m256 e[TOGETHER];
        for (int j = 0; j < TOGETHER; j++)
            e[j] = _mm256_sub_ps(_mm256_loadu_ps(s + t + 8 * j), top);
        exps8(e, TOGETHER, e);
        for (int j = 0; j < TOGETHER; j++) {
            _mm256_storeu_ps(s + t + 8 * j, e[j]);
            sum = _mm256_add_ps(sum, e[j]);
        }
    }
    for (; t + 8 <= n; t += 8) {
        __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(s + t), top));
        _mm256_storeu_ps(s + t, e);
        sum = _mm256_add_ps(sum, e);
    }
    float lane[8];
    _mm256_storeu_ps(lane, sum);
    for (; t < n; t++) {
        s[t] = ds4_exp(s[t] - max);
        lane[t % 8] += s[t];
    }
    return ds4_fold(lane, 8);
}

static float max_of(const float *x, int64_t n) {
    __m256 best = _mm256_set1_ps(-INFINITY);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) best = _mm256_max_ps(_mm256_loadu_ps(x + i), best);
    float lane[8], top = -INFINITY;
    _mm256_storeu_ps(lane, best);
    for (int j = 0; j < 8; j++) top = lane[j] > top ? lane[j] : top;
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static void join(float *y, const float *x, float keep, float take, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = y[i] * keep + x[i] * take;
}

const ds4_vector ds4_vector_avx2 = {
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
#endif
