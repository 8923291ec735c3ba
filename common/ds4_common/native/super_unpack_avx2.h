/* Unpackers of K and TQ blocks into vectors, and of any type by its number (super_block_avx2.h says which shape).
 *
 * Include only from *_avx2.c, *_avxvnni.c, *_avx512.c and *_amx.c.
 */
#ifndef DS4_SUPER_UNPACK_AVX2_H
#define DS4_SUPER_UNPACK_AVX2_H

#include "super_unpack_iq_avx2.h"

/* ---- K types --------------------------------------------------------------------------------- */

DS4_INLINE void finish_q2_k(__m128i scales, const __m256i *codes, const uint8_t *d, super_block *s) {
    const __m256i two = _mm256_set1_epi8(3);
    const __m128i nibble = _mm_set1_epi8(15);
    s->sc = spread_sixteen(_mm_and_si128(scales, nibble));
    s->mn = spread_sixteen(_mm_and_si128(_mm_srli_epi16(scales, 4), nibble));
    s->d = half_at(d);
    s->m = -half_at(d + 2);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m256i v = codes[h];
        s->q[4 * h] = _mm256_and_si256(v, two);
        s->q[4 * h + 1] = _mm256_and_si256(_mm256_srli_epi16(v, 2), two);
        s->q[4 * h + 2] = _mm256_and_si256(_mm256_srli_epi16(v, 4), two);
        s->q[4 * h + 3] = _mm256_and_si256(_mm256_srli_epi16(v, 6), two);
    }
}

DS4_INLINE void load_q2_k(const uint8_t *b, super_block *s) {
    const __m256i codes[2] = {load32(b + 16), load32(b + 48)};
    finish_q2_k(_mm_loadu_si128((const __m128i *)b), codes, b + 80, s);
}

/* The dwords of one of the two rows that take turns in 64 bytes. */
DS4_INLINE __m256i row_of_pair(const uint8_t *p, int parity) {
    __m256 a = _mm256_castsi256_ps(load32(p)), b = _mm256_castsi256_ps(load32(p + 32));
    __m256 v = parity ? _mm256_shuffle_ps(a, b, 0xdd) : _mm256_shuffle_ps(a, b, 0x88);
    return _mm256_permute4x64_epi64(_mm256_castps_si256(v), 0xd8);
}

/* Aligned: a row's block out of that of a pair (aligned.h). */
DS4_INLINE void load_q2_k_of_pair(const uint8_t *d, const uint8_t *scales, const uint8_t *codes,
                                  int parity, super_block *s) {
    const __m256i both[2] = {row_of_pair(codes, parity), row_of_pair(codes + 64, parity)};
    __m128i low = _mm_loadl_epi64((const __m128i *)(scales + 8 * parity));
    __m128i high = _mm_loadl_epi64((const __m128i *)(scales + 16 + 8 * parity));
    finish_q2_k(_mm_unpacklo_epi64(low, high), both, d + 4 * parity, s);
}

DS4_INLINE void load_q3_k(const uint8_t *b, super_block *s) {
    const __m256i two = _mm256_set1_epi8(3), third = _mm256_set1_epi8(4);
    const uint32_t even2 = 0x03030303u, even4 = 0x0f0f0f0fu;
    uint32_t l0 = ds4_load_u32(b + 96), l1 = ds4_load_u32(b + 100), h = ds4_load_u32(b + 104);
    __m128i scales = _mm_setr_epi32((int)((l0 & even4) | ((h & even2) << 4)),
                                    (int)((l1 & even4) | (((h >> 2) & even2) << 4)),
                                    (int)(((l0 >> 4) & even4) | (((h >> 4) & even2) << 4)),
                                    (int)(((l1 >> 4) & even4) | (((h >> 6) & even2) << 4)));
    s->sc = spread_sixteen(_mm_sub_epi8(scales, _mm_set1_epi8(32)));
    s->mn = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(s->sc, 2));
    s->d = half_at(b + 108);
    s->m = 0.0f;
    __m256i high = load32(b);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i low = _mm256_srli_epi16(load32(b + 32 + 32 * (i / 4)), 2 * (i % 4));
        __m256i bit = i < 2 ? _mm256_slli_epi16(high, 2 - i) : _mm256_srli_epi16(high, i - 2);
        s->q[i] = _mm256_or_si256(_mm256_and_si256(low, two), _mm256_and_si256(bit, third));
    }
}

/* The twelve bytes of 6-bit scales and minima of Q4_K and Q5_K. */
DS4_INLINE void load_scales_k4(const uint8_t *p, super_block *s) {
    const uint32_t six = 0x3f3f3f3fu, four = 0x0f0f0f0fu, two = 0x03030303u;
    uint32_t a = ds4_load_u32(p), b = ds4_load_u32(p + 4), c = ds4_load_u32(p + 8);
    s->sc = spread_eight(_mm_setr_epi32((int)(a & six),
                                        (int)((c & four) | (((a >> 6) & two) << 4)), 0, 0));
    s->mn = spread_eight(_mm_setr_epi32((int)(b & six),
                                        (int)(((c >> 4) & four) | (((b >> 6) & two) << 4)), 0, 0));
}

