/* X8 groups of Q2_K .. Q6_K, two at a time: super_x8_avx2.h with sixteen rows.
 *
 * Include only from *_avx512.c and *_amx.c.
 */
#ifndef DS4_SUPER_X8_AVX512_H
#define DS4_SUPER_X8_AVX512_H

#include "avx512.h"
#include "super_x8_avx2.h"

DS4_INLINE __m512i body16(uint32_t type, const uint8_t *a, const uint8_t *b, int dword) {
    const int at = (super_has_min(type) ? 32 : 16) + 32 * dword;
    return two_groups(a + at, b + at);
}

/* The bits of v that lie at `from` moved to `to` and masked there, in every byte. */
DS4_INLINE __m512i move_bits16(__m512i v, int from, int to, int mask) {
    if (from > to) v = _mm512_srli_epi16(v, (unsigned)(from - to));
    if (from < to) v = _mm512_slli_epi16(v, (unsigned)(to - from));
    return _mm512_and_si512(v, _mm512_set1_epi8((char)mask));
}

/* Weights 32 i + 4 j .. + 3 of sixteen rows, unsigned. i and j are constants after unrolling. */
DS4_INLINE __m512i x8_values16(uint32_t type, const uint8_t *a, const uint8_t *b, int i, int j) {
    const int half = i / 4, part = i % 4;
    switch (type) {
    case DS4_Q2_K: return move_bits16(body16(type, a, b, 4 + 8 * half + j), 2 * part, 0, 3);
    case DS4_Q3_K:
        return _mm512_or_si512(move_bits16(body16(type, a, b, 8 + 8 * half + j), 2 * part, 0, 3),
                               move_bits16(body16(type, a, b, j), i, 2, 4));
    case DS4_Q4_K:
        return move_bits16(body16(type, a, b, 3 + 8 * (i / 2) + j), 4 * (i % 2), 0, 15);
    case DS4_Q6_K:
        return _mm512_or_si512(
            move_bits16(body16(type, a, b, q6_k_dword(half, j) + part % 2), 4 * (part / 2), 0, 15),
            move_bits16(body16(type, a, b, q6_k_dword(half, j) + 2), 2 * part, 4, 48));
    default: /* Q5_K */
        return _mm512_or_si512(
            move_bits16(body16(type, a, b, 11 + 8 * (i / 2) + j), 4 * (i % 2), 0, 15),
            move_bits16(body16(type, a, b, 3 + j), i, 4, 16));
    }
}

/* Sub-scales as bytes, as x8_scales of super_x8_avx2.h. */
typedef struct {
    __m512i s[4], m[4];
} x8_scales16;

DS4_INLINE void x8_load_scales16(uint32_t type, const uint8_t *a, const uint8_t *b,
                                 x8_scales16 *out) {
    if (type == DS4_Q2_K) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            __m512i v = body16(type, a, b, k);
            out->s[k] = move_bits16(v, 0, 0, 15);
            out->m[k] = move_bits16(v, 4, 0, 15);
        }
    } else if (type == DS4_Q3_K) {
        __m512i high = body16(type, a, b, 26);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            __m512i low = move_bits16(body16(type, a, b, 24 + k % 2), 4 * (k / 2), 0, 15);
            low = _mm512_or_si512(low, move_bits16(high, 2 * k, 4, 48));
            out->s[k] = _mm512_sub_epi8(low, _mm512_set1_epi8(32));
        }
    } else if (type == DS4_Q6_K) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) out->s[k] = body16(type, a, b, k);
    } else { /* Q4_K, Q5_K */
        __m512i low = body16(type, a, b, 0), min = body16(type, a, b, 1);
        __m512i high = body16(type, a, b, 2);
        out->s[0] = move_bits16(low, 0, 0, 63);
        out->m[0] = move_bits16(min, 0, 0, 63);
        out->s[1] = _mm512_or_si512(move_bits16(high, 0, 0, 15), move_bits16(low, 6, 4, 48));
        out->m[1] = _mm512_or_si512(move_bits16(high, 4, 0, 15), move_bits16(min, 6, 4, 48));
    }
}

/* Bytes t0 and t1 of every row's dword as its two signed int16; t1 < 0: the upper one is zero. */
DS4_INLINE __m512i byte_pair16(__m512i v, int t0, int t1) {
    const int step = t1 < 0 ? 0x00000400 : 0x04000400;
    const int at = (int)0x80800080u | t0 << 8;
    const int first = t1 < 0 ? at : (at & 0x00ffffff) | t1 << 24;
    const __m512i pick = _mm512_broadcast_i32x4(
        _mm_setr_epi32(first, first + step, first + 2 * step, first + 3 * step));
    return _mm512_srai_epi16(_mm512_shuffle_epi8(v, pick), 8);
}

/* The scale of sixteen number `sub`: in the low half of every lane, the upper one zero; for wide sums
 * as int32. */
DS4_INLINE __m512i x8_scale16(uint32_t type, const x8_scales16 *scales, int sub) {
    if (scales_per_32(type)) sub /= 2;
    if (x8_wide_sums(type))
        return _mm512_srai_epi32(_mm512_slli_epi32(scales->s[sub / 4], 24 - 8 * (sub % 4)), 24);
    return byte_pair16(scales->s[sub / 4], sub % 4, -1);
}

/* Integer terms in the order of ds4_act256.sums: pair i < 4 is (4 i, 4 i + 2), then the odd ones. */
DS4_INLINE __m512i x8_term16(uint32_t type, const x8_scales16 *scales, int i) {
    if (scales_per_32(type))
        return byte_pair16(scales->m[i % 4 / 2], 2 * (i % 2), 2 * (i % 2) + 1);
    const int first = i < 4 ? 0 : 1;
    if (type == DS4_Q2_K) return byte_pair16(scales->m[i % 4], first, first + 2);
    __m512i scale = byte_pair16(scales->s[i % 4], first, first + 2);
    scale = _mm512_slli_epi16(scale, type == DS4_Q3_K ? 2 : 5); /* 4 or 32: what is stored on top */
    return _mm512_sub_epi16(_mm512_setzero_si512(), scale);
}

#endif
