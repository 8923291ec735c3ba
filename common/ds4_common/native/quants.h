/* Inside of the quant kernels: block geometry, the unpacked form, activation columns.
 *
 * Owns: what every kernel file must agree on. Nothing here is exported from the library; the seam
 * to the executor is matmul.h. Little-endian hosts only, as GGUF files are.
 */
#ifndef DS4_QUANTS_H
#define DS4_QUANTS_H

#include <string.h>

#include "matmul.h"

#define DS4_INLINE static inline __attribute__((always_inline))

/* ---- ggml type numbers ----------------------------------------------------------------------- */

enum {
    DS4_F32 = 0,
    DS4_F16 = 1,
    DS4_Q4_0 = 2,
    DS4_Q4_1 = 3,
    DS4_Q5_0 = 6,
    DS4_Q5_1 = 7,
    DS4_Q8_0 = 8,
    DS4_Q2_K = 10,
    DS4_Q3_K = 11,
    DS4_Q4_K = 12,
    DS4_Q5_K = 13,
    DS4_Q6_K = 14,
    DS4_IQ2_XXS = 16,
    DS4_IQ2_XS = 17,
    DS4_IQ3_XXS = 18,
    DS4_IQ1_S = 19,
    DS4_IQ4_NL = 20,
    DS4_IQ3_S = 21,
    DS4_IQ2_S = 22,
    DS4_IQ4_XS = 23,
    DS4_IQ1_M = 29,
    DS4_I32 = 26,  /* tables of numbers: no kernel, no floats */
    DS4_BF16 = 30,
    DS4_TQ1_0 = 34,
    DS4_TQ2_0 = 35,
    DS4_MXFP4 = 39,
    DS4_NVFP4 = 40,
    DS4_Q1_0 = 41
};

/* ---- the unpacked form: what the scalar reference computes with ------------------------------ */

#define DS4_SUPER 256 /* weights per K or IQ block */
#define DS4_SUB 16    /* weights per sub-scale inside it */

/* Types with activations in blocks of 32 fill w[0 .. block_weights - 1] with weight = d * w (+ m);
 * NVFP4 with weight = fs[k / 16] * w[k]. Types of 256 fill all of it with
 * weight = (d * sc[k / 16]) * w[k] (+ m * mn[k / 16], m being minus the stored dmin). */
typedef struct {
    float d, m, fs[4];
    int16_t w[DS4_SUPER];
    int16_t sc[DS4_SUPER / DS4_SUB];
    int16_t mn[DS4_SUPER / DS4_SUB];
} ds4_unpacked;

typedef void (*ds4_unpack_fn)(const uint8_t *block, ds4_unpacked *out);

typedef struct {
    uint32_t type;
    int16_t block_bytes, block_weights;
    int8_t act;           /* ds4_act */
    int8_t has_min;       /* a second fmaf per block */
    ds4_unpack_fn unpack; /* NULL for float types */
} ds4_quant;

/* Traits of a ggml type, or NULL for an unknown one. */
const ds4_quant *ds4_quant_find(uint32_t type);

/* One float weight from its stored bits. */
float ds4_float_weight(uint32_t type, const void *row, int64_t k);

/* ---- the X8 layout (docs/layouts.md) --------------------------------------------------------- */

#define DS4_X8_ROWS 8
#define DS4_BLOCK_BYTES_MAX 210 /* Q6_K */

int ds4_x8_exists(uint32_t type);

/* Block of row `r` (0..7) of a group, as raw GGUF bytes. */
void ds4_x8_block(uint32_t type, const uint8_t *group, int r, uint8_t *raw);

/* Byte offset of the interleaved quants of a legacy type in a group: after scales, minima and
 * fifth bits. */
DS4_INLINE int ds4_x8_quants_offset(uint32_t type) {
    switch (type) {
    case DS4_Q4_1: return 32;
    case DS4_Q5_0: return 48;
    case DS4_Q5_1: return 64;
    default: return 16; /* Q4_0, Q8_0 */
    }
}

