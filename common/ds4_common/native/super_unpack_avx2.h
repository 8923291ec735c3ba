/* Unpackers of K, IQ and TQ blocks into vectors. Include only from matmul_super_avx2.c.
 *
 * Every type ends in the same shape: 256 bytes q (unsigned but for IQ4_XS), a scale per 16 and an integer term per
 * 16 that multiplies the sum of the activations. For types with a stored minimum that term is the
 * minimum (a float FMA of its own); for the others it is -offset * scale and joins the integer sum:
 * sum(scale * (q - offset) * x) = sum(scale * q * x) + sum(-offset * scale * sum(x)), exact.
 */
#ifndef DS4_SUPER_UNPACK_AVX2_H
#define DS4_SUPER_UNPACK_AVX2_H

#include "avx2.h"
#include "planes.h"

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

/* ---- IQ2 types ------------------------------------------------------------------------------- */

/* Four code book entries, by indices in memory. */
DS4_INLINE __m256i gather4(const uint64_t *grid, uint32_t i0, uint32_t i1, uint32_t i2,
                           uint32_t i3) {
    return _mm256_setr_epi64x((long long)grid[i0], (long long)grid[i1], (long long)grid[i2],
                              (long long)grid[i3]);
}

/* 32 sign indices of seven bits: the eighth bit makes the number of ones even. */
DS4_INLINE __m256i complete_signs(__m256i seven) {
    const __m256i parity = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0));
    __m256i folded = _mm256_xor_si256(seven, _mm256_srli_epi16(seven, 4));
    __m256i odd = _mm256_shuffle_epi8(parity, _mm256_and_si256(folded, _mm256_set1_epi8(15)));
    return _mm256_or_si256(seven, _mm256_slli_epi16(odd, 7));
}

/* Signed magnitudes up to `top`, moved to 0 .. 2 top: q = top + (grid ^ mask) - mask. `signs` points
 * at four bytes, bit i of byte g telling whether value 8 g + i is negative. */
DS4_INLINE __m256i apply_signs(__m256i grid, const uint8_t *signs, int top) {
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                              0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    __m256i mask = _mm256_and_si256(_mm256_shuffle_epi8(broadcast4(signs), spread), bit);
    mask = _mm256_cmpeq_epi8(mask, bit);
    __m256i value = _mm256_sub_epi8(_mm256_xor_si256(grid, mask), mask);
    return _mm256_add_epi8(value, _mm256_set1_epi8((char)top));
}

/* Odd scales 2 s + 1 over values moved by `top`. */
DS4_INLINE void finish_odd(__m256i scales16, int top, float d, super_block *s) {
    s->sc = _mm256_add_epi16(_mm256_add_epi16(scales16, scales16), _mm256_set1_epi16(1));
    s->mn = _mm256_mullo_epi16(s->sc, _mm256_set1_epi16((short)-top));
    s->d = d;
    s->m = 0.0f;
}

/* Sign bits and scale of each 32 weights, as IQ2_XXS and IQ3_XXS pack them: four signs of seven bits
 * below a scale of four. Gives 32 completed sign bytes and the scales per sixteen. */
DS4_INLINE __m256i signs_and_scales(__m256i tails, uint8_t *signs) {
    __m256i seven = _mm256_and_si256(tails, _mm256_set1_epi32(0x7f));
    for (int g = 1; g < 4; g++) /* seven bits of a tail to the low bits of byte g */
        seven = _mm256_or_si256(seven, _mm256_and_si256(_mm256_slli_epi32(tails, g),
                                                        _mm256_set1_epi32(0x7f << (8 * g))));
    _mm256_storeu_si256((__m256i *)signs, complete_signs(seven));
    __m256i scales = _mm256_srli_epi32(tails, 28);
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(scales, scales), 0x88);
}

DS4_INLINE void load_iq2_xxs(const uint8_t *d, const uint8_t *codes, super_block *s) {
    __m256 v0 = _mm256_castsi256_ps(load32(codes)), v1 = _mm256_castsi256_ps(load32(codes + 32));
    __m256i tails = _mm256_castps_si256(_mm256_shuffle_ps(v0, v1, 0xdd));
    tails = _mm256_permute4x64_epi64(tails, 0xd8); /* the second dword of each of eight pairs */
    uint8_t signs[32];
    __m256i scales = signs_and_scales(tails, signs);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const uint8_t *index = codes + 8 * i;
        __m256i grid = gather4(ds4_iq2xxs_grid, index[0], index[1], index[2], index[3]);
        s->q[i] = apply_signs(grid, signs + 4 * i, 43);
    }
    finish_odd(scales, 43, 0.125f * half_at(d), s);
}

