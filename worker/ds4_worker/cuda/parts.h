/* Attention in parts: the softmax of one part of a row, and parts folded in ascending order.
 *
 * Reference: native/attention.c; same bits. Shared by attention over pages (attend.h) and over rows
 * (attend_rows.cu). The state of a part is its maximum, the sum of its exponentials and its weighted
 * values; a sum of 0 says that the row sees nothing of the part.
 */
#ifndef DS4_CUDA_PARTS_H
#define DS4_CUDA_PARTS_H

#include "op_math.h"

/* By a warp: scores s[0, n) become exponentials. Their maximum goes to *max, their sum to *sum. */
static __device__ __forceinline__ void ds4_part_softmax(float *s, int n, float *max, float *sum) {
    int lane = threadIdx.x & 31;
    float best = -DS4_INFINITY, own = 0.0f;
    for (int i = lane; i < n; i += 32)
        if (s[i] > best) best = s[i];
    for (int step = 16; step; step >>= 1) {
        float other = ds4_shuffle_xor(best, step);
        if (other > best) best = other;
    }
    for (int i = lane; i < n; i += 32) s[i] = ds4_exp(s[i] - best);
    ds4_sync_warp();
    if (lane < 8)
        for (int i = lane; i < n; i += 8) own += s[i];
    for (int step = 4; step; step >>= 1) own += ds4_shuffle_xor(own, step);
    if (lane == 0) {
        *max = best;
        *sum = n > 0 ? own : 0.0f;
    }
}

/* A part joins those before it: their values times `keep`, its own times `take`. */
struct ds4_join {
    float max, keep, take;
};
static __device__ __forceinline__ ds4_join ds4_join_part(float max, float part_max) {
    ds4_join join;
    join.max = part_max > max ? part_max : max;
    join.keep = ds4_exp(max - join.max);
    join.take = ds4_exp(part_max - join.max);
    return join;
}

/* The output of a row from the values of all its parts; `sinks` may be null. */
static __device__ __forceinline__ float ds4_finish_row(const float *sinks, int head, float max,
                                                       float sum, float value) {
    if (sinks) {
        ds4_join join = ds4_join_part(max, sinks[head]);
        sum = sum * join.keep + join.take;
        value *= join.keep;
    }
    return value * (1.0f / sum);
}

/* Where the state of a part lies: maximum, sum, `width` values. */
static __device__ __forceinline__ float *ds4_part_state(uint64_t parts, int heads, int most_parts,
                                                        int width, int token, int head, int part) {
    return (float *)parts + (((int64_t)token * heads + head) * most_parts + part) * (2 + width);
}

/* By a block: the parts [first, end) of a row, whose states follow each other, into y[0, dims). */
static __device__ __forceinline__ void ds4_fold_parts(const float *states, int width, int first,
                                                      int end, const float *sinks, int head,
                                                      int dims, float *y) {
    const int batch = 6; /* parts whose loads are started together */
    for (int d = threadIdx.x; d < dims; d += blockDim.x) {
        float max = -DS4_INFINITY, sum = 0.0f, value = 0.0f;
#pragma unroll 1
        for (int part = first; part < end; part += batch) {
            float maxima[batch], sums[batch], values[batch];
#pragma unroll
            for (int j = 0; j < batch; j++) {
                int at = part + j < end ? part + j : end - 1;
                const float *state = states + (int64_t)at * (2 + width);
                maxima[j] = state[0], sums[j] = state[1], values[j] = state[2 + d];
            }
#pragma unroll
            for (int j = 0; j < batch; j++) {
                if (part + j >= end || sums[j] == 0.0f) continue;
                ds4_join join = ds4_join_part(max, maxima[j]);
                max = join.max;
                sum = sum * join.keep + sums[j] * join.take;
                value = value * join.keep + values[j] * join.take;
            }
        }
        y[d] = ds4_finish_row(sinks, head, max, sum, value);
    }
}

#endif
