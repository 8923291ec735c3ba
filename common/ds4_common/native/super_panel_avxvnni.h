/* One block of 32 rows of a K, IQ or TQ type, unpacked for products with many columns, AVX-VNNI: what
 * super_panel_avx512.h is with half the vector.
 *
 * Include only from *_avxvnni.c.
 */
#ifndef DS4_SUPER_PANEL_AVXVNNI_H
#define DS4_SUPER_PANEL_AVXVNNI_H

#include "avxvnni.h"
#include "super_sums_avx2.h"

#define PANEL 32          /* rows */
#define VECTORS (PANEL / 8)

typedef struct {
    __m256i q[VECTORS][64];     /* [k]: weights 4 k .. 4 k + 3 of eight rows */
    __m256i scale[16][VECTORS]; /* int32, of each of `super_scales` parts of the block */
    __m256i mn[8][VECTORS];     /* stored minima in pairs, as the activations' sums */
    __m256 d[VECTORS], m[VECTORS];
    int vectors;                /* that are filled: VECTORS, or half of them where rows end */
} super_panel;

/* Unpacks block b of rows [r, r + 8 vectors); those from row1 on repeat one that exists. */
typedef void (*super_fill)(const ds4_weight *w, int64_t r, int64_t row1, int64_t b, super_panel *t);

/* NULL for float types and blocks of 32. */
super_fill ds4_super_fill_avxvnni(uint32_t type, uint32_t layout);

#endif
