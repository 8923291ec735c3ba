/* Blocks of one quant type, DS4_TYPE, in one layout, DS4_LAYOUT: as units of 32 weights.
 *
 * Owns: where the bits of a block lie and what they mean on the device. Reference: the unpackers of
 * native/quants.c and quants_iq.c, whose integers these are. A unit has eight words of four signed
 * bytes, weight 4 j + t in byte t of word j. Types of 256 weights (DS4_SUPER) also give two integer
 * scales and minima per unit, for its first and second sixteen: weight = d sc w (+ m mn). Types of 32
 * and more give weight = d w (+ m); DS4_TWO_SCALES (NVFP4) has a float scale per sixteen.
 * Layouts: 0 the GGUF blocks, and the published artifacts 4 (IQ2_XXS), 5 (Q8_0), 6 (Q2_K pairs) and
 * 8 (IQ2_XS) of docs/layouts.md. Reads may touch the bytes before and after a tensor up to the next
 * multiple of 16; allocations are aligned to more than that.
 */
#ifndef DS4_CUDA_QUANTS_H
#define DS4_CUDA_QUANTS_H

#include "op_math.h"

#include "iq_grids.h"

#ifndef DS4_LAYOUT
#define DS4_LAYOUT 0
#endif

/* ---- geometry ----------------------------------------------------------------------------------- */

#if DS4_TYPE == 2 /* Q4_0 */
#define DS4_BLOCK_BYTES 18
#elif DS4_TYPE == 3 /* Q4_1 */
#define DS4_BLOCK_BYTES 20
#define DS4_HAS_MIN 1
#elif DS4_TYPE == 6 /* Q5_0 */
#define DS4_BLOCK_BYTES 22
#elif DS4_TYPE == 7 /* Q5_1 */
#define DS4_BLOCK_BYTES 24
#define DS4_HAS_MIN 1
#elif DS4_TYPE == 8 /* Q8_0 */
#define DS4_BLOCK_BYTES 34
#elif DS4_TYPE == 20 /* IQ4_NL */
#define DS4_BLOCK_BYTES 18
#elif DS4_TYPE == 39 /* MXFP4 */
#define DS4_BLOCK_BYTES 17
#elif DS4_TYPE == 40 /* NVFP4 */
#define DS4_BLOCK_BYTES 36
#define DS4_BLOCK_WEIGHTS 64
#define DS4_TWO_SCALES 1
#elif DS4_TYPE == 41 /* Q1_0 */
#define DS4_BLOCK_BYTES 18
#define DS4_BLOCK_WEIGHTS 128
#elif DS4_TYPE == 10 /* Q2_K */
#define DS4_BLOCK_BYTES 84
#define DS4_HAS_MIN 1
#define DS4_SUPER 1
#define DS4_SIXTEENS 1 /* the two scales of a unit differ */
#elif DS4_TYPE == 11 /* Q3_K */
#define DS4_BLOCK_BYTES 110
#define DS4_SUPER 1
#define DS4_SIXTEENS 1
#elif DS4_TYPE == 12 /* Q4_K */
#define DS4_BLOCK_BYTES 144
#define DS4_HAS_MIN 1
#define DS4_SUPER 1
#elif DS4_TYPE == 13 /* Q5_K */
#define DS4_BLOCK_BYTES 176
#define DS4_HAS_MIN 1
#define DS4_SUPER 1
#elif DS4_TYPE == 14 /* Q6_K */
#define DS4_BLOCK_BYTES 210
#define DS4_SUPER 1
#define DS4_SIXTEENS 1
#elif DS4_TYPE == 16 /* IQ2_XXS */
#define DS4_BLOCK_BYTES 66
#define DS4_SUPER 1
#elif DS4_TYPE == 17 /* IQ2_XS */
#define DS4_BLOCK_BYTES 74
#define DS4_SUPER 1
#define DS4_SIXTEENS 1
#elif DS4_TYPE == 18 /* IQ3_XXS */
#define DS4_BLOCK_BYTES 98
#define DS4_SUPER 1
#elif DS4_TYPE == 19 /* IQ1_S */
#define DS4_BLOCK_BYTES 50
#define DS4_SUPER 1
#elif DS4_TYPE == 21 /* IQ3_S */
#define DS4_BLOCK_BYTES 110
#define DS4_SUPER 1
#elif DS4_TYPE == 22 /* IQ2_S */
#define DS4_BLOCK_BYTES 82
#define DS4_SUPER 1
#define DS4_SIXTEENS 1
#elif DS4_TYPE == 23 /* IQ4_XS */
#define DS4_BLOCK_BYTES 136
#define DS4_SUPER 1
#elif DS4_TYPE == 29 /* IQ1_M */
#define DS4_BLOCK_BYTES 56
#define DS4_SUPER 1
#define DS4_SIXTEENS 1
#elif DS4_TYPE == 34 /* TQ1_0 */
#define DS4_BLOCK_BYTES 54
#define DS4_SUPER 1
#elif DS4_TYPE == 35 /* TQ2_0 */
#define DS4_BLOCK_BYTES 66
#define DS4_SUPER 1
#else
#error "DS4_TYPE is no quant type with kernels"
#endif

