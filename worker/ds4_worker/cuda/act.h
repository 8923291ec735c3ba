/* Activation columns on the device: byte for byte those of ds4_act_quantize (docs/layouts.md).
 *
 * Owns: the planes of a column and the quantization of one block by one warp.
 */
#ifndef DS4_CUDA_ACT_H
#define DS4_CUDA_ACT_H

#include "op_math.h"

enum { DS4_ACT_F32 = 0, DS4_ACT_Q8_32 = 1, DS4_ACT_Q8_256 = 2 };

static __device__ __forceinline__ int64_t ds4_round64(int64_t n) { return (n + 63) & ~(int64_t)63; }

static __device__ __forceinline__ int64_t ds4_act_bytes(int format, int64_t cols) {
    if (format == DS4_ACT_Q8_32) return ds4_round64(ds4_round64(cols) + 12 * (cols / 32));
    if (format == DS4_ACT_Q8_256) return ds4_round64(cols + 36 * (cols / 256));
    return ds4_round64(4 * cols);
}

struct ds4_act32 { /* x ~ d q; sum = sum of q, s = d sum; planes over cols / 32 blocks */
    int8_t *q;
    float *d, *s;
    int32_t *sum;
};
static __device__ __forceinline__ ds4_act32 ds4_act32_view(void *act, int64_t cols) {
    float *d = (float *)((char *)act + ds4_round64(cols));
    return {(int8_t *)act, d, d + cols / 32, (int32_t *)(d + 2 * (cols / 32))};
}

struct ds4_act256 { /* sums over sixteens, even ones first; planes over cols / 256 blocks */
    int8_t *q;
    int16_t *sums;
    float *d;
};
static __device__ __forceinline__ ds4_act256 ds4_act256_view(void *act, int64_t cols) {
    char *p = (char *)act + cols;
    return {(int8_t *)act, (int16_t *)p, (float *)(p + cols / 8)};
}

/* A block's scale and the factor that turns its values into integers; 0 where the block is all zero
 * or holds something that is not finite. */
static __device__ __forceinline__ float ds4_block_scale(uint32_t top, float *inverse) {
    float amax = ds4_float(top);
    *inverse = 0.0f;
    if (top >= 0x7f800000u) return DS4_NAN;
    if (amax < 1e-30f) return 0.0f;
    *inverse = 127.0f / amax;
    return amax / 127.0f;
}

static __device__ __forceinline__ int ds4_round_even(float v) {
    return (int)((v + 12582912.0f) - 12582912.0f);
}

static __device__ __forceinline__ uint32_t ds4_magnitude(float x) { return ds4_bits(x) & 0x7fffffffu; }

/* One block of 32 by a warp: lane i brings value i. */
static __device__ __forceinline__ void ds4_quantize32(const ds4_act32 &to, int64_t block, float x) {
    int lane = threadIdx.x & 31;
    float inverse, d = ds4_block_scale(ds4_warp_max(ds4_magnitude(x)), &inverse);
    int q = inverse != 0.0f ? ds4_round_even(x * inverse) : 0;
    to.q[32 * block + lane] = (int8_t)q;
    int sum = q;
    for (int step = 16; step; step >>= 1) sum += ds4_shuffle_xor(sum, step);
    if (lane == 0) {
        to.d[block] = d;
        to.sum[block] = sum;
        to.s[block] = d * (float)sum;
    }
}

/* One block of 256 by a warp: lane i brings values 8 i to 8 i + 7. */
static __device__ __forceinline__ void ds4_quantize256(const ds4_act256 &to, int64_t block,
                                                       const float (&x)[8]) {
    int lane = threadIdx.x & 31;
    uint32_t top = 0, packed[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t bits = ds4_magnitude(x[i]);
        top = bits > top ? bits : top;
    }
    float inverse, d = ds4_block_scale(ds4_warp_max(top), &inverse);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int q = inverse != 0.0f ? ds4_round_even(x[i] * inverse) : 0;
        sum += q;
        packed[i / 4] |= (uint32_t)(q & 255) << (8 * (i % 4));
    }
    *(uint2 *)(to.q + 256 * block + 8 * lane) = make_uint2(packed[0], packed[1]);
    sum += ds4_shuffle_xor(sum, 1);
    int sub = lane / 2;
    if (lane % 2 == 0) to.sums[16 * block + (sub >> 1) + ((sub & 1) << 3)] = (int16_t)sum;
    if (lane == 0) to.d[block] = d;
}

/* All blocks of a column of values in shared or global memory, dealt to `warps` warps. */
static __device__ __forceinline__ void ds4_quantize_column(int format, const float *x, int64_t cols,
                                                           void *out, int warp, int warps) {
    int lane = threadIdx.x & 31;
    if (format == DS4_ACT_Q8_32) {
        ds4_act32 to = ds4_act32_view(out, cols);
        for (int64_t b = warp; b < cols / 32; b += warps) ds4_quantize32(to, b, x[32 * b + lane]);
    } else if (format == DS4_ACT_Q8_256) {
        ds4_act256 to = ds4_act256_view(out, cols);
        for (int64_t b = warp; b < cols / 256; b += warps) {
            float own[8];
#pragma unroll
            for (int i = 0; i < 8; i++) own[i] = x[256 * b + 8 * lane + i];
            ds4_quantize256(to, b, own);
        }
    } else {
        float *to = (float *)out;
        int64_t padded = ds4_round64(4 * cols) / 4;
        for (int64_t i = 32 * warp + lane; i < padded; i += 32 * warps)
            to[i] = i < cols ? x[i] : 0.0f;
    }
}

#endif
