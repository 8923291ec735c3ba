/* Layouts as sizes and parts: what every layout has, and single blocks of the aligned ones. */
#include "aligned.h"
#include "planes.h"

/* The type that an aligned layout is of; none for the others. */
static uint32_t type_of(uint32_t layout) {
    switch (layout) {
    case DS4_LAYOUT_IQ2_XXS_ALIGNED: return DS4_IQ2_XXS;
    case DS4_LAYOUT_IQ2_XS_ALIGNED: return DS4_IQ2_XS;
    case DS4_LAYOUT_Q2_K_ALIGNED: return DS4_Q2_K;
    default: return UINT32_MAX;
    }
}

int ds4_layout_exists(uint32_t type, uint32_t layout) {
    if (!ds4_quant_find(type)) return 0;
    if (layout == DS4_LAYOUT_RAW) return 1;
    if (layout == DS4_LAYOUT_IQ2_PLANES) return type == DS4_IQ2_XXS || type == DS4_IQ2_XS;
    return layout == DS4_LAYOUT_X8 ? ds4_x8_exists(type) : type_of(layout) == type;
}

/* Of a layout in which rows follow each other. */
static int64_t bytes_of_block(uint32_t type, uint32_t layout) {
    return layout == DS4_LAYOUT_IQ2_PLANES ? ds4_plane_bytes(type) : ds4_block_bytes(type);
}

int64_t ds4_row_granule(uint32_t type, uint32_t layout) {
    (void)type;
    return layout == DS4_LAYOUT_X8 ? DS4_X8_ROWS : layout == DS4_LAYOUT_Q2_K_ALIGNED ? 2 : 1;
}

int64_t ds4_layout_bytes(uint32_t type, uint32_t layout, int64_t rows, int64_t cols) {
    const ds4_quant *quant = ds4_quant_find(type);
    if (!ds4_layout_exists(type, layout) || rows < 1 || cols < 1 || cols % quant->block_weights ||
        rows % ds4_row_granule(type, layout))
        return 0;
    int64_t n = rows * (cols / quant->block_weights);
    if (!ds4_is_aligned(layout)) return n * bytes_of_block(type, layout);
    int64_t extra;
    return ds4_codes_offset(layout, n, &extra) + 64 * n;
}

ds4_weight ds4_weight_rows(const ds4_weight *w, int64_t first, int64_t rows) {
    ds4_weight part = *w;
    part.rows = rows;
    if (ds4_is_aligned(w->layout)) {
        part.all = w->all ? w->all : w->rows;
        part.first += first;
    } else {
        part.data = (const char *)w->data + first * (w->cols / ds4_block_weights(w->type)) *
                                                bytes_of_block(w->type, w->layout);
    }
    return part;
}

/* ---- single blocks --------------------------------------------------------------------------- */

static void q2_k_of_pair(const ds4_sections *s, int64_t pair, int parity, uint8_t *raw) {
    const uint8_t *extra = s->extra + 32 * pair + 8 * parity;
    const uint8_t *codes = s->codes + 128 * pair + 4 * parity;
    memcpy(raw, extra, 8);
    memcpy(raw + 8, extra + 16, 8);
    for (int i = 0; i < 16; i++) memcpy(raw + 16 + 4 * i, codes + 8 * i, 4);
    memcpy(raw + 80, s->scales + 8 * pair + 4 * parity, 4);
}

void ds4_aligned_block(const ds4_weight *w, int64_t r, int64_t b, uint8_t *raw) {
    ds4_sections s = ds4_sections_of(w);
    int64_t blocks = w->cols / DS4_SUPER, i = r * blocks + b;
    if (w->layout == DS4_LAYOUT_Q2_K_ALIGNED) {
        q2_k_of_pair(&s, r / 2 * blocks + b, (int)(r % 2), raw);
        return;
    }
    memcpy(raw, s.scales + 2 * i, 2);
    memcpy(raw + 2, s.codes + 64 * i, 64);
    if (w->layout == DS4_LAYOUT_IQ2_XS_ALIGNED) memcpy(raw + 66, s.extra + 8 * i, 8);
}

const uint8_t *ds4_weight_block(const ds4_weight *w, const ds4_quant *quant, int64_t r, int64_t b,
                                uint8_t *raw) {
    const uint8_t *data = w->data;
    int64_t blocks = w->cols / quant->block_weights;
    if (w->layout == DS4_LAYOUT_RAW) return data + (r * blocks + b) * quant->block_bytes;
    if (w->layout == DS4_LAYOUT_X8) {
        int64_t group = r / DS4_X8_ROWS * blocks + b;
        ds4_x8_block(w->type, data + group * DS4_X8_ROWS * quant->block_bytes,
                     (int)(r % DS4_X8_ROWS), raw);
    } else if (w->layout == DS4_LAYOUT_IQ2_PLANES) {
        ds4_planes_to_raw(w->type, data + (r * blocks + b) * ds4_plane_bytes(w->type), raw);
    } else {
        ds4_aligned_block(w, r, b, raw);
    }
    return raw;
}
