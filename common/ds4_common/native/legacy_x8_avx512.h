/* X8 groups of Q4_0 .. Q5_1, two at a time. Include only from *_avx512.c and *_amx.c. */
#ifndef DS4_LEGACY_X8_AVX512_H
#define DS4_LEGACY_X8_AVX512_H

#include "avx512.h"
#include "legacy_unpack_avx2.h"

/* Steps j and 4 + j of the nibbles of sixteen rows (see x8_steps). */
DS4_INLINE void steps16(uint32_t type, const uint8_t *a, const uint8_t *b, int j, __m512i *low,
                        __m512i *high) {
    const __m512i nibble = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
    const int at = ds4_x8_quants_offset(type) + 32 * j;
    __m512i v = two_groups(a + at, b + at);
    *low = _mm512_and_si512(v, nibble);
    *high = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
    if (is_five_bit(type)) {
        const int plane = has_min(type) ? 32 : 16;
        __m512i h = two_groups(a + plane, b + plane);
        *low = _mm512_or_si512(*low, _mm512_and_si512(_mm512_slli_epi16(h, 4 - j), fifth));
        *high = _mm512_or_si512(*high, _mm512_and_si512(_mm512_srli_epi16(h, j), fifth));
    }
}

#endif
