/* Tiles of the KV cache: storing, and the scalar kernels that define every sum over them (kv.h). */
#include "kv.h"

#include <math.h>
#include <string.h>

#include "image.h"
#include "op_math.h"
#include "op_vector.h"
#include "quants.h"

uint16_t ds4_f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

void ds4_kv_encode_q8(const float *x, int64_t n, void *codes, uint16_t *scales, int isa) {
    enum { MOST = 512 };
    _Alignas(64) char act[2 * MOST];
    for (int64_t first = 0; first < n; first += MOST) {
        int64_t count = n - first < MOST ? n - first : MOST;
        ds4_act_quantize(DS4_ACT_Q8_32, x + first, count, act, isa);
        memcpy((int8_t *)codes + first, act, (size_t)count);
        ds4_act32 view = ds4_act32_view(act, count);
        for (int64_t b = 0; b < count / DS4_KV_BLOCK; b++)
            scales[first / DS4_KV_BLOCK + b] = ds4_f32_to_f16(view.d[b]);
    }
}

void ds4_kv_store_across(const ds4_kv *kv, const float *x, int64_t dim, int64_t page_tokens,
                         int64_t place, void *tile) {
    _Alignas(64) char codes[4 * DS4_MAX_HEAD_DIM];
    uint16_t scales[DS4_MAX_HEAD_DIM / DS4_KV_BLOCK];
    kv->encode(x, dim, codes, scales);
    if (kv->type == DS4_KV_F32) {
        float *to = (float *)tile + place;
        for (int64_t d = 0; d < dim; d++) to[d * page_tokens] = x[d];
    } else if (kv->type != DS4_KV_Q8_0) {
        const uint16_t *from = (const uint16_t *)(const void *)codes;
        uint16_t *to = (uint16_t *)tile + place;
        for (int64_t d = 0; d < dim; d++) to[d * page_tokens] = from[d];
    } else {
        for (int64_t b = 0; b < dim / DS4_KV_BLOCK; b++) {
            int8_t *to = (int8_t *)ds4_kv_codes(tile, b, page_tokens) + place;
            ((uint16_t *)ds4_kv_scales(tile, b, page_tokens))[place] = scales[b];
            for (int64_t d = 0; d < DS4_KV_BLOCK; d++)
                to[d * page_tokens] = codes[b * DS4_KV_BLOCK + d];
        }
    }
}

void ds4_kv_store_along(const ds4_kv *kv, const float *x, int64_t dim, int64_t page_tokens,
                        int64_t place, void *tile) {
    int64_t size = ds4_kv_code_bytes(kv->type);
    if (kv->type != DS4_KV_Q8_0) {
        kv->encode(x, dim, (char *)tile + place * ds4_kv_width(dim) * size, NULL);
        return;
    }
    _Alignas(64) char codes[DS4_MAX_HEAD_DIM];
    uint16_t scales[DS4_MAX_HEAD_DIM / DS4_KV_BLOCK];
    kv->encode(x, dim, codes, scales);
    for (int64_t b = 0; b < dim / DS4_KV_BLOCK; b++) {
        ((uint16_t *)ds4_kv_scales(tile, b, page_tokens))[place] = scales[b];
        memcpy((int8_t *)ds4_kv_codes(tile, b, page_tokens) + place * DS4_KV_BLOCK,
               codes + b * DS4_KV_BLOCK, DS4_KV_BLOCK);
    }
}

/* ---- the definitions -------------------------------------------------------------------------------- */

