/* X8 groups of Q2_K .. Q6_K as vectors with one lane per row, four rows each.
 *
 * Include only from *_neon.c and *_i8mm.c.
 *
 * A group is f16 d[8], for types with minima f16 dmin[8], then the rest of the raw blocks dword by
 * dword, eight rows each (docs/layouts.md). So vector 2 j + h of the body is dword j of rows 4 h .. + 3.
 */
#ifndef DS4_SUPER_X8_NEON_H
#define DS4_SUPER_X8_NEON_H

#include "neon.h"

DS4_INLINE int has_minima(uint32_t type) {
    return type == DS4_Q2_K || type == DS4_Q4_K || type == DS4_Q5_K;
}

DS4_INLINE int scales_per_32(uint32_t type) { return type == DS4_Q4_K || type == DS4_Q5_K; }

/* What is stored on top of the true values. */
DS4_INLINE int stored_offset(uint32_t type) {
    return type == DS4_Q3_K ? 4 : type == DS4_Q6_K ? 32 : 0;
}

/* A weight times its sub-scale is a signed byte: of Q2_K at most 45, of Q3_K, negated, -128 to 124. */
DS4_INLINE int scaled_bytes(uint32_t type) { return type == DS4_Q2_K || type == DS4_Q3_K; }

DS4_INLINE int x8_block_bytes(uint32_t type) {
    switch (type) {
    case DS4_Q2_K: return 84;
    case DS4_Q3_K: return 110;
    case DS4_Q4_K: return 144;
    case DS4_Q5_K: return 176;
    default: return 210; /* Q6_K */
    }
}

DS4_INLINE uint8x16_t body(uint32_t type, const uint8_t *group, int dword, int h) {
    return vld1q_u8(group + (has_minima(type) ? 32 : 16) + 32 * dword + 16 * h);
}

/* Q6_K: the first of three dwords that hold weights 4 j .. + 3 of the quarters of a half. */
DS4_INLINE int q6_k_dword(int half, int j) { return 4 + 3 * (8 * half + j); }

/* Weights 32 i + 4 j .. + 3 of four rows as stored. i, j and h are constants after unrolling. */
DS4_INLINE int8x16_t x8_values(uint32_t type, const uint8_t *group, int i, int j, int h) {
    const int half = i / 4, part = i % 4;
    uint8x16_t v;
    switch (type) {
    case DS4_Q2_K: v = move_bits(body(type, group, 4 + 8 * half + j, h), 2 * part, 0, 3); break;
    case DS4_Q3_K:
        v = vorrq_u8(move_bits(body(type, group, 8 + 8 * half + j, h), 2 * part, 0, 3),
                     move_bits(body(type, group, j, h), i, 2, 4));
        break;
    case DS4_Q4_K: v = move_bits(body(type, group, 3 + 8 * (i / 2) + j, h), 4 * (i % 2), 0, 15); break;
    case DS4_Q6_K:
        v = vorrq_u8(
            move_bits(body(type, group, q6_k_dword(half, j) + part % 2, h), 4 * (part / 2), 0, 15),
            move_bits(body(type, group, q6_k_dword(half, j) + 2, h), 2 * part, 4, 48));
        break;
    default: /* Q5_K */
        v = vorrq_u8(move_bits(body(type, group, 11 + 8 * (i / 2) + j, h), 4 * (i % 2), 0, 15),
                     move_bits(body(type, group, 3 + j, h), i, 4, 16));
    }
    return vreinterpretq_s8_u8(v);
}

/* Sub-scales of four rows as bytes: byte t of a row's dword k belongs to sixteen number 4 k + t, for
 * Q4_K and Q5_K to thirty-two number 4 k + t. m: the minima likewise. */
typedef struct {
    int8x16_t s[4], m[4];
} x8_scales;

