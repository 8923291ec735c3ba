/* One block of a K, IQ or TQ type in any layout but X8, as signed bytes. Include only from *_neon.c and
 * *_i8mm.c.
 */
#ifndef DS4_SUPER_BLOCK_NEON_H
#define DS4_SUPER_BLOCK_NEON_H

#include "super_unpack_iq_neon.h"
#include "super_x8_neon.h"

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

DS4_INLINE void load_super(uint32_t type, const uint8_t *b, super_block *s) {
    switch (type) {
    case DS4_Q2_K: load_q2_k(b, s); break;
    case DS4_Q3_K: load_q3_k(b, s); break;
    case DS4_Q4_K: load_q4_k(b, s); break;
    case DS4_Q5_K: load_q5_k(b, s); break;
    case DS4_Q6_K: load_q6_k(b, s); break;
    case DS4_IQ4_XS: load_iq4_xs(b, s); break;
    case DS4_IQ2_XXS: load_iq2_xxs(b, s); break;
    case DS4_IQ2_XS: load_iq2_xs(b, s); break;
    case DS4_IQ2_S: load_iq2_s(b, s); break;
    case DS4_IQ3_XXS: load_iq3_xxs(b, s); break;
    case DS4_IQ3_S: load_iq3_s(b, s); break;
    case DS4_IQ1_S: load_iq1_s(b, s); break;
    case DS4_IQ1_M: load_iq1_m(b, s); break;
    case DS4_TQ1_0: load_tq1_0(b, s); break;
    default: load_tq2_0(b, s); break;
    }
}

/* Block b of row r in any layout but X8. */
DS4_INLINE void load_block(uint32_t type, const ds4_quant *quant, const ds4_weight *w, int64_t r,
                           int64_t b, super_block *s) {
    uint8_t raw[DS4_BLOCK_BYTES_MAX]; /* aligned layouts: put together, in the first-level cache */
    if ((type == DS4_IQ2_XXS || type == DS4_IQ2_XS) && w->layout == DS4_LAYOUT_IQ2_PLANES) {
        int64_t i = r * (w->cols / DS4_SUPER) + b;
        const uint8_t *planes = (const uint8_t *)w->data + i * ds4_plane_bytes(type);
        __builtin_prefetch(planes + 1024);
        load_iq2_planes(type, planes, s);
        return;
    }
    const uint8_t *block = ds4_weight_block(w, quant, r, b, raw);
    if (w->layout == DS4_LAYOUT_RAW) __builtin_prefetch(block + 1024);
    load_super(type, block, s);
}

#endif
