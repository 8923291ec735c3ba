/* K, IQ and TQ types (blocks of 256), NEON, from raw and aligned blocks.
 *
 * One row at a time, so memory is read in order; each block is unpacked to signed bytes once and
 * multiplied with up to COLUMNS columns. K types and IQ4_XS have vector unpackers; the code books of
 * the other types are looked up by the scalar ones, whose result is narrowed. All of a block's sums
 * are exact integers; one fmaf per block and term follows, in block order.
 */
#if defined(__ARM_FEATURE_DOTPROD)
#include <math.h>

#include "planes.h"
#include "super_x8_neon.h"

#define COLUMNS 8

/* Weights 16 s .. 16 s + 15 in w[s], under scale sc[s]; mn[s] only where the type has minima. */
typedef struct {
    int8x16_t w[16];
    int16_t sc[16], mn[16];
    float d, m;
} super_block;

/* ---- unpackers ------------------------------------------------------------------------------- */

/* Two bits of each of sixteen bytes, from bit `shift` on. */
DS4_INLINE uint8x16_t two_bits(uint8x16_t v, int shift) {
    return vandq_u8(vshlq_u8(v, vdupq_n_s8((int8_t)-shift)), vdupq_n_u8(3));
}

/* Bit `from` of each byte as value 2^to. */
DS4_INLINE uint8x16_t move_bit(uint8x16_t v, int from, int to) {
    return vandq_u8(vshlq_u8(v, vdupq_n_s8((int8_t)(to - from))), vdupq_n_u8((uint8_t)(1 << to)));
}

DS4_INLINE int8x16_t minus(uint8x16_t v, int offset) {
    return vsubq_s8(vreinterpretq_s8_u8(v), vdupq_n_s8((int8_t)offset));
}

DS4_INLINE void load_q2_k(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 16; i++) {
        s->sc[i] = b[i] & 15;
        s->mn[i] = b[i] >> 4;
        uint8x16_t v = vld1q_u8(b + 16 + 32 * (i / 8) + 16 * (i & 1));
        s->w[i] = minus(two_bits(v, 2 * (i / 2 % 4)), 0);
    }
    s->d = neon_half(b + 80);
    s->m = -neon_half(b + 82);
}

