/* Blocks of 32 weights as signed bytes, raw and of X8 groups. Include only from *_neon.c and *_i8mm.c. */
#ifndef DS4_LEGACY_BLOCK_NEON_H
#define DS4_LEGACY_BLOCK_NEON_H

#include "neon.h"

DS4_INLINE int is_five_bit(uint32_t type) { return type == DS4_Q5_0 || type == DS4_Q5_1; }
DS4_INLINE int has_min(uint32_t type) { return type == DS4_Q4_1 || type == DS4_Q5_1; }
DS4_INLINE int block_bytes_of(uint32_t type) {
    switch (type) {
    case DS4_Q4_0:
    case DS4_IQ4_NL:
    case DS4_Q1_0: return 18;
    case DS4_Q4_1: return 20;
    case DS4_Q5_0: return 22;
    case DS4_Q5_1: return 24;
    case DS4_MXFP4: return 17;
    case DS4_NVFP4: return 36;
    default: return 34;
    }
}

/* Parts of 32 weights in a stored block. */
DS4_INLINE int parts_of(uint32_t type) { return type == DS4_NVFP4 ? 2 : type == DS4_Q1_0 ? 4 : 1; }

/* Whether both halves of a part have a scale of their own. */
DS4_INLINE int two_scales(uint32_t type) { return type == DS4_NVFP4; }

/* What was added to the true values of a type to make them unsigned. */
DS4_INLINE int offset_of(uint32_t type) {
    return type == DS4_Q4_0 ? 8 : type == DS4_Q5_0 ? 16 : 0;
}

/* 32 weights of eight rows: w[2 j + h] holds weights 4 j .. 4 j + 3 of rows 4 h .. 4 h + 3. m: minima,
 * or scales of the second halves. */
typedef struct {
    int8x16_t w[16];
    float32x4_t d[2], m[2];
} tile_block;

/* ---- X8 -------------------------------------------------------------------------------------- */

DS4_INLINE void load_x8(uint32_t type, const uint8_t *group, tile_block *t) {
    const uint8_t *quants = group + ds4_x8_quants_offset(type);
    for (int h = 0; h < 2; h++) {
        t->d[h] = neon_half4(group + 8 * h);
        if (has_min(type)) t->m[h] = neon_half4(group + 16 + 8 * h);
    }
    if (type == DS4_Q8_0) {
        for (int i = 0; i < 16; i++) t->w[i] = vld1q_s8((const int8_t *)quants + 16 * i);
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) { /* step i / 2 in the low nibbles, step 4 + i / 2 in the high ones */
        uint8x16_t v = vld1q_u8(quants + 16 * i);
        t->w[i] = low_nibbles(v);
        t->w[8 + i] = high_nibbles(v);
        if (!is_five_bit(type)) continue;
        uint8x16_t fifth = vld1q_u8(group + (has_min(type) ? 32 : 16) + 16 * (i & 1));
        int j = i / 2; /* bit j and bit 4 + j of the high plane */
        uint8x16_t low = move_bits(fifth, j, 4, 16), high = move_bits(fifth, 4 + j, 4, 16);
        t->w[i] = vorrq_s8(t->w[i], vreinterpretq_s8_u8(low));
        t->w[8 + i] = vorrq_s8(t->w[8 + i], vreinterpretq_s8_u8(high));
    }
}

/* ---- raw blocks ------------------------------------------------------------------------------ */

/* The 32 values of a part of a block in order. */
DS4_INLINE void raw_values(uint32_t type, const uint8_t *block, int part, int8x16_t *low,
                           int8x16_t *high) {
    if (type == DS4_Q1_0) {
        *low = vsubq_s8(spread_bits(block + 2 + 4 * part, 2), vdupq_n_s8(1));
        *high = vsubq_s8(spread_bits(block + 4 + 4 * part, 2), vdupq_n_s8(1));
        return;
    }
    if (type == DS4_Q8_0) {
        *low = vld1q_s8((const int8_t *)block + 2);
        *high = vld1q_s8((const int8_t *)block + 18);
        return;
    }
    const int high_at = has_min(type) ? 4 : 2;
    const int quants_at = type == DS4_MXFP4   ? 1
                          : type == DS4_NVFP4 ? 4 + 16 * part
                                              : high_at + (is_five_bit(type) ? 4 : 0);
    uint8x16_t v = vld1q_u8(block + quants_at);
    *low = low_nibbles(v);
    *high = high_nibbles(v);
    if (type == DS4_NVFP4) { /* low and high nibbles of eight bytes are sixteen weights */
        const int8x16_t even = *low, odd = *high;
        *low = vcombine_s8(vget_low_s8(even), vget_low_s8(odd));
        *high = vcombine_s8(vget_high_s8(even), vget_high_s8(odd));
    }
    if (type == DS4_IQ4_NL || type == DS4_MXFP4 || type == DS4_NVFP4) {
        int8x16_t table = vld1q_s8(type == DS4_IQ4_NL ? ds4_iq4_values : ds4_fp4_values);
        *low = vqtbl1q_s8(table, vreinterpretq_u8_s8(*low));
        *high = vqtbl1q_s8(table, vreinterpretq_u8_s8(*high));
    }
    if (is_five_bit(type)) {
        *low = vorrq_s8(*low, spread_bits(block + high_at, 16));
        *high = vorrq_s8(*high, spread_bits(block + high_at + 2, 16));
    }
}

DS4_INLINE float raw_scale(uint32_t type, const uint8_t *block, int part) {
    if (type == DS4_NVFP4) return ds4_ue4m3_half(block[2 * part]);
    return type == DS4_MXFP4 ? ds4_e8m0_half(block[0]) : neon_half(block);
}

/* tile_block.m */
DS4_INLINE float raw_second(uint32_t type, const uint8_t *block, int part) {
    if (type == DS4_NVFP4) return ds4_ue4m3_half(block[2 * part + 1]);
    return has_min(type) ? neon_half(block + 2) : 0.0f;
}

#endif
