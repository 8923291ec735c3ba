/* Scalar versions: the definition of what op_vector_avx2.c, _avx512.c and _neon.c compute. */
#include "op_vector.h"

#include "op_math.h"
#include "quants.h"

static float sum_squares(const float *x, int64_t n) {
    float lane[DS4_SUM_LANES] = {0};
    for (int64_t i = 0; i < n; i++) {
        float *sum = lane + i % DS4_SUM_LANES;
        *sum = fmaf(x[i], x[i], *sum);
    }
    return ds4_fold(lane, DS4_SUM_LANES);
}

static void scale_by(float *y, const float *x, const float *w, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
}

static void add(float *y, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

static void silu_mul(float *y, const float *gate, const float *up, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = ds4_silu(gate[i]) * up[i];
}

static void gated_mul(float *y, const float *gate, const float *up, int mode, float limit,
                      float alpha, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float g = gate[i], u = up[i];
        if (limit != 0.0f) { /* a NaN passes */
            g = limit < g ? limit : g;
            u = limit < u ? limit : u;
            u = -limit > u ? -limit : u;
        }
        float e = ds4_exp(-ds4_gate_argument(mode, g, alpha));
        y[i] = g / (1.0f + e) * (mode == DS4_GLU_SHIFTED ? u + 1.0f : u);
    }
}

static void soft_cap(float *y, const float *x, float cap, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = ds4_soft_cap(x[i], cap, -2.0f / cap);
}

static void add_scaled(float *y, const float *x, float w, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = fmaf(w, x[i], y[i]);
}

static float max_finite(const float *x, int64_t n, int *finite) {
    float best = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (!(x[i] < INFINITY)) *finite = 0;
        if (x[i] > best) best = x[i];
    }
    return best;
}

static void exp_scaled(float *y, const float *x, float max, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = ds4_exp((x[i] - max) * scale);
}

static void running_softmax(float *max, float *sum, float *weighted, const float *k,
                            const float *gate, const float *bias, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float s = gate[i] + bias[i], top = s > max[i] ? s : max[i];
        float keep = ds4_exp(max[i] - top), taken = ds4_exp(s - top);
        sum[i] = fmaf(sum[i], keep, taken);
        weighted[i] = fmaf(weighted[i], keep, taken * k[i]);
        max[i] = top;
    }
}

static float softmax(float *s, float max, int64_t n) {
    float lane[8] = {0};
    for (int64_t t = 0; t < n; t++) {
        s[t] = ds4_exp(s[t] - max);
        lane[t % 8] += s[t];
    }
    return ds4_fold(lane, 8);
}

static float max_of(const float *x, int64_t n) {
    float best = -INFINITY;
    for (int64_t i = 0; i < n; i++)
        if (x[i] > best) best = x[i];
    return best;
}

static void join(float *y, const float *x, float keep, float take, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = y[i] * keep + x[i] * take;
}

const ds4_vector ds4_vector_scalar = {
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

const ds4_vector *ds4_vector_table(int isa) {
#if defined(__x86_64__)
    if (isa >= DS4_ISA_AVX512) return &ds4_vector_avx512;
    if (isa != DS4_ISA_SCALAR) return &ds4_vector_avx2;
#elif defined(__aarch64__)
    if (isa != DS4_ISA_SCALAR) return &ds4_vector_neon;
#endif
    (void)isa;
    return &ds4_vector_scalar;
}
