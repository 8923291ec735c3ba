/* Types whose activations come in blocks of 32, NEON: X8 and raw, one column and many.
 *
 * Owns the fast paths for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 (X8 and raw), IQ4_NL and MXFP4 (raw). Eight
 * rows at a time, one lane per row, so the float order is the scalar one: a block of eight rows is
 * unpacked into sixteen vectors once and multiplied with up to COLUMNS columns, four activations being
 * broadcast by the dot product instruction itself. Raw blocks are transposed into the same form.
 */
#if defined(__ARM_FEATURE_DOTPROD)
#include "neon.h"

#define COLUMNS 8 /* their sixteen sums stay in the second half of the registers */

DS4_INLINE int is_five_bit(uint32_t type) { return type == DS4_Q5_0 || type == DS4_Q5_1; }
DS4_INLINE int has_min(uint32_t type) { return type == DS4_Q4_1 || type == DS4_Q5_1; }
DS4_INLINE int block_bytes_of(uint32_t type) {
    switch (type) {
    case DS4_Q4_0:
    case DS4_IQ4_NL: return 18;
    case DS4_Q4_1: return 20;
    case DS4_Q5_0: return 22;
    case DS4_Q5_1: return 24;
    case DS4_MXFP4: return 17;
    default: return 34;
    }
}

/* What was added to the true values of a type to make them unsigned. */
DS4_INLINE int offset_of(uint32_t type) {
    return type == DS4_Q4_0 ? 8 : type == DS4_Q5_0 ? 16 : 0;
}

/* One block of eight rows: w[2 j + h] holds weights 4 j .. 4 j + 3 of rows 4 h .. 4 h + 3. */
typedef struct {
    int8x16_t w[16];
    float32x4_t d[2], m[2];
} tile_block;

/* ---- X8 -------------------------------------------------------------------------------------- */

DS4_INLINE void fill_x8(uint32_t type, const uint8_t *group, tile_block *t) {
    const uint8_t *quants = group + ds4_x8_quants_offset(type);
    for (int h = 0; h < 2; h++) {
        t->d[h] = neon_half4(group + 8 * h);
        if (has_min(type)) t->m[h] = neon_half4(group + 16 + 8 * h);
    }
    if (type == DS4_Q8_0) {
        for (int i = 0; i < 16; i++) t->w[i] = vld1q_s8((const int8_t *)quants + 16 * i);
        return;
    }
    for (int i = 0; i < 8; i++) { /* step i / 2 in the low nibbles, step 4 + i / 2 in the high ones */
        uint8x16_t v = vld1q_u8(quants + 16 * i);
        t->w[i] = low_nibbles(v);
        t->w[8 + i] = high_nibbles(v);
        if (!is_five_bit(type)) continue;
        uint8x16_t fifth = vld1q_u8(group + (has_min(type) ? 32 : 16) + 16 * (i & 1));
        const uint8x16_t sixteen = vdupq_n_u8(16);
        int j = i / 2; /* bit j and bit 4 + j of the high plane */
        uint8x16_t low = vandq_u8(vshlq_u8(fifth, vdupq_n_s8((int8_t)(4 - j))), sixteen);
        uint8x16_t high = vandq_u8(vshlq_u8(fifth, vdupq_n_s8((int8_t)-j)), sixteen);
        t->w[i] = vorrq_s8(t->w[i], vreinterpretq_s8_u8(low));
        t->w[8 + i] = vorrq_s8(t->w[8 + i], vreinterpretq_s8_u8(high));
    }
}

/* ---- raw blocks ------------------------------------------------------------------------------ */