#ifndef DS4_HAS_MIN
#define DS4_HAS_MIN 0
#endif
#ifndef DS4_SUPER
#define DS4_SUPER 0
#endif
#ifndef DS4_SIXTEENS
#define DS4_SIXTEENS 0
#endif
#ifndef DS4_TWO_SCALES
#define DS4_TWO_SCALES 0
#endif
#ifndef DS4_BLOCK_WEIGHTS
#define DS4_BLOCK_WEIGHTS (DS4_SUPER ? 256 : 32)
#endif
#define DS4_UNITS (DS4_BLOCK_WEIGHTS / 32) /* of a block */

#ifndef DS4_GRID_ENTRIES
#define DS4_GRID_ENTRIES 0
typedef uint32_t ds4_grid_entry;
static __device__ const ds4_grid_entry *const ds4_grid = 0;
#endif

struct ds4_unit {
    int w[8];
    int sc[2], mn[2];
};

/* A block: its bytes, or its place in the sections of an artifact. */
struct ds4_block {
    const uint8_t *raw; /* all of it; in artifacts the codes */
    const uint8_t *scale, *extra;
    int parity;
};

/* ---- words -------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint16_t ds4_u16(const uint8_t *p) { return *(const uint16_t *)p; }

/* N words from any address, out of the aligned words around them. */
template <int N> static __device__ __forceinline__ void ds4_words(const uint8_t *p, uint32_t *out) {
    const uint32_t *from = (const uint32_t *)((uint64_t)p & ~(uint64_t)3);
    if (DS4_BLOCK_BYTES % 4 == 0) { /* then every field that is read by words is aligned */
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = from[i];
        return;
    }
    uint32_t shift = 8 * (uint32_t)((uint64_t)p & 3), low = from[0];
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t high = i + 1 < N || shift ? from[i + 1] : 0;
        out[i] = ds4_funnel(low, high, shift);
        low = high;
    }
}
static __device__ __forceinline__ uint32_t ds4_u32(const uint8_t *p) {
    uint32_t word[1];
    ds4_words<1>(p, word);
    return word[0];
}

/* Bit i of a nibble as bit 0 of byte i. */
static __device__ __forceinline__ uint32_t ds4_spread(uint32_t nibble) {
    return ((nibble & 15) * 0x00204081u) & 0x01010101u;
}
/* Four bytes below 128, each less `by`. */
static __device__ __forceinline__ uint32_t ds4_less(uint32_t bytes, uint32_t by) {
    return ((bytes | 0x80808080u) - by * 0x01010101u) ^ 0x80808080u;
}
/* Bytes that are not zero, negated where the sign nibble says so. */
static __device__ __forceinline__ uint32_t ds4_signed(uint32_t bytes, uint32_t nibble) {
    uint32_t ones = ds4_spread(nibble);
    return (bytes ^ ones * 255u) + ones;
}

