/* One block of 32 rows of a K, IQ or TQ type, unpacked for products with many columns, AVX-512.
 *
 * Include only from *_avx512.c.
 *
 * Weights are unsigned bytes, four of a row in a lane, moved up by `super_offset` where the type has no stored
 * minimum. Where a weight times its sub-scale is a byte, that product is what is stored, and no sub-scale is
 * left. Integer sums are exact, so nothing of this shows in a result.
 */
#ifndef DS4_SUPER_PANEL_AVX512_H
#define DS4_SUPER_PANEL_AVX512_H

#include "avx512.h"
#include "super_block_avx2.h"

#define PANEL 32 /* rows */

typedef struct {
    _Alignas(64) uint8_t q[2][64][64]; /* [k]: weights 4 k .. 4 k + 3 of sixteen rows */
    __m512i scale[16][2];              /* int32, of each of `super_scales` parts of the block */
    __m512i mn[8][2];                  /* stored minima in pairs, as the activations' sums */
    __m512 d[2], m[2];
    groups_ahead ahead; /* next but one; X8 only: rows are unpacked slowly enough to ask on the way */
} super_panel;

/* Sub-scales that are left: 1 when there is none. */
DS4_INLINE int super_scales(uint32_t type) {
    switch (type) {
    case DS4_Q2_K:
    case DS4_Q3_K:
    case DS4_TQ1_0:
    case DS4_TQ2_0: return 1;
    case DS4_Q6_K:
    case DS4_IQ1_M:
    case DS4_IQ2_XS:
    case DS4_IQ2_S: return 16;
    default: return 8;
    }
}

/* What stored values are above their weights, for types without a minimum. */
DS4_INLINE int super_offset(uint32_t type) {
    switch (type) {
    case DS4_Q3_K: return 124; /* products with the sub-scale: -124 to 128 */
    case DS4_Q6_K: return 32;
    case DS4_IQ1_S:
    case DS4_IQ1_M: return 9;
    case DS4_IQ2_XXS:
    case DS4_IQ2_XS:
    case DS4_IQ2_S: return 43;
    case DS4_IQ3_XXS: return 62;
    case DS4_IQ3_S: return 15;
    case DS4_IQ4_XS: return 128;
    case DS4_TQ1_0:
    case DS4_TQ2_0: return 1;
    default: return 0;
    }
}

/* Blocks from block b of a row, or of a group, to the one that is read `ahead` blocks later: behind the end of
 * a row comes the next panel, after the `rows` that lie side by side in this one. */
DS4_INLINE int64_t blocks_ahead(int64_t b, int64_t blocks, int ahead, int rows) {
    return ahead + (b + ahead < blocks ? 0 : (rows - 1) * blocks);
}

/* Unpacks block b of rows [r, r + PANEL); those from row1 on repeat one that exists. */
typedef void (*super_fill)(const ds4_weight *w, int64_t r, int64_t row1, int64_t b, super_panel *t);

/* NULL for float types and blocks of 32. */
super_fill ds4_super_fill_avx512(uint32_t type, uint32_t layout);
/* Of IQ2_XXS and IQ2_XS. */
super_fill ds4_super_fill_iq2_avx512(uint32_t type, uint32_t layout);

#endif
