/* One raw block of a K, IQ or TQ type as signed bytes. Include only from *_neon.c and *_i8mm.c.
 *
 * K types, IQ4_XS, IQ2_XXS and IQ2_XS have unpackers here; the code books of the other types are looked
 * up by the scalar ones, whose result is narrowed.
 */
#ifndef DS4_SUPER_BLOCK_NEON_H
#define DS4_SUPER_BLOCK_NEON_H

#include "planes.h"
#include "super_x8_neon.h"

/* Weights 16 s .. 16 s + 15 in w[s], under scale sc[s]. mn, only where the type has minima, in the order
 * of the activations' sums. */
typedef struct {
    int8x16_t w[16];
    int16_t sc[16], mn[16];
    float d, m;
} super_block;

/* ---- unpackers ------------------------------------------------------------------------------- */

DS4_INLINE int8x16_t minus(uint8x16_t v, int offset) {
    return vsubq_s8(vreinterpretq_s8_u8(v), vdupq_n_s8((int8_t)offset));
}

DS4_INLINE void load_q2_k(const uint8_t *b, super_block *s) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        s->sc[i] = b[i] & 15;
        s->mn[ds4_sum_place(i)] = b[i] >> 4;
        uint8x16_t v = vld1q_u8(b + 16 + 32 * (i / 8) + 16 * (i & 1));
        s->w[i] = vreinterpretq_s8_u8(move_bits(v, 2 * (i / 2 % 4), 0, 3));
    }
    s->d = neon_half(b + 80);
    s->m = -neon_half(b + 82);
}

DS4_INLINE void load_q3_k(const uint8_t *b, super_block *s) {
    const uint8_t *scales = b + 96;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
        s->sc[i] = (int16_t)((low | (scales[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32);
        uint8x16_t v = vld1q_u8(b + 32 + 32 * (i / 8) + 16 * (i & 1));
        uint8x16_t high = vld1q_u8(b + 16 * (i & 1));
        high = move_bits(high, i / 2, 2, 4);
        s->w[i] = minus(vorrq_u8(move_bits(v, 2 * (i / 2 % 4), 0, 3), high), 4);
    }
    s->d = neon_half(b + 108);
}

DS4_INLINE void load_scales_k4(const uint8_t *p, super_block *s) {
    for (int i = 0; i < 8; i++) {
        int j = i & 3;
        int scale = i < 4 ? p[j] & 63 : (p[8 + j] & 15) | (p[j] >> 2 & 48);
        int minimum = i < 4 ? p[4 + j] & 63 : p[8 + j] >> 4 | (p[4 + j] >> 2 & 48);
        s->sc[2 * i] = s->sc[2 * i + 1] = (int16_t)scale;
        s->mn[i] = s->mn[8 + i] = (int16_t)minimum;
    }
}

DS4_INLINE void load_q4_k(const uint8_t *b, super_block *s) {
    load_scales_k4(b + 4, s);
    for (int i = 0; i < 8; i++) { /* sixteens 4 (i / 2) + (i & 1) and two further on */
        uint8x16_t v = vld1q_u8(b + 16 + 16 * i);
        s->w[4 * (i / 2) + (i & 1)] = low_nibbles(v);
        s->w[4 * (i / 2) + (i & 1) + 2] = high_nibbles(v);
    }
    s->d = neon_half(b);
    s->m = -neon_half(b + 2);
}

DS4_INLINE void load_q5_k(const uint8_t *b, super_block *s) {
    load_scales_k4(b + 4, s);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        uint8x16_t v = vld1q_u8(b + 48 + 32 * (i / 4) + 16 * (i & 1));
        uint8x16_t fifth = move_bits(vld1q_u8(b + 16 + 16 * (i & 1)), i / 2, 4, 16);
        int8x16_t low = i & 2 ? high_nibbles(v) : low_nibbles(v);
        s->w[i] = vorrq_s8(low, vreinterpretq_s8_u8(fifth));
    }
    s->d = neon_half(b);
    s->m = -neon_half(b + 2);
}

DS4_INLINE void load_q6_k(const uint8_t *b, super_block *s) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        int half = i / 8, part = i / 2 % 4;
        s->sc[i] = (int8_t)b[192 + i];
        uint8x16_t v = vld1q_u8(b + 64 * half + 32 * (part & 1) + 16 * (i & 1));
        uint8x16_t high = move_bits(vld1q_u8(b + 128 + 32 * half + 16 * (i & 1)), 2 * part, 4, 48);
        int8x16_t low = part >> 1 ? high_nibbles(v) : low_nibbles(v);
        s->w[i] = minus(vorrq_u8(vreinterpretq_u8_s8(low), high), 32);
    }
    s->d = neon_half(b + 208);
}

DS4_INLINE void load_iq4_xs(const uint8_t *b, super_block *s) {
    const int8x16_t values = vld1q_s8(ds4_iq4_values);
    int high = ds4_load_u16(b + 2);
    for (int i = 0; i < 8; i++) {
        int low = b[4 + i / 2] >> (4 * (i & 1)) & 15;
        uint8x16_t v = vld1q_u8(b + 8 + 16 * i);
        s->sc[2 * i] = s->sc[2 * i + 1] = (int16_t)((low | (high >> (2 * i) & 3) << 4) - 32);
        s->w[2 * i] = vqtbl1q_s8(values, vreinterpretq_u8_s8(low_nibbles(v)));
        s->w[2 * i + 1] = vqtbl1q_s8(values, vreinterpretq_u8_s8(high_nibbles(v)));
    }
    s->d = neon_half(b);
}

