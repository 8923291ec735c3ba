/* Raw blocks of 32 weights, AVX-512 VNNI: sixteen rows, up to sixteen columns.
 *
 * A block of sixteen rows is unpacked into eight vectors whose lanes are rows, as the X8 layout has
 * them in memory, so the float order is the scalar one. vpdpbusd takes its left factors unsigned:
 * values are moved up by a power of two, and the sum of the activations takes that off, exactly.
 */
#if defined(__AVX512F__)
#include "legacy_raw_avx512.h"

#define COLUMNS 16 /* accumulators of that many fit the registers beside a block */

/* ---- against columns ------------------------------------------------------------------------- */

typedef struct {
    __m512i q[8];
    __m512 d, m; /* scale and minimum; NVFP4: scales of the two halves */
} block16;

/* Sum of values 4 first .. 4 (first + count) - 1 of each row times those of a column. */
DS4_INLINE __m512i dot(const block16 *w, const char *x, int first, int count, __m512i sum) {
#pragma GCC unroll 8
    for (int j = first; j < first + count; j++)
        sum = _mm512_dpbusd_epi32(sum, w->q[j], broadcast4_16(x + 4 * j));
    return sum;
}

/* Sum of the first sixteen of a block of activations. */
DS4_INLINE int32_t first_half(const char *x) {
    __m128i v = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1),
                                 _mm_loadu_si128((const __m128i *)(const void *)x));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}

DS4_INLINE __m512 add_sum(__m512i sum, __m512 d, float dx, __m512 acc) {
    return _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(dx)), _mm512_cvtepi32_ps(sum), acc);
}

/* acc plus block b of sixteen rows times a column; its planes lie `d_at` bytes behind and on. */
DS4_INLINE __m512 add_block(uint32_t type, const block16 *w, const char *x, size_t d_at,
                            int64_t blocks, int64_t b, __m512 acc) {
    const char *q = x + 32 * b;
    const float *d = (const float *)(const void *)(x + d_at) + b; /* d, s and sum: a plane each */
    const int32_t sum = ((const int32_t *)(const void *)d)[2 * blocks];
    const int shift = shift_of(type);
    if (type == DS4_NVFP4) {
        const int32_t half = first_half(q);
        acc = add_sum(dot(w, q, 0, 4, _mm512_set1_epi32(-(half * (1 << shift)))), w->d, *d, acc);
        return add_sum(dot(w, q, 4, 4, _mm512_set1_epi32((half - sum) * (1 << shift))), w->m, *d,
                       acc);
    }
    __m512i off = _mm512_setzero_si512();
    if (shift >= 0) off = _mm512_set1_epi32(-(sum * (1 << shift)));
    acc = add_sum(dot(w, q, 0, 8, off), w->d, *d, acc);
    return has_min(type) ? _mm512_fmadd_ps(w->m, _mm512_set1_ps(d[blocks]), acc) : acc;
}

DS4_INLINE void rows16(uint32_t type, const int columns, const uint8_t *const *rows,
                       int64_t blocks, const char *acts, size_t act_stride, float *y, int64_t ldy,
                       __mmask16 mask) {
    const size_t d_at = ds4_round64((size_t)(32 * blocks));
    const int64_t row_bytes = raw_at(type, blocks);
    __m512 acc[COLUMNS];
    for (int c = 0; c < columns; c++) acc[c] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = raw_at(type, b);
        const int part = (int)(b % parts_of(type));
        block16 w;
        if (!part && (at & 63) < block_bytes_of(type)) { /* once per cache line */
            const int64_t next = at + 1024 < row_bytes ? 0 : 15 * row_bytes; /* the next rows */
            for (int i = 0; i < 16; i++)
                _mm_prefetch((const char *)rows[i] + at + 1024 + next, _MM_HINT_T0);
        }
        sixteen_rows(type, rows, at, part, w.q);
        scales16(type, rows, at, part, &w.d, &w.m);
#pragma GCC unroll 16
        for (int c = 0; c < columns; c++)
            acc[c] = add_block(type, &w, acts + (size_t)c * act_stride, d_at, blocks, b, acc[c]);
    }
#pragma GCC unroll 16
    for (int c = 0; c < columns; c++) _mm512_mask_storeu_ps(y + c * ldy, mask, acc[c]);
}

DS4_INLINE void rectangle(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
    ds4_matmul_fn many = ds4_matmul_avx512_many(type, DS4_LAYOUT_RAW);
    if (many && n >= DS4_LEAST_MANY) {
        many(w, row0, row1, acts, act_stride, n, y, ldy);
        return;
    }
    const int64_t blocks = w->cols / 32, row_bytes = raw_at(type, blocks);
    for (int64_t r = row0; r < row1; r += 16) {
        const uint8_t *rows[16];
        raw_rows(w, r, row1, row_bytes, rows);
        raw_rows(w, r + 8 < row1 ? r + 8 : r, row1, row_bytes, rows + 8);
        __mmask16 mask = first_of_16(row1 - r);
        for (int64_t c = 0, count; c < n; c += count) {
            const char *x = acts + (size_t)c * act_stride;
            float *out = y + c * ldy + r;
            /* a constant column count keeps the sums in registers */
            if (n - c >= 16)
                rows16(type, count = 16, rows, blocks, x, act_stride, out, ldy, mask);
            else if (n - c >= 8)
                rows16(type, count = 8, rows, blocks, x, act_stride, out, ldy, mask);
            else if (n - c >= 4)
                rows16(type, count = 4, rows, blocks, x, act_stride, out, ldy, mask);
            else if (n - c >= 2)
                rows16(type, count = 2, rows, blocks, x, act_stride, out, ldy, mask);
            else
                rows16(type, count = 1, rows, blocks, x, act_stride, out, ldy, mask);
        }
    }
}

#define KERNEL(name, type)                                                                         \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,           \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                       \
        rectangle(type, w, row0, row1, acts, act_stride, n, y, ldy);                              \
    }

KERNEL(q4_0, DS4_Q4_0)
KERNEL(q4_1, DS4_Q4_1)
KERNEL(q5_0, DS4_Q5_0)
KERNEL(q5_1, DS4_Q5_1)
KERNEL(q8_0, DS4_Q8_0)
KERNEL(q1_0, DS4_Q1_0)
KERNEL(iq4_nl, DS4_IQ4_NL)
KERNEL(mxfp4, DS4_MXFP4)
KERNEL(nvfp4, DS4_NVFP4)

ds4_matmul_fn ds4_matmul_avx512_blocks(uint32_t type) {
    switch (type) {
    case DS4_Q4_0: return q4_0;
    case DS4_Q4_1: return q4_1;
    case DS4_Q5_0: return q5_0;
    case DS4_Q5_1: return q5_1;
    case DS4_Q8_0: return q8_0;
    case DS4_Q1_0: return q1_0;
    case DS4_IQ4_NL: return iq4_nl;
    case DS4_MXFP4: return mxfp4;
    case DS4_NVFP4: return nvfp4;
    default: return NULL;
    }
}
#else
typedef int ds4_matmul_blocks_avx512_is_for_x86;
#endif
