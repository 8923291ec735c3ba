/* The executor's own vector operations: a table per instruction set, bit for bit equal.
 *
 * Owns: every reduction order outside the matmul kernels. Sums of n values run in 32 lanes (value i in
 * lane i mod 32, an fmaf or add chain in order of i) and end in ds4_fold; attention sums run in 8.
 */
#ifndef DS4_OP_VECTOR_H
#define DS4_OP_VECTOR_H

#include <stdint.h>

#define DS4_SUM_LANES 32

typedef struct {
    /* sum of x[i]^2 */
    float (*sum_squares)(const float *x, int64_t n);
    /* y = (x * scale) * w; y may be x */
    void (*scale_by)(float *y, const float *x, const float *w, float scale, int64_t n);
    void (*add)(float *y, const float *a, const float *b, int64_t n);
    /* y = silu(gate) * up; y may be either */
    void (*silu_mul)(float *y, const float *gate, const float *up, int64_t n);
    /* y = g sigmoid(argument(g)) u, and u + 1 in DS4_GLU_SHIFTED (op_math.h); gate and up
     * limited first when limit is not 0; y may be either */
    void (*gated_mul)(float *y, const float *gate, const float *up, int mode, float limit,
                      float alpha, int64_t n);
    /* y = cap tanh(x / cap); y may be x */
    void (*soft_cap)(float *y, const float *x, float cap, int64_t n);
    /* y = fmaf(w, x, y) */
    void (*add_scaled)(float *y, const float *x, float w, int64_t n);
    /* Largest value; *finite = 0 when any is NaN or +infinity. -infinity is an ordinary value. */
    float (*max_finite)(const float *x, int64_t n, int *finite);
    /* y = exp((x - max) * scale) */
    void (*exp_scaled)(float *y, const float *x, float max, float scale, int64_t n);
    /* One more score s = gate + bias and value k per lane, into a running softmax: top = max(max, s),
     * keep = exp(max - top), take = exp(s - top), sum = fmaf(sum, keep, take),
     * weighted = fmaf(weighted, keep, take * k), max = top. */
    void (*running_softmax)(float *max, float *sum, float *weighted, const float *k,
                            const float *gate, const float *bias, int64_t n);
    /* p = exp(s - max) in place over n values; returns the sum of 8 lanes (value t in lane t mod 8). */
    float (*softmax)(float *s, float max, int64_t n);
    /* Largest of n values; NaN wins never, it shows in softmax. */
    float (*max)(const float *x, int64_t n);
    /* y = y * keep + x * take, each product rounded */
    void (*join)(float *y, const float *x, float keep, float take, int64_t n);
} ds4_vector;

/* Of ds4_vector_avx2, what AVX-512 takes as it is. */
float ds4_avx2_sum_squares(const float *x, int64_t n);
void ds4_avx2_gated_mul(float *y, const float *gate, const float *up, int mode, float limit,
                        float alpha, int64_t n);
void ds4_avx2_soft_cap(float *y, const float *x, float cap, int64_t n);
float ds4_avx2_max_finite(const float *x, int64_t n, int *finite);
void ds4_avx2_running_softmax(float *max, float *sum, float *weighted, const float *k,
                              const float *gate, const float *bias, int64_t n);

extern const ds4_vector ds4_vector_scalar, ds4_vector_avx2, ds4_vector_avx512, ds4_vector_neon;

/* The table of an instruction set that this CPU has (a ds4_isa). */
__attribute__((visibility("default"))) const ds4_vector *ds4_vector_table(int isa);

/* Fixed tree over lanes. */
static inline float ds4_fold(float *lane, int lanes) {
    for (int half = lanes / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

#endif
