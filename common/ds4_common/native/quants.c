/* Traits of the quant types and their scalar unpackers: the definition every kernel is tested by.
 *
 * Owns: block sizes, the meaning of the bits of a block, dequantization of a row. Sources: the GGUF
 * block layouts as published by ggml; tests compare with the `gguf` package bit for bit.
 */
#include "quants.h"

/* ---- legacy types: 32 weights ---------------------------------------------------------------- */

static void unpack_nibbles(const uint8_t *qs, uint32_t high, int offset, int16_t *w) {
    for (int i = 0; i < 16; i++) {
        w[i] = (int16_t)(((qs[i] & 15) | (((high >> i) & 1) << 4)) - offset);
        w[16 + i] = (int16_t)(((qs[i] >> 4) | (((high >> (16 + i)) & 1) << 4)) - offset);
    }
}

static void unpack_q4_0(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    unpack_nibbles(b + 2, 0, 8, u->w);
}

static void unpack_q4_1(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    u->m = ds4_f16_to_f32(ds4_load_u16(b + 2));
    unpack_nibbles(b + 4, 0, 0, u->w);
}

static void unpack_q5_0(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    unpack_nibbles(b + 6, ds4_load_u32(b + 2), 16, u->w);
}

static void unpack_q5_1(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    u->m = ds4_f16_to_f32(ds4_load_u16(b + 2));
    unpack_nibbles(b + 8, ds4_load_u32(b + 4), 0, u->w);
}

static void unpack_q8_0(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    for (int i = 0; i < 32; i++) u->w[i] = (int8_t)b[2 + i];
}

static void unpack_q1_0(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    for (int k = 0; k < 128; k++) u->w[k] = (int16_t)(2 * ((b[2 + k / 8] >> (k % 8)) & 1) - 1);
}

/* ---- code books of sixteen values ------------------------------------------------------------ */

const int8_t ds4_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
const int8_t ds4_fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static void unpack_iq4_nl(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    for (int i = 0; i < 16; i++) {
        u->w[i] = ds4_iq4_values[b[2 + i] & 15];
        u->w[16 + i] = ds4_iq4_values[b[2 + i] >> 4];
    }
}

static void unpack_mxfp4(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_e8m0_half(b[0]);
    for (int i = 0; i < 16; i++) {
        u->w[i] = ds4_fp4_values[b[1 + i] & 15];
        u->w[16 + i] = ds4_fp4_values[b[1 + i] >> 4];
    }
}

/* Four runs of sixteen with a scale of their own. */
static void unpack_nvfp4(const uint8_t *b, ds4_unpacked *u) {
    for (int s = 0; s < 4; s++) {
        const uint8_t *qs = b + 4 + 8 * s;
        u->fs[s] = ds4_ue4m3_half(b[s]);
        for (int i = 0; i < 8; i++) {
            u->w[16 * s + i] = ds4_fp4_values[qs[i] & 15];
            u->w[16 * s + 8 + i] = ds4_fp4_values[qs[i] >> 4];
        }
    }
}

/* ---- K types: 256 weights, a sub-scale per 16 or 32 ------------------------------------------ */

static void unpack_q2_k(const uint8_t *b, ds4_unpacked *u) {
    const uint8_t *qs = b + 16;
    u->d = ds4_f16_to_f32(ds4_load_u16(b + 80));
    u->m = -ds4_f16_to_f32(ds4_load_u16(b + 82));
    for (int s = 0; s < 16; s++) {
        u->sc[s] = b[s] & 15;
        u->mn[s] = b[s] >> 4;
    }
    for (int k = 0; k < 256; k++)
        u->w[k] = (qs[(k / 128) * 32 + k % 32] >> (2 * ((k / 32) % 4))) & 3;
}

static void unpack_q3_k(const uint8_t *b, ds4_unpacked *u) {
    const uint8_t *hmask = b, *qs = b + 32, *scales = b + 96;
    u->d = ds4_f16_to_f32(ds4_load_u16(b + 108));
    for (int s = 0; s < 16; s++) {
        int low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
        int high = (scales[8 + s % 4] >> (2 * (s / 4))) & 3;
        u->sc[s] = (int16_t)((low | (high << 4)) - 32);
    }
    for (int k = 0; k < 256; k++) {
        int low = (qs[(k / 128) * 32 + k % 32] >> (2 * ((k / 32) % 4))) & 3;
        int high = (hmask[k % 32] >> (k / 32)) & 1;
        u->w[k] = (int16_t)((low | (high << 2)) - 4);
    }
}

