/* K, IQ and TQ types (blocks of 256), AVX-VNNI: which kernel takes a rectangle, and X8 with few columns.
 *
 * X8, few columns: one lane per row, eight rows at once, weights straight from memory. Sums of sixteen products
 * of Q2_K and Q3_K stay below 2^15, so vpdpwssd multiplies them with the sub-scale in the low half of each lane and
 * adds. Q4_K and Q5_K, whose sub-scales hold for 32 weights, and Q6_K multiply in int32. Types without a stored
 * minimum begin their sums at -offset times the sum of the activations. Rows that lie one after the other are read by
 * the AVX2 kernel for few columns; more columns go to panels (matmul_super_tile_avxvnni.c).
 */
#if defined(__AVXVNNI__)
#include "avxvnni.h"
#include "kernel_list.h"
#include "super_sums_avx2.h"
#include "super_x8_avx2.h"

#define COLUMNS 4 /* that are taken at once */

/* Of one block of a column: where the sums of each sixteen begin, or pairs that meet the stored minima. */
typedef struct {
    _Alignas(32) int32_t dwords[16];
} x8_column;

DS4_INLINE void prepare_x8(uint32_t type, const char *sums, x8_column *out) {
    __m256i *to = (__m256i *)(void *)out, v = load32(sums);
    if (super_has_min(type)) {
        _mm256_store_si256(to, v);
        return;
    }
    const int shift = type == DS4_Q3_K ? 2 : 5; /* 4 or 32: what is stored on top */
    for (int h = 0; h < 2; h++) {
        __m256i wide = _mm256_cvtepi16_epi32(h ? _mm256_extracti128_si256(v, 1)
                                               : _mm256_castsi256_si128(v));
        wide = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(wide, shift));
        _mm256_store_si256(to + h, wide);
    }
}

/* The products of one block. Of types of two bits, thirty-twos whose weights share bytes go together, so that those
 * bytes are read once, while their sums fit the registers. */
DS4_INLINE void add_block_x8(uint32_t type, const int columns, const uint8_t *group,
                             const x8_scales *scales, const x8_column *own, const char *const *x,
                             __m256i *isum) {
    const int parts = columns <= 2 && (type == DS4_Q2_K || type == DS4_Q3_K) ? 4 : 1;
    const int steps = scales_per_32(type) ? 8 : 4, wide = type == DS4_Q4_K || x8_wide_sums(type);
#pragma GCC unroll 16
    for (int k = 0; k < 64 / (parts * steps); k++) {
        const int i = k / (8 / steps) * parts, first = k % (8 / steps) * steps;
        __m256i sum[4][COLUMNS];
        in_order();
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++)
            for (int c = 0; c < columns; c++)
                sum[part][c] =
                    super_has_min(type)
                        ? _mm256_setzero_si256()
                        : broadcast4(own[c].dwords + ds4_sum_place(2 * (i + part) + first / 4));
#pragma GCC unroll 8
        for (int j = first; j < first + steps; j++)
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) {
                const __m256i w = x8_values(type, group, i + part, j);
                for (int c = 0; c < columns; c++)
                    sum[part][c] = dot4(sum[part][c], w, broadcast4(x[c] + 32 * (i + part) + 4 * j));
            }
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            const int number = scales_per_32(type) ? i + part : 2 * (i + part) + first / 4;
            if (wide) {
                const __m256i scale = x8_wide_scale(scales, number);
                for (int c = 0; c < columns; c++)
                    isum[c] = pinned(_mm256_add_epi32(isum[c], _mm256_mullo_epi32(sum[part][c], scale)));
            } else {
                const __m256i scale = low_byte(scales->s[number / 4], number % 4);
                for (int c = 0; c < columns; c++) isum[c] = pinned(dot2(isum[c], sum[part][c], scale));
            }
        }
    }
}

