/* NEON versions of op_vector.c: the same operations on the same lanes in the same order. */
#include "op_vector.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include "neon.h"
#include "op_math.h"

DS4_INLINE float32x4_t greater(float32x4_t a, float32x4_t b) { /* a > b ? a : b, also for NaN */
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

DS4_INLINE float32x4_t exp4(float32x4_t x) {
    const float32x4_t low = vdupq_n_f32(DS4_EXP_LOW), high = vdupq_n_f32(DS4_EXP_HIGH);
    const float32x4_t round = vdupq_n_f32(DS4_ROUND);
    float32x4_t c = greater(low, x); /* x when unordered: NaN stays */
    c = vbslq_f32(vcltq_f32(high, c), high, c);
    float32x4_t shifted = vfmaq_f32(round, c, vdupq_n_f32(DS4_LOG2E));
    float32x4_t n = vsubq_f32(shifted, round);
    float32x4_t r = vfmaq_f32(c, n, vdupq_n_f32(-DS4_LN2_HIGH));
    r = vfmaq_f32(r, n, vdupq_n_f32(-DS4_LN2_LOW));
    float32x4_t p = vdupq_n_f32(DS4_EXP_P0);
    p = vfmaq_f32(vdupq_n_f32(DS4_EXP_P1), p, r);
    p = vfmaq_f32(vdupq_n_f32(DS4_EXP_P2), p, r);
    p = vfmaq_f32(vdupq_n_f32(DS4_EXP_P3), p, r);
    p = vfmaq_f32(vdupq_n_f32(DS4_EXP_P4), p, r);
    p = vfmaq_f32(vdupq_n_f32(DS4_EXP_P5), p, r);
    p = vaddq_f32(vfmaq_f32(r, p, vmulq_f32(r, r)), vdupq_n_f32(1.0f));
    uint32x4_t power = vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23);
    float32x4_t scaled = vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(p), power));
    scaled = vbslq_f32(vcltq_f32(x, low), vdupq_n_f32(0.0f), scaled);
    return vbslq_f32(vceqq_f32(x, x), scaled, x);
}

static float sum_squares(const float *x, int64_t n) {
    float32x4_t sum[8];
    for (int j = 0; j < 8; j++) sum[j] = vdupq_n_f32(0.0f);
    int64_t i = 0;
    for (; i + DS4_SUM_LANES <= n; i += DS4_SUM_LANES)
        for (int j = 0; j < 8; j++) {
            float32x4_t v = vld1q_f32(x + i + 4 * j);
            sum[j] = vfmaq_f32(sum[j], v, v);
        }
    float lane[DS4_SUM_LANES];
    for (int j = 0; j < 8; j++) vst1q_f32(lane + 4 * j, sum[j]);
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
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t g = vld1q_f32(gate + i);
        float32x4_t s = vdivq_f32(g, vaddq_f32(vdupq_n_f32(1.0f), exp4(vnegq_f32(g))));
        vst1q_f32(y + i, vmulq_f32(s, vld1q_f32(up + i)));
    }
    for (; i < n; i++) y[i] = ds4_silu(gate[i]) * up[i];
}

DS4_INLINE float32x4_t gate_argument4(int mode, float32x4_t x, float alpha) {
    if (mode == DS4_GLU_GELU) {
        float32x4_t slope = vfmaq_n_f32(vdupq_n_f32(DS4_GELU_LINEAR), vmulq_f32(x, x), DS4_GELU_CUBIC);
        return vmulq_f32(x, slope);
    }
    return mode == DS4_GLU_SHIFTED ? vmulq_n_f32(x, alpha) : x;
}

static void gated_mul(float *y, const float *gate, const float *up, int mode, float limit,
                      float alpha, int64_t n) {
    const float32x4_t one = vdupq_n_f32(1.0f), high = vdupq_n_f32(limit);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t g = vld1q_f32(gate + i), u = vld1q_f32(up + i);
        if (limit != 0.0f) { /* a NaN passes */
            g = vbslq_f32(vcltq_f32(high, g), high, g);
            u = vbslq_f32(vcltq_f32(high, u), high, u);
            u = greater(vnegq_f32(high), u);
        }
        float32x4_t e = exp4(vnegq_f32(gate_argument4(mode, g, alpha)));
        if (mode == DS4_GLU_SHIFTED) u = vaddq_f32(u, one);
        vst1q_f32(y + i, vmulq_f32(vdivq_f32(g, vaddq_f32(one, e)), u));
    }
    ds4_vector_scalar.gated_mul(y + i, gate + i, up + i, mode, limit, alpha, n - i);
}

