/* Raw blocks of 32 weights, AVX-512 VNNI: sixteen rows, up to sixteen columns.
 *
 * A block of sixteen rows is unpacked into eight vectors whose lanes are rows, as the X8 layout has
 * them in memory, so the float order is the scalar one. vpdpbusd takes its left factors unsigned:
 * values are moved up by a power of two, and the sum of the activations takes that off, exactly.
 */
#if defined(__AVX512F__)
#include "avx512.h"
#include "legacy_unpack_avx2.h"

#define COLUMNS 16 /* accumulators of that many fit the registers beside a block */

/* How far unpacked values lie above the true ones: 2^shift; -1: not at all. */
DS4_INLINE int shift_of(uint32_t type) {
    switch (type) {
    case DS4_Q4_0: return 3;
    case DS4_Q8_0:
    case DS4_IQ4_NL: return 7;
    case DS4_Q1_0: return 0;
    case DS4_Q4_1:
    case DS4_Q5_1: return -1;
    default: return 4; /* Q5_0, MXFP4, NVFP4 */
    }
}

/* ---- a block of sixteen rows ----------------------------------------------------------------- */

/* Sixteen bytes of one row twice, then of another. */
DS4_INLINE __m512i twice16(const uint8_t *a, const uint8_t *b) {
    __m512i low = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)a));
    return _mm512_mask_broadcast_i32x4(low, 0xff00,
                                       _mm_loadu_si128((const __m128i *)(const void *)b));
}

/* 32 bits of each of two rows. */
DS4_INLINE __mmask64 bits_of(const uint8_t *a, const uint8_t *b) {
    return (__mmask64)((uint64_t)ds4_load_u32(a) | (uint64_t)ds4_load_u32(b) << 32);
}

/* Values of sixteen codes, moved up by 2^shift. */
DS4_INLINE __m512i lookup_moved(uint32_t type, __m512i codes) {
    const int8_t *values = type == DS4_IQ4_NL ? ds4_iq4_values : ds4_fp4_values;
    __m128i table = _mm_add_epi8(_mm_loadu_si128((const __m128i *)(const void *)values),
                                 _mm_set1_epi8((char)(1 << shift_of(type))));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}

/* The 32 values of part `part` of two rows' blocks, in order, as unsigned bytes. */
DS4_INLINE __m512i two_rows(uint32_t type, const uint8_t *a, const uint8_t *b, int part) {
    const __m512i nibble = _mm512_set1_epi8(15);
    if (type == DS4_Q8_0)
        return _mm512_xor_si512(two_groups(a + 2, b + 2), _mm512_set1_epi8(-128));
    if (type == DS4_Q1_0) {
        const int at = 2 + 4 * part;
        return _mm512_maskz_set1_epi8(bits_of(a + at, b + at), 2);
    }
    if (type == DS4_NVFP4) { /* eight bytes hold sixteen values: low nibbles first */
        const int at = 4 + 16 * part;
        const __m512i places = _mm512_set_epi64(0x0004000400040004, 0, 0x0004000400040004, 0,
                                                0x0004000400040004, 0, 0x0004000400040004, 0);
        __m512i v = _mm512_permutex_epi64(twice16(a + at, b + at), 0x50);
        return lookup_moved(type, _mm512_and_si512(_mm512_srlv_epi16(v, places), nibble));
    }
    const __m512i places = _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0,
                                            0x0004000400040004, 0x0004000400040004, 0, 0);
    const int high_at = type == DS4_MXFP4 ? 1 : has_min(type) ? 4 : 2;
    const int at = high_at + (is_five_bit(type) ? 4 : 0);
    __m512i q = _mm512_and_si512(_mm512_srlv_epi16(twice16(a + at, b + at), places), nibble);
    if (type == DS4_MXFP4 || type == DS4_IQ4_NL) return lookup_moved(type, q);
    if (is_five_bit(type))
        q = _mm512_mask_add_epi8(q, bits_of(a + high_at, b + high_at), q, _mm512_set1_epi8(16));
    return q;
}