/* ---- code books of sixteen values ---------------------------------------------------------------- */

#if DS4_TYPE == 20 || DS4_TYPE == 23
#define DS4_BOOK 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u
#elif DS4_TYPE == 39 || DS4_TYPE == 40
#define DS4_BOOK 0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu
#endif

#ifdef DS4_BOOK
/* The values of four nibbles of `q`, the lowest in byte 0. */
static __device__ __forceinline__ uint32_t ds4_look_up(uint32_t q) {
    const uint32_t book[4] = {DS4_BOOK};
    uint32_t index = q & 0x7777u, pick = 0x3210u | (q & 0x8888u) >> 1;
    return ds4_pick_bytes(ds4_pick_bytes(book[0], book[1], index),
                          ds4_pick_bytes(book[2], book[3], index), pick);
}
/* Low and high nibbles of four bytes. */
static __device__ __forceinline__ void ds4_look_up_word(uint32_t q, int &low, int &high) {
    uint32_t first = ds4_look_up(q), second = ds4_look_up(q >> 16);
    low = (int)ds4_pick_bytes(first, second, 0x6420);
    high = (int)ds4_pick_bytes(first, second, 0x7531);
}
#endif

/* ---- where a block lies --------------------------------------------------------------------------- */

/* Block b of row r (experts count as one tall matrix) of a tensor of `all` blocks in rows of `n`. */
static __device__ __forceinline__ ds4_block ds4_block_at(const uint8_t *data, int64_t all, int64_t r,
                                                         int n, int b) {
    int64_t i = r * n + b;
    (void)all, (void)i;
#if DS4_LAYOUT == 0
    return {data + i * DS4_BLOCK_BYTES, data, data, 0};
#elif DS4_LAYOUT == 4
    return {data + ((2 * all + 63) & ~63ll) + 64 * i, data + 2 * i, data, 0};
#elif DS4_LAYOUT == 5
    return {data + ((2 * all + 63) & ~63ll) + 32 * i, data + 2 * i, data, 0};
#elif DS4_LAYOUT == 8
    const uint8_t *extra = data + ((2 * all + 63) & ~63ll);
    return {extra + ((8 * all + 63) & ~63ll) + 64 * i, data + 2 * i, extra + 8 * i, 0};
#else /* 6: the same block of two neighbouring rows together */
    int64_t pairs = all / 2, p = (r >> 1) * n + b;
    const uint8_t *extra = data + ((8 * pairs + 63) & ~63ll);
    int q = (int)(r & 1);
    return {extra + ((32 * pairs + 63) & ~63ll) + 128 * p, data + 8 * p + 4 * q, extra + 32 * p, q};
#endif
}

/* ---- scales ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float ds4_half_at(const uint8_t *p) {
    return ds4_half_to_float(ds4_u16(p));
}

static __device__ __forceinline__ float ds4_block_d(const ds4_block &b) {
#if DS4_LAYOUT == 4 || DS4_LAYOUT == 8
    return 0.125f * ds4_half_at(b.scale);
#elif DS4_LAYOUT == 5 || DS4_LAYOUT == 6
    return ds4_half_at(b.scale);
#elif DS4_TYPE == 10
    return ds4_half_at(b.raw + 80);
#elif DS4_TYPE == 11
    return ds4_half_at(b.raw + 108);
#elif DS4_TYPE == 14
    return ds4_half_at(b.raw + 208);
#elif DS4_TYPE == 16 || DS4_TYPE == 17 || DS4_TYPE == 22 || DS4_TYPE == 19
    return 0.125f * ds4_half_at(b.raw);
#elif DS4_TYPE == 18
    return 0.25f * ds4_half_at(b.raw);
#elif DS4_TYPE == 29
    const uint8_t *s = b.raw + 48;
    uint32_t bits = (uint32_t)s[1] >> 4 | (s[3] & 0xf0u) | (s[5] & 0xf0u) << 4 | (s[7] & 0xf0u) << 8;
    return 0.125f * ds4_half_to_float((uint16_t)bits);
#elif DS4_TYPE == 34
    return ds4_half_at(b.raw + 52);
#elif DS4_TYPE == 35
    return ds4_half_at(b.raw + 64);
#elif DS4_TYPE == 39
    uint32_t e = b.raw[0];
    return ds4_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
#elif DS4_TYPE == 40
    (void)b; /* sixteens have their own */
    return 0.0f;
