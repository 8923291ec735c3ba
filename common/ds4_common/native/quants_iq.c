/* Scalar unpackers of the IQ and TQ types: blocks of 256 weights from code books and base 3.
 *
 * Owns: the meaning of their bits. Every weight is a power of two times the block's scale, times an
 * odd integer scale, times a small integer: so the reference computes with exact integers, as it
 * does for the K types. Tests compare with the `gguf` package bit for bit.
 */
#include "quants.h"

/* ---- IQ2 types: code books of eight magnitudes ----------------------------------------------- */

static void signed_eight(uint64_t grid, uint64_t mask, int16_t *w) {
    for (int i = 0; i < 8; i++) {
        int16_t magnitude = (int16_t)((grid >> (8 * i)) & 255);
        w[i] = (mask >> (8 * i)) & 1 ? (int16_t)-magnitude : magnitude;
    }
}

/* 0xff in byte i where bit i is set. */
static uint64_t byte_mask(uint8_t bits) {
    uint64_t mask = 0;
    for (int i = 0; i < 8; i++) mask |= (uint64_t)(bits >> i & 1) * 0xff << (8 * i);
    return mask;
}

/* A weight is d/4 * (scale + 1/2) * w, kept exact as (d/8) * (2 scale + 1) * w. */
void ds4_unpack_iq2_xxs(const uint8_t *b, ds4_unpacked *u) {
    u->d = 0.125f * ds4_f16_to_f32(ds4_load_u16(b));
    for (int i = 0; i < 8; i++) {
        const uint8_t *index = b + 2 + 8 * i;
        uint32_t tail = ds4_load_u32(index + 4);
        u->sc[2 * i] = u->sc[2 * i + 1] = (int16_t)(2 * (tail >> 28) + 1);
        for (int g = 0; g < 4; g++)
            signed_eight(ds4_iq2xxs_grid[index[g]], ds4_iq2_sign_mask[(tail >> (7 * g)) & 127],
                             u->w + 32 * i + 8 * g);
    }
}

void ds4_unpack_iq2_xs(const uint8_t *b, ds4_unpacked *u) {
    u->d = 0.125f * ds4_f16_to_f32(ds4_load_u16(b));
    for (int s = 0; s < 16; s++)
        u->sc[s] = (int16_t)(2 * ((b[66 + s / 2] >> (4 * (s & 1))) & 15) + 1);
    for (int g = 0; g < 32; g++) {
        uint16_t code = ds4_load_u16(b + 2 + 2 * g);
        signed_eight(ds4_iq2xs_grid[code & 511], ds4_iq2_sign_mask[code >> 9], u->w + 8 * g);
    }
}

void ds4_unpack_iq2_s(const uint8_t *b, ds4_unpacked *u) {
    const uint8_t *qs = b + 2, *signs = b + 34, *qh = b + 66;
    u->d = 0.125f * ds4_f16_to_f32(ds4_load_u16(b));
    for (int s = 0; s < 16; s++)
        u->sc[s] = (int16_t)(2 * ((b[74 + s / 2] >> (4 * (s & 1))) & 15) + 1);
    for (int g = 0; g < 32; g++) {
        int index = qs[g] | ((qh[g / 4] >> (2 * (g % 4))) & 3) << 8;
        signed_eight(ds4_iq2s_grid[index], byte_mask(signs[g]), u->w + 8 * g);
    }
}

/* ---- IQ3 types: code books of four magnitudes ------------------------------------------------ */

static uint64_t two_fours(const uint32_t *grid, int first, int second) {
    return grid[first] | (uint64_t)grid[second] << 32;
}

/* A weight is d/2 * (scale + 1/2) * w, kept exact as (d/4) * (2 scale + 1) * w. */
void ds4_unpack_iq3_xxs(const uint8_t *b, ds4_unpacked *u) {
    u->d = 0.25f * ds4_f16_to_f32(ds4_load_u16(b));
    for (int i = 0; i < 8; i++) {
        const uint8_t *qs = b + 2 + 8 * i;
        uint32_t tail = ds4_load_u32(b + 66 + 4 * i);
        u->sc[2 * i] = u->sc[2 * i + 1] = (int16_t)(2 * (tail >> 28) + 1);
        for (int g = 0; g < 4; g++)
            signed_eight(two_fours(ds4_iq3xxs_grid, qs[2 * g], qs[2 * g + 1]),
                         ds4_iq2_sign_mask[(tail >> (7 * g)) & 127], u->w + 32 * i + 8 * g);
    }
}

void ds4_unpack_iq3_s(const uint8_t *b, ds4_unpacked *u) {
    const uint8_t *qs = b + 2, *qh = b + 66, *signs = b + 74;
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    for (int i = 0; i < 8; i++) {
        int scale = (b[106 + i / 2] >> (4 * (i & 1))) & 15;
        u->sc[2 * i] = u->sc[2 * i + 1] = (int16_t)(2 * scale + 1);
        for (int g = 0; g < 4; g++) {
            const uint8_t *pair = qs + 8 * i + 2 * g;
            int high = qh[i] >> (2 * g);
            uint64_t grid = two_fours(ds4_iq3s_grid, pair[0] | (high & 1) << 8,
                                      pair[1] | (high & 2) << 7);
            signed_eight(grid, byte_mask(signs[4 * i + g]), u->w + 32 * i + 8 * g);
        }
    }
}

