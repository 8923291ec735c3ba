/* X8 groups of Q2_K .. Q6_K as vectors with one lane per row.
 *
 * Include only from *_avx2.c, *_avxvnni.c, *_avx512.c and *_amx.c.
 *
 * A group is f16 d[8], for types with minima f16 dmin[8], then the rest of the raw blocks dword by
 * dword, eight rows each (docs/layouts.md). So vector j of the body is dword j of every row.
 */
#ifndef DS4_SUPER_X8_AVX2_H
#define DS4_SUPER_X8_AVX2_H

#include "super_unpack_avx2.h"

DS4_INLINE __m256i body(uint32_t type, const uint8_t *group, int dword) {
    return load32(group + (super_has_min(type) ? 32 : 16) + 32 * dword);
}

/* The bits of v that lie at `from` moved to `to` and masked there, in every byte. */
DS4_INLINE __m256i move_bits(__m256i v, int from, int to, int mask) {
    if (from > to) v = _mm256_srli_epi16(v, from - to);
    if (from < to) v = _mm256_slli_epi16(v, to - from);
    return _mm256_and_si256(v, _mm256_set1_epi8((char)mask));
}

/* Q6_K: the first of three dwords that hold weights 4 j .. + 3 of the quarters of a half. */
DS4_INLINE int q6_k_dword(int half, int j) { return 4 + 3 * (8 * half + j); }

/* Weights 32 i + 4 j .. + 3 of eight rows, unsigned. i and j are constants after unrolling. */
DS4_INLINE __m256i x8_values(uint32_t type, const uint8_t *group, int i, int j) {
    int half = i / 4, part = i % 4;
    switch (type) {
    case DS4_Q2_K: return move_bits(body(type, group, 4 + 8 * half + j), 2 * part, 0, 3);
    case DS4_Q3_K:
        return _mm256_or_si256(move_bits(body(type, group, 8 + 8 * half + j), 2 * part, 0, 3),
                               move_bits(body(type, group, j), i, 2, 4));
    case DS4_Q4_K: return move_bits(body(type, group, 3 + 8 * (i / 2) + j), 4 * (i % 2), 0, 15);
    case DS4_Q6_K:
        return _mm256_or_si256(
            move_bits(body(type, group, q6_k_dword(half, j) + part % 2), 4 * (part / 2), 0, 15),
            move_bits(body(type, group, q6_k_dword(half, j) + 2), 2 * part, 4, 48));
    default: /* Q5_K */
        return _mm256_or_si256(
            move_bits(body(type, group, 11 + 8 * (i / 2) + j), 4 * (i % 2), 0, 15),
            move_bits(body(type, group, 3 + j), i, 4, 16));
    }
}

/* Sub-scales as bytes: byte t of a row's dword k belongs to sixteen number 4 k + t, for Q4_K and
 * Q5_K to thirty-two number 4 k + t. m: the minima likewise. */
typedef struct {
    __m256i s[4], m[4];
} x8_scales;

DS4_INLINE int scales_per_32(uint32_t type) { return type == DS4_Q4_K || type == DS4_Q5_K; }

DS4_INLINE void x8_load_scales(uint32_t type, const uint8_t *group, x8_scales *out) {
    if (type == DS4_Q2_K) {
        for (int k = 0; k < 4; k++) {
            out->s[k] = move_bits(body(type, group, k), 0, 0, 15);
            out->m[k] = move_bits(body(type, group, k), 4, 0, 15);
        }
    } else if (type == DS4_Q3_K) {
        __m256i high = body(type, group, 26);
        for (int k = 0; k < 4; k++) {
            __m256i low = move_bits(body(type, group, 24 + k % 2), 4 * (k / 2), 0, 15);
            low = _mm256_or_si256(low, move_bits(high, 2 * k, 4, 48));
            out->s[k] = _mm256_sub_epi8(low, _mm256_set1_epi8(32));
        }
    } else if (type == DS4_Q6_K) {
        for (int k = 0; k < 4; k++) out->s[k] = body(type, group, k);
    } else { /* Q4_K, Q5_K */
        __m256i a = body(type, group, 0), b = body(type, group, 1), c = body(type, group, 2);
        out->s[0] = move_bits(a, 0, 0, 63);
        out->m[0] = move_bits(b, 0, 0, 63);
        out->s[1] = _mm256_or_si256(move_bits(c, 0, 0, 15), move_bits(a, 6, 4, 48));
        out->m[1] = _mm256_or_si256(move_bits(c, 4, 0, 15), move_bits(b, 6, 4, 48));
    }
}

/* Bytes t0 and t1 of every row's dword as its two int16, signed or not. */
DS4_INLINE __m256i byte_pair(const int has_sign, __m256i v, int t0, int t1) {
    if (!has_sign) { /* zeros above */
        const int at = (int)0x80008000 | t0 | t1 << 16;
        return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(_mm_setr_epi32(
                                          at, at + 0x00040004, at + 0x00080008, at + 0x000c000c)));
    }
    const int at = 0x00800080 | t0 << 8 | t1 << 24; /* into the upper bytes, zeros below */
    const __m256i pick = _mm256_broadcastsi128_si256(
        _mm_setr_epi32(at, at + 0x04000400, at + 0x08000800, at + 0x0c000c00));
    return _mm256_srai_epi16(_mm256_shuffle_epi8(v, pick), 8);
}

/* Byte t of every row's dword as a signed int16, zero above it. */
DS4_INLINE __m256i low_byte(__m256i v, int t) {
    const int at = (int)0x80800080u | t << 8;
    const __m256i pick = _mm256_broadcastsi128_si256(
        _mm_setr_epi32(at, at + 0x00000400, at + 0x00000800, at + 0x00000c00));
    return _mm256_srai_epi16(_mm256_shuffle_epi8(v, pick), 8);
}

/* Sums of sixteen products of these types pass 2^15: they meet their scale as int32. */
DS4_INLINE int x8_wide_sums(uint32_t type) { return type == DS4_Q5_K || type == DS4_Q6_K; }

/* The scale of sixteen number `sub` in both halves of every lane. */
DS4_INLINE __m256i x8_scale(uint32_t type, const x8_scales *scales, int sub) {
    if (scales_per_32(type)) sub /= 2;
    return byte_pair(!super_has_min(type), scales->s[sub / 4], sub % 4, sub % 4);
}

/* Sub-scale number i as int32. */
DS4_INLINE __m256i x8_wide_scale(const x8_scales *scales, int i) {
    return _mm256_srai_epi32(_mm256_slli_epi32(scales->s[i / 4], 24 - 8 * (i % 4)), 24);
}

/* Integer terms in the order of ds4_act256.sums: pair i < 4 is (4 i, 4 i + 2), then the odd ones. */
DS4_INLINE __m256i x8_term(uint32_t type, const x8_scales *scales, int i) {
    if (scales_per_32(type))
        return byte_pair(0, scales->m[i % 4 / 2], 2 * (i % 2), 2 * (i % 2) + 1);
    int first = i < 4 ? 0 : 1;
    if (type == DS4_Q2_K) return byte_pair(0, scales->m[i % 4], first, first + 2);
    __m256i scale = byte_pair(1, scales->s[i % 4], first, first + 2);
    scale = _mm256_slli_epi16(scale, type == DS4_Q3_K ? 2 : 5); /* 4 or 32: what is stored on top */
    return _mm256_sub_epi16(_mm256_setzero_si256(), scale);
}

#endif
