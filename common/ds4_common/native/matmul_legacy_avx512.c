/* Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 in the X8 layout, AVX-512 VNNI: sixteen rows, up to eight columns.
 *
 * One lane per row, as in the AVX2 kernels, so the float order is the scalar one. Two groups of eight
 * rows, two runs of memory that are asked for ahead, share a vector; weights are unpacked in registers and
 * meet every column at once. vpdpbusd takes its left factors unsigned: Q8_0 is moved by 128, and the sum
 * of the activations takes that off again, exactly. One column waits for memory, and short rows come
 * fastest along one run of it, eight at a time; those of Q8_0, which has nothing to unpack, always.
 */
#if defined(__AVX512F__)
#include "legacy_x8_avx512.h"

/* What is stored is more than the true value by a power of two. */
DS4_INLINE int offset_bits(uint32_t type) {
    return type == DS4_Q4_0 ? 3 : type == DS4_Q5_0 ? 4 : 7;
}

/* ---- one column: eight rows ------------------------------------------------------------------- */

DS4_INLINE __m256i dot4_8(__m256i sum, __m256i w, const int8_t *x) {
    return _mm256_dpbusd_epi32(sum, w, broadcast4(x));
}

/* Asks for the lines of a group far ahead. Where nothing has to be unpacked, a CPU's own prefetching is as
 * fast, but ends where a page does. */
DS4_INLINE void ask_along(uint32_t type, const uint8_t *group, int bytes, int64_t block) {
    if (type == DS4_Q8_0) {
        if (block % 8 == 0) open_page_ahead(group);
        return;
    }
    prefetch_bytes(group, bytes, DS4_AHEAD_FAR);
}

/* Along one run of memory. */
DS4_INLINE __m256 rows8(uint32_t type, const uint8_t *group, int64_t blocks, const void *act) {
    const int bytes = DS4_X8_ROWS * block_bytes_of(type);
    ds4_act32 x = ds4_act32_view(act, 32 * blocks);
    __m256 acc = _mm256_setzero_ps();
    for (int64_t i = 0; i < blocks; i++, group += bytes) {
        __m256i start = _mm256_setzero_si256();
        if (!has_min(type))
            start = _mm256_slli_epi32(_mm256_set1_epi32(-x.sum[i]), offset_bits(type));
        __m256i sum[2] = {start, _mm256_setzero_si256()};
        ask_along(type, group, bytes, i);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m256i first, second; /* steps j and 4 + j; of Q8_0 2 j and 2 j + 1, which lie side by side */
            in_order();
            if (type == DS4_Q8_0) {
                first = _mm256_xor_si256(load32(group + 16 + 64 * j), _mm256_set1_epi8(-128));
                sum[0] = dot4_8(sum[0], first, x.q + 32 * i + 8 * j);
                in_order();
                second = _mm256_xor_si256(load32(group + 48 + 64 * j), _mm256_set1_epi8(-128));
                sum[1] = dot4_8(sum[1], second, x.q + 32 * i + 8 * j + 4);
            } else {
                x8_steps(type, group, j, &first, &second);
                sum[0] = dot4_8(sum[0], first, x.q + 32 * i + 4 * j);
                sum[1] = dot4_8(sum[1], second, x.q + 32 * i + 16 + 4 * j);
            }
        }
        __m256 scale = _mm256_mul_ps(load_half8(group), _mm256_broadcast_ss(x.d + i));
        acc = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(_mm256_add_epi32(sum[0], sum[1])), acc);
        if (has_min(type))
            acc = _mm256_fmadd_ps(load_half8(group + 16), _mm256_broadcast_ss(x.s + i), acc);
    }
    return acc;
}

/* ---- sixteen rows ----------------------------------------------------------------------------- */

#define COLUMNS 8 /* sums and accumulators of that many fit the registers */

/* Adds weights 4 step .. 4 step + 3 times those of every column. */
DS4_INLINE void add_step(const int columns, __m512i w, const char *const *x, int64_t b, int step,
                         __m512i *isum) {
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++)
        isum[c] = _mm512_dpbusd_epi32(isum[c], w, broadcast4_16(x[c] + 32 * b + 4 * step));
}

/* Where the integer sums of a block begin: takes off what the moved-up weights give too much. */
DS4_INLINE __m512i start16(uint32_t type, const char *sum) {
    if (has_min(type)) return _mm512_setzero_si512();
    return _mm512_set1_epi32(-(int)(ds4_load_u32(sum) << offset_bits(type)));
}

