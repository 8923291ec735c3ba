/* Pages of the KV cache on the device: byte for byte those of the CPU (native/kv.h), for the cache
 * type DS4_KV: 0 f16, 1 f32, 2 bf16, 3 q8_0.
 *
 * A tile holds one head's vectors of page_tokens positions: keys ACROSS, [dim][page_tokens], values
 * ALONG, [page_tokens][width]; q8_0 in blocks of 32 dims, the half scales of all positions, then the
 * codes of the block, in either order.
 */
#ifndef DS4_CUDA_KV_H
#define DS4_CUDA_KV_H

#include "act.h"

#define DS4_KV_BLOCK 32
#define DS4_KV_Q8 (DS4_KV == 3)

static __device__ __forceinline__ int64_t ds4_kv_tile_bytes(int64_t width, int64_t page_tokens) {
    const int64_t bytes = DS4_KV == 1 ? 4 : DS4_KV_Q8 ? 1 : 2;
    return page_tokens * (width * bytes + (DS4_KV_Q8 ? width / DS4_KV_BLOCK * 2 : 0));
}
static __device__ __forceinline__ int ds4_kv_width(int dim) { return (dim + 7) / 8 * 8; }

/* Block b of a q8_0 tile. */
static __device__ __forceinline__ char *ds4_kv_block(const char *tile, int b, int64_t page_tokens) {
    return (char *)tile + b * page_tokens * (DS4_KV_BLOCK + 2);
}

/* A stored value by its index; of q8_0 the code. */
static __device__ __forceinline__ float ds4_kv_get(const char *codes, int64_t i) {
#if DS4_KV == 0
    return ds4_half_to_float(((const uint16_t *)codes)[i]);
#elif DS4_KV == 1
    return ((const float *)codes)[i];
#elif DS4_KV == 2
    return ds4_float((uint32_t)((const uint16_t *)codes)[i] << 16);
#else
    return (float)((const int8_t *)codes)[i];
#endif
}

#if !DS4_KV_Q8
/* Eight neighbouring values, from an index that is a multiple of 8. */
struct ds4_kv_eight {
    int4 words[DS4_KV == 1 ? 2 : 1];
};
static __device__ __forceinline__ ds4_kv_eight ds4_kv_get_eight(const char *codes, int64_t i) {
    ds4_kv_eight eight;
    const int4 *from = (const int4 *)(codes + i * (DS4_KV == 1 ? 4 : 2));
    eight.words[0] = from[0];
#if DS4_KV == 1
    eight.words[1] = from[1];
#endif
    return eight;
}
/* Value i of them, a constant. */
static __device__ __forceinline__ float ds4_kv_of_eight(const ds4_kv_eight &eight, int i) {
#if DS4_KV == 1
    const int4 &four = eight.words[i / 4];
    return ds4_float((uint32_t)(i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w));
#else
    const int4 &all = eight.words[0];
    uint32_t pair = (uint32_t)(i / 2 == 0 ? all.x : i / 2 == 1 ? all.y : i / 2 == 2 ? all.z : all.w);
    uint16_t half = (uint16_t)(pair >> 16 * (i % 2));
    return DS4_KV == 0 ? ds4_half_to_float(half) : ds4_float((uint32_t)half << 16);
#endif
}
#endif

static __device__ __forceinline__ void ds4_kv_put(char *codes, int64_t i, float x) {
#if DS4_KV == 0
    ((uint16_t *)codes)[i] = ds4_float_to_half(x);
#elif DS4_KV == 1
    ((float *)codes)[i] = x;
#elif DS4_KV == 2
    uint32_t bits = ds4_bits(x);
    bool none = (bits & 0x7fffffffu) > 0x7f800000u;
    ((uint16_t *)codes)[i] =
        (uint16_t)(none ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#else
    ((int8_t *)codes)[i] = (int8_t)x;
#endif
}

/* One layer's cache, as kernels see it. */
struct ds4_cache {
    uint64_t pages;       /* this layer's place in physical page 0 */
    uint64_t page_stride; /* bytes from page to page */
    uint64_t page_table;  /* int32[banks][pages_per_bank]: physical pages */
    int32_t pages_per_bank, page_tokens, kv_heads, dim, value_dim;
    int32_t latent; /* 1: one vector of dim, stored ALONG, is key and value of all heads */
};

static __device__ __forceinline__ const char *ds4_kv_keys(const ds4_cache &c, int64_t page, int head) {
    return (const char *)c.pages + page * c.page_stride +
           head * ds4_kv_tile_bytes(c.latent ? ds4_kv_width(c.dim) : c.dim, c.page_tokens);
}
static __device__ __forceinline__ const char *ds4_kv_values(const ds4_cache &c, int64_t page,
                                                            int head) {
    if (c.latent) return ds4_kv_keys(c, page, 0);
    return (const char *)c.pages + page * c.page_stride +
           c.kv_heads * ds4_kv_tile_bytes(c.dim, c.page_tokens) +
           head * ds4_kv_tile_bytes(ds4_kv_width(c.value_dim), c.page_tokens);
}
/* Values that a position takes in its tile of values. */
static __device__ __forceinline__ int ds4_kv_value_width(const ds4_cache &c) {
    return ds4_kv_width(c.latent ? c.dim : c.value_dim);
}
static __device__ __forceinline__ int ds4_kv_page(const ds4_cache &c, int bank, int logical) {
    return ((const int *)c.page_table)[(int64_t)bank * c.pages_per_bank + logical];
}

#endif
