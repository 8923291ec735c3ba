/* Pieces shared by the AVX2 kernel files, and by those of later sets (avx512.h). */
#ifndef DS4_AVX2_H
#define DS4_AVX2_H

#include <immintrin.h>

#include "quants.h"

/* Bytes ahead of the current weights that a streaming kernel prefetches. */
#define DS4_PREFETCH_AHEAD 2560
/* Bytes ahead that packed groups along one run of memory are asked for. */
#define DS4_AHEAD_FAR 8192

DS4_INLINE __m256i load32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

DS4_INLINE __m256i broadcast4(const void *p) { return _mm256_set1_epi32((int)ds4_load_u32(p)); }

/* Adds in source order: left alone, GCC turns a chain of integer adds into a tree of temporaries
 * that no longer fit the registers, at half the speed. */
DS4_INLINE __m256i pinned(__m256i v) {
    __asm__("" : "+x"(v));
    return v;
}

/* Loads before stay before, loads after stay after. Left alone, GCC moves the loads of an unrolled
 * block about, and a CPU that prefetches lines it sees touched in ascending order no longer does:
 * half the rate from DRAM, at the same rate from the cache. */
DS4_INLINE void in_order(void) { __asm__ volatile("" ::: "memory"); }

/* One line of the next page: a CPU's own prefetching ends where a page of 4 KiB does. */
DS4_INLINE void open_page_ahead(const void *p) {
    _mm_prefetch((const char *)p + 4096, _MM_HINT_T0);
}

DS4_INLINE void prefetch_bytes(const uint8_t *p, int bytes, int ahead) {
    for (int at = 0; at < bytes; at += 64)
        _mm_prefetch((const char *)p + ahead + at, _MM_HINT_T0);
}

/* Eight halves to floats. */
DS4_INLINE __m256 load_half8(const void *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

DS4_INLINE __m256i widen_pairs(__m256i p16) {
    return _mm256_madd_epi16(p16, _mm256_set1_epi16(1));
}

/* Signed w times signed x, |x| <= 127: sums of two products, exact in int16 even for w = -128. */
DS4_INLINE __m256i signed_pairs(__m256i w, __m256i x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}

/* Eight vectors of eight int32: lane i of out[h] is the sum of lanes 4 h .. 4 h + 3 of p[i]. */
DS4_INLINE void sum_lanes4(const __m256i *p, __m256i *out) {
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(p[4], p[5]), _mm256_hadd_epi32(p[6], p[7]));
    out[0] = _mm256_permute2x128_si256(a, b, 0x20);
    out[1] = _mm256_permute2x128_si256(a, b, 0x31);
}

/* Eight vectors of eight int32: lane i of the result is the sum of the lanes of p[i]. */
DS4_INLINE __m256i sum_lanes8(const __m256i *p) {
    __m256i halves[2];
    sum_lanes4(p, halves);
    return _mm256_add_epi32(halves[0], halves[1]);
}

/* Eight rows of eight dwords become eight columns: out[j] lane i = in[i] lane j. */
DS4_INLINE void transpose8(const __m256i *in, __m256i *out) {
    __m256i a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
        out[4 + i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
    }
}

/* Lanes below `count` (1..8) selected, for rows at the ragged end of a matrix. */
DS4_INLINE __m256i first_lanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count < 8 ? count : 8)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The sum of eight lanes in the order of ds4_fold (op_vector.h). */
DS4_INLINE float fold8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

#endif