/* Sixteen rows, whose blocks are at `a` and `b`, against `columns` columns. */
DS4_INLINE void rows16(uint32_t type, const int columns, const uint8_t *a, const uint8_t *b,
                       int64_t blocks, const char *acts, size_t act_stride, float *y, int64_t ldy,
                       __mmask16 rows) {
    const int bytes = DS4_X8_ROWS * block_bytes_of(type);
    const size_t d_at = ds4_round64((size_t)(32 * blocks)), plane = 4 * (size_t)blocks;
    const char *x[COLUMNS];
    __m512 acc[COLUMNS];
    for (int c = 0; c < columns; c++) {
        x[c] = acts + (size_t)c * act_stride;
        acc[c] = _mm512_setzero_ps();
    }
    group_stream next = stream_ahead(a, 2, blocks, bytes);
    for (int64_t i = 0; i < blocks; i++, a += bytes, b += bytes) {
        __m512i isum[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            isum[c] = start16(type, x[c] + d_at + 2 * plane + 4 * i);
        ask_part(&next, 2, blocks, bytes, 0, 1);
        step_ahead(&next, 2, blocks, bytes);
        if (type == DS4_Q8_0) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                __m512i w = two_groups(a + 16 + 32 * j, b + 16 + 32 * j);
                add_step(columns, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x, i, j, isum);
            }
        } else {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512i low, high;
                steps16(type, a, b, j, &low, &high);
                add_step(columns, low, x, i, j, isum);
                add_step(columns, high, x, i, 4 + j, isum);
            }
        }
        __m512 d = two_half8(a, b), m = d;
        if (has_min(type)) m = two_half8(a + 16, b + 16);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            const float *dx = (const float *)(const void *)(x[c] + d_at) + i;
            acc[c] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(*dx)),
                                     _mm512_cvtepi32_ps(isum[c]), acc[c]);
            if (has_min(type))
                acc[c] = _mm512_fmadd_ps(m, _mm512_set1_ps(dx[blocks]), acc[c]);
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) _mm512_mask_storeu_ps(y + c * ldy, rows, acc[c]);
}

DS4_INLINE void rectangle(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    if (n >= DS4_LEAST_MANY) {
        ds4_matmul_avx512_many(type, w->layout)(w, row0, row1, acts, act_stride, n, y, ldy);
        return;
    }
    int64_t blocks = w->cols / 32, row_bytes = blocks * block_bytes_of(type);
    if (n == 1 && (type == DS4_Q8_0 || w->cols <= DS4_LONG_ROW)) {
        for (int64_t r = row0; r < row1; r += 8)
            _mm256_storeu_ps(y + r, rows8(type, (const uint8_t *)w->data + r * row_bytes, blocks, acts));
        return;
    }
    for (int64_t r = row0; r < row1; r += 16) {
        const uint8_t *a = (const uint8_t *)w->data + r * row_bytes;
        const uint8_t *b = r + 8 < row1 ? a + 8 * row_bytes : a; /* its sums are dropped */
        __mmask16 rows = first_of_16(row1 - r);
        for (int64_t c = 0, count; c < n; c += count) {
            const char *x = acts + (size_t)c * act_stride;
            float *out = y + c * ldy + r;
            /* a constant column count keeps the sums in registers */
            if (n == 8)
                rows16(type, count = 8, a, b, blocks, x, act_stride, out, ldy, rows);
            else if (n - c >= 4)
                rows16(type, count = 4, a, b, blocks, x, act_stride, out, ldy, rows);
            else if (n - c >= 2)
                rows16(type, count = 2, a, b, blocks, x, act_stride, out, ldy, rows);
            else
                rows16(type, count = 1, a, b, blocks, x, act_stride, out, ldy, rows);
        }
    }
}

#define KERNEL(name, type)                                                                         \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,           \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                       \
        rectangle(type, w, row0, row1, acts, act_stride, n, y, ldy);                              \
    }

KERNEL(q4_0_x8, DS4_Q4_0)
KERNEL(q4_1_x8, DS4_Q4_1)
KERNEL(q5_0_x8, DS4_Q5_0)
KERNEL(q5_1_x8, DS4_Q5_1)
KERNEL(q8_0_x8, DS4_Q8_0)

ds4_matmul_fn ds4_matmul_avx512_legacy(uint32_t type, uint32_t layout) {
    if (layout != DS4_LAYOUT_X8) return ds4_matmul_avx512_blocks(type);
    switch (type) {
    case DS4_Q4_0: return q4_0_x8;
    case DS4_Q4_1: return q4_1_x8;
    case DS4_Q5_0: return q5_0_x8;
    case DS4_Q5_1: return q5_1_x8;
    case DS4_Q8_0: return q8_0_x8;
    default: return NULL;
    }
}
#else
typedef int ds4_matmul_legacy_avx512_is_for_x86;
#endif