/* Sixteen scales of four bits, even sixteens in the low nibbles of eight bytes. */
DS4_INLINE __m256i nibble_scales(const uint8_t *p) {
    const __m128i nibble = _mm_set1_epi8(15);
    __m128i pairs = _mm_loadl_epi64((const __m128i *)p);
    __m128i even = _mm_and_si128(pairs, nibble);
    __m128i odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
    return _mm256_cvtepu8_epi16(_mm_unpacklo_epi64(even, odd));
}

DS4_INLINE void load_iq2_xs(const uint8_t *d, const uint8_t *scales, const uint8_t *codes,
                            super_block *s) {
    __m256i c0 = load32(codes), c1 = load32(codes + 32);
    uint16_t index[32];
    uint8_t signs[32];
    __m256i seven = _mm256_packus_epi16(_mm256_srli_epi16(c0, 9), _mm256_srli_epi16(c1, 9));
    seven = complete_signs(_mm256_permute4x64_epi64(seven, 0xd8));
    _mm256_storeu_si256((__m256i *)signs, seven);
    _mm256_storeu_si256((__m256i *)index, _mm256_and_si256(c0, _mm256_set1_epi16(511)));
    _mm256_storeu_si256((__m256i *)index + 1, _mm256_and_si256(c1, _mm256_set1_epi16(511)));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const uint16_t *j = index + 4 * i;
        s->q[i] = apply_signs(gather4(ds4_iq2xs_grid, j[0], j[1], j[2], j[3]), signs + 4 * i, 43);
    }
    finish_odd(nibble_scales(scales), 43, 0.125f * half_at(d), s);
}

/* Entry number g of 32, of IQ2_XS with its ninth bit. */
DS4_INLINE uint32_t plane_index(uint32_t type, const ds4_planes *p, int g) {
    if (type == DS4_IQ2_XXS) return p->index[g];
    return p->index[g] | (p->ninth >> g & 1) << 8;
}

DS4_INLINE void load_iq2_planes(uint32_t type, const uint8_t *b, super_block *s) {
    const ds4_planes p = ds4_planes_of(type, b);
    const uint64_t *grid = type == DS4_IQ2_XXS ? ds4_iq2xxs_grid : ds4_iq2xs_grid;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i four = gather4(grid, plane_index(type, &p, 4 * i), plane_index(type, &p, 4 * i + 1),
                               plane_index(type, &p, 4 * i + 2), plane_index(type, &p, 4 * i + 3));
        s->q[i] = apply_signs(four, p.signs + 4 * i, 43);
    }
    if (type == DS4_IQ2_XS) {
        finish_odd(nibble_scales(p.scales), 43, 0.125f * half_at(p.d), s);
        return;
    }
    s->sc = spread_eight(_mm_loadl_epi64((const __m128i *)p.scales));
    s->mn = _mm256_mullo_epi16(s->sc, _mm256_set1_epi16(-43));
    s->d = 0.125f * half_at(p.d);
    s->m = 0.0f;
}

DS4_INLINE void load_iq2_s(const uint8_t *b, super_block *s) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const uint8_t *j = b + 2 + 4 * i;
        uint32_t high = (uint32_t)b[66 + i] << 8; /* two bits for each of four */
        __m256i grid = gather4(ds4_iq2s_grid, j[0] | (high & 0x300), j[1] | (high >> 2 & 0x300),
                               j[2] | (high >> 4 & 0x300), j[3] | (high >> 6 & 0x300));
        s->q[i] = apply_signs(grid, b + 34 + 4 * i, 43);
    }
    finish_odd(nibble_scales(b + 74), 43, 0.125f * half_at(b), s);
}

/* ---- IQ3 types ------------------------------------------------------------------------------- */

DS4_INLINE void load_iq3_xxs(const uint8_t *b, super_block *s) {
    uint8_t signs[32];
    __m256i scales = signs_and_scales(load32(b + 66), signs);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(b + 2 + 8 * i)));
        __m256i grid = _mm256_i32gather_epi32((const int *)ds4_iq3xxs_grid, index, 4);
        s->q[i] = apply_signs(grid, signs + 4 * i, 62);
    }
    finish_odd(scales, 62, 0.25f * half_at(b), s);
}

