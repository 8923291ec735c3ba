/* NEON versions of kv.c: the same operations on the same lanes in the same order, four at a time. */
#include "kv.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <math.h>

#include "neon.h"
#include "op_vector.h"

DS4_INLINE float32x4_t cached4(const int type, const void *tile, int64_t i) {
    if (type == DS4_KV_F32) return vld1q_f32((const float *)tile + i);
    if (type == DS4_KV_F16) return neon_half4((const uint16_t *)tile + i);
    if (type == DS4_KV_BF16)
        return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)tile + i), 16));
    uint32_t four;
    memcpy(&four, (const int8_t *)tile + i, 4);
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

/* ---- keys, a lane is a position ----------------------------------------------------------------------- */

/* rows x 4*vectors sums over `count` dims (kv_avx2.c). */
DS4_INLINE void score_block(const int type, const float *q, const int rows, int64_t dim,
                            int64_t count, const void *k, int64_t page_tokens, int64_t t,
                            const int vectors, const uint16_t *scales, int first, float *scores,
                            int64_t ld) {
    float32x4_t sum[DS4_SCORE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sum[r][j] = vdupq_n_f32(0.0f);
    for (int64_t d = 0; d < count; d++) {
        float32x4_t key[4];
        for (int j = 0; j < vectors; j++) key[j] = cached4(type, k, d * page_tokens + t + 4 * j);
        for (int r = 0; r < rows; r++) {
            float query = q[r * dim + d];
            for (int j = 0; j < vectors; j++) sum[r][j] = vfmaq_n_f32(sum[r][j], key[j], query);
        }
    }
    for (int j = 0; j < vectors; j++) {
        float32x4_t scale = vdupq_n_f32(0.0f);
        if (type == DS4_KV_Q8_0) scale = neon_half4(scales + t + 4 * j);
        for (int r = 0; r < rows; r++) {
            float *to = scores + r * ld + t + 4 * j;
            if (type == DS4_KV_Q8_0)
                sum[r][j] = vfmaq_f32(first ? vdupq_n_f32(0.0f) : vld1q_f32(to), scale, sum[r][j]);
            vst1q_f32(to, sum[r][j]);
        }
    }
}

DS4_INLINE void score_lanes(const int type, const float *q, const int rows, int64_t dim,
                            const void *k, int64_t page_tokens, int64_t t, const int vectors,
                            float *scores, int64_t ld) {
    if (type != DS4_KV_Q8_0) {
        score_block(type, q, rows, dim, dim, k, page_tokens, t, vectors, NULL, 0, scores, ld);
        return;
    }
    for (int64_t b = 0; b < dim / DS4_KV_BLOCK; b++)
        score_block(type, q + b * DS4_KV_BLOCK, rows, dim, DS4_KV_BLOCK,
                    ds4_kv_codes(k, b, page_tokens), page_tokens, t, vectors,
                    ds4_kv_scales(k, b, page_tokens), b == 0, scores, ld);
}

DS4_INLINE void score_rows(const int type, const float *q, const int rows, int64_t dim,
                           const void *k, int64_t page_tokens, int64_t tokens8, float *scores,
                           int64_t ld) {
    int64_t t = 0;
    for (; t + 16 <= tokens8; t += 16)
        score_lanes(type, q, rows, dim, k, page_tokens, t, 4, scores, ld);
    if (t < tokens8) score_lanes(type, q, rows, dim, k, page_tokens, t, 2, scores, ld);
}

/* ---- keys, a lane is a dim ---------------------------------------------------------------------------- */

/* Eight chains of one row and position: lanes 0 to 3, and 4 to 7. */
typedef struct {
    float32x4_t low, high;
} lanes8;

DS4_INLINE lanes8 chain(const int type, lanes8 sum, const float *q, const void *k, int64_t at,
                        int64_t count) {
    for (int64_t d = 0; d < count; d += 8) {
        sum.low = vfmaq_f32(sum.low, vld1q_f32(q + d), cached4(type, k, at + d));
        sum.high = vfmaq_f32(sum.high, vld1q_f32(q + d + 4), cached4(type, k, at + d + 4));
    }
    return sum;
}

DS4_INLINE float score_one(const int type, const float *q, int64_t dim, const void *k,
                           int64_t page_tokens, int64_t width, int64_t t) {
    const lanes8 none = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    lanes8 total = none;
    float lane[8];
    if (type == DS4_KV_Q8_0) {
        for (int64_t b = 0; b < dim / DS4_KV_BLOCK; b++) {
            lanes8 part = chain(type, none, q + b * DS4_KV_BLOCK, ds4_kv_codes(k, b, page_tokens),
                                t * DS4_KV_BLOCK, DS4_KV_BLOCK);
            float scale = neon_half(ds4_kv_scales(k, b, page_tokens) + t);
            total.low = vfmaq_n_f32(total.low, part.low, scale);
            total.high = vfmaq_n_f32(total.high, part.high, scale);
        }
    } else {
        total = chain(type, total, q, k, t * width, dim / 8 * 8);
    }
    vst1q_f32(lane, total.low), vst1q_f32(lane + 4, total.high);
    if (type != DS4_KV_Q8_0 && dim % 8) {
        float rest[8];
        vst1q_f32(rest, cached4(type, k, t * width + dim / 8 * 8));
        vst1q_f32(rest + 4, cached4(type, k, t * width + dim / 8 * 8 + 4));
        for (int64_t i = 0; i < dim % 8; i++) lane[i] = fmaf(q[dim / 8 * 8 + i], rest[i], lane[i]);
    }
    return ds4_fold(lane, 8);
}

DS4_INLINE void score_along(const int type, const float *q, int rows, int64_t dim, const void *k,
                            int64_t page_tokens, int64_t width, int64_t tokens, float *scores,
                            int64_t ld) {
    for (int64_t t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++)
            scores[r * ld + t] = score_one(type, q + r * dim, dim, k, page_tokens, width, t);
}

/* ---- values -------------------------------------------------------------------------------------------- */

enum { FEW_ROWS = 3 }; /* 8 vectors of sums each; of more, 4: of 32 registers, 24 at most */

DS4_INLINE void value_block(const int type, const float *p, int64_t ld, const int rows,
                            int64_t tokens, const void *v, int64_t step, const int vectors,
                            int64_t vdim, float *out) {
    float32x4_t sum[DS4_VALUE_ROWS][8];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sum[r][j] = vld1q_f32(out + r * vdim + 4 * j);
    for (int64_t t = 0; t < tokens; t++)
        for (int j = 0; j < vectors; j++) {
            float32x4_t value = cached4(type, v, t * step + 4 * j);
            for (int r = 0; r < rows; r++) sum[r][j] = vfmaq_n_f32(sum[r][j], value, p[r * ld + t]);
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) vst1q_f32(out + r * vdim + 4 * j, sum[r][j]);
}

DS4_INLINE void scaled_block(const float *p, int64_t ld, const int rows, int64_t from,
                             int64_t tokens, const uint16_t *scales, const int8_t *codes,
                             int64_t vdim, float *out) {
    float weights[DS4_VALUE_ROWS * DS4_SCALED_TOKENS];
    for (int64_t first = 0; first < tokens; first += DS4_SCALED_TOKENS) {
        int64_t left = tokens - first, count = left < DS4_SCALED_TOKENS ? left : DS4_SCALED_TOKENS;
        for (int64_t t = 0; t < count; t++)
            for (int r = 0; r < rows; r++)
                weights[r * DS4_SCALED_TOKENS + t] =
                    p[r * ld + first + t] * neon_half(scales + from + first + t);
        const int vectors = rows <= FEW_ROWS ? 8 : 4;
        for (int d = 0; d < DS4_KV_BLOCK; d += 4 * vectors)
            value_block(DS4_KV_Q8_0, weights, DS4_SCALED_TOKENS, rows, count,
                        codes + (from + first) * DS4_KV_BLOCK + d, DS4_KV_BLOCK, vectors, vdim,
                        out + d);
    }
}

DS4_INLINE void value_rows(const int type, const float *p, int64_t ld, const int rows, int64_t from,
                           int64_t tokens, const void *v, int64_t page_tokens, int64_t width,
                           int64_t vdim, float *out) {
    int64_t d = 0, size = ds4_kv_code_bytes(type);
    if (type == DS4_KV_Q8_0) {
        for (int64_t b = 0; b < vdim / DS4_KV_BLOCK; b++)
            scaled_block(p, ld, rows, from, tokens, ds4_kv_scales(v, b, page_tokens),
                         ds4_kv_codes(v, b, page_tokens), vdim, out + b * DS4_KV_BLOCK);
        return;
    }
    const char *at = (const char *)v + from * width * size;
    const int vectors = rows <= FEW_ROWS ? 8 : 4;
    for (; d + 4 * vectors <= vdim; d += 4 * vectors)
        value_block(type, p, ld, rows, tokens, at + d * size, width, vectors, vdim, out + d);
    for (; d < vdim; d += 8)
        value_block(type, p, ld, rows, tokens, at + d * size, width, 2, vdim, out + d);
}

/* ---- encoding ------------------------------------------------------------------------------------------ */

static void encode_f16(const float *x, int64_t n, void *codes, uint16_t *scales) {
    uint16_t *y = codes;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1_u16(y + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
    ds4_kv_scalar[DS4_KV_F16].encode(x + i, n - i, y + i, scales);
}

static void encode_q8(const float *x, int64_t n, void *codes, uint16_t *scales) {
    ds4_kv_encode_q8(x, n, codes, scales, DS4_ISA_NEON);
}

static void encode_f32(const float *x, int64_t n, void *codes, uint16_t *scales) {
    ds4_kv_scalar[DS4_KV_F32].encode(x, n, codes, scales);
}

static void encode_bf16(const float *x, int64_t n, void *codes, uint16_t *scales) {
    ds4_kv_scalar[DS4_KV_BF16].encode(x, n, codes, scales);
}

#define ROWS_CASE(call, n) \
    case n: call; break

#define KERNELS(name, number)                                                                        \
    static void score_##name(const float *q, int rows, int64_t dim, const void *k, const void *next, \
                             int64_t page_tokens, int64_t tokens8, float *scores, int64_t ld) {      \
        __builtin_prefetch(next);                                                                    \
        switch (rows) {                                                                              \
            ROWS_CASE(score_rows(number, q, 1, dim, k, page_tokens, tokens8, scores, ld), 1);        \
            ROWS_CASE(score_rows(number, q, 2, dim, k, page_tokens, tokens8, scores, ld), 2);        \
            ROWS_CASE(score_rows(number, q, 3, dim, k, page_tokens, tokens8, scores, ld), 3);        \
            ROWS_CASE(score_rows(number, q, 4, dim, k, page_tokens, tokens8, scores, ld), 4);        \
            ROWS_CASE(score_rows(number, q, 5, dim, k, page_tokens, tokens8, scores, ld), 5);        \
            ROWS_CASE(score_rows(number, q, 6, dim, k, page_tokens, tokens8, scores, ld), 6);        \
        }                                                                                            \
    }                                                                                                \
    static void score_along_##name(const float *q, int rows, int64_t dim, const void *k,             \
                                   const void *next, int64_t page_tokens, int64_t width,             \
                                   int64_t tokens, float *scores, int64_t ld) {                      \
        __builtin_prefetch(next);                                                                    \
        score_along(number, q, rows, dim, k, page_tokens, width, tokens, scores, ld);                \
    }                                                                                                \
    static void accumulate_##name(const float *p, int64_t ld, int rows, int64_t from,                \
                                  int64_t tokens, const void *v, const void *next,                   \
                                  int64_t page_tokens, int64_t width, int64_t vdim, float *out) {    \
        __builtin_prefetch(next);                                                                    \
        switch (rows) {                                                                              \
            ROWS_CASE(value_rows(number, p, ld, 1, from, tokens, v, page_tokens, width,              \
                                 vdim, out), 1);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 2, from, tokens, v, page_tokens, width,              \
                                 vdim, out), 2);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 3, from, tokens, v, page_tokens, width,              \
                                 vdim, out), 3);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 4, from, tokens, v, page_tokens, width,              \
                                 vdim, out), 4);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 5, from, tokens, v, page_tokens, width,              \
                                 vdim, out), 5);                                                     \
            ROWS_CASE(value_rows(number, p, ld, 6, from, tokens, v, page_tokens, width,              \
                                 vdim, out), 6);                                                     \
        }                                                                                            \
    }
KERNELS(f16, DS4_KV_F16)
KERNELS(f32, DS4_KV_F32)
KERNELS(bf16, DS4_KV_BF16)
KERNELS(q8, DS4_KV_Q8_0)

const ds4_kv ds4_kv_neon[DS4_KV_TYPES] = {
    {DS4_KV_F16, encode_f16, score_f16, score_along_f16, accumulate_f16},
    {DS4_KV_F32, encode_f32, score_f32, score_along_f32, accumulate_f32},
    {DS4_KV_BF16, encode_bf16, score_bf16, score_along_bf16, accumulate_bf16},
    {DS4_KV_Q8_0, encode_q8, score_q8, score_along_q8, accumulate_q8},
};
#endif