#else
    return ds4_half_at(b.raw);
#endif
}

#if DS4_HAS_MIN
/* Types of 256 store minus m. */
static __device__ __forceinline__ float ds4_block_m(const ds4_block &b) {
#if DS4_LAYOUT == 6
    return -ds4_half_at(b.scale + 2);
#elif DS4_TYPE == 10
    return -ds4_half_at(b.raw + 82);
#elif DS4_SUPER
    return -ds4_half_at(b.raw + 2);
#else
    return ds4_half_at(b.raw + 2);
#endif
}
#endif

#if DS4_TWO_SCALES
/* The scale of sixteen number s: half an unsigned E4M3 number; its NaN counts as zero. */
static __device__ __forceinline__ float ds4_sixteen_d(const ds4_block &b, int s) {
    uint32_t x = b.raw[s], exponent = x >> 3 & 15, mantissa = x & 7;
    if (x == 0x7f) return 0.0f;
    if (!exponent) return (float)mantissa * 0.0009765625f;
    return ds4_float((exponent + 119) << 23 | mantissa << 20);
}
#endif

/* ---- units ----------------------------------------------------------------------------------------- */

#if DS4_TYPE == 12 || DS4_TYPE == 13
static __device__ __forceinline__ void ds4_scales_k4(const uint8_t *s, int i, ds4_unit &out) {
    int j = i & 3;
    int scale = i < 4 ? s[j] & 63 : (s[8 + j] & 15) | (s[j] >> 2 & 48);
    int minimum = i < 4 ? s[4 + j] & 63 : s[8 + j] >> 4 | (s[4 + j] >> 2 & 48);
    out.sc[0] = out.sc[1] = scale;
    out.mn[0] = out.mn[1] = minimum;
}
#endif

#if DS4_TYPE == 34
static __device__ __forceinline__ uint32_t ds4_digits(const uint8_t *p, int power) {
    uint32_t word = 0;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        uint32_t byte = (uint32_t)p[t] * (uint32_t)power & 255;
        word |= (byte * 3 >> 8) << (8 * t);
    }
    return ds4_less(word, 1);
}
static __device__ __forceinline__ int ds4_power(int n) {
    return n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
}
#endif

#if DS4_TYPE == 16 || DS4_TYPE == 18
/* The sign bits of eight weights: seven are stored, the eighth makes the parity even. */
static __device__ __forceinline__ uint32_t ds4_eight_signs(uint32_t seven) {
    return seven | (uint32_t)(ds4_count_bits(seven) & 1) << 7;
}
#endif

#if DS4_TYPE == 16 || DS4_TYPE == 17 || DS4_TYPE == 22
static __device__ __forceinline__ void ds4_eight(uint64_t magnitudes, uint32_t signs, int *w) {
    w[0] = (int)ds4_signed((uint32_t)magnitudes, signs);
    w[1] = (int)ds4_signed((uint32_t)(magnitudes >> 32), signs >> 4);
}
#endif