static void soft_cap(float *y, const float *x, float cap, int64_t n) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    const uint32x4_t sign = vdupq_n_u32(0x80000000u);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vld1q_f32(x + i), e = exp4(vmulq_n_f32(vabsq_f32(v), -2.0f / cap));
        float32x4_t t = vdivq_f32(vsubq_f32(one, e), vaddq_f32(one, e));
        vst1q_f32(y + i, vbslq_f32(sign, v, vmulq_n_f32(t, cap)));
    }
    ds4_vector_scalar.soft_cap(y + i, x + i, cap, n - i);
}

static void add_scaled(float *y, const float *x, float w, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, vfmaq_n_f32(vld1q_f32(y + i), vld1q_f32(x + i), w));
    for (; i < n; i++) y[i] = fmaf(w, x[i], y[i]);
}

static float max_finite(const float *x, int64_t n, int *finite) {
    const float32x4_t infinity = vdupq_n_f32(INFINITY);
    float32x4_t best = vdupq_n_f32(-INFINITY);
    uint32x4_t fine = vdupq_n_u32(~0u);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vld1q_f32(x + i);
        fine = vandq_u32(fine, vcltq_f32(v, infinity));
        best = greater(v, best);
    }
    if (vminvq_u32(fine) != ~0u) *finite = 0;
    float lane[4], top = -INFINITY;
    vst1q_f32(lane, best);
    for (int j = 0; j < 4; j++) top = lane[j] > top ? lane[j] : top;
    for (; i < n; i++) {
        if (!(x[i] < INFINITY)) *finite = 0;
        if (x[i] > top) top = x[i];
    }
    return top;
}

static void exp_scaled(float *y, const float *x, float max, float scale, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vsubq_f32(vld1q_f32(x + i), vdupq_n_f32(max));
        vst1q_f32(y + i, exp4(vmulq_f32(v, vdupq_n_f32(scale))));
    }
    for (; i < n; i++) y[i] = ds4_exp((x[i] - max) * scale);
}

static void running_softmax(float *max, float *sum, float *weighted, const float *k,
                            const float *gate, const float *bias, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t s = vaddq_f32(vld1q_f32(gate + i), vld1q_f32(bias + i)), old = vld1q_f32(max + i);
        float32x4_t top = vbslq_f32(vcgtq_f32(s, old), s, old);
        float32x4_t keep = exp4(vsubq_f32(old, top)), taken = exp4(vsubq_f32(s, top));
        float32x4_t share = vmulq_f32(taken, vld1q_f32(k + i));
        vst1q_f32(sum + i, vfmaq_f32(taken, vld1q_f32(sum + i), keep));
        vst1q_f32(weighted + i, vfmaq_f32(share, vld1q_f32(weighted + i), keep));
        vst1q_f32(max + i, top);
    }
    ds4_vector_scalar.running_softmax(max + i, sum + i, weighted + i, k + i, gate + i, bias + i, n - i);
}

static float softmax(float *s, float max, int64_t n) {
    float32x4_t top = vdupq_n_f32(max), low = vdupq_n_f32(0.0f), high = low;
    int64_t t = 0;
    for (; t + 8 <= n; t += 8) {
        float32x4_t a = exp4(vsubq_f32(vld1q_f32(s + t), top));
        float32x4_t b = exp4(vsubq_f32(vld1q_f32(s + t + 4), top));
        vst1q_f32(s + t, a);
        vst1q_f32(s + t + 4, b);
        low = vaddq_f32(low, a);
        high = vaddq_f32(high, b);
    }
    float lane[8];
    vst1q_f32(lane, low);
    vst1q_f32(lane + 4, high);
    for (; t < n; t++) {
        s[t] = ds4_exp(s[t] - max);
        lane[t % 8] += s[t];
    }
    return ds4_fold(lane, 8);
}

static float max_of(const float *x, int64_t n) {
    float32x4_t best = vdupq_n_f32(-INFINITY);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) best = greater(vld1q_f32(x + i), best);
    float lane[4], top = -INFINITY;
    vst1q_f32(lane, best);
    for (int j = 0; j < 4; j++) top = lane[j] > top ? lane[j] : top;
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static void join(float *y, const float *x, float keep, float take, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = y[i] * keep + x[i] * take;
}

const ds4_vector ds4_vector_neon = {
    .sum_squares = sum_squares,
    .scale_by = scale_by,
    .add = add,
    .silu_mul = silu_mul,
    .gated_mul = gated_mul,
    .soft_cap = soft_cap,
    .add_scaled = add_scaled,
    .max_finite = max_finite,
    .exp_scaled = exp_scaled,
    .running_softmax = running_softmax,
    .softmax = softmax,
    .max = max_of,
    .join = join,
};
#endif
