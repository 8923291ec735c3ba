/* K types (blocks of 256), AVX-512: X8 of Q2_K .. Q6_K, one lane per row, sixteen rows and up to eight
 * columns at once.
 *
 * Sums of sixteen products stay below 2^15 for all but Q5_K and Q6_K, so vpdpwssd multiplies them with
 * the sub-scale in the low half of each lane and adds: a sub-scale costs one instruction. Those two
 * multiply in int32. The two groups of eight rows are two runs of memory, asked for ahead. One column
 * of the larger types waits for memory, and short rows come fastest along one run of it: eight at a time.
 */
#if defined(__AVX512F__)
#include "avx512.h"
#include "super_x8_avx512.h"

#define COLUMNS 8 /* columns whose sums fit the registers at most */

DS4_INLINE int64_t most_columns(uint32_t type) { return type == DS4_Q3_K ? 4 : COLUMNS; }

typedef struct {
    __m512i isum, term;
} sums16;

/* Left alone, the compiler makes a tree of a block's sums, and keeps all of its leaves in memory. */
#define add_now(v) __asm__("" : "+v"(v))

/* The products of one block, and what is asked for meanwhile. Thirty-twos whose weights share bytes go
 * together, so that these are read and joined once, as many as have registers for their sums. */
DS4_INLINE void add_block16(uint32_t type, const int columns, const uint8_t *a, const uint8_t *b,
                            const x8_scales16 *scales, const char *const *x, int64_t at,
                            const group_stream *next, int64_t blocks, sums16 *s) {
    const int parts = scales_per_32(type) || columns > 4 ? 2 : 4, steps = type == DS4_Q5_K ? 8 : 4;
    const int turns = 64 / (parts * steps), bytes = DS4_X8_ROWS * super_bytes(type);
    const int apart = !scales_per_32(type) && parts == 2 ? 2 : 1; /* one byte's nibbles in Q6_K */
#pragma GCC unroll 16
    for (int k = 0; k < turns; k++) {
        ask_part(next, 2, blocks, bytes, k, turns);
        const int set = k / (8 / steps), first = k % (8 / steps) * steps;
        const int i = apart == 2 ? set / 2 * 4 + set % 2 : set * parts;
        __m512i sub[4][COLUMNS];
        for (int part = 0; part < parts; part++)
            for (int c = 0; c < columns; c++) sub[part][c] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = first; j < first + steps; j++)
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) {
                __m512i w = x8_values16(type, a, b, i + apart * part, j);
#pragma GCC unroll 8
                for (int c = 0; c < columns; c++)
                    sub[part][c] = dot4_16(sub[part][c], w,
                                           x[c] + at + 32 * (i + apart * part) + 4 * j);
            }
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            __m512i scale = x8_scale16(type, scales, 2 * (i + apart * part) + first / 4);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                s[c].isum =
                    x8_wide_sums(type)
                        ? _mm512_add_epi32(s[c].isum, _mm512_mullo_epi32(sub[part][c], scale))
                        : _mm512_dpwssd_epi32(s[c].isum, sub[part][c], scale);
        }
        for (int c = 0; c < columns; c++) add_now(s[c].isum);
    }
}

