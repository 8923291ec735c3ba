/* Scalar matmul kernels: the definition that every vector kernel equals bit for bit.
 *
 * Order per output: integer sums exact inside a block, then acc = fmaf(d * dx, isum, acc), then for
 * types with a minimum a second fmaf, in block order. Float types: eight lanes (k mod 8), each an
 * fmaf chain over k padded with zeros to a multiple of 8, then a fixed tree.
 */
#include <math.h>

#include "quants.h"

/* ---- activations in blocks of 32 ------------------------------------------------------------- */

static int32_t dot_of(const int16_t *w, const int8_t *q, int count) {
    int32_t isum = 0;
    for (int k = 0; k < count; k++) isum += w[k] * q[k];
    return isum;
}

/* Part `part` of a weight block against activation block b. */
static float add_block32(const ds4_quant *quant, const ds4_unpacked *u, int part, ds4_act32 x,
                         int64_t b, float acc) {
    const int16_t *w = u->w + 32 * part;
    const int8_t *q = x.q + 32 * b;
    if (quant->type == DS4_NVFP4) {
        for (int s = 0; s < 2; s++)
            acc = fmaf(u->fs[2 * part + s] * x.d[b], (float)dot_of(w + 16 * s, q + 16 * s, 16), acc);
        return acc;
    }
    acc = fmaf(u->d * x.d[b], (float)dot_of(w, q, 32), acc);
    return quant->has_min ? fmaf(u->m, x.s[b], acc) : acc;
}

static void matmul_32(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                      size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const ds4_quant *quant = ds4_quant_find(w->type);
    const int parts = quant->block_weights / 32;
    for (int64_t r = row0; r < row1; r++) {
        for (int64_t c = 0; c < n; c++) y[c * ldy + r] = 0.0f;
        for (int64_t b = 0; b < w->cols / quant->block_weights; b++) {
            ds4_unpacked u;
            uint8_t raw[DS4_BLOCK_BYTES_MAX];
            quant->unpack(ds4_weight_block(w, quant, r, b, raw), &u);
            for (int64_t c = 0; c < n; c++) {
                ds4_act32 x = ds4_act32_view((const char *)acts + (size_t)c * act_stride, w->cols);
                for (int part = 0; part < parts; part++)
                    y[c * ldy + r] =
                        add_block32(quant, &u, part, x, parts * b + part, y[c * ldy + r]);
            }
        }
    }
}

/* ----K, IQ and TQ types----------------------------------------------------------------------- */

static float add_block256(const ds4_unpacked *u, int has_min, ds4_act256 x, int64_t b, float acc) {
    int32_t isum = 0, minsum = 0;
    for (int sub = 0; sub < 16; sub++) {
        int32_t dot = 0;
        for (int i = 0; i < 16; i++) dot += u->w[16 * sub + i] * x.q[256 * b + 16 * sub + i];
        isum += u->sc[sub] * dot;
        if (has_min) minsum += u->mn[sub] * x.sums[16 * b + ds4_sum_place(sub)];
    }
    acc = fmaf(u->d * x.d[b], (float)isum, acc);
    return has_min ? fmaf(u->m * x.d[b], (float)minsum, acc) : acc;
}

static void matmul_super(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                         size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const ds4_quant *quant = ds4_quant_find(w->type);
    for (int64_t r = row0; r < row1; r++) {
        for (int64_t c = 0; c < n; c++) y[c * ldy + r] = 0.0f;
        for (int64_t b = 0; b < w->cols / DS4_SUPER; b++) {
            ds4_unpacked u;
            uint8_t raw[DS4_BLOCK_BYTES_MAX];
            quant->unpack(ds4_weight_block(w, quant, r, b, raw), &u);
            for (int64_t c = 0; c < n; c++) {
                const char *act = (const char *)acts + (size_t)c * act_stride;
                y[c * ldy + r] = add_block256(&u, quant->has_min, ds4_act256_view(act, w->cols), b,
                                              y[c * ldy + r]);
            }
        }
    }
}

/* ---- float types ----------------------------------------------------------------------------- */

static float dot_float(uint32_t type, const uint8_t *row, const float *x, int64_t cols) {
    float lane[8] = {0};
    int64_t padded = (cols + 7) & ~(int64_t)7;
    for (int64_t k = 0; k < padded; k++) {
        float weight = k < cols ? ds4_float_weight(type, row, k) : 0.0f;
        lane[k & 7] = fmaf(weight, k < cols ? x[k] : 0.0f, lane[k & 7]);
    }
    float t[4];
    for (int i = 0; i < 4; i++) t[i] = lane[i] + lane[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

static void matmul_float(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                         size_t act_stride, int64_t n, float *y, int64_t ldy) {
    int64_t row_bytes = w->cols * ds4_block_bytes(w->type);
    for (int64_t r = row0; r < row1; r++)
        for (int64_t c = 0; c < n; c++) {
            const char *act = (const char *)acts + (size_t)c * act_stride;
            y[c * ldy + r] = dot_float(w->type, (const uint8_t *)w->data + r * row_bytes,
                                       (const float *)(const void *)act, w->cols);
        }
}

ds4_matmul_fn ds4_matmul_scalar(uint32_t type, uint32_t layout) {
    (void)layout; /* ds4_weight_block reads both */
    switch (ds4_act_format(type)) {
    case DS4_ACT_F32: return matmul_float;
    case DS4_ACT_Q8_32: return matmul_32;
    case DS4_ACT_Q8_256: return matmul_super;
    default: return NULL;
    }
}
