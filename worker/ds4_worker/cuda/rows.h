/* Planes of rows in the pages of the KV cache: one f16 row, key and value in one, for each `ratio`
 * consecutive tokens of a sequence, whatever the type of the cache; and running states in f32. */
#ifndef DS4_CUDA_ROWS_H
#define DS4_CUDA_ROWS_H

#include "op_math.h"

struct ds4_plane {
    uint64_t pages;       /* this plane's place in physical page 0; 0: no such plane */
    uint64_t page_stride; /* bytes from page to page */
    uint64_t page_table;  /* int32[banks][pages_per_bank]: physical pages */
    int32_t pages_per_bank, page_tokens, dim, ratio;
};

static __device__ __forceinline__ char *ds4_plane_page(const ds4_plane &p, int bank, int64_t index) {
    int64_t page = ((const int *)p.page_table)[(int64_t)bank * p.pages_per_bank + index];
    return (char *)p.pages + page * p.page_stride;
}
static __device__ __forceinline__ int ds4_plane_records(const ds4_plane &p) {
    return p.page_tokens / p.ratio;
}

#endif
