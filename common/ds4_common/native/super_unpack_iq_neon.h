/* Code books and ternary types of 256 weights, as signed bytes. Include only from super_block_neon.h.
 *
 * Two entries of eight magnitudes, or four of four, are loaded from their book and negated under a mask
 * of their signs: the same values as quants_iq.c.
 */
#ifndef DS4_SUPER_UNPACK_IQ_NEON_H
#define DS4_SUPER_UNPACK_IQ_NEON_H

#include "neon.h"
#include "planes.h"

/* Weights 16 s .. 16 s + 15 in w[s], under scale sc[s]. mn, only where the type has minima, in the order
 * of the activations' sums. */
typedef struct {
    int8x16_t w[16];
    int16_t sc[16], mn[16];
    float d, m;
} super_block;

/* 0xff where a bit is set: two bytes of them, one per entry of eight weights. */
DS4_INLINE int8x16_t minus_of(const uint8_t *signs) { return spread_bits(signs, -1); }

/* The same from numbers of the table of signs. */
DS4_INLINE int8x16_t minus_of_table(uint32_t s0, uint32_t s1) {
    return vreinterpretq_s8_u64(
        vcombine_u64(vld1_u64(ds4_iq2_sign_mask + s0), vld1_u64(ds4_iq2_sign_mask + s1)));
}

DS4_INLINE int8x16_t two_entries(const uint64_t *grid, uint32_t g0, uint32_t g1) {
    return vreinterpretq_s8_u64(vcombine_u64(vld1_u64(grid + g0), vld1_u64(grid + g1)));
}

DS4_INLINE int8x16_t four_entries(const uint32_t *grid, uint32_t g0, uint32_t g1, uint32_t g2,
                                  uint32_t g3) {
    const uint32x4_t v = {grid[g0], grid[g1], grid[g2], grid[g3]};
    return vreinterpretq_s8_u32(v);
}

DS4_INLINE int8x16_t with_signs(int8x16_t v, int8x16_t minus) {
    return vsubq_s8(veorq_s8(v, minus), minus);
}

/* ---- IQ2 ------------------------------------------------------------------------------------- */

DS4_INLINE void load_iq2_planes(uint32_t type, const uint8_t *b, super_block *s) {
    const ds4_planes p = ds4_planes_of(type, b);
    const int wide = type == DS4_IQ2_XS;
    const uint64_t *grid = wide ? ds4_iq2xs_grid : ds4_iq2xxs_grid;
    for (int i = 0; i < 16; i++) {
        uint32_t g0 = p.index[2 * i], g1 = p.index[2 * i + 1];
        if (wide) g0 |= (p.ninth >> (2 * i) & 1) << 8, g1 |= (p.ninth >> (2 * i + 1) & 1) << 8;
        s->w[i] = with_signs(two_entries(grid, g0, g1), minus_of(p.signs + 2 * i));
        s->sc[i] = wide ? (int16_t)(2 * (p.scales[i / 2] >> (4 * (i & 1)) & 15) + 1)
                        : p.scales[i / 2];
    }
    s->d = 0.125f * neon_half(p.d);
}

DS4_INLINE void load_iq2_xxs(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 8; i++) {
        const uint8_t *p = b + 2 + 8 * i;
        uint32_t tail = ds4_load_u32(p + 4);
        s->sc[2 * i] = s->sc[2 * i + 1] = (int16_t)(2 * (tail >> 28) + 1);
        for (int h = 0; h < 2; h++)
            s->w[2 * i + h] = with_signs(
                two_entries(ds4_iq2xxs_grid, p[2 * h], p[2 * h + 1]),
                minus_of_table(tail >> (14 * h) & 127, tail >> (14 * h + 7) & 127));
    }
    s->d = 0.125f * neon_half(b);
}

DS4_INLINE void load_iq2_xs(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 16; i++) {
        uint32_t two = ds4_load_u32(b + 2 + 4 * i);
        s->sc[i] = (int16_t)(2 * (b[66 + i / 2] >> (4 * (i & 1)) & 15) + 1);
        s->w[i] = with_signs(two_entries(ds4_iq2xs_grid, two & 511, two >> 16 & 511),
                             minus_of_table(two >> 9 & 127, two >> 25));
    }
    s->d = 0.125f * neon_half(b);
}

DS4_INLINE void load_iq2_s(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 16; i++) {
        uint32_t high = b[66 + i / 2] >> (4 * (i & 1));
        s->sc[i] = (int16_t)(2 * (b[74 + i / 2] >> (4 * (i & 1)) & 15) + 1);
        s->w[i] = with_signs(two_entries(ds4_iq2s_grid, b[2 + 2 * i] | (high & 3) << 8,
                                         b[3 + 2 * i] | (high >> 2 & 3) << 8),
                             minus_of(b + 34 + 2 * i));
    }
    s->d = 0.125f * neon_half(b);
}