/* Block b of row r in any layout, as raw GGUF bytes: in place, or put together in `raw`. */
const uint8_t *ds4_weight_block(const ds4_weight *w, const ds4_quant *quant, int64_t r, int64_t b,
                                uint8_t *raw);

/* ---- half precision -------------------------------------------------------------------------- */

/* The value that the F16C instruction gives, denormals included; a NaN stays some NaN. */
static inline float ds4_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = 0x7f800000u | (mantissa << 13);
    } else if (exponent) {
        bits = ((exponent + 112) << 23) | (mantissa << 13);
    } else { /* denormal or zero: mantissa * 2^-24, exact */
        float value = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

/* Half of 2^(e - 127), the block scale of MXFP4 whose values are stored doubled. */
static inline float ds4_e8m0_half(uint8_t e) {
    uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

/* Half of an unsigned E4M3 number, the scale of NVFP4; its NaN counts as zero, bit 7 as nothing. */
static inline float ds4_ue4m3_half(uint8_t x) {
    int exponent = (x >> 3) & 15, mantissa = x & 7;
    if (x == 0x7f) return 0.0f;
    if (!exponent) return (float)mantissa * 0x1p-10f;
    uint32_t bits = (uint32_t)(exponent + 119) << 23 | (uint32_t)mantissa << 20;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static inline uint16_t ds4_load_u16(const void *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static inline uint32_t ds4_load_u32(const void *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* ---- activation columns ---------------------------------------------------------------------- */

static inline size_t ds4_round64(size_t n) { return (n + 63) & ~(size_t)63; }

/* DS4_ACT_Q8_32: planes over cols/32 blocks. x[k] ~ d * q[k]; sum = sum of q, s = d * sum. */
typedef struct {
    const int8_t *q;
    const float *d, *s;
    const int32_t *sum;
} ds4_act32;

static inline ds4_act32 ds4_act32_view(const void *act, int64_t cols) {
    const char *p = (const char *)act + ds4_round64((size_t)cols);
    const float *d = (const float *)(const void *)p;
    int64_t blocks = cols / 32;
    return (ds4_act32){(const int8_t *)act, d, d + blocks,
                       (const int32_t *)(const void *)(d + 2 * blocks)};
}

/* DS4_ACT_Q8_256: planes over cols/256 blocks. sums[16 * b ...] are the sums of q over sixteen
 * consecutive values, even sixteens first: 0,2,..,14,1,3,..,15 - the order in which a 32-byte
 * vector meets its sub-scales. */
typedef struct {
    const int8_t *q;
    const int16_t *sums;
    const float *d;
} ds4_act256;

static inline ds4_act256 ds4_act256_view(const void *act, int64_t cols) {
    const char *p = (const char *)act + cols;
    return (ds4_act256){(const int8_t *)act, (const int16_t *)(const void *)p,
                        (const float *)(const void *)(p + cols / 8)};
}

/* Place of the sum of sixteen number `sub` in ds4_act256.sums. */
static inline int ds4_sum_place(int sub) { return (sub >> 1) + ((sub & 1) << 3); }

/* A block whose largest magnitude is below this is stored as zeros: 127/amax must stay finite. */
#define DS4_ACT_TINY 1e-30f

void ds4_act_quantize_scalar(int format, const float *x, int64_t cols, void *out);
void ds4_act_quantize_avx2(int format, const float *x, int64_t cols, void *out);
void ds4_act_quantize_neon(int format, const float *x, int64_t cols, void *out);

/* ---- kernels per instruction set ------------------------------------------------------------- */

ds4_matmul_fn ds4_matmul_scalar(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_avx2_legacy(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_avx2_super(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_avx2_iq2(uint32_t type, uint32_t layout); /* few columns of IQ2_XXS and IQ2_XS */
ds4_matmul_fn ds4_matmul_avx2_super_many(uint32_t type, uint32_t layout); /* several columns */
ds4_matmul_fn ds4_matmul_avx2_float(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_avxvnni_legacy(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_avxvnni_many(uint32_t type, uint32_t layout); /* blocks of 32 */
ds4_matmul_fn ds4_matmul_avxvnni_super(uint32_t type, uint32_t layout); /* K, IQ and TQ types */
/* Of them, three columns and more. */
void ds4_matmul_avxvnni_super_many(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                                   size_t act_stride, int64_t n, float *y, int64_t ldy);
ds4_matmul_fn ds4_matmul_avx512_legacy(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_avx512_blocks(uint32_t type); /* raw */
ds4_matmul_fn ds4_matmul_avx512_many(uint32_t type, uint32_t layout); /* blocks of 32 */
ds4_matmul_fn ds4_matmul_avx512_rows(uint32_t type); /* raw */
ds4_matmul_fn ds4_matmul_avx512_super(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_avx512_few(uint32_t type, uint32_t layout); /* K, IQ and TQ types */
ds4_matmul_fn ds4_matmul_avx512_iq2(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_avx512_q2_k_pairs(void); /* aligned */
ds4_matmul_fn ds4_matmul_amx_legacy(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_amx_super(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_neon_legacy(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_neon_super(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_neon_super_x8(uint32_t type);
ds4_matmul_fn ds4_matmul_i8mm_legacy(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_i8mm_super(uint32_t type, uint32_t layout);
ds4_matmul_fn ds4_matmul_neon_float(uint32_t type, uint32_t layout);

/* ---- IQ and TQ types ------------------------------------------------------------------------- */

void ds4_unpack_iq1_s(const uint8_t *block, ds4_unpacked *out);
void ds4_unpack_iq1_m(const uint8_t *block, ds4_unpacked *out);
void ds4_unpack_iq2_xxs(const uint8_t *block, ds4_unpacked *out);
void ds4_unpack_iq2_xs(const uint8_t *block, ds4_unpacked *out);
void ds4_unpack_iq2_s(const uint8_t *block, ds4_unpacked *out);
void ds4_unpack_iq3_xxs(const uint8_t *block, ds4_unpacked *out);
void ds4_unpack_iq3_s(const uint8_t *block, ds4_unpacked *out);
void ds4_unpack_iq4_xs(const uint8_t *block, ds4_unpacked *out);
void ds4_unpack_tq1_0(const uint8_t *block, ds4_unpacked *out);
void ds4_unpack_tq2_0(const uint8_t *block, ds4_unpacked *out);

/* The half-precision scale of an IQ1_M block: a nibble in each of its four words of scales. */
uint16_t ds4_iq1_m_scale(const uint8_t *scales);

extern const int8_t ds4_iq4_values[16]; /* IQ4_NL, IQ4_XS */
extern const int8_t ds4_fp4_values[16]; /* E2M1 doubled: MXFP4, NVFP4 */

extern const uint64_t ds4_iq2xxs_grid[256]; /* eight magnitudes of 8, 25 or 43 */
extern const uint64_t ds4_iq2xs_grid[512];
/* The same books for byte look-ups: three of an entry's weights in a byte, two bits each. */
extern const uint8_t ds4_iq2xxs_thirds[3 * 256];
extern const uint8_t ds4_iq2xs_thirds[3 * 512];
extern const uint64_t ds4_iq2s_grid[1024];
extern const uint64_t ds4_iq1s_grid[2048];  /* eight times digit + 1: 0, 8 or 16 */
extern const uint32_t ds4_iq3xxs_grid[256]; /* four magnitudes of 4 to 62 */
extern const uint32_t ds4_iq3s_grid[512];   /* four odd magnitudes up to 15 */
/* 0xff in byte i where value i is negative; the eighth sign makes the parity even. */
extern const uint64_t ds4_iq2_sign_mask[128];

#endif
