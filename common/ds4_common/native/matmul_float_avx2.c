/* F32, F16 and BF16 weights, AVX2: four rows by up to three columns in flight.
 *
 * Order per output: eight lanes (k mod 8), fmaf chains over k, zero-padded to a multiple of 8, then
 * the tree ((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7)), as in matmul_scalar.c. Activation columns are
 * padded with zeros; the last weights of a ragged row are copied before they are read as a vector.
 */
#if defined(__AVX2__)
#include "avx2.h"

DS4_INLINE int weight_bytes(uint32_t type) { return type == DS4_F32 ? 4 : 2; }

DS4_INLINE __m256 load_weights(uint32_t type, const void *p) {
    if (type == DS4_F32) return _mm256_loadu_ps(p);
    if (type == DS4_F16) return load_half8(p);
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

DS4_INLINE float sum_tree(__m256 v) {
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}

/* Eight weights of each row, `at` bytes into it, times x[c][0..7]. */
DS4_INLINE void add_eight(uint32_t type, int columns, const char *const *rows, int64_t at,
                          const float *const *x, __m256 acc[4][3]) {
    __m256 xv[3];
#pragma GCC unroll 3
    for (int c = 0; c < columns; c++) xv[c] = _mm256_loadu_ps(x[c]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m256 weight = load_weights(type, rows[i] + at);
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) acc[i][c] = _mm256_fmadd_ps(weight, xv[c], acc[i][c]);
    }
}

DS4_INLINE void dot_tile(uint32_t type, int columns, const char *const *rows, int64_t cols,
                         const char *acts, size_t act_stride, __m256 acc[4][3]) {
    const int bytes = weight_bytes(type);
    const float *x[3];
    for (int c = 0; c < columns; c++)
        x[c] = (const float *)(const void *)(acts + (size_t)c * act_stride);
    for (int i = 0; i < 4; i++)
        for (int c = 0; c < columns; c++) acc[i][c] = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 8 <= cols; k += 8) {
        if (columns == 1 && k % 32 == 0)
            for (int i = 0; i < 4; i++)
                for (int line = 0; line < 32 * bytes; line += 64)
                    _mm_prefetch(rows[i] + k * bytes + 1024 + line, _MM_HINT_T0);
        add_eight(type, columns, rows, k * bytes, x, acc);
        for (int c = 0; c < columns; c++) x[c] += 8;
    }
    if (k == cols) return;
    char ragged[4][32] = {{0}};
    const char *ends[4] = {ragged[0], ragged[1], ragged[2], ragged[3]};
    for (int i = 0; i < 4; i++)
        memcpy(ragged[i], rows[i] + k * bytes, (size_t)((cols - k) * bytes));
    add_eight(type, columns, ends, 0, x, acc);
}

DS4_INLINE void dot_columns(uint32_t type, int columns, const char *const *rows, int64_t count,
                            int64_t cols, const char *acts, size_t act_stride, float *y,
                            int64_t ldy) {
    __m256 acc[4][3];
    dot_tile(type, columns, rows, cols, acts, act_stride, acc);
    for (int c = 0; c < columns; c++)
        for (int64_t i = 0; i < count; i++) y[c * ldy + i] = sum_tree(acc[i][c]);
}

DS4_INLINE void rectangle(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    int64_t row_bytes = w->cols * weight_bytes(type);
    for (int64_t r = row0; r < row1; r += 4) {
        int64_t count = row1 - r < 4 ? row1 - r : 4, c = 0;
        const char *rows[4]; /* rows past the end repeat the last one; their sums are dropped */
        for (int64_t i = 0; i < 4; i++)
            rows[i] = (const char *)w->data + (r + (i < count ? i : count - 1)) * row_bytes;
        for (; c + 3 <= n; c += 3)
            dot_columns(type, 3, rows, count, w->cols, acts + (size_t)c * act_stride, act_stride,
                        y + c * ldy + r, ldy);
        for (; c < n; c++)
            dot_columns(type, 1, rows, count, w->cols, acts + (size_t)c * act_stride, act_stride,
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

ds4_matmul_fn ds4_matmul_avx2_float(uint32_t type, uint32_t layout) {
    if (layout != DS4_LAYOUT_RAW) return NULL;
    switch (type) {
    case DS4_F32: return f32_raw;
    case DS4_F16: return f16_raw;
    case DS4_BF16: return bf16_raw;
    default: return NULL;
    }
}
#else
typedef int ds4_matmul_float_avx2_is_for_x86;
#endif