/* Eight scales of four bits, one per 32 weights, low nibbles first. */
DS4_INLINE __m256i scales_of_32(const uint8_t *p) {
    __m128i v = _mm_cvtsi32_si128((int)ds4_load_u32(p));
    __m128i both = _mm_unpacklo_epi8(v, _mm_srli_epi16(v, 4));
    return spread_eight(_mm_and_si128(both, _mm_set1_epi8(15)));
}

DS4_INLINE void load_iq3_s(const uint8_t *b, super_block *s) {
    const __m256i shift = _mm256_setr_epi32(8, 7, 6, 5, 4, 3, 2, 1);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(b + 2 + 8 * i)));
        __m256i high = _mm256_sllv_epi32(_mm256_set1_epi32(b[66 + i]), shift);
        index = _mm256_or_si256(index, _mm256_and_si256(high, _mm256_set1_epi32(256)));
        __m256i grid = _mm256_i32gather_epi32((const int *)ds4_iq3s_grid, index, 4);
        s->q[i] = apply_signs(grid, b + 74 + 4 * i, 15);
    }
    finish_odd(scales_of_32(b + 106), 15, half_at(b), s);
}

/* ---- IQ1 types ------------------------------------------------------------------------------- */

/* Sixteen consecutive scales in memory as super_block orders them. */
DS4_INLINE __m256i order_scales(const uint8_t *scales) {
    return spread_sixteen(_mm_loadu_si128((const __m128i *)scales));
}

DS4_INLINE void load_iq1_s(const uint8_t *b, super_block *s) {
    uint8_t scales[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const uint8_t *j = b + 2 + 4 * i;
        uint32_t high = ds4_load_u16(b + 34 + 2 * i);
        __m256i grid = gather4(ds4_iq1s_grid, j[0] | (high << 8 & 0x700),
                               j[1] | (high << 5 & 0x700), j[2] | (high << 2 & 0x700),
                               j[3] | (high >> 1 & 0x700));
        /* 8 (digit + 1) + 1 + delta */
        s->q[i] = _mm256_add_epi8(grid, _mm256_set1_epi8(high & 0x8000 ? 0 : 2));
        scales[2 * i] = scales[2 * i + 1] = high >> 12 & 7;
    }
    finish_odd(order_scales(scales), 9, 0.125f * half_at(b), s);
}

/* Eight times 1 + delta: 2, or 0 where bit `at` is set. */
DS4_INLINE long long iq1_delta(uint32_t bits, int at) {
    return bits >> at & 1 ? 0 : 0x0202020202020202;
}

DS4_INLINE void load_iq1_m(const uint8_t *b, super_block *s) {
    uint8_t scales[16];
    for (int i = 0; i < 16; i++)
        scales[i] = ds4_load_u16(b + 48 + 2 * (i / 4)) >> (3 * (i % 4)) & 7;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const uint8_t *j = b + 4 * i;
        uint32_t h = ds4_load_u16(b + 32 + 2 * i); /* four nibbles: three bits of index, delta */
        __m256i grid = gather4(ds4_iq1s_grid, j[0] | (h << 8 & 0x700), j[1] | (h << 4 & 0x700),
                               j[2] | (h & 0x700), j[3] | (h >> 4 & 0x700));
        __m256i delta = _mm256_setr_epi64x(iq1_delta(h, 3), iq1_delta(h, 7), iq1_delta(h, 11),
                                           iq1_delta(h, 15));
        s->q[i] = _mm256_add_epi8(grid, delta);
    }
    const uint16_t d = ds4_iq1_m_scale(b + 48);
    finish_odd(order_scales(scales), 9, 0.125f * _cvtsh_ss(d), s);
}

/* ---- IQ4_XS ---------------------------------------------------------------------------------- */

DS4_INLINE void load_iq4_xs(const uint8_t *b, super_block *s) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)ds4_iq4_values));
    uint32_t high = ds4_load_u16(b + 2);
    uint8_t scales[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m128i v = _mm_loadu_si128((const __m128i *)(b + 8 + 16 * i));
        __m256i q = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), nibble);
        s->q[i] = _mm256_shuffle_epi8(values, q);
        uint32_t low = b[4 + i / 2] >> (4 * (i & 1)) & 15;
        scales[2 * i] = scales[2 * i + 1] = (uint8_t)((low | (high >> (2 * i) & 3) << 4) - 32);
    }
    s->sc = order_scales(scales);
    s->mn = _mm256_setzero_si256();
    s->d = half_at(b);
    s->m = 0.0f;
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