/* Eight interleaved rows. */
DS4_INLINE void rows_x8(uint32_t type, const int columns, const uint8_t *group, int64_t blocks,
                        const char *acts, size_t act_stride, float *y, int64_t ldy) {
    const int bytes = DS4_X8_ROWS * super_bytes(type);
    const char *x[COLUMNS];
    __m256 acc[COLUMNS];
    for (int c = 0; c < columns; c++) {
        x[c] = acts + (size_t)c * act_stride;
        acc[c] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < blocks; b++, group += bytes) {
        const char *sums = acts + 256 * blocks + 32 * b;
        const float *dx[COLUMNS];
        x8_column own[COLUMNS];
        x8_scales scales;
        __m256i isum[COLUMNS], term[COLUMNS];
        prefetch_bytes(group, bytes, DS4_AHEAD_FAR);
        for (int c = 0; c < columns; c++) {
            prepare_x8(type, sums + (size_t)c * act_stride, own + c);
            dx[c] = (const float *)(const void *)(acts + (size_t)c * act_stride + 288 * blocks) + b;
            isum[c] = term[c] = _mm256_setzero_si256();
        }
        x8_load_scales(type, group, &scales);
        add_block_x8(type, columns, group, &scales, own, x, isum);
        const __m256 d = load_half8(group);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            const __m256 scale = _mm256_broadcast_ss(dx[c]);
            acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(d, scale), _mm256_cvtepi32_ps(isum[c]), acc[c]);
            x[c] += 256;
        }
        if (!super_has_min(type)) continue;
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i mn = x8_term(type, &scales, i);
            for (int c = 0; c < columns; c++)
                term[c] = dot2(term[c], mn, broadcast4(own[c].dwords + i));
        }
        const __m256 m = _mm256_xor_ps(load_half8(group + 16), _mm256_set1_ps(-0.0f));
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            const __m256 scale = _mm256_broadcast_ss(dx[c]);
            acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(m, scale), _mm256_cvtepi32_ps(term[c]), acc[c]);
        }
    }
    for (int c = 0; c < columns; c++) _mm256_storeu_ps(y + c * ldy, acc[c]);
}

DS4_INLINE void few_x8(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                       size_t act_stride, int64_t n, float *y, int64_t ldy) {
    const int64_t blocks = w->cols / DS4_SUPER, row_bytes = blocks * super_bytes(type);
    for (int64_t r = row0; r < row1; r += DS4_X8_ROWS) {
        const uint8_t *group = (const uint8_t *)w->data + r * row_bytes;
        switch (n) { /* constants keep the sums in registers */
        case 1: rows_x8(type, 1, group, blocks, acts, act_stride, y + r, ldy); break;
        case 2: rows_x8(type, 2, group, blocks, acts, act_stride, y + r, ldy); break;
        case 3: rows_x8(type, 3, group, blocks, acts, act_stride, y + r, ldy); break;
        default: rows_x8(type, 4, group, blocks, acts, act_stride, y + r, ldy);
        }
    }
}

/* ---- rectangles ------------------------------------------------------------------------------ */

/* Columns up to which panels are no gain: planes need no putting together. */
DS4_INLINE int64_t most_few(uint32_t layout) {
    return layout == DS4_LAYOUT_X8 ? COLUMNS : layout == DS4_LAYOUT_IQ2_PLANES ? 6 : 2;
}

DS4_INLINE void rectangle(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t row0, int64_t row1,
                          const void *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    if (n > most_few(layout))
        ds4_matmul_avxvnni_super_many(w, row0, row1, acts, act_stride, n, y, ldy);
    else if (layout == DS4_LAYOUT_X8)
        few_x8(type, w, row0, row1, acts, act_stride, n, y, ldy);
    else
        ds4_matmul_avx2_super(type, layout)(w, row0, row1, acts, act_stride, n, y, ldy);
}

/* NULL for float types. */
DS4_KERNELS(ds4_matmul_avxvnni_super, DS4_SUPER_ALL, layout)
#else
typedef int ds4_matmul_super_avxvnni_is_for_x86;
#endif
