/* One block of 32 rows of a K, IQ or TQ type, unpacked for products with many columns, AVX-512.
 *
 * Include only from *_avx512.c. Which bytes they are: super_sums_avx2.h.
 */
#ifndef DS4_SUPER_PANEL_AVX512_H
#define DS4_SUPER_PANEL_AVX512_H

#include "avx512.h"
#include "super_sums_avx2.h"

#define PANEL 32 /* rows */

typedef struct {
    _Alignas(64) uint8_t q[2][64][64]; /* [k]: weights 4 k .. 4 k + 3 of sixteen rows */
    __m512i scale[16][2];              /* int32, of each of `super_scales` parts of the block */
    __m512i mn[8][2];                  /* stored minima in pairs, as the activations' sums */
    __m512 d[2], m[2];
    groups_ahead ahead; /* next but one; X8 only: rows are unpacked slowly enough to ask on the way */
} super_panel;

/* Unpacks block b of rows [r, r + PANEL); those from row1 on repeat one that exists. */
typedef void (*super_fill)(const ds4_weight *w, int64_t r, int64_t row1, int64_t b, super_panel *t);

/* NULL for float types and blocks of 32. */
super_fill ds4_super_fill_avx512(uint32_t type, uint32_t layout);
/* Of IQ2_XXS and IQ2_XS. */
super_fill ds4_super_fill_iq2_avx512(uint32_t type, uint32_t layout);

#endif