/* Lane r of out[j] is values 4 j .. 4 j + 3 of row r. */
DS4_INLINE void sixteen_rows(uint32_t type, const uint8_t *const *rows, int64_t at, int part,
                             __m512i *out) {
    __m512i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const int r = i < 2 ? 2 * i : 2 * i + 4; /* rows four further go to the upper halves */
        __m512i v = two_rows(type, rows[r] + at, rows[r + 4] + at, part);
        __m512i w = two_rows(type, rows[r + 1] + at, rows[r + 5] + at, part);
        a[2 * i] = _mm512_unpacklo_epi32(v, w);
        a[2 * i + 1] = _mm512_unpackhi_epi32(v, w);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        out[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        out[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    }
}

DS4_INLINE __m512 halves16(const uint8_t *const *rows, int64_t at) {
    uint16_t h[16];
    for (int i = 0; i < 16; i++) h[i] = ds4_load_u16(rows[i] + at);
    return _mm512_cvtph_ps(load32(h));
}

/* The scale and the minimum of sixteen rows, side by side in their blocks. */
DS4_INLINE void scales_and_minima(const uint8_t *const *rows, int64_t at, __m512 *d, __m512 *m) {
    uint32_t both[16];
    for (int i = 0; i < 16; i++) both[i] = ds4_load_u32(rows[i] + at);
    __m512i v = load64(both);
    *d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v));
    *m = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)));
}

DS4_INLINE __m512i bytes16(const uint8_t *const *rows, int64_t at) {
    uint8_t e[16];
    for (int i = 0; i < 16; i++) e[i] = rows[i][at];
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)e));
}

/* ds4_e8m0_half and ds4_ue4m3_half of sixteen. */
DS4_INLINE __m512 e8m0_half16(__m512i e) {
    __mmask16 least = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    __m512i bits = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    return _mm512_castsi512_ps(
        _mm512_mask_sllv_epi32(bits, least, _mm512_set1_epi32(0x00200000), e));
}

DS4_INLINE __m512 ue4m3_half16(__m512i x) {
    __m512i number = _mm512_and_si512(x, _mm512_set1_epi32(127));
    __mmask16 small = _mm512_cmplt_epi32_mask(number, _mm512_set1_epi32(8));
    __mmask16 nan = _mm512_cmpeq_epi32_mask(x, _mm512_set1_epi32(127));
    __m512 normal = _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(number, 20), _mm512_set1_epi32(119 << 23)));
    normal = _mm512_mask_mul_ps(normal, small, _mm512_cvtepi32_ps(number),
                                _mm512_set1_ps(0x1p-10f));
    return _mm512_mask_mov_ps(normal, nan, _mm512_setzero_ps());
}

/* The scale at the same offset of sixteen rows' blocks. `half`: which sixteen, for NVFP4. */
DS4_INLINE __m512 scales16(uint32_t type, const uint8_t *const *rows, int64_t at, int half) {
    if (type == DS4_MXFP4) return e8m0_half16(bytes16(rows, at));
    if (type == DS4_NVFP4) return ue4m3_half16(bytes16(rows, at + half));
    return halves16(rows, at);
}

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
    __m512 acc[COLUMNS];
    for (int c = 0; c < columns; c++) acc[c] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = raw_at(type, b);
        const int part = (int)(b % parts_of(type));
        block16 w;
        if (!part && (at & 63) < block_bytes_of(type)) /* once per cache line */
            for (int i = 0; i < 16; i++)
                _mm_prefetch((const char *)rows[i] + at + 512, _MM_HINT_T1);
        sixteen_rows(type, rows, at, part, w.q);
        if (has_min(type))
            scales_and_minima(rows, at, &w.d, &w.m);
        else
            w.d = scales16(type, rows, at, 2 * part);
        if (type == DS4_NVFP4) w.m = scales16(type, rows, at, 2 * part + 1);
#pragma GCC unroll 16
        for (int c = 0; c < columns; c++)
            acc[c] = add_block(type, &w, acts + (size_t)c * act_stride, d_at, blocks, b, acc[c]);
    }
#pragma GCC unroll 16
    for (int c = 0; c < columns; c++) _mm512_mask_storeu_ps(y + c * ldy, mask, acc[c]);
}

DS4_INLINE void rectangle(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, int64_t n, float *y, int64_t ldy) {
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
