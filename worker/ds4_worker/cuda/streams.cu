/* Residual streams that exchange, and the two ops that make values coarse.
 *
 * Reference: native/exec_hyper.c; same bits. Parameter ds4_streams; rows of x, w, s and y are their
 * strides apart. hyper_weights: grid (rows), block (32), a lane does it. hyper_read, hyper_write: grid
 * (blocks over width, rows), block (256). hadamard: grid (heads, rows), block (128), dynamic shared
 * memory 4 dim bytes. round_floats: grid (heads, rows), block (128), a warp per block of values.
 */
#include "op_math.h"

struct ds4_streams {
    uint64_t x;       /* hyper_weights: mix; hyper_write: what a layer adds; else the values */
    uint64_t w, s, y; /* weights and streams in; y: the result (hyper_weights: the weights) */
    uint64_t scale, base, live; /* hyper_weights */
    uint32_t x_stride, w_stride, s_stride, y_stride;
    int32_t rows, width;        /* width: of a stream; hyper_weights: floats of a row of mix */
    int32_t streams, iterations;
    int32_t heads, dim;         /* hadamard, round_floats: of a row */
    int32_t format, block, dims; /* round_floats: the first `dims` of each head, in blocks */
    float eps;
};

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + ds4_exp(-x)); }

/* Divides each of the n columns (step 1) or rows (step n) by its sum + eps. */
static __device__ void normalize(float *c, int n, int step, float eps) {
    int along = step == 1 ? n : 1;
    for (int i = 0; i < n; i++) {
        float *first = c + i * step, sum = 0.0f;
        for (int j = 0; j < n; j++) sum += first[j * along];
        sum = 1.0f / (sum + eps);
        for (int j = 0; j < n; j++) first[j * along] *= sum;
    }
}

DS4_KERNEL(hyper_weights, ds4_streams, 32, 8) {
    int row = blockIdx.x, n = p.streams;
    if (row >= ds4_rows(p.live, p.rows)) return;
    const float *mix = ds4_row<const float>(p.x, p.x_stride, row), *base = (const float *)p.base;
    const float *scale = (const float *)p.scale;
    float *w = ds4_row<float>(p.y, p.y_stride, row);
    for (int i = threadIdx.x; i < p.width; i += 32) {
        int part = i < n ? 0 : i < 2 * n ? 1 : 2;
        float x = mix[i] * scale[part] + base[i];
        w[i] = part == 0 ? sigmoid(x) + p.eps : part == 1 ? 2.0f * sigmoid(x) : x;
    }
    ds4_sync_warp();
    if (p.width == n || threadIdx.x) return;
    float *cross = w + 2 * n;
    for (int i = 0; i < n; i++) {
        float *c = cross + i * n, top = c[0], sum = 0.0f;
        for (int j = 1; j < n; j++) top = c[j] > top ? c[j] : top;
        for (int j = 0; j < n; j++) {
            c[j] = ds4_exp(c[j] - top);
            sum += c[j];
        }
        for (int j = 0; j < n; j++) c[j] = c[j] / sum + p.eps;
    }
    normalize(cross, n, 1, p.eps);
    for (int i = 1; i < p.iterations; i++) {
        normalize(cross, n, n, p.eps);
        normalize(cross, n, 1, p.eps);
    }
}

DS4_KERNEL(hyper_read, ds4_streams, 256, 2) {
    int row = blockIdx.y;
    if (row >= ds4_rows(p.live, p.rows)) return;
    const float *s = ds4_row<const float>(p.s, p.s_stride, row);
    const float *w = ds4_row<const float>(p.w, p.w_stride, row);
    float *y = ds4_row<float>(p.y, p.y_stride, row);
    for (int i = blockIdx.x * 256 + threadIdx.x; i < p.width; i += gridDim.x * 256) {
        float sum = 0.0f;
        for (int j = 0; j < p.streams; j++) sum = fmaf(w[j], s[j * p.width + i], sum);
        y[i] = sum;
    }
}