/* Sixteen rows, whose blocks are at `a` and `b`, against `columns` columns. */
DS4_INLINE void rows16(uint32_t type, const int columns, const uint8_t *a, const uint8_t *b,
                       int64_t blocks, const char *acts, size_t act_stride, float *y, int64_t ldy,
                       __mmask16 rows) {
    const int bytes = DS4_X8_ROWS * super_bytes(type);
    const char *x[COLUMNS];
    __m512 acc[COLUMNS];
    for (int c = 0; c < columns; c++) {
        x[c] = acts + (size_t)c * act_stride;
        acc[c] = _mm512_setzero_ps();
    }
    group_stream next = stream_ahead(a, 2, blocks, bytes);
    for (int64_t k = 0; k < blocks; k++, a += bytes, b += bytes) {
        sums16 s[COLUMNS];
        for (int c = 0; c < columns; c++) s[c].isum = s[c].term = _mm512_setzero_si512();
        x8_scales16 scales;
        x8_load_scales16(type, a, b, &scales);
        add_block16(type, columns, a, b, &scales, x, 256 * k, &next, blocks, s);
        step_ahead(&next, 2, blocks, bytes);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m512i mn = x8_term16(type, &scales, i);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                s[c].term = dot2_16(s[c].term, mn, x[c] + 256 * blocks + 32 * k + 4 * i);
        }
        __m512 d = two_half8(a, b), m = d;
        if (super_has_min(type))
            m = _mm512_xor_ps(two_half8(a + 16, b + 16), _mm512_set1_ps(-0.0f));
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            const float *xd = (const float *)(const void *)(x[c] + 288 * blocks) + k;
            __m512 dx = _mm512_set1_ps(*xd);
            if (!super_has_min(type)) s[c].isum = _mm512_add_epi32(s[c].isum, s[c].term);
            acc[c] = _mm512_fmadd_ps(_mm512_mul_ps(d, dx), _mm512_cvtepi32_ps(s[c].isum), acc[c]);
            if (super_has_min(type))
                acc[c] = _mm512_fmadd_ps(_mm512_mul_ps(m, dx), _mm512_cvtepi32_ps(s[c].term),
                                         acc[c]);
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) _mm512_mask_storeu_ps(y + c * ldy, rows, acc[c]);
}

/* ---- one column: eight rows ------------------------------------------------------------------- */

/* With eight rows at a time; the others take longer to unpack than their few bytes take to come. */
DS4_INLINE int is_bound_by_memory(uint32_t type) {
    return type == DS4_Q4_K || type == DS4_Q5_K || type == DS4_Q6_K;
}

/* x8_scale16 of one group. */
DS4_INLINE __m256i x8_scale8(uint32_t type, const x8_scales *scales, int sub) {
    if (scales_per_32(type)) sub /= 2;
    return x8_wide_sums(type) ? x8_wide_scale(scales, sub) : low_byte(scales->s[sub / 4], sub % 4);
}

/* The products of one block, and lines far ahead meanwhile; order and sharing as in add_block16. */
DS4_INLINE __m256i sums8(uint32_t type, const uint8_t *group, const x8_scales *scales,
                         const int8_t *x) {
    const int parts = scales_per_32(type) ? 2 : 4, steps = type == DS4_Q5_K ? 8 : 4;
    const int turns = 64 / (parts * steps), lines = DS4_X8_ROWS * super_bytes(type) / 64 + 1;
    __m256i isum = _mm256_setzero_si256();
#pragma GCC unroll 16
    for (int k = 0; k < turns; k++) {
        const int i = k / (8 / steps) * parts, first = k % (8 / steps) * steps;
        __m256i sub[4];
        for (int line = lines * k / turns; line < lines * (k + 1) / turns; line++)
            _mm_prefetch((const char *)group + DS4_AHEAD_FAR + 64 * line, _MM_HINT_T0);
        for (int part = 0; part < parts; part++) sub[part] = _mm256_setzero_si256();
        in_order();
#pragma GCC unroll 8
        for (int j = first; j < first + steps; j++)
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++)
                sub[part] = _mm256_dpbusd_epi32(sub[part], x8_values(type, group, i + part, j),
                                                broadcast4(x + 32 * (i + part) + 4 * j));
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            const __m256i scale = x8_scale8(type, scales, 2 * (i + part) + first / 4);
            isum = x8_wide_sums(type)
                       ? _mm256_add_epi32(isum, _mm256_mullo_epi32(sub[part], scale))
                       : _mm256_dpwssd_epi32(isum, sub[part], scale);
        }
        add_now(isum);
    }
    return isum;
}