DS4_INLINE void load_q4_k(const uint8_t *b, super_block *s) {
    const __m256i nibble = _mm256_set1_epi8(15);
    s->d = half_at(b);
    s->m = -half_at(b + 2);
    load_scales_k4(b + 4, s);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m256i v = load32(b + 16 + 32 * i);
        s->q[2 * i] = _mm256_and_si256(v, nibble);
        s->q[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
    }
}

DS4_INLINE void load_q5_k(const uint8_t *b, super_block *s) {
    const __m256i nibble = _mm256_set1_epi8(15), fifth = _mm256_set1_epi8(16);
    s->d = half_at(b);
    s->m = -half_at(b + 2);
    load_scales_k4(b + 4, s);
    __m256i high = load32(b + 16);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i low = _mm256_srli_epi16(load32(b + 48 + 32 * (i / 2)), 4 * (i % 2));
        __m256i bit = i < 4 ? _mm256_slli_epi16(high, 4 - i) : _mm256_srli_epi16(high, i - 4);
        s->q[i] = _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(bit, fifth));
    }
}

DS4_INLINE void load_q6_k(const uint8_t *b, super_block *s) {
    const __m256i nibble = _mm256_set1_epi8(15), high2 = _mm256_set1_epi8(48);
    s->sc = spread_sixteen(_mm_loadu_si128((const __m128i *)(b + 192)));
    s->mn = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(s->sc, 5));
    s->d = half_at(b + 208);
    s->m = 0.0f;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        int half = i / 4, part = i % 4;
        __m256i low = load32(b + 64 * half + 32 * (part & 1));
        __m256i high = load32(b + 128 + 32 * half);
        if (part >> 1) low = _mm256_srli_epi16(low, 4);
        high = part < 2 ? _mm256_slli_epi16(high, 4 - 2 * part)
                        : _mm256_srli_epi16(high, 2 * part - 4);
        s->q[i] = _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(high, high2));
    }
}

/* ---- TQ types -------------------------------------------------------------------------------- */

DS4_INLINE void finish_ternary(float d, super_block *s) {
    s->sc = _mm256_set1_epi16(1);
    s->mn = _mm256_set1_epi16(-1);
    s->d = d;
    s->m = 0.0f;
}

DS4_INLINE __m256i times3(__m256i v) { return _mm256_add_epi8(_mm256_add_epi8(v, v), v); }

/* First base-3 digit of 32 fractions of 256: 3 v / 256, that is v >= 86 and v >= 171. */
DS4_INLINE __m256i ternary_digits(__m256i v) {
    __m256i one = _mm256_cmpeq_epi8(_mm256_max_epu8(v, _mm256_set1_epi8(86)), v);
    __m256i two = _mm256_cmpeq_epi8(_mm256_max_epu8(v, _mm256_set1_epi8((char)171)), v);
    return _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(one, two));
}

DS4_INLINE void load_tq1_0(const uint8_t *b, super_block *s) {
    __m256i v = load32(b);
#pragma GCC unroll 5
    for (int i = 0; i < 5; i++, v = times3(v)) s->q[i] = ternary_digits(v);
    /* five digits of sixteen bytes, then four digits of four: 96 weights */
    uint8_t tail[96];
    __m256i w = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(b + 32)));
    for (int i = 0; i < 5; i++, w = times3(w))
        _mm_storeu_si128((__m128i *)(tail + 16 * i), _mm256_castsi256_si128(ternary_digits(w)));
    __m256i last = _mm256_castsi128_si256(_mm_cvtsi32_si128((int)ds4_load_u32(b + 48)));
    for (int i = 0; i < 4; i++, last = times3(last)) {
        uint32_t four = (uint32_t)_mm_cvtsi128_si32(_mm256_castsi256_si128(ternary_digits(last)));
        memcpy(tail + 80 + 4 * i, &four, 4);
    }
    for (int i = 0; i < 3; i++) s->q[5 + i] = load32(tail + 32 * i);
    finish_ternary(half_at(b + 52), s);
}

DS4_INLINE void load_tq2_0(const uint8_t *b, super_block *s) {
    const __m256i two = _mm256_set1_epi8(3);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i v = _mm256_srli_epi16(load32(b + 32 * (i / 4)), 2 * (i % 4));
        s->q[i] = _mm256_and_si256(v, two);
    }
    finish_ternary(half_at(b + 64), s);
}

DS4_INLINE void load_super(uint32_t type, const uint8_t *block, super_block *s) {
    switch (type) {
    case DS4_Q2_K: load_q2_k(block, s); break;
    case DS4_Q3_K: load_q3_k(block, s); break;
    case DS4_Q4_K: load_q4_k(block, s); break;
    case DS4_Q5_K: load_q5_k(block, s); break;
    case DS4_Q6_K: load_q6_k(block, s); break;
    case DS4_IQ1_S: load_iq1_s(block, s); break;
    case DS4_IQ1_M: load_iq1_m(block, s); break;
    case DS4_IQ2_XXS: load_iq2_xxs(block, block + 2, s); break;
    case DS4_IQ2_XS: load_iq2_xs(block, block + 66, block + 2, s); break;
    case DS4_IQ2_S: load_iq2_s(block, s); break;
    case DS4_IQ3_XXS: load_iq3_xxs(block, s); break;
    case DS4_IQ3_S: load_iq3_s(block, s); break;
    case DS4_IQ4_XS: load_iq4_xs(block, s); break;
    case DS4_TQ1_0: load_tq1_0(block, s); break;
    default: load_tq2_0(block, s); break;
    }
}

#endif
