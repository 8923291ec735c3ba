/* Pieces shared by the NEON kernel files. Include only from *_neon.c.
 *
 * They want ARMv8.2 with the dot product extension (every 64-bit server core since 2018, Apple M1);
 * ds4_isa_best asks the kernel for it. vdotq_s32 sums four products of signed bytes into each int32
 * lane: exact, so order does not matter until a float is involved.
 */
#ifndef DS4_NEON_H
#define DS4_NEON_H

#include <arm_neon.h>

#include "quants.h"

/* Half to single precision, exact. */
DS4_INLINE float neon_half(const void *p) {
    __fp16 h;
    memcpy(&h, p, 2);
    return (float)h;
}

/* Four halves to floats. */
DS4_INLINE float32x4_t neon_half4(const void *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
}

DS4_INLINE int8x16_t low_nibbles(uint8x16_t v) {
    return vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15)));
}

DS4_INLINE int8x16_t high_nibbles(uint8x16_t v) { return vreinterpretq_s8_u8(vshrq_n_u8(v, 4)); }

/* The bits of v that lie at `from` moved to `to` and masked there, in every byte. Written with the
 * compiler's vector shifts: their counts become constants of the instruction. */
DS4_INLINE uint8x16_t move_bits(uint8x16_t v, int from, int to, int mask) {
    const int left = from > to ? 255 >> (from - to) : 255 << (to - from) & 255;
    v = from > to ? v >> (from - to) : v << (to - from);
    return left == mask ? v : vandq_u8(v, vdupq_n_u8((uint8_t)mask));
}

/* `bit` in byte i where bit i of the sixteen bits at p is set. */
DS4_INLINE int8x16_t spread_bits(const uint8_t *p, int8_t bit) {
    const uint8x16_t place = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t v = vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1]));
    return vreinterpretq_s8_u8(vandq_u8(vtstq_u8(v, place), vdupq_n_u8((uint8_t)bit)));
}

/* No load crosses this: left alone, the compiler hoists them all and spills what it has no registers for. */
DS4_INLINE void in_order(void) { __asm__ volatile("" ::: "memory"); }

/* A dot product of each dword of w with dword `lane` of x. */
DS4_INLINE int32x4_t dot_lane(int32x4_t acc, int8x16_t w, int8x16_t x, int lane) {
    switch (lane) {
    case 0: return vdotq_laneq_s32(acc, w, x, 0);
    case 1: return vdotq_laneq_s32(acc, w, x, 1);
    case 2: return vdotq_laneq_s32(acc, w, x, 2);
    default: return vdotq_laneq_s32(acc, w, x, 3);
    }
}

/* Four of them, with dwords 0 to 3 of x. */
DS4_INLINE int32x4_t dot4(int32x4_t acc, int8x16_t w0, int8x16_t w1, int8x16_t w2, int8x16_t w3,
                          int8x16_t x) {
    acc = dot_lane(dot_lane(acc, w0, x, 0), w1, x, 1);
    return dot_lane(dot_lane(acc, w2, x, 2), w3, x, 3);
}

/* Four rows of four dwords become four columns. */
DS4_INLINE void transpose4(const int8x16_t *in, int8x16_t *out) {
    int32x4_t a = vreinterpretq_s32_s8(in[0]), b = vreinterpretq_s32_s8(in[1]);
    int32x4_t c = vreinterpretq_s32_s8(in[2]), d = vreinterpretq_s32_s8(in[3]);
    int64x2_t ab0 = vreinterpretq_s64_s32(vtrn1q_s32(a, b));
    int64x2_t ab1 = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
    int64x2_t cd0 = vreinterpretq_s64_s32(vtrn1q_s32(c, d));
    int64x2_t cd1 = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
    out[0] = vreinterpretq_s8_s64(vtrn1q_s64(ab0, cd0));
    out[1] = vreinterpretq_s8_s64(vtrn1q_s64(ab1, cd1));
    out[2] = vreinterpretq_s8_s64(vtrn2q_s64(ab0, cd0));
    out[3] = vreinterpretq_s8_s64(vtrn2q_s64(ab1, cd1));
}

#endif