DS4_INLINE x8_scales x8_load_scales(uint32_t type, const uint8_t *group, int h) {
    x8_scales out;
    if (scales_per_32(type)) {
        uint8x16_t a = body(type, group, 0, h), b = body(type, group, 1, h);
        uint8x16_t c = body(type, group, 2, h);
        out.s[0] = vreinterpretq_s8_u8(move_bits(a, 0, 0, 63));
        out.m[0] = vreinterpretq_s8_u8(move_bits(b, 0, 0, 63));
        out.s[1] = vreinterpretq_s8_u8(vorrq_u8(move_bits(c, 0, 0, 15), move_bits(a, 6, 4, 48)));
        out.m[1] = vreinterpretq_s8_u8(vorrq_u8(move_bits(c, 4, 0, 15), move_bits(b, 6, 4, 48)));
        return out;
    }
    for (int k = 0; k < 4; k++) {
        uint8x16_t v = body(type, group, type == DS4_Q3_K ? 24 + k % 2 : k, h);
        if (type == DS4_Q2_K) {
            out.m[k] = high_nibbles(v);
            v = move_bits(v, 0, 0, 15);
        } else if (type == DS4_Q3_K) {
            uint8x16_t high = move_bits(body(type, group, 26, h), 2 * k, 4, 48);
            v = vorrq_u8(move_bits(v, 4 * (k / 2), 0, 15), high);
            v = vsubq_u8(v, vdupq_n_u8(32));
        }
        out.s[k] = vreinterpretq_s8_u8(v);
    }
    return out;
}

/* The scale of sixteen number `sub` of each row. */
DS4_INLINE int32x4_t x8_scale(uint32_t type, const x8_scales *scales, int sub) {
    if (scales_per_32(type)) sub /= 2;
    int32x4_t v = vreinterpretq_s32_s8(scales->s[sub / 4]);
    return v << (24 - 8 * (sub % 4)) >> 24;
}

/* The same in every byte of a row's dword. */
DS4_INLINE int8x16_t x8_scale_bytes(uint32_t type, const x8_scales *scales, int sub) {
    if (scales_per_32(type)) sub /= 2;
    const uint8x16_t first = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    return vqtbl1q_s8(scales->s[sub / 4], vaddq_u8(first, vdupq_n_u8((uint8_t)(sub % 4))));
}

/* ---- sums of activations times a byte each ------------------------------------------------------ */

/* The sums of sixteen activations of a block (of thirty-two, where scales are) as 128 high + low, in
 * order: dword k meets the bytes s[k] or m[k] of x8_scales in dot products. */
typedef struct {
    int8x16_t low, high;
} split_sums;

DS4_INLINE split_sums load_sums(uint32_t type, const int16_t *sums) {
    const int16x8_t even = vld1q_s16(sums), odd = vld1q_s16(sums + 8), seven = vdupq_n_s16(127);
    if (scales_per_32(type)) {
        int16x8_t both = vaddq_s16(even, odd);
        int8x8_t low = vmovn_s16(vandq_s16(both, seven)), high = vshrn_n_s16(both, 7);
        return (split_sums){vcombine_s8(low, low), vcombine_s8(high, high)};
    }
    int16x8_t a = vzip1q_s16(even, odd), b = vzip2q_s16(even, odd);
    return (split_sums){
        vcombine_s8(vmovn_s16(vandq_s16(a, seven)), vmovn_s16(vandq_s16(b, seven))),
        vcombine_s8(vshrn_n_s16(a, 7), vshrn_n_s16(b, 7))};
}

/* Sum over the block of a byte per sub-scale times its activations' sum. */
DS4_INLINE int32x4_t times_sums(uint32_t type, const int8x16_t *bytes, split_sums sums) {
    int32x4_t low = vdupq_n_s32(0), high = low;
    if (scales_per_32(type)) {
        low = dot_lane(dot_lane(low, bytes[0], sums.low, 0), bytes[1], sums.low, 1);
        high = dot_lane(dot_lane(high, bytes[0], sums.high, 0), bytes[1], sums.high, 1);
    } else {
        low = dot4(low, bytes[0], bytes[1], bytes[2], bytes[3], sums.low);
        high = dot4(high, bytes[0], bytes[1], bytes[2], bytes[3], sums.high);
    }
    return vaddq_s32(low, vshlq_n_s32(high, 7));
}

#endif
