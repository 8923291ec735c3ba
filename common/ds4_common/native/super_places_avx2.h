/* Where the blocks of a K, IQ or TQ weight lie that is not interleaved, and one of them as vectors.
 *
 * Include only from *_avx2.c, *_avxvnni.c and *_avx512.c.
 */
#ifndef DS4_SUPER_PLACES_AVX2_H
#define DS4_SUPER_PLACES_AVX2_H

#include "aligned.h"
#include "super_unpack_avx2.h"

typedef struct {
    const uint8_t *raw;
    ds4_sections sections;
    int64_t blocks; /* of a row */
} super_places;

DS4_INLINE super_places places_of(uint32_t layout, const ds4_weight *w) {
    super_places p = {w->data, {NULL, NULL, NULL}, w->cols / DS4_SUPER};
    if (ds4_is_aligned(layout)) p.sections = ds4_sections_of(w);
    return p;
}

/* Block b of row r. */
DS4_INLINE void load_block(uint32_t type, uint32_t layout, const super_places *p, int64_t r, int64_t b,
                           super_block *s) {
    const ds4_sections *at = &p->sections;
    int64_t i = r * p->blocks + b, pair = (r >> 1) * p->blocks + b;
    switch (layout) {
    case DS4_LAYOUT_IQ2_XXS_ALIGNED:
        load_iq2_xxs(at->scales + 2 * i, at->codes + 64 * i, s);
        break;
    case DS4_LAYOUT_IQ2_XS_ALIGNED:
        load_iq2_xs(at->scales + 2 * i, at->extra + 8 * i, at->codes + 64 * i, s);
        break;
    case DS4_LAYOUT_IQ2_PLANES:
        load_iq2_planes(type, p->raw + i * ds4_plane_bytes(type), s);
        break;
    case DS4_LAYOUT_Q2_K_ALIGNED:
        load_q2_k_of_pair(at->scales + 8 * pair, at->extra + 32 * pair, at->codes + 128 * pair,
                          (int)(r & 1), s);
        break;
    default: load_super(type, p->raw + i * super_bytes(type), s);
    }
}

/* Asks for what lies `ahead` bytes behind the codes of block number i. */
DS4_INLINE void prefetch_codes(uint32_t type, uint32_t layout, const super_places *p, int64_t i,
                               int ahead) {
    const int bytes = layout == DS4_LAYOUT_RAW          ? super_bytes(type)
                      : layout == DS4_LAYOUT_IQ2_PLANES ? ds4_plane_bytes(type)
                                                        : 64;
    const uint8_t *codes = (ds4_is_aligned(layout) ? p->sections.codes : p->raw) + i * bytes + ahead;
    for (int at = 0; at < bytes; at += 64) _mm_prefetch((const char *)codes + at, _MM_HINT_T0);
}

#endif
