/* Scalar arithmetic shared by the kernels: operation for operation that of
 * ds4_common/native/op_math.h, which is the definition and the reference of its tests. */
#ifndef DS4_CUDA_OP_MATH_H
#define DS4_CUDA_OP_MATH_H

#include "intrinsics.h"

#define DS4_INFINITY (ds4_float(0x7f800000u))
#define DS4_NAN (ds4_float(0x7fc00000u))

/* The one exponential: below -87 it is 0, above 88 it stays at exp(88). */
static __device__ __forceinline__ float ds4_exp(float x) {
    float c = -87.0f > x ? -87.0f : x;
    c = 88.0f < c ? 88.0f : c;
    float shifted = fmaf(c, 1.44269504088896341f, 12582912.0f);
    float n = shifted - 12582912.0f;
    float r = fmaf(n, -0.693359375f, c);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r) + 1.0f;
    float scaled = ds4_float(ds4_bits(p) + (ds4_bits(shifted) << 23));
    if (x < -87.0f) return 0.0f;
    return x != x ? x : scaled;
}

static __device__ __forceinline__ float ds4_silu(float x) { return x / (1.0f + ds4_exp(-x)); }

/* Modes of gated units (contract/ops.py, GatedUnit). */
enum { DS4_GLU_SILU = 0, DS4_GLU_GELU = 1, DS4_GLU_SHIFTED = 2 };

static __device__ __forceinline__ float ds4_gate_argument(int mode, float x, float alpha) {
    if (mode == DS4_GLU_GELU) return x * fmaf(7.1354814364e-2f, x * x, 1.5957691216057308f);
    return mode == DS4_GLU_SHIFTED ? x * alpha : x;
}

static __device__ __forceinline__ float ds4_gated(int mode, float limit, float alpha, float gate,
                                                  float up) {
    float g = gate, u = up;
    if (mode == DS4_GLU_SILU && limit == 0.0f) return ds4_silu(g) * u;
    if (limit != 0.0f) { /* a NaN passes */
        g = limit < g ? limit : g;
        u = limit < u ? limit : u;
        u = -limit > u ? -limit : u;
    }
    float e = ds4_exp(-ds4_gate_argument(mode, g, alpha));
    return g / (1.0f + e) * (mode == DS4_GLU_SHIFTED ? u + 1.0f : u);
}

/* cap * tanh(x / cap). */
static __device__ __forceinline__ float ds4_soft_cap(float x, float cap) {
    float e = ds4_exp(fabsf(x) * (-2.0f / cap));
    return copysignf(cap * ((1.0f - e) / (1.0f + e)), x);
}

/* Largest of the warp's values by the bits of non-negative floats; integers order alike. */
static __device__ __forceinline__ uint32_t ds4_warp_max(uint32_t value) {
    for (int step = 16; step; step >>= 1) {
        uint32_t other = ds4_shuffle_xor(value, step);
        value = other > value ? other : value;
    }
    return value;
}

/* Rows in use: those of the grid, or fewer (see `live` in intrinsics.h). */
static __device__ __forceinline__ int ds4_rows(uint64_t live, int rows) {
    if (!live) return rows;
    int used = *(const int *)live;
    return used < rows ? used : rows;
}

/* Row `row` of a slot whose rows are `stride` bytes apart. */
template <typename T>
static __device__ __forceinline__ T *ds4_row(uint64_t base, uint32_t stride, int64_t row) {
    return (T *)(base + (uint64_t)row * stride);
}

#endif