DS4_INLINE void load_q3_k(const uint8_t *b, super_block *s) {
    const uint8_t *scales = b + 96;
    for (int i = 0; i < 16; i++) {
        int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
        s->sc[i] = (int16_t)((low | (scales[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32);
        uint8x16_t v = vld1q_u8(b + 32 + 32 * (i / 8) + 16 * (i & 1));
        uint8x16_t high = vld1q_u8(b + 16 * (i & 1));
        s->w[i] = minus(vorrq_u8(two_bits(v, 2 * (i / 2 % 4)), move_bit(high, i / 2, 2)), 4);
    }
    s->d = neon_half(b + 108);
}

DS4_INLINE void load_scales_k4(const uint8_t *p, super_block *s) {
    for (int i = 0; i < 8; i++) {
        int j = i & 3;
        int scale = i < 4 ? p[j] & 63 : (p[8 + j] & 15) | (p[j] >> 2 & 48);
        int minimum = i < 4 ? p[4 + j] & 63 : p[8 + j] >> 4 | (p[4 + j] >> 2 & 48);
        s->sc[2 * i] = s->sc[2 * i + 1] = (int16_t)scale;
        s->mn[2 * i] = s->mn[2 * i + 1] = (int16_t)minimum;
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
    for (int i = 0; i < 16; i++) {
        uint8x16_t v = vld1q_u8(b + 48 + 32 * (i / 4) + 16 * (i & 1));
        uint8x16_t fifth = move_bit(vld1q_u8(b + 16 + 16 * (i & 1)), i / 2, 4);
        int8x16_t low = i & 2 ? high_nibbles(v) : low_nibbles(v);
        s->w[i] = vorrq_s8(low, vreinterpretq_s8_u8(fifth));
    }
    s->d = neon_half(b);
    s->m = -neon_half(b + 2);
}

DS4_INLINE void load_q6_k(const uint8_t *b, super_block *s) {
    for (int i = 0; i < 16; i++) {
        int half = i / 8, part = i / 2 % 4;
        s->sc[i] = (int8_t)b[192 + i];
        uint8x16_t v = vld1q_u8(b + 64 * half + 32 * (part & 1) + 16 * (i & 1));
        uint8x16_t high = two_bits(vld1q_u8(b + 128 + 32 * half + 16 * (i & 1)), 2 * part);
        int8x16_t low = part >> 1 ? high_nibbles(v) : low_nibbles(v);
        s->w[i] = minus(vorrq_u8(vreinterpretq_u8_s8(low), vshlq_n_u8(high, 4)), 32);
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
    default: load_any(unpack, b, s); break;
    }
}

/* ---- one block times one column -------------------------------------------------------------- */

DS4_INLINE float add_block(uint32_t type, const super_block *s, ds4_act256 x, int64_t b,
                           float acc) {
    const int8_t *q = x.q + 256 * b;
    const int16_t *sums = x.sums + 16 * b;
    int32x4_t isum = vdupq_n_s32(0);
    int32_t minsum = 0;
    for (int i = 0; i < 16; i++) {
        int32x4_t dot = vdotq_s32(vdupq_n_s32(0), s->w[i], vld1q_s8(q + 16 * i));
        isum = vmlaq_n_s32(isum, dot, s->sc[i]);
        if (has_minima(type)) minsum += s->mn[i] * sums[ds4_sum_place(i)];
    }
    acc = fmaf(s->d * x.d[b], (float)vaddvq_s32(isum), acc);
    return has_minima(type) ? fmaf(s->m * x.d[b], (float)minsum, acc) : acc;
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void load_block(uint32_t type, const ds4_quant *quant, const ds4_weight *w, int64_t r,
                           int64_t b, super_block *s) {
    uint8_t raw[DS4_BLOCK_BYTES_MAX]; /* aligned layouts: put together, in the first-level cache */
    if (w->layout == DS4_LAYOUT_IQ2_PLANES) {
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

DS4_INLINE void one_row(uint32_t type, const ds4_quant *quant, const ds4_weight *w, int64_t r,
                        const char *acts, size_t act_stride, int columns, float *y, int64_t ldy) {
    const int64_t blocks = w->cols / DS4_SUPER;
    float acc[COLUMNS] = {0};
    for (int64_t b = 0; b < blocks; b++) {
        super_block s;
        load_block(type, quant, w, r, b, &s);
        for (int c = 0; c < columns; c++) {
            ds4_act256 x = ds4_act256_view(acts + (size_t)c * act_stride, DS4_SUPER * blocks);
            acc[c] = add_block(type, &s, x, b, acc[c]);
        }
    }
    for (int c = 0; c < columns; c++) y[c * ldy] = acc[c];
}

DS4_INLINE void rectangle(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                          const void *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const ds4_quant *quant = ds4_quant_find(w->type);
    for (int64_t r = row0; r < row1; r++) {
        for (int64_t c = 0; c < n; c += COLUMNS) {
            int columns = n - c < COLUMNS ? (int)(n - c) : COLUMNS;
            one_row(type, quant, w, r, (const char *)acts + (size_t)c * act_stride, act_stride,
                    columns, y + c * ldy + r, ldy);
        }
    }
}

#define KERNEL(name, type)                                                                         \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,           \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                       \
        rectangle(type, w, row0, row1, acts, act_stride, n, y, ldy);                              \
    }

KERNEL(q2_k, DS4_Q2_K)
KERNEL(q3_k, DS4_Q3_K)
KERNEL(q4_k, DS4_Q4_K)
KERNEL(q5_k, DS4_Q5_K)
KERNEL(q6_k, DS4_Q6_K)
KERNEL(iq4_xs, DS4_IQ4_XS)
KERNEL(any_super, DS4_SUPER) /* no type's number: by the scalar unpacker */

ds4_matmul_fn ds4_matmul_neon_super(uint32_t type, uint32_t layout) {
    if (layout == DS4_LAYOUT_X8) return ds4_matmul_neon_super_x8(type);
    switch (type) {
    case DS4_Q2_K: return q2_k;
    case DS4_Q3_K: return q3_k;
    case DS4_Q4_K: return q4_k;
    case DS4_Q5_K: return q5_k;
    case DS4_Q6_K: return q6_k;
    case DS4_IQ4_XS: return iq4_xs;
    default: return any_super;
    }
}
#else
typedef int ds4_matmul_super_neon_is_for_arm;
#endif
