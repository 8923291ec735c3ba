/* Pieces shared by the AVX-VNNI kernel files. Include only from *_avxvnni.c. */
#ifndef DS4_AVXVNNI_H
#define DS4_AVXVNNI_H

#include "avx2.h"

/* Adds the products of the four bytes of every lane, w's unsigned. Inline assembly, because GCC 12
 * spilled registers with the intrinsic. */
DS4_INLINE __m256i dot4(__m256i sum, __m256i w, __m256i x) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
}

/* Adds the products of the two int16 of every lane. */
DS4_INLINE __m256i dot2(__m256i sum, __m256i w, __m256i x) {
    return _mm256_dpwssd_avx_epi32(sum, w, x);
}

#endif
