/* A block of 256 weights of a K, IQ or TQ type as vectors, and what its type says about it.
 *
 * Include only from *_avx2.c, *_avxvnni.c, *_avx512.c and *_amx.c.
 *
 * Every type ends in the same shape: 256 bytes q (unsigned but for IQ4_XS), a scale per 16 and an integer term per
 * 16 that multiplies the sum of the activations. For types with a stored minimum that term is the
 * minimum (a float FMA of its own); for the others it is -offset * scale and joins the integer sum:
 * sum(scale * (q - offset) * x) = sum(scale * q * x) + sum(-offset * scale * sum(x)), exact.
 */
#ifndef DS4_SUPER_BLOCK_AVX2_H
#define DS4_SUPER_BLOCK_AVX2_H

#include "avx2.h"

typedef struct {
    __m256i q[8];   /* weights 32 i .. 32 i + 31 */
    __m256i sc, mn; /* int16 per sixteen, even sixteens in the low lane, odd in the high lane */
    float d, m;     /* m is minus the stored dmin */
} super_block;

DS4_INLINE int super_bytes(uint32_t type) {
    switch (type) {
    case DS4_Q2_K: return 84;
    case DS4_Q3_K: return 110;
    case DS4_Q4_K: return 144;
    case DS4_Q5_K: return 176;
    case DS4_Q6_K: return 210;
    case DS4_IQ1_S: return 50;
    case DS4_IQ1_M: return 56;
    case DS4_IQ2_XXS: return 66;
    case DS4_IQ2_XS: return 74;
    case DS4_IQ2_S: return 82;
    case DS4_IQ3_XXS: return 98;
    case DS4_IQ3_S: return 110;
    case DS4_IQ4_XS: return 136;
    case DS4_TQ1_0: return 54;
    default: return 66; /* TQ2_0 */
    }
}

/* IQ4_XS alone keeps its values signed: moved to be positive they would pass 127. */
DS4_INLINE int super_signed(uint32_t type) { return type == DS4_IQ4_XS; }

/* Sums of two products, exact in int16. */
DS4_INLINE __m256i super_pairs(uint32_t type, __m256i q, __m256i x) {
    return super_signed(type) ? signed_pairs(q, x) : _mm256_maddubs_epi16(q, x);
}

DS4_INLINE int super_has_min(uint32_t type) {
    return type == DS4_Q2_K || type == DS4_Q4_K || type == DS4_Q5_K;
}

/* How many products of pairs add up in int16: 2 * top value * 127 * steps <= 32767. */
DS4_INLINE int super_steps(uint32_t type) {
    switch (type) {
    case DS4_Q4_K: return 8; /* 15 */
    case DS4_Q6_K: return 2; /* 63 */
    case DS4_IQ2_XXS:
    case DS4_IQ2_XS:
    case DS4_IQ2_S:           /* 86 */
    case DS4_IQ3_XXS:         /* 124 */
    case DS4_IQ4_XS: return 1; /* 127 */
    default: return 4;        /* at most 31 */
    }
}

DS4_INLINE float half_at(const uint8_t *p) { return _cvtsh_ss(ds4_load_u16(p)); }

/* Sixteen bytes in order to int16, even ones in the low lane and odd ones in the high lane. */
DS4_INLINE __m256i spread_sixteen(__m128i bytes) {
    const __m128i even_odd = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, even_odd));
}

/* Eight bytes that hold for 32 weights each: the same in both lanes. */
DS4_INLINE __m256i spread_eight(__m128i bytes) {
    return _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(bytes));
}

/* Broadcasts int16 number i of each lane over that lane. */
DS4_INLINE __m256i lane_scale(__m256i sc, int i) {
    return _mm256_shuffle_epi8(sc, _mm256_set1_epi16((short)((2 * i + 1) << 8 | 2 * i)));
}

#endif