/* The 32 values of a block in order. */
DS4_INLINE void raw_values(uint32_t type, const uint8_t *block, int8x16_t *low, int8x16_t *high) {
    if (type == DS4_Q8_0) {
        *low = vld1q_s8((const int8_t *)block + 2);
        *high = vld1q_s8((const int8_t *)block + 18);
        return;
    }
    const int high_at = has_min(type) ? 4 : 2;
    const int quants_at = type == DS4_MXFP4 ? 1 : high_at + (is_five_bit(type) ? 4 : 0);
    uint8x16_t v = vld1q_u8(block + quants_at);
    *low = low_nibbles(v);
    *high = high_nibbles(v);
    if (type == DS4_IQ4_NL || type == DS4_MXFP4) {
        int8x16_t table = vld1q_s8(type == DS4_MXFP4 ? ds4_fp4_values : ds4_iq4_values);
        *low = vqtbl1q_s8(table, vreinterpretq_u8_s8(*low));
        *high = vqtbl1q_s8(table, vreinterpretq_u8_s8(*high));
    }
    if (is_five_bit(type)) {
        *low = vorrq_s8(*low, spread_bits(block + high_at, 16));
        *high = vorrq_s8(*high, spread_bits(block + high_at + 2, 16));
    }
}

DS4_INLINE void fill_raw(uint32_t type, const uint8_t *const *rows, int64_t at, tile_block *t) {
    float d[8], m[8];
    for (int h = 0; h < 2; h++) {
        int8x16_t low[4], high[4], out[4];
        for (int i = 0; i < 4; i++) {
            const uint8_t *block = rows[4 * h + i] + at;
            raw_values(type, block, low + i, high + i);
            d[4 * h + i] = type == DS4_MXFP4 ? ds4_e8m0_half(block[0]) : neon_half(block);
            m[4 * h + i] = has_min(type) ? neon_half(block + 2) : 0.0f;
        }
        transpose4(low, out);
        for (int j = 0; j < 4; j++) t->w[2 * j + h] = out[j];
        transpose4(high, out);
        for (int j = 0; j < 4; j++) t->w[8 + 2 * j + h] = out[j];
        t->d[h] = vld1q_f32(d + 4 * h);
        t->m[h] = vld1q_f32(m + 4 * h);
    }
}

/* ---- one block times some columns ------------------------------------------------------------ */

DS4_INLINE void add_block(uint32_t type, const tile_block *t, ds4_act32 x, int64_t b,
                          float32x4_t *acc) {
    const int32x4_t x0 = vreinterpretq_s32_s8(vld1q_s8(x.q + 32 * b));
    const int32x4_t x1 = vreinterpretq_s32_s8(vld1q_s8(x.q + 32 * b + 16));
    const int8x16_t low = vreinterpretq_s8_s32(x0), high = vreinterpretq_s8_s32(x1);
    const float32x4_t dx = vdupq_n_f32(x.d[b]);
    for (int h = 0; h < 2; h++) {
        int32x4_t sum = vdupq_n_s32(-offset_of(type) * x.sum[b]);
        sum = vdotq_laneq_s32(sum, t->w[0 + h], low, 0);
        sum = vdotq_laneq_s32(sum, t->w[2 + h], low, 1);
        sum = vdotq_laneq_s32(sum, t->w[4 + h], low, 2);
        sum = vdotq_laneq_s32(sum, t->w[6 + h], low, 3);
        sum = vdotq_laneq_s32(sum, t->w[8 + h], high, 0);
        sum = vdotq_laneq_s32(sum, t->w[10 + h], high, 1);
        sum = vdotq_laneq_s32(sum, t->w[12 + h], high, 2);
        sum = vdotq_laneq_s32(sum, t->w[14 + h], high, 3);
        acc[h] = vfmaq_f32(acc[h], vmulq_f32(t->d[h], dx), vcvtq_f32_s32(sum));
        if (has_min(type)) acc[h] = vfmaq_f32(acc[h], t->m[h], vdupq_n_f32(x.s[b]));
    }
}

/* ---- rectangles ------------------------------------------------------------------------------ */