/* 0xff where a bit is set: two bytes of them, one per entry of eight weights. */
DS4_INLINE int8x16_t minus_of(const uint8_t *signs) { return spread_bits(signs, -1); }

DS4_INLINE void load_iq2_planes(uint32_t type, const uint8_t *b, super_block *s) {
    const ds4_planes p = ds4_planes_of(type, b);
    const int wide = type == DS4_IQ2_XS;
    const uint64_t *grid = wide ? ds4_iq2xs_grid : ds4_iq2xxs_grid;
    for (int i = 0; i < 16; i++) {
        uint32_t g0 = p.index[2 * i], g1 = p.index[2 * i + 1];
        if (wide) g0 |= (p.ninth >> (2 * i) & 1) << 8, g1 |= (p.ninth >> (2 * i + 1) & 1) << 8;
        uint64x2_t two = vcombine_u64(vld1_u64(grid + g0), vld1_u64(grid + g1));
        int8x16_t minus = minus_of(p.signs + 2 * i);
        s->w[i] = vsubq_s8(veorq_s8(vreinterpretq_s8_u64(two), minus), minus);
        s->sc[i] = wide ? (int16_t)(2 * (p.scales[i / 2] >> (4 * (i & 1)) & 15) + 1)
                        : p.scales[i / 2];
    }
    s->d = 0.125f * neon_half(p.d);
}

/* Two entries of a code book with their signs. */
DS4_INLINE int8x16_t signed_entries(const uint64_t *grid, uint32_t g0, uint32_t g1, uint32_t s0,
                                    uint32_t s1) {
    uint64x2_t minus = vcombine_u64(vld1_u64(ds4_iq2_sign_mask + s0), vld1_u64(ds4_iq2_sign_mask + s1));
    uint64x2_t two = veorq_u64(vcombine_u64(vld1_u64(grid + g0), vld1_u64(grid + g1)), minus);
    return vsubq_s8(vreinterpretq_s8_u64(two), vreinterpretq_s8_u64(minus));
}

DS4_INLINE void load_iq2_xxs(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 8; i++) {
        const uint8_t *p = b + 2 + 8 * i;
        uint32_t tail = ds4_load_u32(p + 4);
        s->sc[2 * i] = s->sc[2 * i + 1] = (int16_t)(2 * (tail >> 28) + 1);
        s->w[2 * i] = signed_entries(ds4_iq2xxs_grid, p[0], p[1], tail & 127, tail >> 7 & 127);
        s->w[2 * i + 1] = signed_entries(ds4_iq2xxs_grid, p[2], p[3], tail >> 14 & 127, tail >> 21 & 127);
    }
    s->d = 0.125f * neon_half(b);
}

DS4_INLINE void load_iq2_xs(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 16; i++) {
        uint32_t two = ds4_load_u32(b + 2 + 4 * i);
        s->sc[i] = (int16_t)(2 * (b[66 + i / 2] >> (4 * (i & 1)) & 15) + 1);
        s->w[i] = signed_entries(ds4_iq2xs_grid, two & 511, two >> 16 & 511, two >> 9 & 127, two >> 25);
    }
    s->d = 0.125f * neon_half(b);
}

/* Any type, by its scalar unpacker. */
DS4_INLINE void load_any(ds4_unpack_fn unpack, const uint8_t *b, super_block *s) {
    ds4_unpacked u;
    unpack(b, &u);
    for (int i = 0; i < 16; i++) {
        int16x8_t low = vld1q_s16(u.w + 16 * i), high = vld1q_s16(u.w + 16 * i + 8);
        s->w[i] = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
    }
    memcpy(s->sc, u.sc, sizeof u.sc);
    s->d = u.d;
}

DS4_INLINE void load_super(uint32_t type, ds4_unpack_fn unpack, const uint8_t *b, super_block *s) {
    switch (type) {
    case DS4_Q2_K: load_q2_k(b, s); break;
    case DS4_Q3_K: load_q3_k(b, s); break;
    case DS4_Q4_K: load_q4_k(b, s); break;
    case DS4_Q5_K: load_q5_k(b, s); break;
    case DS4_Q6_K: load_q6_k(b, s); break;
    case DS4_IQ4_XS: load_iq4_xs(b, s); break;
    case DS4_IQ2_XXS: load_iq2_xxs(b, s); break;
    case DS4_IQ2_XS: load_iq2_xs(b, s); break;
    default: load_any(unpack, b, s); break;
    }
}

/* Block b of row r in any layout but X8. */
DS4_INLINE void load_block(uint32_t type, const ds4_quant *quant, const ds4_weight *w, int64_t r,
                           int64_t b, super_block *s) {
    uint8_t raw[DS4_BLOCK_BYTES_MAX]; /* aligned layouts: put together, in the first-level cache */
    if (!has_minima(type) && w->layout == DS4_LAYOUT_IQ2_PLANES) {
        int64_t i = r * (w->cols / DS4_SUPER) + b;
        const uint8_t *planes = (const uint8_t *)w->data + i * ds4_plane_bytes(w->type);
        __builtin_prefetch(planes + 1024);
        load_iq2_planes(w->type, planes, s);
        return;
    }
    const uint8_t *block = ds4_weight_block(w, quant, r, b, raw);
    if (w->layout == DS4_LAYOUT_RAW) __builtin_prefetch(block + 1024);
    load_super(type, quant->unpack, block, s);
}

#endif
