/* F32, F16 and BF16 weights, NEON: four rows by up to three columns in flight.
 *
 * Order per output as in matmul_scalar.c: eight lanes (k mod 8), fmaf chains over k padded with zeros
 * to a multiple of 8, then the tree ((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7)).
 */
#if defined(__ARM_FEATURE_DOTPROD)
#include "neon.h"

typedef struct {
    float32x4_t low, high;
} eight;

DS4_INLINE int weight_bytes(uint32_t type) { return type == DS4_F32 ? 4 : 2; }

DS4_INLINE float32x4_t widen_bf16(uint16x4_t v) {
    return vreinterpretq_f32_u32(vshll_n_u16(v, 16));
}

DS4_INLINE eight load_weights(uint32_t type, const char *p) {
    if (type == DS4_F32)
        return (eight){vld1q_f32((const float *)(const void *)p),
                       vld1q_f32((const float *)(const void *)(p + 16))};
    if (type == DS4_F16) return (eight){neon_half4(p), neon_half4(p + 8)};
    uint16x8_t v = vld1q_u16((const uint16_t *)(const void *)p);
    return (eight){widen_bf16(vget_low_u16(v)),
                   vreinterpretq_f32_u32(vshll_high_n_u16(v, 16))};
}

DS4_INLINE float sum_tree(eight v) {
    float32x4_t t = vaddq_f32(v.low, v.high);
    float32x2_t pair = vadd_f32(vget_low_f32(t), vget_high_f32(t));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}

/* Eight weights of each row, `at` bytes into it, times x[c][0..7]. */
DS4_INLINE void add_eight(uint32_t type, int columns, const char *const *rows, int64_t at,
                          const float *const *x, float32x4_t (*low)[3], float32x4_t (*high)[3]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        eight weight = load_weights(type, rows[i] + at);
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) {
            low[i][c] = vfmaq_f32(low[i][c], weight.low, vld1q_f32(x[c]));
            high[i][c] = vfmaq_f32(high[i][c], weight.high, vld1q_f32(x[c] + 4));
        }
    }
}

DS4_INLINE void dot_columns(uint32_t type, int columns, const char *const *rows, int64_t count,
                            int64_t cols, const char *acts, size_t act_stride, float *y,
                            int64_t ldy) {
    const int bytes = weight_bytes(type);
    float32x4_t low[4][3], high[4][3];
    const float *x[3];
    for (int c = 0; c < columns; c++) {
        x[c] = (const float *)(const void *)(acts + (size_t)c * act_stride);
        for (int i = 0; i < 4; i++) low[i][c] = high[i][c] = vdupq_n_f32(0.0f);
    }
    int64_t k = 0;
    for (; k + 8 <= cols; k += 8) {
        add_eight(type, columns, rows, k * bytes, x, low, high);
        for (int c = 0; c < columns; c++) x[c] += 8;
    }
    if (k < cols) { /* the last weights are copied: the row ends inside the vector */
        char ragged[4][32] = {{0}};
        const char *ends[4] = {ragged[0], ragged[1], ragged[2], ragged[3]};
        for (int i = 0; i < 4; i++)
            memcpy(ragged[i], rows[i] + k * bytes, (size_t)((cols - k) * bytes));
        add_eight(type, columns, ends, 0, x, low, high);
    }
    for (int c = 0; c < columns; c++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            if (i < count) y[c * ldy + i] = sum_tree((eight){low[i][c], high[i][c]});
}

DS4_INLINE void rectangle(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                          const void *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    int64_t row_bytes = w->cols * weight_bytes(type);
    const char *x = acts;
    for (int64_t r = row0; r < row1; r += 4) {
        int64_t count = row1 - r < 4 ? row1 - r : 4, c = 0;
        const char *rows[4]; /* rows past the end repeat the last one; their sums are dropped */
        for (int64_t i = 0; i < 4; i++)
            rows[i] = (const char *)w->data + (r + (i < count ? i : count - 1)) * row_bytes;
        for (; c + 3 <= n; c += 3)
            dot_columns(type, 3, rows, count, w->cols, x + (size_t)c * act_stride, act_stride,
                        y + c * ldy + r, ldy);
        for (; c < n; c++)
            dot_columns(type, 1, rows, count, w->cols, x + (size_t)c * act_stride, act_stride,
                        y + c * ldy + r, ldy);
    }
}

#define KERNEL(name, type)                                                                         \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,           \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                       \
        rectangle(type, w, row0, row1, acts, act_stride, n, y, ldy);                              \
    }

KERNEL(f32_raw, DS4_F32)
KERNEL(f16_raw, DS4_F16)
KERNEL(bf16_raw, DS4_BF16)

ds4_matmul_fn ds4_matmul_neon_float(uint32_t type, uint32_t layout) {
    if (layout != DS4_LAYOUT_RAW) return NULL;
    switch (type) {
    case DS4_F32: return f32_raw;
    case DS4_F16: return f16_raw;
    case DS4_BF16: return bf16_raw;
    default: return NULL;
    }
}
#else
typedef int ds4_matmul_float_neon_is_for_arm;
#endif
