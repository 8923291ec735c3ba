/* Where the planes of an IQ2_XXS or IQ2_XS block lie (docs/layouts.md). */
#ifndef DS4_PLANES_H
#define DS4_PLANES_H

#include "quants.h"

typedef struct {
    const uint8_t *d;      /* f16 */
    const uint8_t *scales; /* IQ2_XXS: 2 s + 1 of each 32 weights; IQ2_XS: s of each 16, low nibble first */
    const uint8_t *index;  /* of 32 entries; IQ2_XS: without their ninth bit */
    const uint8_t *signs;  /* a byte per entry */
    uint32_t ninth;        /* IQ2_XS: bit g of entry g */
} ds4_planes;

DS4_INLINE int ds4_plane_bytes(uint32_t type) { return type == DS4_IQ2_XXS ? 74 : 78; }

DS4_INLINE ds4_planes ds4_planes_of(uint32_t type, const uint8_t *p) {
    if (type == DS4_IQ2_XXS) return (ds4_planes){p, p + 2, p + 10, p + 42, 0};
    return (ds4_planes){p, p + 2, p + 14, p + 46, ds4_load_u32(p + 10)};
}

/* One block as raw GGUF bytes. */
void ds4_planes_to_raw(uint32_t type, const uint8_t *planes, uint8_t *raw);

#endif
