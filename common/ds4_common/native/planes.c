/* The planes layout of IQ2_XXS and IQ2_XS (docs/layouts.md): a block's indices, signs and scales apart.
 *
 * Owns: making it from raw blocks and the way back. Signs are completed to a byte per entry, so no kernel
 * has to put seven bits together; that is what the layout costs memory for, 74 bytes instead of 66 and 78
 * instead of 74.
 */
#include "planes.h"

/* The seven sign bits of entry g of a raw IQ2_XXS block, in the dword behind its four indices. */
static uint32_t seven_of(const uint8_t *codes, int g) {
    return ds4_load_u32(codes + 8 * (g / 4) + 4) >> (7 * (g % 4)) & 127;
}

static uint8_t completed(uint32_t seven) {
    return (uint8_t)(seven | (uint32_t)__builtin_parity(seven) << 7);
}

static void xxs_to_planes(const uint8_t *raw, uint8_t *out) {
    ds4_planes p = ds4_planes_of(DS4_IQ2_XXS, out);
    memcpy(out, raw, 2);
    for (int i = 0; i < 8; i++)
        out[2 + i] = (uint8_t)(2 * (ds4_load_u32(raw + 2 + 8 * i + 4) >> 28) + 1);
    for (int g = 0; g < 32; g++) {
        ((uint8_t *)p.index)[g] = raw[2 + 8 * (g / 4) + g % 4];
        ((uint8_t *)p.signs)[g] = completed(seven_of(raw + 2, g));
    }
}

static void xxs_to_raw(const uint8_t *planes, uint8_t *raw) {
    ds4_planes p = ds4_planes_of(DS4_IQ2_XXS, planes);
    memcpy(raw, planes, 2);
    for (int i = 0; i < 8; i++) {
        uint32_t tail = (uint32_t)(p.scales[i] >> 1) << 28;
        for (int g = 0; g < 4; g++) tail |= (uint32_t)(p.signs[4 * i + g] & 127) << (7 * g);
        memcpy(raw + 2 + 8 * i, p.index + 4 * i, 4);
        memcpy(raw + 2 + 8 * i + 4, &tail, 4);
    }
}

static void xs_to_planes(const uint8_t *raw, uint8_t *out) {
    ds4_planes p = ds4_planes_of(DS4_IQ2_XS, out);
    uint32_t ninth = 0;
    memcpy(out, raw, 2);
    memcpy(out + 2, raw + 66, 8);
    for (int g = 0; g < 32; g++) {
        uint32_t code = ds4_load_u16(raw + 2 + 2 * g);
        ((uint8_t *)p.index)[g] = (uint8_t)code;
        ((uint8_t *)p.signs)[g] = completed(code >> 9);
        ninth |= (code >> 8 & 1) << g;
    }
    memcpy(out + 10, &ninth, 4);
}

static void xs_to_raw(const uint8_t *planes, uint8_t *raw) {
    ds4_planes p = ds4_planes_of(DS4_IQ2_XS, planes);
    memcpy(raw, planes, 2);
    memcpy(raw + 66, p.scales, 8);
    for (int g = 0; g < 32; g++) {
        uint32_t code = p.index[g] | (p.ninth >> g & 1) << 8 | (uint32_t)(p.signs[g] & 127) << 9;
        uint16_t half = (uint16_t)code;
        memcpy(raw + 2 + 2 * g, &half, 2);
    }
}

void ds4_planes_to_raw(uint32_t type, const uint8_t *planes, uint8_t *raw) {
    type == DS4_IQ2_XXS ? xxs_to_raw(planes, raw) : xs_to_raw(planes, raw);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static int64_t blocks_of(uint32_t type, int64_t rows, int64_t cols) {
    if (!ds4_layout_bytes(type, DS4_LAYOUT_IQ2_PLANES, rows, cols)) return -1;
    return rows * (cols / DS4_SUPER);
}

int ds4_planes_pack(uint32_t type, const void *src, void *dst, int64_t rows, int64_t cols) {
    int64_t n = blocks_of(type, rows, cols), raw_bytes = ds4_block_bytes(type);
    const uint8_t *raw = src;
    uint8_t *out = dst;
    for (int64_t i = 0; i < n; i++, raw += raw_bytes, out += ds4_plane_bytes(type))
        type == DS4_IQ2_XXS ? xxs_to_planes(raw, out) : xs_to_planes(raw, out);
    return n < 0 ? -1 : 0;
}

int ds4_planes_unpack(uint32_t type, const void *src, void *dst, int64_t rows, int64_t cols) {
    int64_t n = blocks_of(type, rows, cols), raw_bytes = ds4_block_bytes(type);
    const uint8_t *planes = src;
    uint8_t *raw = dst;
    for (int64_t i = 0; i < n; i++, raw += raw_bytes, planes += ds4_plane_bytes(type))
        ds4_planes_to_raw(type, planes, raw);
    return n < 0 ? -1 : 0;
}
