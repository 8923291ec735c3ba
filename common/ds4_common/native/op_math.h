/* Scalar arithmetic that every vector version repeats operation for operation.
 *
 * Owns: the one exponential of the executor and float <-> half conversion. Accuracy of ds4_exp: under
 * 2 units in the last place; below -87 it is 0, above 88 it stays at exp(88).
 */
#ifndef DS4_OP_MATH_H
#define DS4_OP_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define DS4_EXP_LOW -87.0f
#define DS4_EXP_HIGH 88.0f
#define DS4_LOG2E 1.44269504088896341f
#define DS4_LN2_HIGH 0.693359375f /* exact product with every exponent */
#define DS4_LN2_LOW -2.12194440e-4f
#define DS4_ROUND 0x1.8p23f /* adding it rounds to an integer in the low bits */
/* Minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2 (Cephes expf). */
#define DS4_EXP_P0 1.9875691500e-4f
#define DS4_EXP_P1 1.3981999507e-3f
#define DS4_EXP_P2 8.3334519073e-3f
#define DS4_EXP_P3 4.1665795894e-2f
#define DS4_EXP_P4 1.6666665459e-1f
#define DS4_EXP_P5 5.0000001201e-1f

static inline uint32_t ds4_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float ds4_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline float ds4_exp(float x) {
    float c = DS4_EXP_LOW > x ? DS4_EXP_LOW : x;
    c = DS4_EXP_HIGH < c ? DS4_EXP_HIGH : c;
    float shifted = fmaf(c, DS4_LOG2E, DS4_ROUND);
    float n = shifted - DS4_ROUND;
    float r = fmaf(n, -DS4_LN2_HIGH, c);
    r = fmaf(n, -DS4_LN2_LOW, r);
    float p = DS4_EXP_P0;
    p = fmaf(p, r, DS4_EXP_P1);
    p = fmaf(p, r, DS4_EXP_P2);
    p = fmaf(p, r, DS4_EXP_P3);
    p = fmaf(p, r, DS4_EXP_P4);
    p = fmaf(p, r, DS4_EXP_P5);
    p = fmaf(p, r * r, r) + 1.0f;
    float scaled = ds4_float(ds4_bits(p) + (ds4_bits(shifted) << 23));
    if (x < DS4_EXP_LOW) return 0.0f;
    return x != x ? x : scaled;
}

/* SiLU as glu uses it. */
static inline float ds4_silu(float x) { return x / (1.0f + ds4_exp(-x)); }

/* Modes of gated units (contract/ops.py, GatedUnit). */
enum { DS4_GLU_SILU = 0, DS4_GLU_GELU = 1, DS4_GLU_SHIFTED = 2, DS4_GLU_KINDS };

/* What a gated unit puts through the sigmoid: the value itself, the GELU's polynomial
 * 2 sqrt(2/pi) (x + 0.044715 x^3), or a multiple. */
#define DS4_GELU_LINEAR 1.5957691216057308f
#define DS4_GELU_CUBIC 7.1354814364e-2f

static inline float ds4_gate_argument(int mode, float x, float alpha) {
    if (mode == DS4_GLU_GELU) return x * fmaf(DS4_GELU_CUBIC, x * x, DS4_GELU_LINEAR);
    return mode == DS4_GLU_SHIFTED ? x * alpha : x;
}

/* cap * tanh(x / cap); `factor` = -2 / cap. Absolute error about 1e-7 * cap. */
static inline float ds4_soft_cap(float x, float cap, float factor) {
    float e = ds4_exp(fabsf(x) * factor);
    return copysignf(cap * ((1.0f - e) / (1.0f + e)), x);
}

/* Same bits as the F16C instruction: nearest even, denormals kept, a NaN stays a NaN. */
static inline uint16_t ds4_f32_to_f16(float x) {
    uint32_t bits = ds4_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (magnitude < 0x38800000) { /* denormal: the float adder rounds to multiples of 2^-24 */
        float value = ds4_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (ds4_bits(value) - 0x3f000000));
    }
    uint32_t even = magnitude >> 13 & 1;
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + even) >> 13));
}

#endif
