/* The artifacts that only move bytes: planes of IQ2_XXS, IQ2_XS and Q8_0, pairs of Q2_K, MLA kv_b.
 *
 * Nothing is allocated and nothing is aligned but by the layouts themselves: every access goes
 * through memcpy. Shapes are checked once per job, in ds4_repack.
 */
#include "repack.h"

#include <string.h>

static int64_t round64(int64_t n) { return (n + 63) & ~(int64_t)63; }

/* ---- planes: each field of the blocks in an array of its own ------------------------------- */

static void iq2_xxs(const ds4_repack_shape *s, const uint8_t *src, int64_t first, int64_t count,
                    uint8_t *dst) {
    int64_t per_row = s->in_dim / 256, n = s->units * per_row;
    uint8_t *scales = dst, *codes = dst + round64(2 * n);
    for (int64_t i = first * per_row; i < (first + count) * per_row; i++, src += 66) {
        memcpy(scales + 2 * i, src, 2);
        memcpy(codes + 64 * i, src + 2, 64);
    }
}

static void iq2_xs(const ds4_repack_shape *s, const uint8_t *src, int64_t first, int64_t count,
                   uint8_t *dst) {
    int64_t per_row = s->in_dim / 256, n = s->units * per_row;
    uint8_t *scales = dst, *subscales = dst + round64(2 * n);
    uint8_t *codes = subscales + round64(8 * n);
    for (int64_t i = first * per_row; i < (first + count) * per_row; i++, src += 74) {
        memcpy(scales + 2 * i, src, 2);
        memcpy(codes + 64 * i, src + 2, 64);
        memcpy(subscales + 8 * i, src + 66, 8);
    }
}

static void q8_0(const ds4_repack_shape *s, const uint8_t *src, int64_t first, int64_t count,
                 uint8_t *dst) {
    int64_t per_row = s->in_dim / 32, n = s->units * per_row;
    uint8_t *scales = dst, *codes = dst + round64(2 * n);
    for (int64_t i = first * per_row; i < (first + count) * per_row; i++, src += 34) {
        memcpy(scales + 2 * i, src, 2);
        memcpy(codes + 32 * i, src + 2, 32);
    }
}

/* ---- Q2_K: the same block of two neighbouring rows, interleaved ---------------------------- */

static void q2_k_block(const uint8_t *src, int64_t pair, int parity, uint8_t *dm, uint8_t *sc,
                       uint8_t *qs) {
    memcpy(dm + 4 * (2 * pair + parity), src + 80, 4);
    for (int w = 0; w < 4; w++)
        memcpy(sc + 4 * (8 * pair + 4 * (w >> 1) + 2 * parity + (w & 1)), src + 4 * w, 4);
    for (int i = 0; i < 16; i++)
        memcpy(qs + 4 * (32 * pair + 2 * i + parity), src + 16 + 4 * i, 4);
}

static void q2_k(const ds4_repack_shape *s, const uint8_t *src, int64_t first, int64_t count,
                 uint8_t *dst) {
    int64_t per_row = s->in_dim / 256, n = s->units * per_row;
    uint8_t *dm = dst, *sc = dm + round64(8 * n), *qs = sc + round64(32 * n);
    for (int64_t unit = first; unit < first + count; unit++, src += 2 * 84 * per_row)
        for (int64_t b = 0; b < per_row; b++)
            for (int parity = 0; parity < 2; parity++)
                q2_k_block(src + 84 * (parity * per_row + b), unit * per_row + b, parity, dm, sc,
                           qs);
}

/* ---- MLA kv_b: the value rows of each head, transposed ------------------------------------- */

#define VALUE_DIM 128