DS4_INLINE void eight_rows(uint32_t type, int x8, const ds4_weight *w, int64_t r, int64_t count,
                           const char *acts, size_t act_stride, int columns, float *y,
                           int64_t ldy) {
    const int bytes = block_bytes_of(type);
    const int64_t blocks = w->cols / 32;
    const uint8_t *data = (const uint8_t *)w->data + r * blocks * bytes, *rows[8];
    for (int64_t i = 0; i < 8; i++) rows[i] = data + (i < count ? i : count - 1) * blocks * bytes;
    float32x4_t acc[2 * COLUMNS];
    ds4_act32 x[COLUMNS];
    for (int c = 0; c < columns; c++) {
        acc[2 * c] = acc[2 * c + 1] = vdupq_n_f32(0.0f);
        x[c] = ds4_act32_view(acts + (size_t)c * act_stride, w->cols);
    }
    for (int64_t b = 0; b < blocks; b++) {
        tile_block t;
        if (x8) {
            __builtin_prefetch(data + (b + 4) * DS4_X8_ROWS * bytes);
            fill_x8(type, data + b * DS4_X8_ROWS * bytes, &t);
        } else
            fill_raw(type, rows, b * bytes, &t);
        for (int c = 0; c < columns; c++) add_block(type, &t, x[c], b, acc + 2 * c);
    }
    for (int c = 0; c < columns; c++) {
        float out[8];
        vst1q_f32(out, acc[2 * c]);
        vst1q_f32(out + 4, acc[2 * c + 1]);
        memcpy(y + c * ldy, out, (size_t)count * sizeof(float));
    }
}

DS4_INLINE void rectangle(uint32_t type, int x8, const ds4_weight *w, int64_t row0, int64_t row1,
                          const void *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    for (int64_t r = row0; r < row1; r += 8) {
        int64_t count = row1 - r < 8 ? row1 - r : 8, c = 0;
        const char *x = acts;
        for (; c + COLUMNS <= n; c += COLUMNS)
            eight_rows(type, x8, w, r, count, x + (size_t)c * act_stride, act_stride, COLUMNS,
                       y + c * ldy + r, ldy);
        for (; c < n; c++) /* a constant column count keeps the sums in registers */
            eight_rows(type, x8, w, r, count, x + (size_t)c * act_stride, act_stride, 1,
                       y + c * ldy + r, ldy);
    }
}

#define KERNEL(name, type, x8)                                                                     \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,           \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                       \
        rectangle(type, x8, w, row0, row1, acts, act_stride, n, y, ldy);                          \
    }

KERNEL(q4_0_raw, DS4_Q4_0, 0)
KERNEL(q4_1_raw, DS4_Q4_1, 0)
KERNEL(q5_0_raw, DS4_Q5_0, 0)
KERNEL(q5_1_raw, DS4_Q5_1, 0)
KERNEL(q8_0_raw, DS4_Q8_0, 0)
KERNEL(iq4_nl_raw, DS4_IQ4_NL, 0)
KERNEL(mxfp4_raw, DS4_MXFP4, 0)
KERNEL(q4_0_x8, DS4_Q4_0, 1)
KERNEL(q4_1_x8, DS4_Q4_1, 1)
KERNEL(q5_0_x8, DS4_Q5_0, 1)
KERNEL(q5_1_x8, DS4_Q5_1, 1)
KERNEL(q8_0_x8, DS4_Q8_0, 1)

ds4_matmul_fn ds4_matmul_neon_legacy(uint32_t type, uint32_t layout) {
    int x8 = layout == DS4_LAYOUT_X8;
    switch (type) {
    case DS4_Q4_0: return x8 ? q4_0_x8 : q4_0_raw;
    case DS4_Q4_1: return x8 ? q4_1_x8 : q4_1_raw;
    case DS4_Q5_0: return x8 ? q5_0_x8 : q5_0_raw;
    case DS4_Q5_1: return x8 ? q5_1_x8 : q5_1_raw;
    case DS4_Q8_0: return x8 ? q8_0_x8 : q8_0_raw;
    case DS4_IQ4_NL: return x8 ? NULL : iq4_nl_raw;
    case DS4_MXFP4: return x8 ? NULL : mxfp4_raw;
    default: return NULL;
    }
}
#else
typedef int ds4_matmul_legacy_neon_is_for_arm;
#endif