/* ---- IQ3 ------------------------------------------------------------------------------------- */

DS4_INLINE void load_iq3_xxs(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 16; i++) {
        const uint8_t *q = b + 2 + 4 * i;
        uint32_t tail = ds4_load_u32(b + 66 + 4 * (i / 2)), signs = tail >> (14 * (i & 1));
        s->sc[i] = (int16_t)(2 * (tail >> 28) + 1);
        s->w[i] = with_signs(four_entries(ds4_iq3xxs_grid, q[0], q[1], q[2], q[3]),
                             minus_of_table(signs & 127, signs >> 7 & 127));
    }
    s->d = 0.25f * neon_half(b);
}

DS4_INLINE void load_iq3_s(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 16; i++) {
        const uint8_t *q = b + 2 + 4 * i;
        uint32_t high = (uint32_t)b[66 + i / 2] << 8 >> (4 * (i & 1));
        s->sc[i] = (int16_t)(2 * (b[106 + i / 4] >> (4 * (i / 2 & 1)) & 15) + 1);
        s->w[i] = with_signs(four_entries(ds4_iq3s_grid, q[0] | (high & 256), q[1] | (high >> 1 & 256),
                                          q[2] | (high >> 2 & 256), q[3] | (high >> 3 & 256)),
                             minus_of(b + 74 + 2 * i));
    }
    s->d = neon_half(b);
}

/* ---- IQ1: digits times eight, plus or minus one -------------------------------------------------- */

DS4_INLINE void load_iq1_s(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 16; i++) {
        uint32_t word = ds4_load_u16(b + 34 + 2 * (i / 2)), high = word >> (6 * (i & 1));
        s->sc[i] = (int16_t)(2 * (word >> 12 & 7) + 1);
        s->w[i] = vaddq_s8(two_entries(ds4_iq1s_grid, b[2 + 2 * i] | (high & 7) << 8,
                                       b[3 + 2 * i] | (high >> 3 & 7) << 8),
                           vdupq_n_s8(word & 0x8000 ? -9 : -7));
    }
    s->d = 0.125f * neon_half(b);
}

DS4_INLINE void load_iq1_m(const uint8_t *b, super_block *s) {
    const uint8_t *scales = b + 48;
    const uint16_t half = ds4_iq1_m_scale(scales);
    for (int i = 0; i < 16; i++) {
        uint32_t high = b[32 + i];
        s->sc[i] = (int16_t)(2 * (ds4_load_u16(scales + 2 * (i / 4)) >> (3 * (i % 4)) & 7) + 1);
        s->w[i] = vaddq_s8(
            two_entries(ds4_iq1s_grid, b[2 * i] | (high & 7) << 8, b[2 * i + 1] | (high >> 4 & 7) << 8),
            vcombine_s8(vdup_n_s8(high & 8 ? -9 : -7), vdup_n_s8(high & 128 ? -9 : -7)));
    }
    s->d = 0.125f * neon_half(&half);
}

/* ---- TQ: -1, 0, 1 ---------------------------------------------------------------------------- */

/* The leading digit in base 3 of each byte as a fraction of 256, less one. */
DS4_INLINE int8x16_t leading_digit(uint8x16_t v) {
    const uint8x16_t one = vcgtq_u8(v, vdupq_n_u8(85)), two = vcgtq_u8(v, vdupq_n_u8(170));
    return vreinterpretq_s8_u8(vsubq_u8(vsubq_u8(vdupq_n_u8(255), one), two));
}

DS4_INLINE void load_tq1_0(const uint8_t *b, super_block *s) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    const uint8x16_t by_four = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
    for (int i = 0; i < 10; i++)
        s->w[i] = leading_digit(
            vmulq_u8(vld1q_u8(b + 16 * (i & 1)), vdupq_n_u8(powers[i / 2])));
    for (int i = 0; i < 5; i++)
        s->w[10 + i] = leading_digit(vmulq_u8(vld1q_u8(b + 32), vdupq_n_u8(powers[i])));
    const uint8x16_t last = vreinterpretq_u8_u32(vdupq_n_u32(ds4_load_u32(b + 48)));
    s->w[15] = leading_digit(vmulq_u8(last, by_four));
    for (int i = 0; i < 16; i++) s->sc[i] = 1;
    s->d = neon_half(b + 52);
}

DS4_INLINE void load_tq2_0(const uint8_t *b, super_block *s) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        uint8x16_t v = move_bits(vld1q_u8(b + 32 * (i / 8) + 16 * (i & 1)), 2 * (i / 2 % 4), 0, 3);
        s->w[i] = vreinterpretq_s8_u8(vsubq_u8(v, vdupq_n_u8(1)));
        s->sc[i] = 1;
    }
    s->d = neon_half(b + 64);
}

#endif
