/* Pieces shared by the AVX-512 and AMX kernel files. Include only from *_avx512.c and *_amx.c. */
#ifndef DS4_AVX512_H
#define DS4_AVX512_H

#include "avx2.h"
#include "group_stream.h"

/* Columns from which matmul_many_avx512.c is faster than what it stands beside. */
#define DS4_LEAST_MANY 9

/* Weights in a row up to which one column is faster along one run of memory than along two, which end too
 * soon then: blocks of 32 with that many, those of 256 below it. */
#define DS4_LONG_ROW 4096

DS4_INLINE __m512i load64(const void *p) { return _mm512_loadu_si512(p); }

DS4_INLINE __m512i broadcast4_16(const void *p) { return _mm512_set1_epi32((int)ds4_load_u32(p)); }

/* A dword of bytes or of int16. */
typedef int32_t __attribute__((may_alias, aligned(1))) any_dword;

/* Adds the products of the four bytes at x with those of every lane, w's unsigned; and of the two int16.
 * The compiler's own would load x into a register first, for every column of a kernel. */
DS4_INLINE __m512i dot4_16(__m512i sum, __m512i w, const void *x) {
    __asm__("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*(const any_dword *)x), "v"(w));
    return sum;
}

DS4_INLINE __m512i dot2_16(__m512i sum, __m512i w, const void *x) {
    __asm__("vpdpwssd %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*(const any_dword *)x), "v"(w));
    return sum;
}

/* 32 bytes of each of two groups of eight rows. */
DS4_INLINE __m512i two_groups(const uint8_t *a, const uint8_t *b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load32(a)), load32(b), 1);
}

/* Eight halves of each of two groups, as floats. */
DS4_INLINE __m512 two_half8(const uint8_t *a, const uint8_t *b) {
    __m128i low = _mm_loadu_si128((const __m128i *)(const void *)a);
    __m128i high = _mm_loadu_si128((const __m128i *)(const void *)b);
    return _mm512_cvtph_ps(_mm256_set_m128i(high, low));
}

/* Lanes below `count` of sixteen rows, for the ragged end of a matrix. */
DS4_INLINE __mmask16 first_of_16(int64_t count) {
    return (__mmask16)(count < 16 ? (1u << count) - 1 : 0xffffu);
}

/* What four groups will be unpacked from, later. A core can have few lines on their way, and whoever asks for all at
 * once waits: products with many columns ask for some at a time. */
typedef struct {
    const uint8_t *at[4];
    int left, bytes, done; /* groups; of each; of the one that is asked for now */
} groups_ahead;

DS4_INLINE int lines_ahead(const groups_ahead *a) { return a->left * ((a->bytes + 63) / 64); }

/* Asks for some lines, into the second-level cache: the first one is full of columns. */
DS4_INLINE void ask_lines(groups_ahead *a, int lines) {
    for (; lines > 0 && a->left; lines--) {
        _mm_prefetch((const char *)a->at[a->left - 1] + a->done, _MM_HINT_T1);
        a->done += 64;
        if (a->done >= a->bytes) a->done = 0, a->left--;
    }
}

/* Eight floats of each of two places. */
DS4_INLINE __m512 two_float8(const float *low, const float *high) {
    __m256d upper = _mm256_castps_pd(_mm256_loadu_ps(high));
    __m512d both = _mm512_castps_pd(_mm512_castps256_ps512(_mm256_loadu_ps(low)));
    return _mm512_castpd_ps(_mm512_insertf64x4(both, upper, 1));
}

/* 16 rows of 16 dwords become 16 columns, `stride` bytes apart in `in`. */
DS4_INLINE void transpose16(const uint8_t *in, int stride, uint8_t *out) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        __m512i even = load64(in + i * stride), odd = load64(in + (i + 1) * stride);
        a[i] = _mm512_unpacklo_epi32(even, odd);
        a[i + 1] = _mm512_unpackhi_epi32(even, odd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* b[i + k] lane l: dword 4 l + k of rows i .. i + 3 */
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i low0 = _mm512_shuffle_i32x4(b[k], b[4 + k], 0x88);
        __m512i low1 = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0x88);
        __m512i high0 = _mm512_shuffle_i32x4(b[k], b[4 + k], 0xdd);
        __m512i high1 = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0xdd);
        _mm512_storeu_si512(out + 64 * k, _mm512_shuffle_i32x4(low0, low1, 0x88));
        _mm512_storeu_si512(out + 64 * (4 + k), _mm512_shuffle_i32x4(high0, high1, 0x88));
        _mm512_storeu_si512(out + 64 * (8 + k), _mm512_shuffle_i32x4(low0, low1, 0xdd));
        _mm512_storeu_si512(out + 64 * (12 + k), _mm512_shuffle_i32x4(high0, high1, 0xdd));
    }
}

#endif
