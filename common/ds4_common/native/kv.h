/* The KV cache of one page and head: how keys and values lie, and what attention asks of them.
 *
 * Owns: the types of the cache, the bytes of a tile, the rounding of what is stored, and the order of
 * sums over it - a table of kernels per type and instruction set, bit for bit equal across sets.
 *
 * A tile holds the vectors of page_tokens positions. ACROSS (keys): [dim][page_tokens], a lane is a
 * position. ALONG (values): [page_tokens][width], a lane is a dim, width a multiple of 8. Q8_0 cuts
 * dims into blocks of 32 with one scale per position, block after block: the half scales of all
 * positions, then the codes of the block, in either order.
 */
#ifndef DS4_KV_H
#define DS4_KV_H

#include <stdint.h>

enum { DS4_KV_F16 = 0, DS4_KV_F32, DS4_KV_BF16, DS4_KV_Q8_0, DS4_KV_TYPES };

#define DS4_KV_BLOCK 32
#define DS4_SCORE_ROWS 6 /* most query rows per score call */
#define DS4_VALUE_ROWS 6 /* most query rows per value call */
#define DS4_SCALED_TOKENS 64 /* weights that are multiplied with the scales of Q8_0 at once */

typedef struct {
    int type;
    /* n stored values, and of Q8_0 the scale of each block: d = half(amax / 127), codes rounded to
     * nearest even of x * (127 / amax) */
    void (*encode)(const float *x, int64_t n, void *codes, uint16_t *scales);
    /* ACROSS: scores[r * ld + t] = q_r . k_t for t in [0, tokens8), tokens8 = tokens rounded up to 8: an
     * fmaf chain in order of dims; Q8_0: one per block, then fmaf(scale, block, s) in order of
     * blocks. `next` is the tile to be read after this one: only prefetched. */
    void (*score)(const float *q, int rows, int64_t dim, const void *k, const void *next,
                  int64_t page_tokens, int64_t tokens8, float *scores, int64_t ld);
    /* ALONG: the same for t in [0, tokens), in eight chains by dim mod 8 and then a fixed tree. */
    void (*score_along)(const float *q, int rows, int64_t dim, const void *k, const void *next,
                        int64_t page_tokens, int64_t width, int64_t tokens, float *scores,
                        int64_t ld);
    /* ALONG: out[r * vdim + d] = fmaf chain over t in [0, tokens) of p[r * ld + t] * v[from + t][d],
     * starting at out, d < vdim (a multiple of 8); Q8_0: of (p * scale) * code. */
    void (*accumulate)(const float *p, int64_t ld, int rows, int64_t from, int64_t tokens,
                       const void *v, const void *next, int64_t page_tokens, int64_t width,
                       int64_t vdim, float *out);
} ds4_kv;

extern const ds4_kv ds4_kv_scalar[DS4_KV_TYPES], ds4_kv_avx2[DS4_KV_TYPES], ds4_kv_neon[DS4_KV_TYPES];
extern const ds4_kv ds4_kv_avx512[DS4_KV_Q8_0], ds4_kv_avx512_q8;

/* The kernels of a type for an instruction set that this CPU has (a ds4_isa). NULL: no such type. */
__attribute__((visibility("default"))) const ds4_kv *ds4_kv_table(int type, int isa);

/* Bytes of one value without its share of scales. */
static inline int64_t ds4_kv_code_bytes(int type) {
    return type == DS4_KV_F32 ? 4 : type == DS4_KV_Q8_0 ? 1 : 2;
}

/* Bytes of the tile of vectors of `width` dims, a multiple of 32 for Q8_0. */
static inline int64_t ds4_kv_tile_bytes(int type, int64_t width, int64_t page_tokens) {
    int64_t scales = type == DS4_KV_Q8_0 ? width / DS4_KV_BLOCK * 2 : 0;
    return page_tokens * (width * ds4_kv_code_bytes(type) + scales);
}

/* Dims that a vector of values takes in its tile. */
static inline int64_t ds4_kv_width(int64_t dim) { return (dim + 7) / 8 * 8; }

/* Bytes of one Q8_0 block of a tile, and where its codes begin. */
static inline int64_t ds4_kv_block_bytes(int64_t page_tokens) {
    return page_tokens * (DS4_KV_BLOCK + 2);
}
static inline const int8_t *ds4_kv_codes(const void *tile, int64_t block, int64_t page_tokens) {
    return (const int8_t *)tile + block * ds4_kv_block_bytes(page_tokens) + 2 * page_tokens;
}
static inline const uint16_t *ds4_kv_scales(const void *tile, int64_t block, int64_t page_tokens) {
    return (const uint16_t *)(const void *)((const char *)tile +
                                            block * ds4_kv_block_bytes(page_tokens));
}

/* Writes the vector of position `place` of the page into a tile of either order. */
void ds4_kv_store_across(const ds4_kv *kv, const float *x, int64_t dim, int64_t page_tokens,
                         int64_t place, void *tile);
void ds4_kv_store_along(const ds4_kv *kv, const float *x, int64_t dim, int64_t page_tokens,
                        int64_t place, void *tile);

/* The rounding of one value to bfloat16, to nearest even; NaN stays one. */
uint16_t ds4_f32_to_bf16(float x);

/* Of an encoder of Q8_0: the blocks by the quantizer of activations for `isa`. */
void ds4_kv_encode_q8(const float *x, int64_t n, void *codes, uint16_t *scales, int isa);

#endif