/* Unit u of a block. `grid` is the type's code book, in global or shared memory. */
static __device__ __forceinline__ void ds4_decode(const ds4_block &block, int u,
                                                  const ds4_grid_entry *grid, ds4_unit &out) {
    const uint8_t *b = block.raw;
    uint32_t q[8];
    (void)grid;
    (void)u;
#if DS4_SUPER
    out.sc[0] = out.sc[1] = 1;
#endif
#if DS4_TYPE == 2 || DS4_TYPE == 3 || DS4_TYPE == 6 || DS4_TYPE == 7
    ds4_words<4>(b + DS4_BLOCK_BYTES - 16, q);
#if DS4_TYPE == 6 || DS4_TYPE == 7
    uint32_t high = ds4_u32(b + (DS4_TYPE == 6 ? 2 : 4));
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t low4 = q[j] & 0x0f0f0f0fu, high4 = q[j] >> 4 & 0x0f0f0f0fu;
#if DS4_TYPE == 6 || DS4_TYPE == 7
        low4 |= ds4_spread(high >> (4 * j)) << 4;
        high4 |= ds4_spread(high >> (16 + 4 * j)) << 4;
#endif
        const uint32_t offset = DS4_TYPE == 2 ? 8 : DS4_TYPE == 6 ? 16 : 0;
        out.w[j] = (int)(offset ? ds4_less(low4, offset) : low4);
        out.w[4 + j] = (int)(offset ? ds4_less(high4, offset) : high4);
    }
#elif DS4_TYPE == 8
#if DS4_LAYOUT == 5
    int4 first = *(const int4 *)b, second = *(const int4 *)(b + 16);
    out.w[0] = first.x, out.w[1] = first.y, out.w[2] = first.z, out.w[3] = first.w;
    out.w[4] = second.x, out.w[5] = second.y, out.w[6] = second.z, out.w[7] = second.w;
    (void)q;
#else
    ds4_words<8>(b + 2, q);
#pragma unroll
    for (int j = 0; j < 8; j++) out.w[j] = (int)q[j];
#endif
#elif DS4_TYPE == 41
    uint32_t bits = ds4_u32(b + 2 + 4 * u);
    (void)q;
#pragma unroll
    for (int j = 0; j < 8; j++) out.w[j] = (int)(~(ds4_spread(bits >> (4 * j)) * 0xfeu));
#elif DS4_TYPE == 20 || DS4_TYPE == 39 || DS4_TYPE == 23
    ds4_words<4>(b + (DS4_TYPE == 20 ? 2 : DS4_TYPE == 39 ? 1 : 8 + 16 * u), q);
#pragma unroll
    for (int j = 0; j < 4; j++) ds4_look_up_word(q[j], out.w[j], out.w[4 + j]);
#if DS4_TYPE == 23
    int low = b[4 + u / 2] >> (4 * (u & 1)) & 15, high = ds4_u16(b + 2) >> (2 * u) & 3;
    out.sc[0] = out.sc[1] = (low | high << 4) - 32;
#endif
#elif DS4_TYPE == 40
    ds4_words<4>(b + 4 + 16 * u, q);
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            ds4_look_up_word(q[2 * s + i], out.w[4 * s + i], out.w[4 * s + 2 + i]);
#elif DS4_TYPE == 10
#if DS4_LAYOUT == 6
    const uint8_t *scales = block.extra + 4 * (4 * (u / 4) + 2 * block.parity + u / 2 % 2);
    const uint32_t *codes = (const uint32_t *)b + 16 * (u / 4) + block.parity;
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] = codes[2 * j];
    int pair = *(const uint16_t *)(scales + 2 * (u & 1));
#else
    ds4_words<8>(b + 16 + 32 * (u / 4), q);
    int pair = ds4_u16(b + 2 * u);
#endif
#pragma unroll
    for (int j = 0; j < 8; j++) out.w[j] = (int)(q[j] >> (2 * (u % 4)) & 0x03030303u);
    out.sc[0] = pair & 15, out.mn[0] = pair >> 4 & 15;
    out.sc[1] = pair >> 8 & 15, out.mn[1] = pair >> 12;
#elif DS4_TYPE == 11
    uint32_t h[8];
    ds4_words<8>(b + 32 + 32 * (u / 4), q);
    ds4_words<8>(b, h);