/* ---- IQ1 types: code books of eight ternary digits ------------------------------------------- */

/* A weight is scale * (digit +- 1/8), kept exact as (d/8) * scale * (8 digit +- 1). */
static void ternary_eight(uint64_t grid, int delta, int16_t *w) {
    for (int i = 0; i < 8; i++) w[i] = (int16_t)((int)((grid >> (8 * i)) & 255) - 8 + delta);
}

void ds4_unpack_iq1_s(const uint8_t *b, ds4_unpacked *u) {
    u->d = 0.125f * ds4_f16_to_f32(ds4_load_u16(b));
    for (int i = 0; i < 8; i++) {
        const uint8_t *qs = b + 2 + 4 * i;
        int high = ds4_load_u16(b + 34 + 2 * i), delta = high & 0x8000 ? -1 : 1;
        u->sc[2 * i] = u->sc[2 * i + 1] = (int16_t)(2 * ((high >> 12) & 7) + 1);
        for (int g = 0; g < 4; g++)
            ternary_eight(ds4_iq1s_grid[qs[g] | ((high >> (3 * g)) & 7) << 8], delta,
                          u->w + 32 * i + 8 * g);
    }
}

uint16_t ds4_iq1_m_scale(const uint8_t *scales) {
    return (uint16_t)(scales[1] >> 4 | (scales[3] & 0xf0) | (scales[5] & 0xf0) << 4 |
                      (scales[7] & 0xf0) << 8);
}

void ds4_unpack_iq1_m(const uint8_t *b, ds4_unpacked *u) {
    const uint8_t *qs = b, *qh = b + 32, *scales = b + 48;
    u->d = 0.125f * ds4_f16_to_f32(ds4_iq1_m_scale(scales));
    for (int s = 0; s < 16; s++)
        u->sc[s] = (int16_t)(2 * ((ds4_load_u16(scales + 2 * (s / 4)) >> (3 * (s % 4))) & 7) + 1);
    for (int g = 0; g < 32; g++) {
        int high = qh[g / 2] >> (4 * (g & 1));
        ternary_eight(ds4_iq1s_grid[qs[g] | (high & 7) << 8], high & 8 ? -1 : 1, u->w + 8 * g);
    }
}

/* ---- IQ4_XS: the code book of IQ4_NL under 6-bit scales --------------------------------------- */

void ds4_unpack_iq4_xs(const uint8_t *b, ds4_unpacked *u) {
    int high = ds4_load_u16(b + 2);
    u->d = ds4_f16_to_f32(ds4_load_u16(b));
    for (int i = 0; i < 8; i++) {
        const uint8_t *qs = b + 8 + 16 * i;
        int low = (b[4 + i / 2] >> (4 * (i & 1))) & 15;
        u->sc[2 * i] = u->sc[2 * i + 1] = (int16_t)((low | ((high >> (2 * i)) & 3) << 4) - 32);
        for (int j = 0; j < 16; j++) {
            u->w[32 * i + j] = ds4_iq4_values[qs[j] & 15];
            u->w[32 * i + 16 + j] = ds4_iq4_values[qs[j] >> 4];
        }
    }
}

/* ---- TQ types: -1, 0, 1 ---------------------------------------------------------------------- */

static void scales_of_one(ds4_unpacked *u) {
    for (int s = 0; s < 16; s++) u->sc[s] = 1;
}

/* Digit n of a byte: the byte is a fraction of 256 in base 3, most significant digit first. */
static int16_t ternary_digit(uint8_t byte, int n) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    return (int16_t)(((uint8_t)(byte * powers[n]) * 3 >> 8) - 1);
}

void ds4_unpack_tq1_0(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_f16_to_f32(ds4_load_u16(b + 52));
    scales_of_one(u);
    for (int k = 0; k < 160; k++) u->w[k] = ternary_digit(b[k % 32], k / 32);
    for (int k = 0; k < 80; k++) u->w[160 + k] = ternary_digit(b[32 + k % 16], k / 16);
    for (int k = 0; k < 16; k++) u->w[240 + k] = ternary_digit(b[48 + k % 4], k / 4);
}

void ds4_unpack_tq2_0(const uint8_t *b, ds4_unpacked *u) {
    u->d = ds4_f16_to_f32(ds4_load_u16(b + 64));
    scales_of_one(u);
    for (int k = 0; k < 256; k++)
        u->w[k] = (int16_t)(((b[(k / 128) * 32 + k % 32] >> (2 * ((k / 32) % 4))) & 3) - 1);
}
