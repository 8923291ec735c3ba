/* Unpackers of IQ blocks into vectors, of IQ2_XXS and IQ2_XS in every layout (super_block_avx2.h says which shape).
 *
 * Include only from *_avx2.c, *_avxvnni.c, *_avx512.c and *_amx.c.
 */
#ifndef DS4_SUPER_UNPACK_IQ_AVX2_H
#define DS4_SUPER_UNPACK_IQ_AVX2_H

#include "planes.h"
#include "super_block_avx2.h"

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

/* `signs` points at four bytes, bit i of byte g telling whether value 8 g + i is negative: -1 where it is. */
DS4_INLINE __m256i sign_mask(const uint8_t *signs) {
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                              0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    __m256i mask = _mm256_and_si256(_mm256_shuffle_epi8(broadcast4(signs), spread), bit);
    return _mm256_cmpeq_epi8(mask, bit);
}

/* Signed magnitudes up to `top`, moved to 0 .. 2 top: q = top + (grid ^ mask) - mask. */
DS4_INLINE __m256i apply_signs(__m256i grid, const uint8_t *signs, int top) {
    const __m256i mask = sign_mask(signs);
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

/* The signs of the 64 bytes of codes of a block, and the scales. */
DS4_INLINE __m256i iq2_xxs_tails(const uint8_t *codes, uint8_t *signs) {
    __m256 v0 = _mm256_castsi256_ps(load32(codes)), v1 = _mm256_castsi256_ps(load32(codes + 32));
    __m256i tails = _mm256_castps_si256(_mm256_shuffle_ps(v0, v1, 0xdd));
    tails = _mm256_permute4x64_epi64(tails, 0xd8); /* the second dword of each of eight pairs */
    return signs_and_scales(tails, signs);
}

DS4_INLINE void load_iq2_xxs(const uint8_t *d, const uint8_t *codes, super_block *s) {
    uint8_t signs[32];
    __m256i scales = iq2_xxs_tails(codes, signs);
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

/* The entries of the 64 bytes of codes of a block, and the signs. */
DS4_INLINE void iq2_xs_places(const uint8_t *codes, uint16_t *index, uint8_t *signs) {
    __m256i c0 = load32(codes), c1 = load32(codes + 32);
    __m256i seven = _mm256_packus_epi16(_mm256_srli_epi16(c0, 9), _mm256_srli_epi16(c1, 9));
    seven = complete_signs(_mm256_permute4x64_epi64(seven, 0xd8));
    _mm256_storeu_si256((__m256i *)signs, seven);
    _mm256_storeu_si256((__m256i *)index, _mm256_and_si256(c0, _mm256_set1_epi16(511)));
    _mm256_storeu_si256((__m256i *)index + 1, _mm256_and_si256(c1, _mm256_set1_epi16(511)));
}

DS4_INLINE void load_iq2_xs(const uint8_t *d, const uint8_t *scales, const uint8_t *codes,
                            super_block *s) {
    uint16_t index[32];
    uint8_t signs[32];
    iq2_xs_places(codes, index, signs);
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

#endif
