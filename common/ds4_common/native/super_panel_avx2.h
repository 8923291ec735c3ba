/* One block of 32 rows of a K, IQ or TQ type, unpacked for products with many columns, AVX2.
 *
 * Include only from *_avx2.c.
 *
 * Products of two bytes are summed in int16, as many as fit, then times the sub-scale into int32. What has to
 * fit is the sum of the true weights: int16 sums wrap, so those of types whose stored values are above their
 * weights begin at minus the offset times the sum of the activations, and no term of its own is left of it.
 */
#ifndef DS4_SUPER_PANEL_AVX2_H
#define DS4_SUPER_PANEL_AVX2_H

#include "super_sums_avx2.h"

#define PANEL 32 /* rows: two halves of two vectors */

typedef struct {
    __m256i q[2][64][2];     /* [half][k]: weights 4 k .. 4 k + 3 of eight rows, of the next eight */
    __m256i scale[2][16][2]; /* int16, twice in each lane, of each sixteen */
    __m256i mn[2][8][2];     /* stored minima in pairs, as the activations' sums */
    __m256 d[2][2], m[2][2];
} super_panel;

/* Products of pairs that are summed in int16, at most 32767 / (2 * 127 * largest magnitude): a power of two, and
 * no more than a sub-scale holds for. Each product alone stays below the 32768 where maddubs saturates. */
DS4_INLINE int panel_steps(uint32_t type) {
    switch (type) {
    case DS4_IQ2_XXS:           /* 43 */
    case DS4_IQ2_XS:            /* 43 */
    case DS4_IQ2_S:             /* 43 */
    case DS4_IQ3_XXS: return 2; /* 62 */
    case DS4_Q2_K:
    case DS4_Q3_K:
    case DS4_IQ1_M:
    case DS4_Q5_K:            /* 31: with a minimum, sums are those of stored values */
    case DS4_Q6_K: return 4;  /* 32 */
    case DS4_IQ4_XS: return 1; /* 127 */
    default: return 8;        /* 15 at most */
    }
}

/* What stored values are above their weights, for types without a minimum: as in super_sums_avx2.h, but
 * that no product with a sub-scale is stored, and signed weights stay so. */
DS4_INLINE int panel_offset(uint32_t type) {
    return type == DS4_Q3_K ? 4 : super_signed(type) ? 0 : super_offset(type);
}

/* Unpacks block b of rows [r, r + PANEL); those from row1 on repeat one that exists. */
typedef void (*super_fill)(const ds4_weight *w, int64_t r, int64_t row1, int64_t b, super_panel *t);

/* NULL for float types and blocks of 32. */
super_fill ds4_super_fill_avx2(uint32_t type, uint32_t layout);

#endif