#pragma unroll
    for (int j = 0; j < 8; j++)
        out.w[j] = (int)ds4_less((q[j] >> (2 * (u % 4)) & 0x03030303u) |
                                     (h[j] >> u & 0x01010101u) << 2, 4);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int s = 2 * u + i;
        int low = b[96 + s % 8] >> (4 * (s / 8)) & 15, high = b[104 + s % 4] >> (2 * (s / 4)) & 3;
        out.sc[i] = (low | high << 4) - 32;
    }
#elif DS4_TYPE == 12 || DS4_TYPE == 13
    ds4_words<8>(b + (DS4_TYPE == 12 ? 16 : 48) + 32 * (u / 2), q);
#if DS4_TYPE == 13
    uint32_t h[8];
    ds4_words<8>(b + 16, h);
#endif
#pragma unroll
    for (int j = 0; j < 8; j++) {
        out.w[j] = (int)(q[j] >> (4 * (u & 1)) & 0x0f0f0f0fu);
#if DS4_TYPE == 13
        out.w[j] |= (int)((h[j] >> u & 0x01010101u) << 4);
#endif
    }
    ds4_scales_k4(b + 4, u, out);
#elif DS4_TYPE == 14
    uint32_t h[8];
    int half = u / 4, part = u % 4;
    ds4_words<8>(b + 64 * half + 32 * (part & 1), q);
    ds4_words<8>(b + 128 + 32 * half, h);
#pragma unroll
    for (int j = 0; j < 8; j++)
        out.w[j] = (int)ds4_less((q[j] >> (4 * (part >> 1)) & 0x0f0f0f0fu) |
                                     (h[j] >> (2 * part) & 0x03030303u) << 4, 32);
    out.sc[0] = (int8_t)b[192 + 2 * u], out.sc[1] = (int8_t)b[193 + 2 * u];
#elif DS4_TYPE == 16
#if DS4_LAYOUT == 4
    uint2 both = *(const uint2 *)(b + 8 * u);
    uint32_t index = both.x, tail = both.y;
    (void)q;
#else
    ds4_words<2>(b + 2 + 8 * u, q);
    uint32_t index = q[0], tail = q[1];
#endif
#pragma unroll
    for (int g = 0; g < 4; g++)
        ds4_eight(grid[index >> (8 * g) & 255], ds4_eight_signs(tail >> (7 * g) & 127), out.w + 2 * g);
    out.sc[0] = out.sc[1] = 2 * (int)(tail >> 28) + 1;
#elif DS4_TYPE == 17
#if DS4_LAYOUT == 8
    uint2 both = *(const uint2 *)(b + 8 * u);
    q[0] = both.x, q[1] = both.y;
    int scales = block.extra[u];
#else
    ds4_words<2>(b + 2 + 8 * u, q);
    int scales = b[66 + u];
#endif
#pragma unroll
    for (int g = 0; g < 4; g++) {
        uint32_t code = q[g / 2] >> (16 * (g & 1)) & 0xffff, seven = code >> 9;
        ds4_eight(grid[code & 511], seven | (uint32_t)(ds4_count_bits(seven) & 1) << 7,
                  out.w + 2 * g);
    }
    out.sc[0] = 2 * (scales & 15) + 1, out.sc[1] = 2 * (scales >> 4) + 1;
#elif DS4_TYPE == 22
    uint32_t low = ds4_u32(b + 2 + 4 * u), signs = ds4_u32(b + 34 + 4 * u), high = b[66 + u];
    (void)q;
#pragma unroll
    for (int g = 0; g < 4; g++)
        ds4_eight(grid[(low >> (8 * g) & 255) | (high >> (2 * g) & 3) << 8],
                  signs >> (8 * g) & 255, out.w + 2 * g);
    out.sc[0] = 2 * (b[74 + u] & 15) + 1, out.sc[1] = 2 * (b[74 + u] >> 4) + 1;