/* The 6-bit scales and minima shared by Q4_K and Q5_K, one per 32 weights. */
static void unpack_scales_k4(const uint8_t *s, ds4_unpacked *u) {
    for (int i = 0; i < 8; i++) {
        int j = i & 3;
        int scale = i < 4 ? s[j] & 63 : (s[8 + j] & 15) | ((s[j] >> 2) & 48);
        int minimum = i < 4 ? s[4 + j] & 63 : (s[8 + j] >> 4) | ((s[4 + j] >> 2) & 48);
        u->sc[2 * i] = u->sc[2 * i + 1] = (int16_t)scale;
        u->mn[2 * i] = u->mn[2 * i + 1] = (int16_t)minimum;
    }
}

static void unpack_q4_k(const uint8_t *b, ds4_unpacked *u) {
    const uint8_t *qs = b + 16;
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    u->m = -ds4_f16_to_f32(ds4_load_u16(b + 2));
    unpack_scales_k4(b + 4, u);
    for (int k = 0; k < 256; k++)
        u->w[k] = (qs[(k / 64) * 32 + k % 32] >> (4 * ((k / 32) % 2))) & 15;
}

static void unpack_q5_k(const uint8_t *b, ds4_unpacked *u) {
    const uint8_t *qh = b + 16, *qs = b + 48;
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    u->m = -ds4_f16_to_f32(ds4_load_u16(b + 2));
    unpack_scales_k4(b + 4, u);
    for (int k = 0; k < 256; k++) {
        int low = (qs[(k / 64) * 32 + k % 32] >> (4 * ((k / 32) % 2))) & 15;
        u->w[k] = (int16_t)(low | (((qh[k % 32] >> (k / 32)) & 1) << 4));
    }
}

static void unpack_q6_k(const uint8_t *b, ds4_unpacked *u) {
    const uint8_t *ql = b, *qh = b + 128;
    u->d = ds4_f16_to_f32(ds4_load_u16(b + 208));
    for (int s = 0; s < 16; s++) u->sc[s] = (int8_t)b[192 + s];
    for (int k = 0; k < 256; k++) {
        int half = k / 128, part = (k / 32) % 4, i = k % 32;
        int low = (ql[64 * half + 32 * (part & 1) + i] >> (4 * (part >> 1))) & 15;
        int high = (qh[32 * half + i] >> (2 * part)) & 3;
        u->w[k] = (int16_t)((low | (high << 4)) - 32);
    }
}

/* ---- traits ---------------------------------------------------------------------------------- */