DS4_INLINE float cached(const int type, const void *tile, int64_t i) {
    if (type == DS4_KV_F32) return ((const float *)tile)[i];
    if (type == DS4_KV_Q8_0) return ((const int8_t *)tile)[i];
    if (type == DS4_KV_F16) return ds4_f16_to_f32(((const uint16_t *)tile)[i]);
    uint32_t bits = (uint32_t)((const uint16_t *)tile)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

DS4_INLINE void score(const int type, const float *q, int rows, int64_t dim, const void *k,
                      int64_t page_tokens, int64_t tokens8, float *scores, int64_t ld) {
    int64_t block = type == DS4_KV_Q8_0 ? DS4_KV_BLOCK : dim;
    for (int r = 0; r < rows; r++)
        for (int64_t t = 0; t < tokens8; t++) {
            float s = 0.0f;
            for (int64_t first = 0; first < dim; first += block) {
                const void *codes = k;
                if (type == DS4_KV_Q8_0) codes = ds4_kv_codes(k, first / block, page_tokens);
                float part = 0.0f;
                for (int64_t d = 0; d < block; d++)
                    part = fmaf(q[r * dim + first + d], cached(type, codes, d * page_tokens + t), part);
                if (type == DS4_KV_Q8_0)
                    part = fmaf(ds4_f16_to_f32(ds4_kv_scales(k, first / block, page_tokens)[t]), part,
                                s);
                s = part;
            }
            scores[r * ld + t] = s;
        }
}

DS4_INLINE void score_along(const int type, const float *q, int rows, int64_t dim, const void *k,
                            int64_t page_tokens, int64_t width, int64_t tokens, float *scores,
                            int64_t ld) {
    for (int r = 0; r < rows; r++)
        for (int64_t t = 0; t < tokens; t++) {
            float lane[8] = {0}, part[8] = {0};
            for (int64_t d = 0; d < dim; d++) {
                float query = q[r * dim + d];
                if (type != DS4_KV_Q8_0) {
                    lane[d % 8] = fmaf(query, cached(type, k, t * width + d), lane[d % 8]);
                    continue;
                }
                int64_t b = d / DS4_KV_BLOCK, at = t * DS4_KV_BLOCK + d % DS4_KV_BLOCK;
                part[d % 8] = fmaf(query, cached(type, ds4_kv_codes(k, b, page_tokens), at), part[d % 8]);
                if (d % DS4_KV_BLOCK != DS4_KV_BLOCK - 1) continue;
                float scale = ds4_f16_to_f32(ds4_kv_scales(k, b, page_tokens)[t]);
                for (int i = 0; i < 8; i++) {
                    lane[i] = fmaf(scale, part[i], lane[i]);
                    part[i] = 0.0f;
                }
            }
            scores[r * ld + t] = ds4_fold(lane, 8);
        }
}

DS4_INLINE void accumulate(const int type, const float *p, int64_t ld, int rows, int64_t from,
                           int64_t tokens, const void *v, int64_t page_tokens, int64_t width,
                           int64_t vdim, float *out) {
    for (int r = 0; r < rows; r++)
        for (int64_t t = from; t < from + tokens; t++)
            for (int64_t d = 0; d < vdim; d++) {
                float weight = p[r * ld + t - from], value;
                if (type == DS4_KV_Q8_0) {
                    int64_t b = d / DS4_KV_BLOCK, at = t * DS4_KV_BLOCK + d % DS4_KV_BLOCK;
                    weight *= ds4_f16_to_f32(ds4_kv_scales(v, b, page_tokens)[t]);
                    value = cached(type, ds4_kv_codes(v, b, page_tokens), at);
                } else {
                    value = cached(type, v, t * width + d);
                }
                out[r * vdim + d] = fmaf(weight, value, out[r * vdim + d]);
            }
}

static void encode_f16(const float *x, int64_t n, void *codes, uint16_t *scales) {
    (void)scales;
    for (int64_t i = 0; i < n; i++) ((uint16_t *)codes)[i] = ds4_f32_to_f16(x[i]);
}

static void encode_f32(const float *x, int64_t n, void *codes, uint16_t *scales) {
    (void)scales;
    memcpy(codes, x, (size_t)n * 4);
}

static void encode_bf16(const float *x, int64_t n, void *codes, uint16_t *scales) {
    (void)scales;
    for (int64_t i = 0; i < n; i++) ((uint16_t *)codes)[i] = ds4_f32_to_bf16(x[i]);
}

static void encode_q8(const float *x, int64_t n, void *codes, uint16_t *scales) {
    ds4_kv_encode_q8(x, n, codes, scales, DS4_ISA_SCALAR);
}

#define KERNELS(name, number)                                                                        \
    static void score_##name(const float *q, int rows, int64_t dim, const void *k, const void *next, \
                             int64_t page_tokens, int64_t tokens8, float *scores, int64_t ld) {      \
        (void)next;                                                                                  \
        score(number, q, rows, dim, k, page_tokens, tokens8, scores, ld);                            \
    }                                                                                                \
    static void score_along_##name(const float *q, int rows, int64_t dim, const void *k,             \
                                   const void *next, int64_t page_tokens, int64_t width,             \
                                   int64_t tokens, float *scores, int64_t ld) {                      \
        (void)next;                                                                                  \
        score_along(number, q, rows, dim, k, page_tokens, width, tokens, scores, ld);                \
    }                                                                                                \
    static void accumulate_##name(const float *p, int64_t ld, int rows, int64_t from,                \
                                  int64_t tokens, const void *v, const void *next,                   \
                                  int64_t page_tokens, int64_t width, int64_t vdim, float *out) {    \
        (void)next;                                                                                  \
        accumulate(number, p, ld, rows, from, tokens, v, page_tokens, width, vdim, out);             \
    }
KERNELS(f16, DS4_KV_F16)
KERNELS(f32, DS4_KV_F32)
KERNELS(bf16, DS4_KV_BF16)
KERNELS(q8, DS4_KV_Q8_0)

const ds4_kv ds4_kv_scalar[DS4_KV_TYPES] = {
    {DS4_KV_F16, encode_f16, score_f16, score_along_f16, accumulate_f16},
    {DS4_KV_F32, encode_f32, score_f32, score_along_f32, accumulate_f32},
    {DS4_KV_BF16, encode_bf16, score_bf16, score_along_bf16, accumulate_bf16},
    {DS4_KV_Q8_0, encode_q8, score_q8, score_along_q8, accumulate_q8},
};

const ds4_kv *ds4_kv_table(int type, int isa) {
    if (type < 0 || type >= DS4_KV_TYPES) return NULL;
#if defined(__x86_64__)
    if (isa >= DS4_ISA_AVX512)
        return type == DS4_KV_Q8_0 ? &ds4_kv_avx512_q8 : ds4_kv_avx512 + type;
    if (isa != DS4_ISA_SCALAR) return ds4_kv_avx2 + type;
#elif defined(__aarch64__)
    if (isa != DS4_ISA_SCALAR) return ds4_kv_neon + type;
#endif
    (void)isa;
    return ds4_kv_scalar + type;
}
