/* kv_store: writes the keys and values of the step's tokens into their pages.
 *
 * Reference: native/exec_rows.c (kv_store) with kv.c; same bytes. Parameter ds4_kv_store, grid
 * (kv_heads, tokens), block (128): a warp takes 32 dims at a time. A token whose bank is below 0 is
 * skipped.
 */
#ifndef DS4_CUDA_KV_STORE_H
#define DS4_CUDA_KV_STORE_H

#include "kv.h"

struct ds4_kv_store {
    ds4_cache cache;
    uint64_t k, v, positions, banks, live; /* v: not of latents; positions, banks: int32[tokens] */
    uint32_t k_stride, v_stride;
    int32_t tokens, reserved;
};

/* Dims [32 b, 32 b + 32) of a vector by a warp; `across`: the order of the tile. */
static __device__ __forceinline__ void ds4_kv_put_block(const ds4_cache &c, char *tile, bool across,
                                                        int place, int b, int dim, float x) {
    int lane = threadIdx.x & 31, d = DS4_KV_BLOCK * b + lane;
#if DS4_KV_Q8
    float inverse, scale = ds4_block_scale(ds4_warp_max(ds4_magnitude(x)), &inverse);
    char *block = ds4_kv_block(tile, b, c.page_tokens);
    if (lane == 0) ((uint16_t *)block)[place] = ds4_float_to_half(scale);
    int q = inverse != 0.0f ? ds4_round_even(x * inverse) : 0;
    int at = across ? lane * c.page_tokens + place : place * DS4_KV_BLOCK + lane;
    ds4_kv_put(block + 2 * c.page_tokens, at, (float)q);
    (void)d, (void)dim;
#else
    int width = ds4_kv_width(dim);
    if (d < dim) ds4_kv_put(tile, across ? d * c.page_tokens + place : place * width + d, x);
#endif
}

DS4_KERNEL(kv_store, ds4_kv_store, 128, 4) {
    const ds4_cache &c = p.cache;
    int token = blockIdx.y, head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    if (token >= ds4_rows(p.live, p.tokens)) return;
    int bank = ((const int *)p.banks)[token], position = ((const int *)p.positions)[token];
    if (bank < 0) return;
    int64_t page = ds4_kv_page(c, bank, position / c.page_tokens);
    int place = position % c.page_tokens;
    const float *k = ds4_row<const float>(p.k, p.k_stride, token) + head * c.dim;
    char *keys = (char *)ds4_kv_keys(c, page, head), *values = (char *)ds4_kv_values(c, page, head);
    for (int b = warp; b < (c.dim + 31) / 32; b += 4) {
        int d = 32 * b + lane;
        ds4_kv_put_block(c, keys, !c.latent, place, b, c.dim, d < c.dim ? k[d] : 0.0f);
    }
    if (c.latent) return;
    const float *v = ds4_row<const float>(p.v, p.v_stride, token) + head * c.value_dim;
    for (int b = warp; b < (c.value_dim + 31) / 32; b += 4) {
        int d = 32 * b + lane;
        ds4_kv_put_block(c, values, false, place, b, c.value_dim, d < c.value_dim ? v[d] : 0.0f);
    }
}

#endif