/* y may be s. */
DS4_KERNEL(hyper_write, ds4_streams, 256, 2) {
    int row = blockIdx.y, n = p.streams;
    if (row >= ds4_rows(p.live, p.rows)) return;
    const float *add = ds4_row<const float>(p.x, p.x_stride, row);
    const float *s = ds4_row<const float>(p.s, p.s_stride, row);
    const float *w = ds4_row<const float>(p.w, p.w_stride, row) + n, *cross = w + n;
    float *y = ds4_row<float>(p.y, p.y_stride, row);
    for (int i = blockIdx.x * 256 + threadIdx.x; i < p.width; i += gridDim.x * 256) {
        float own[16], more = add[i];
#pragma unroll
        for (int j = 0; j < 16; j++) own[j] = j < n ? s[j * p.width + i] : 0.0f;
        for (int d = 0; d < n; d++) {
            float sum = fmaf(w[d], more, 0.0f);
#pragma unroll
            for (int j = 0; j < 16; j++)
                if (j < n) sum = fmaf(cross[j * n + d], own[j], sum);
            y[d * p.width + i] = sum;
        }
    }
}

DS4_KERNEL(hadamard, ds4_streams, 128, 4) {
    DS4_SHARED_BYTES(shared);
    float *v = (float *)shared;
    int row = blockIdx.y, head = blockIdx.x, dim = p.dim;
    if (row >= ds4_rows(p.live, p.rows)) return;
    const float *x = ds4_row<const float>(p.x, p.x_stride, row) + head * dim;
    float *y = ds4_row<float>(p.y, p.y_stride, row) + head * dim;
    float scale = (float)(1.0 / sqrt((double)dim));
    for (int i = threadIdx.x; i < dim; i += 128) v[i] = x[i] * scale;
    for (int half = 1; half < dim; half *= 2) {
        ds4_sync_block();
        for (int k = threadIdx.x; k < dim / 2; k += 128) {
            int i = k / half * 2 * half + k % half;
            float a = v[i], b = v[i + half];
            v[i] = a + b;
            v[i + half] = a - b;
        }
    }
    ds4_sync_block();
    for (int i = threadIdx.x; i < dim; i += 128) y[i] = v[i];
}

/* ---- floats of few bits ------------------------------------------------------------------------------ */

static __device__ __forceinline__ float power_of_two(int exponent) {
    return ds4_float((uint32_t)(exponent + 127) << 23);
}
static __device__ __forceinline__ int exponent_of(float x) {
    return (int)(ds4_bits(x) >> 23 & 255) - 127;
}

/* The nearest value of the format, ties to even; x is within its range, or no number. */
static __device__ __forceinline__ float nearest(float x, int mantissa, int least) {
    int exponent = exponent_of(x);
    if (exponent < least) exponent = least;
    float step = power_of_two(exponent - mantissa), steps = fabsf(x) / step;
    steps = (steps + 8388608.0f) - 8388608.0f;
    return copysignf(steps * step, x);
}

DS4_KERNEL(round_floats, ds4_streams, 128, 4) {
    int row = blockIdx.y, head = blockIdx.x, lane = threadIdx.x & 31;
    if (row >= ds4_rows(p.live, p.rows)) return;
    const float *x = ds4_row<const float>(p.x, p.x_stride, row) + head * p.dim;
    float *y = ds4_row<float>(p.y, p.y_stride, row) + head * p.dim;
    bool wide = p.format == 0; /* e4m3, else e2m1 */
    float most = wide ? 448.0f : 6.0f, least_amax = wide ? 1e-4f : 6.0f * ds4_float(0x00800000u);
    int mantissa = wide ? 3 : 1, least = wide ? -6 : 0;
    for (int first = threadIdx.x / 32 * p.block; first < p.dims; first += 4 * p.block) {
        float amax = least_amax;
        for (int i = lane; i < p.block; i += 32)
            amax = fabsf(x[first + i]) > amax ? fabsf(x[first + i]) : amax;
        amax = ds4_float(ds4_warp_max(ds4_bits(amax))); /* no NaN is above anything */
        bool none = !(amax < ds4_float(247u << 23)); /* 2^120 */
        float ratio = amax / most;
        int exponent = exponent_of(ratio) + ((ds4_bits(ratio) & 0x7fffff) != 0);
        float scale = power_of_two(exponent), inverse = power_of_two(-exponent);
        for (int i = lane; i < p.block; i += 32) {
            float v = x[first + i] * inverse;
            v = v > most ? most : v < -most ? -most : v;
            y[first + i] = none ? DS4_NAN : nearest(v, mantissa, least) * scale;
        }
    }
    if (p.x != p.y)
        for (int d = p.dims + threadIdx.x; d < p.dim; d += 128) y[d] = x[d];
}