static void mla_kv_b(const ds4_repack_shape *s, const uint8_t *src, int64_t first, int64_t count,
                     uint8_t *dst) {
    int64_t per_row = s->in_dim / 32, row_bytes = 34 * per_row;
    uint8_t *scales = dst, *codes = dst + 2 * s->units * per_row * VALUE_DIM;
    for (int64_t h = first; h < first + count; h++, src += s->unit_rows * row_bytes) {
        const uint8_t *values = src + (s->unit_rows - VALUE_DIM) * row_bytes;
        for (int64_t kb = 0; kb < per_row; kb++) {
            uint8_t *scale = scales + 2 * VALUE_DIM * (h * per_row + kb);
            uint8_t *code = codes + 32 * VALUE_DIM * (h * per_row + kb);
            for (int64_t d = 0; d < VALUE_DIM; d++) {
                const uint8_t *block = values + d * row_bytes + 34 * kb;
                memcpy(scale + 2 * d, block, 2);
                for (int i = 0; i < 32; i++) code[i * VALUE_DIM + d] = block[2 + i];
            }
        }
    }
}

/* ---- dispatch and checks ------------------------------------------------------------------- */

typedef void (*repack_fn)(const ds4_repack_shape *, const uint8_t *, int64_t, int64_t, uint8_t *);

/* Bytes of the artifact that the functions above will write into. */
static int64_t artifact_bytes(int kind, const ds4_repack_shape *s) {
    int64_t weights = s->in_dim * s->units * s->unit_rows, n = weights / 256;
    switch (kind) {
    case DS4_ROW_GROUP_NORMS: return 4 * s->units * s->groups;
    case DS4_Q8_F16: return 2 * weights;
    case DS4_Q8_F32: return 4 * weights;
    case DS4_IQ2_XXS_ALIGNED: return round64(2 * n) + 64 * n;
    case DS4_IQ2_XS_ALIGNED: return round64(2 * n) + round64(8 * n) + 64 * n;
    case DS4_Q8_0_ALIGNED: return round64(2 * (weights / 32)) + weights;
    case DS4_Q2_K_ALIGNED: return round64(8 * (n / 2)) + round64(32 * (n / 2)) + 128 * (n / 2);
    default: return s->units * (s->in_dim / 32) * VALUE_DIM * 34;
    }
}

static int fits(int kind, const ds4_repack_shape *s, int64_t first, int64_t count) {
    static const int BLOCK[9] = {0, 32, 32, 32, 256, 32, 256, 32, 256};
    int64_t limit = (int64_t)1 << 40; /* keeps every product below 2^63 */
    if (kind < 1 || kind > 8 || s->in_dim <= 0 || s->in_dim % BLOCK[kind]) return 0;
    if (s->units <= 0 || s->unit_rows <= 0 || s->groups < 0) return 0;
    if (s->in_dim > limit || s->units > limit / s->in_dim) return 0;
    if (s->unit_rows > limit / (s->in_dim * s->units)) return 0;
    if (kind == DS4_ROW_GROUP_NORMS && (s->groups < 1 || s->groups > 16)) return 0;
    if (kind == DS4_MLA_KV_B ? s->unit_rows < VALUE_DIM
                             : s->unit_rows != (kind == DS4_Q2_K_ALIGNED ? 2 : 1))
        return 0;
    if (first < 0 || count < 0 || first > s->units || count > s->units - first) return 0;
    return artifact_bytes(kind, s) == s->dst_bytes;
}

int ds4_repack(int kind, const ds4_repack_shape *shape, const uint8_t *src, int64_t first,
               int64_t count, uint8_t *dst) {
    static const repack_fn FUNCTIONS[9] = {
        [DS4_ROW_GROUP_NORMS] = ds4_q8_row_group_norms,
        [DS4_Q8_F16] = ds4_q8_to_f16,
        [DS4_Q8_F32] = ds4_q8_to_f32,
        [DS4_IQ2_XXS_ALIGNED] = iq2_xxs,
        [DS4_Q8_0_ALIGNED] = q8_0,
        [DS4_Q2_K_ALIGNED] = q2_k,
        [DS4_MLA_KV_B] = mla_kv_b,
        [DS4_IQ2_XS_ALIGNED] = iq2_xs,
    };
    if (!fits(kind, shape, first, count)) return -1;
    FUNCTIONS[kind](shape, src, first, count, dst);
    return 0;
}
