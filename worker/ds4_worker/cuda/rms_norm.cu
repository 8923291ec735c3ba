/* rms_norm, with the residual sum before it and the quantization after it.
 *
 * Reference: native/exec_rows.c (rms_norm) with op_vector.c (add, sum_squares, scale_by) and act.c;
 * same bits. t = x (+ add); sum := t; y = t / sqrt(mean(t^2) + eps) * weight in each of `heads` parts
 * of `width`; act32 and act256 := y quantized (one head only). Parameter ds4_rms_norm; grid (heads,
 * rows), block (256), dynamic shared memory 4 width bytes. Squares are summed by 32 lanes, value i in
 * lane i mod 32, then a fixed tree, whatever the number of threads.
 */
#include "act.h"

struct ds4_rms_norm {
    uint64_t x, add, sum, weight, y, act32, act256, live; /* all but x and live: or 0 */
    uint32_t x_stride, add_stride, sum_stride, y_stride, act32_stride, act256_stride;
    int32_t rows, heads, width;
    float eps;
};

#define BATCH 8 /* loads that are started together: there is one block per row */

/* Calls store(i, load(i)) for all values of this thread. */
template <typename Load, typename Store>
static __device__ __forceinline__ void each(int width, Load load, Store store) {
#pragma unroll 1
    for (int first = threadIdx.x; first < width; first += BATCH * 256) {
        float value[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (first + 256 * j < width) value[j] = load(first + 256 * j);
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (first + 256 * j < width) store(first + 256 * j, value[j]);
    }
}

DS4_KERNEL(rms_norm, ds4_rms_norm, 256, 2) {
    int row = blockIdx.y, head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    if (row >= ds4_rows(p.live, p.rows)) return;
    DS4_SHARED_BYTES(shared);
    float *t = (float *)shared;
    __shared__ float factor;
    int64_t at = (int64_t)head * p.width;
    const float *x = ds4_row<const float>(p.x, p.x_stride, row) + at;
    const float *add = p.add ? ds4_row<const float>(p.add, p.add_stride, row) + at : (float *)0;
    float *sum = p.sum ? ds4_row<float>(p.sum, p.sum_stride, row) + at : (float *)0;
    auto keep = [&](int i, float value) {
        t[i] = value;
        if (sum) sum[i] = value;
    };
    if (add) each(p.width, [&](int i) { return x[i] + add[i]; }, keep);
    else each(p.width, [&](int i) { return x[i]; }, keep);
    ds4_sync_block();
    if (warp == 0) {
        float squares = 0.0f;
#pragma unroll 8
        for (int i = lane; i < p.width; i += 32) squares = fmaf(t[i], t[i], squares);
        for (int step = 16; step; step >>= 1) squares += ds4_shuffle_xor(squares, step);
        float mean = squares / (float)p.width;
        if (lane == 0) factor = 1.0f / sqrtf(mean + p.eps);
    }
    ds4_sync_block();
    const float *weight = (const float *)p.weight;
    float *y = p.y ? ds4_row<float>(p.y, p.y_stride, row) + at : (float *)0;
    auto put = [&](int i, float by) {
        float value = t[i] * factor;
        if (weight) value *= by;
        t[i] = value;
        if (y) y[i] = value;
    };
    if (weight) each(p.width, [&](int i) { return weight[i]; }, put);
    else each(p.width, [&](int) { return 1.0f; }, put);
    if (!p.act32 && !p.act256) return;
    ds4_sync_block();
    if (p.act32)
        ds4_quantize_column(DS4_ACT_Q8_32, t, p.width, ds4_row<void>(p.act32, p.act32_stride, row),
                            warp, 8);
    if (p.act256)
        ds4_quantize_column(DS4_ACT_Q8_256, t, p.width,
                            ds4_row<void>(p.act256, p.act256_stride, row), warp, 8);
}
