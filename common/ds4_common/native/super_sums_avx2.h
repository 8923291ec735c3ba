/* How blocks of 256 are summed by vpdpbusd, with vectors of any size; the AVX2 panel shares the offsets.
 *
 * Include only from *_avx2.c, *_avxvnni.c and *_avx512.c.
 *
 * Weights are unsigned bytes, four of a row in a lane, moved up by `super_offset` where the type has no stored
 * minimum: sums then begin at -offset times the sum of the activations. Where a weight times its sub-scale is a
 * byte, that product is what is stored, and no sub-scale is left. Integer sums are exact, so nothing of this
 * shows in a result.
 */
#ifndef DS4_SUPER_SUMS_AVX2_H
#define DS4_SUPER_SUMS_AVX2_H

#include "super_block_avx2.h"

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

/* Weights that are bytes together with their sub-scale. */
DS4_INLINE int in_one_byte(uint32_t type) { return type == DS4_Q2_K || type == DS4_Q3_K; }

/* Pairs of weights times a sub-scale in every int16: (q0 + 256 q1) s = q0 s + 256 (q1 s), where neither
 * product leaves its byte. Q3_K's are moved up until they are positive: (q - 4) s + 124. */
DS4_INLINE __m256i with_scale(uint32_t type, __m256i q, __m256i scale) {
    __m256i v = _mm256_mullo_epi16(q, scale);
    if (type != DS4_Q3_K) return v;
    __m256i above = _mm256_sub_epi16(_mm256_set1_epi16(124), _mm256_slli_epi16(scale, 2));
    return _mm256_add_epi16(v, _mm256_add_epi16(above, _mm256_slli_epi16(above, 8)));
}

/* Where the start of part `i` of `scales` lies. */
DS4_INLINE int start_place(const int scales, int i) { return scales == 16 ? ds4_sum_place(i) : i; }

/* Sums over 32 activations, in order. */
DS4_INLINE __m128i sums_of_32(const char *sums) {
    __m256i v = load32(sums); /* even sixteens, then odd ones */
    return _mm_add_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

/* `times` the sum over 256 activations. */
DS4_INLINE int32_t sum_of_block(const char *sums, int times) {
    __m128i v = _mm_madd_epi16(sums_of_32(sums), _mm_set1_epi16(1));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1));
    return times * _mm_cvtsi128_si32(v);
}

/* Blocks from block b of a row, or of a group, to the one that is read `ahead` blocks later: behind the end of
 * a row comes the next panel, after the `rows` that lie side by side in this one. */
DS4_INLINE int64_t blocks_ahead(int64_t b, int64_t blocks, int ahead, int rows) {
    return ahead + (b + ahead < blocks ? 0 : (rows - 1) * blocks);
}

#endif