static const ds4_quant QUANTS[] = {
    /* type      bytes weights act      min unpack */
    {DS4_F32, 4, 1, DS4_ACT_F32, 0, NULL},
    {DS4_F16, 2, 1, DS4_ACT_F32, 0, NULL},
    {DS4_BF16, 2, 1, DS4_ACT_F32, 0, NULL},
    {DS4_Q4_0, 18, 32, DS4_ACT_Q8_32, 0, unpack_q4_0},
    {DS4_Q4_1, 20, 32, DS4_ACT_Q8_32, 1, unpack_q4_1},
    {DS4_Q5_0, 22, 32, DS4_ACT_Q8_32, 0, unpack_q5_0},
    {DS4_Q5_1, 24, 32, DS4_ACT_Q8_32, 1, unpack_q5_1},
    {DS4_Q8_0, 34, 32, DS4_ACT_Q8_32, 0, unpack_q8_0},
    {DS4_Q1_0, 18, 128, DS4_ACT_Q8_32, 0, unpack_q1_0},
    {DS4_IQ4_NL, 18, 32, DS4_ACT_Q8_32, 0, unpack_iq4_nl},
    {DS4_MXFP4, 17, 32, DS4_ACT_Q8_32, 0, unpack_mxfp4},
    {DS4_NVFP4, 36, 64, DS4_ACT_Q8_32, 0, unpack_nvfp4},
    {DS4_Q2_K, 84, 256, DS4_ACT_Q8_256, 1, unpack_q2_k},
    {DS4_Q3_K, 110, 256, DS4_ACT_Q8_256, 0, unpack_q3_k},
    {DS4_Q4_K, 144, 256, DS4_ACT_Q8_256, 1, unpack_q4_k},
    {DS4_Q5_K, 176, 256, DS4_ACT_Q8_256, 1, unpack_q5_k},
    {DS4_Q6_K, 210, 256, DS4_ACT_Q8_256, 0, unpack_q6_k},
    {DS4_IQ1_S, 50, 256, DS4_ACT_Q8_256, 0, ds4_unpack_iq1_s},
    {DS4_IQ1_M, 56, 256, DS4_ACT_Q8_256, 0, ds4_unpack_iq1_m},
    {DS4_IQ2_XXS, 66, 256, DS4_ACT_Q8_256, 0, ds4_unpack_iq2_xxs},
    {DS4_IQ2_XS, 74, 256, DS4_ACT_Q8_256, 0, ds4_unpack_iq2_xs},
    {DS4_IQ2_S, 82, 256, DS4_ACT_Q8_256, 0, ds4_unpack_iq2_s},
    {DS4_IQ3_XXS, 98, 256, DS4_ACT_Q8_256, 0, ds4_unpack_iq3_xxs},
    {DS4_IQ3_S, 110, 256, DS4_ACT_Q8_256, 0, ds4_unpack_iq3_s},
    {DS4_IQ4_XS, 136, 256, DS4_ACT_Q8_256, 0, ds4_unpack_iq4_xs},
    {DS4_TQ1_0, 54, 256, DS4_ACT_Q8_256, 0, ds4_unpack_tq1_0},
    {DS4_TQ2_0, 66, 256, DS4_ACT_Q8_256, 0, ds4_unpack_tq2_0},
};

const ds4_quant *ds4_quant_find(uint32_t type) {
    for (size_t i = 0; i < sizeof QUANTS / sizeof *QUANTS; i++)
        if (QUANTS[i].type == type) return &QUANTS[i];
    return NULL;
}

int64_t ds4_block_bytes(uint32_t type) {
    const ds4_quant *quant = ds4_quant_find(type);
    return quant ? quant->block_bytes : 0;
}

int64_t ds4_block_weights(uint32_t type) {
    const ds4_quant *quant = ds4_quant_find(type);
    return quant ? quant->block_weights : 0;
}

/* ---- dequantization -------------------------------------------------------------------------- */

float ds4_float_weight(uint32_t type, const void *row, int64_t k) {
    float value;
    if (type == DS4_F32) {
        memcpy(&value, (const char *)row + 4 * k, 4);
        return value;
    }
    uint16_t half = ds4_load_u16((const char *)row + 2 * k);
    if (type == DS4_F16) return ds4_f16_to_f32(half);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static void dequant_block(const ds4_quant *quant, const ds4_unpacked *u, float *out) {
    for (int k = 0; k < quant->block_weights; k++) {
        int sub = k / DS4_SUB;
        int wide = quant->block_weights == DS4_SUPER;
        float scale = wide ? u->d * (float)u->sc[sub] : quant->type == DS4_NVFP4 ? u->fs[sub] : u->d;
        float value = scale * (float)u->w[k];
        if (quant->has_min) value += wide ? u->m * (float)u->mn[sub] : u->m;
        out[k] = value;
    }
}

int ds4_dequant_row(const ds4_weight *w, int64_t r, float *out) {
    const ds4_quant *quant = ds4_quant_find(w->type);
    if (!quant || !ds4_layout_exists(w->type, w->layout) || r < 0 || r >= w->rows ||
        w->cols % quant->block_weights)
        return -1;
    int64_t blocks = w->cols / quant->block_weights;
    if (!quant->unpack) {
        const uint8_t *row = (const uint8_t *)w->data + r * blocks * quant->block_bytes;
        for (int64_t k = 0; k < w->cols; k++) out[k] = ds4_float_weight(w->type, row, k);
        return 0;
    }
    for (int64_t b = 0; b < blocks; b++) {
        ds4_unpacked u;
        uint8_t raw[DS4_BLOCK_BYTES_MAX];
        quant->unpack(ds4_weight_block(w, quant, r, b, raw), &u);
        dequant_block(quant, &u, out + b * quant->block_weights);
    }
    return 0;
}