DS4_INLINE __m256 rows8(uint32_t type, const uint8_t *group, int64_t blocks, const void *act) {
    ds4_act256 x = ds4_act256_view(act, DS4_SUPER * blocks);
    __m256 acc = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, group += DS4_X8_ROWS * super_bytes(type)) {
        x8_scales scales;
        x8_load_scales(type, group, &scales);
        __m256i isum = sums8(type, group, &scales, x.q + 256 * b), term = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            term = _mm256_dpwssd_epi32(term, x8_term(type, &scales, i),
                                       broadcast4(x.sums + 16 * b + 2 * i));
        const __m256 d = load_half8(group), dx = _mm256_broadcast_ss(x.d + b);
        if (!super_has_min(type)) isum = _mm256_add_epi32(isum, term);
        acc = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum), acc);
        if (!super_has_min(type)) continue;
        const __m256 m = _mm256_xor_ps(load_half8(group + 16), _mm256_set1_ps(-0.0f));
        acc = _mm256_fmadd_ps(_mm256_mul_ps(m, dx), _mm256_cvtepi32_ps(term), acc);
    }
    return acc;
}

/* ---- rectangles ------------------------------------------------------------------------------- */

DS4_INLINE void rectangle_x8(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                             const char *acts, size_t act_stride, int64_t n, float *y,
                             int64_t ldy) {
    int64_t blocks = w->cols / DS4_SUPER, row_bytes = blocks * super_bytes(type);
    const uint8_t *data = w->data;
    if (n == 1 && w->cols < DS4_LONG_ROW && is_bound_by_memory(type)) {
        for (int64_t r = row0; r < row1; r += 8)
            _mm256_storeu_ps(y + r, rows8(type, data + r * row_bytes, blocks, acts));
        return;
    }
    for (int64_t r = row0; r < row1; r += 16) {
        const uint8_t *a = data + r * row_bytes;
        const uint8_t *b = r + 8 < row1 ? a + 8 * row_bytes : a; /* its sums are dropped */
        __mmask16 rows = first_of_16(row1 - r);
        for (int64_t c = 0, count; c < n; c += count) {
            const char *x = acts + (size_t)c * act_stride;
            float *out = y + c * ldy + r;
            /* a constant column count keeps the sums in registers */
            switch (count = n - c < most_columns(type) ? n - c : most_columns(type)) {
            case 1: rows16(type, 1, a, b, blocks, x, act_stride, out, ldy, rows); break;
            case 2: rows16(type, 2, a, b, blocks, x, act_stride, out, ldy, rows); break;
            case 3: rows16(type, 3, a, b, blocks, x, act_stride, out, ldy, rows); break;
            case 4: rows16(type, 4, a, b, blocks, x, act_stride, out, ldy, rows); break;
            case 5: rows16(type, 5, a, b, blocks, x, act_stride, out, ldy, rows); break;
            case 6: rows16(type, 6, a, b, blocks, x, act_stride, out, ldy, rows); break;
            case 7: rows16(type, 7, a, b, blocks, x, act_stride, out, ldy, rows); break;
            default: rows16(type, 8, a, b, blocks, x, act_stride, out, ldy, rows); break;
            }
        }
    }
}

#define KERNEL_X8(name, type)                                                                      \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,           \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                       \
        rectangle_x8(type, w, row0, row1, acts, act_stride, n, y, ldy);                           \
    }

KERNEL_X8(q2_k_x8, DS4_Q2_K)
KERNEL_X8(q3_k_x8, DS4_Q3_K)
KERNEL_X8(q4_k_x8, DS4_Q4_K)
KERNEL_X8(q5_k_x8, DS4_Q5_K)
KERNEL_X8(q6_k_x8, DS4_Q6_K)

/* NULL where the AVX2 kernel serves. */
ds4_matmul_fn ds4_matmul_avx512_few(uint32_t type, uint32_t layout) {
    if (type == DS4_IQ2_XXS || type == DS4_IQ2_XS) return ds4_matmul_avx512_iq2(type, layout);
    if (layout == DS4_LAYOUT_Q2_K_ALIGNED) return ds4_matmul_avx512_q2_k_pairs();
    if (layout == DS4_LAYOUT_RAW) return ds4_matmul_avx512_rows(type);
    switch (type) {
    case DS4_Q2_K: return q2_k_x8;
    case DS4_Q3_K: return q3_k_x8;
    case DS4_Q4_K: return q4_k_x8;
    case DS4_Q5_K: return q5_k_x8;
    case DS4_Q6_K: return q6_k_x8;
    default: return NULL;
    }
}
#else
typedef int ds4_matmul_super_avx512_is_for_x86;
#endif
