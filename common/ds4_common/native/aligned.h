/* Where blocks lie in the published aligned artifacts of experts (kinds 4, 6 and 8; docs/layouts.md).
 *
 * Owns: the addresses of their sections for the CPU kernels. A tensor is one after the other its scales,
 * what else a block has, and its codes, each section padded to 64 bytes; so a row of it has no address of
 * its own, and a weight that is some rows of a tensor says which (ds4_weight.first, .all).
 */
#ifndef DS4_ALIGNED_H
#define DS4_ALIGNED_H

#include "quants.h"

/* The sections from the first row of a weight on. */
typedef struct {
    const uint8_t *scales; /* f16 d; Q2_K: of a pair of rows d, dmin, d, dmin */
    const uint8_t *extra;  /* IQ2_XS: eight bytes of sub-scales; Q2_K: 32 of a pair; IQ2_XXS: none */
    const uint8_t *codes;  /* 64 bytes; Q2_K: 128 of a pair */
} ds4_sections;

DS4_INLINE int ds4_is_aligned(uint32_t layout) {
    return layout > DS4_LAYOUT_X8 && layout != DS4_LAYOUT_IQ2_PLANES;
}

/* Offset of the section of codes in a tensor of n blocks; *extra: of the one before. */
DS4_INLINE int64_t ds4_codes_offset(uint32_t layout, int64_t n, int64_t *extra) {
    if (layout == DS4_LAYOUT_Q2_K_ALIGNED) {
        *extra = (int64_t)ds4_round64((size_t)(4 * n));
        return *extra + (int64_t)ds4_round64((size_t)(16 * n));
    }
    *extra = (int64_t)ds4_round64((size_t)(2 * n));
    return layout == DS4_LAYOUT_IQ2_XS_ALIGNED ? *extra + (int64_t)ds4_round64((size_t)(8 * n)) : *extra;
}

DS4_INLINE ds4_sections ds4_sections_of(const ds4_weight *w) {
    int64_t blocks = w->cols / DS4_SUPER, before = w->first * blocks, extra;
    int64_t codes = ds4_codes_offset(w->layout, (w->all ? w->all : w->rows) * blocks, &extra);
    const uint8_t *tensor = w->data;
    if (w->layout == DS4_LAYOUT_Q2_K_ALIGNED) /* bytes of half a pair */
        return (ds4_sections){tensor + 4 * before, tensor + extra + 16 * before,
                              tensor + codes + 64 * before};
    return (ds4_sections){tensor + 2 * before, tensor + extra + 8 * before,
                          tensor + codes + 64 * before};
}

/* The raw bytes of block b of row r of a weight. */
void ds4_aligned_block(const ds4_weight *w, int64_t r, int64_t b, uint8_t *raw);

#endif