#elif DS4_TYPE == 18
    uint32_t tail = ds4_u32(b + 66 + 4 * u);
    ds4_words<2>(b + 2 + 8 * u, q);
#pragma unroll
    for (int g = 0; g < 4; g++) {
        uint32_t signs = ds4_eight_signs(tail >> (7 * g) & 127), pair = q[g / 2] >> (16 * (g & 1));
        out.w[2 * g] = (int)ds4_signed(grid[pair & 255], signs);
        out.w[2 * g + 1] = (int)ds4_signed(grid[pair >> 8 & 255], signs >> 4);
    }
    out.sc[0] = out.sc[1] = 2 * (int)(tail >> 28) + 1;
#elif DS4_TYPE == 21
    uint32_t high = b[66 + u], signs = ds4_u32(b + 74 + 4 * u);
    ds4_words<2>(b + 2 + 8 * u, q);
#pragma unroll
    for (int g = 0; g < 4; g++) {
        uint32_t pair = q[g / 2] >> (16 * (g & 1)), bits = high >> (2 * g), eight = signs >> (8 * g);
        out.w[2 * g] = (int)ds4_signed(grid[(pair & 255) | (bits & 1) << 8], eight);
        out.w[2 * g + 1] = (int)ds4_signed(grid[(pair >> 8 & 255) | (bits & 2) << 7], eight >> 4);
    }
    out.sc[0] = out.sc[1] = 2 * (b[106 + u / 2] >> (4 * (u & 1)) & 15) + 1;
#elif DS4_TYPE == 19
    uint32_t low = ds4_u32(b + 2 + 4 * u), high = ds4_u16(b + 34 + 2 * u);
    (void)q;
#pragma unroll
    for (int g = 0; g < 4; g++) {
        uint64_t digits = grid[(low >> (8 * g) & 255) | (high >> (3 * g) & 7) << 8];
        uint32_t by = high & 0x8000 ? 9 : 7; /* 8 digit - 8, then +-1 */
        out.w[2 * g] = (int)ds4_less((uint32_t)digits, by);
        out.w[2 * g + 1] = (int)ds4_less((uint32_t)(digits >> 32), by);
    }
    out.sc[0] = out.sc[1] = 2 * (int)(high >> 12 & 7) + 1;
#elif DS4_TYPE == 29
    uint32_t low = ds4_u32(b + 4 * u), high = ds4_u16(b + 32 + 2 * u);
    (void)q;
#pragma unroll
    for (int g = 0; g < 4; g++) {
        uint32_t four = high >> (4 * g);
        uint64_t digits = grid[(low >> (8 * g) & 255) | (four & 7) << 8];
        uint32_t by = four & 8 ? 9 : 7;
        out.w[2 * g] = (int)ds4_less((uint32_t)digits, by);
        out.w[2 * g + 1] = (int)ds4_less((uint32_t)(digits >> 32), by);
    }
    int scales = ds4_u16(b + 48 + 2 * (u / 2)) >> (6 * (u & 1));
    out.sc[0] = 2 * (scales & 7) + 1, out.sc[1] = 2 * (scales >> 3 & 7) + 1;
#elif DS4_TYPE == 34
    (void)q;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const uint8_t *from = b + 4 * j;
        int digit = u;
        if (u == 5 || u == 6) from = b + 32 + 4 * (j % 4), digit = 2 * (u - 5) + j / 4;
        if (u == 7) from = j < 4 ? b + 32 + 4 * j : b + 48, digit = j < 4 ? 4 : j - 4;
        out.w[j] = (int)ds4_digits(from, ds4_power(digit));
    }
#elif DS4_TYPE == 35
    ds4_words<8>(b + 32 * (u / 4), q);
#pragma unroll
    for (int j = 0; j < 8; j++)
        out.w[j] = (int)ds4_less(q[j] >> (2 * (u % 4)) & 0x03030303u, 1);
#endif
}

#endif
