/* K types (blocks of 256), AVX-512: X8 of Q2_K .. Q6_K, one lane per row.
 *
 * Few columns wait for memory: eight rows at a time, so that a core reads one run of it, front to back.
 * With more, two groups of eight rows share a vector, up to four columns at once; many go to
 * matmul_super_tile_avx512.c. Sums of sixteen
 * products stay below 2^15 for all but Q5_K and Q6_K, so vpdpwssd multiplies them with the sub-scale in
 * the low half of each lane and adds: a sub-scale costs one instruction. Those two multiply in int32.
 */
#if defined(__AVX512F__)
#include "avx512.h"
#include "super_x8_avx512.h"

#define COLUMNS 4 /* columns whose sums fit the registers */

/* ---- few columns: eight rows ----------------------------------------------------------------- */

/* Columns up to which memory is waited for: measured from DRAM. */
DS4_INLINE int64_t few_columns(uint32_t type) {
    return type == DS4_Q2_K || type == DS4_Q3_K ? 2 : COLUMNS;
}

/* The scale of sixteen number `sub`, as x8_scale16 gives it. */
DS4_INLINE __m256i x8_scale8(uint32_t type, const x8_scales *scales, int sub) {
    if (scales_per_32(type)) sub /= 2;
    const int t = sub % 4, at = (int)0x80800080u | t << 8;
    if (x8_wide_sums(type))
        return _mm256_srai_epi32(_mm256_slli_epi32(scales->s[sub / 4], 24 - 8 * t), 24);
    const __m256i pick = _mm256_broadcastsi128_si256(
        _mm_setr_epi32(at, at + 0x400, at + 0x800, at + 0xc00));
    return _mm256_srai_epi16(_mm256_shuffle_epi8(scales->s[sub / 4], pick), 8);
}

typedef struct {
    __m256i isum, term;
} sums8;

/* The products of one block; x at its activations. Thirty-twos whose weights share bytes go together,
 * so that a group is read front to back, and once. */
DS4_INLINE void add_block8(uint32_t type, const int columns, const uint8_t *group,
                           const x8_scales *scales, const char *const *x, sums8 *s) {
    const int parts = scales_per_32(type) ? 2 : 4, steps = type == DS4_Q5_K ? 8 : 4;
#pragma GCC unroll 8
    for (int k = 0; k < 64 / (parts * steps); k++) {
        const int i = k / (8 / steps) * parts, first = k % (8 / steps) * steps;
        __m256i sub[4][COLUMNS];
        for (int part = 0; part < parts; part++)
            for (int c = 0; c < columns; c++) sub[part][c] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int j = first; j < first + steps; j++) {
            in_order();
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) {
                __m256i w = x8_values(type, group, i + part, j);
#pragma GCC unroll 4
                for (int c = 0; c < columns; c++)
                    sub[part][c] = _mm256_dpbusd_epi32(sub[part][c], w,
                                                       broadcast4(x[c] + 32 * (i + part) + 4 * j));
            }
        }
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            __m256i scale = x8_scale8(type, scales, 2 * (i + part) + first / 4);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++)
                s[c].isum =
                    x8_wide_sums(type)
                        ? _mm256_add_epi32(s[c].isum, _mm256_mullo_epi32(sub[part][c], scale))
                        : _mm256_dpwssd_epi32(s[c].isum, sub[part][c], scale);
        }
    }
}

/* Eight rows, whose blocks are at `group`, against `columns` columns. */
DS4_INLINE void rows8(uint32_t type, const int columns, const uint8_t *group, int64_t blocks,
                      const char *acts, size_t act_stride, float *y, int64_t ldy) {
    const char *x[COLUMNS];
    __m256 acc[COLUMNS];
    for (int c = 0; c < columns; c++) {
        x[c] = acts + (size_t)c * act_stride;
        acc[c] = _mm256_setzero_ps();
    }
    for (int64_t k = 0; k < blocks; k++, group += DS4_X8_ROWS * super_bytes(type)) {
        const char *sums = acts + 256 * blocks + 32 * k, *dx = acts + 288 * blocks + 4 * k;
        sums8 s[COLUMNS];
        for (int c = 0; c < columns; c++) s[c].isum = s[c].term = _mm256_setzero_si256();
        __m256 d = load_half8(group), m = d;
        if (super_has_min(type)) m = _mm256_xor_ps(load_half8(group + 16), _mm256_set1_ps(-0.0f));
        x8_scales scales;
        x8_load_scales(type, group, &scales);
        open_page_ahead(group);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m256i mn = x8_term(type, &scales, i);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++)
                s[c].term = _mm256_dpwssd_epi32(
                    s[c].term, mn, broadcast4(sums + (size_t)c * act_stride + 4 * i));
        }
        add_block8(type, columns, group, &scales, x, s);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++, dx += act_stride) {
            __m256 scale = _mm256_broadcast_ss((const float *)(const void *)dx);
            if (!super_has_min(type)) s[c].isum = _mm256_add_epi32(s[c].isum, s[c].term);
            acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(d, scale), _mm256_cvtepi32_ps(s[c].isum), acc[c]);
            if (super_has_min(type))
                acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(m, scale), _mm256_cvtepi32_ps(s[c].term),
                                         acc[c]);
            x[c] += 256;
        }
    }
    for (int c = 0; c < columns; c++) _mm256_storeu_ps(y + c * ldy, acc[c]);
}

/* ---- more columns: sixteen rows -------------------------------------------------------------- */

typedef struct {
    __m512i isum, term;
} sums16;

/* The products of one thirty-two with every column. */
DS4_INLINE void add_32(uint32_t type, const int columns, const uint8_t *a, const uint8_t *b, int i,
                       const x8_scales16 *scales, const char *const *x, int64_t at, sums16 *s) {
    const int subs = type == DS4_Q5_K ? 1 : 2, steps = 8 / subs;
#pragma GCC unroll 2
    for (int half = 0; half < subs; half++) {
        __m512i scale = x8_scale16(type, scales, 2 * i + half), sub[COLUMNS];
        for (int c = 0; c < columns; c++) sub[c] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < steps; j++) {
            const int step = half * steps + j;
            __m512i w = x8_values16(type, a, b, i, step);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                sub[c] = _mm512_dpbusd_epi32(sub[c], w,
                                             broadcast4_16(x[c] + at + 32 * i + 4 * step));
        }
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            s[c].isum = x8_wide_sums(type)
                            ? _mm512_add_epi32(s[c].isum, _mm512_mullo_epi32(sub[c], scale))
                            : _mm512_dpwssd_epi32(s[c].isum, sub[c], scale);
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
    for (int64_t k = 0; k < blocks; k++, a += bytes, b += bytes) {
        sums16 s[COLUMNS];
        for (int c = 0; c < columns; c++) s[c].isum = s[c].term = _mm512_setzero_si512();
        prefetch_bytes(a, bytes, 4096);
        prefetch_bytes(b, bytes, 4096);
        x8_scales16 scales;
        x8_load_scales16(type, a, b, &scales);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) add_32(type, columns, a, b, i, &scales, x, 256 * k, s);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m512i mn = x8_term16(type, &scales, i);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                s[c].term = _mm512_dpwssd_epi32(
                    s[c].term, mn, broadcast4_16(x[c] + 256 * blocks + 32 * k + 4 * i));
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

DS4_INLINE void rectangle_x8(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                             const char *acts, size_t act_stride, int64_t n, float *y,
                             int64_t ldy) {
    int64_t blocks = w->cols / DS4_SUPER, row_bytes = blocks * super_bytes(type);
    for (int64_t r = row0; n <= few_columns(type) && r < row1; r += 8) {
        const uint8_t *group = (const uint8_t *)w->data + r * row_bytes;
        switch (n) { /* constants keep the sums in registers */
        case 1: rows8(type, 1, group, blocks, acts, act_stride, y + r, ldy); break;
        case 2: rows8(type, 2, group, blocks, acts, act_stride, y + r, ldy); break;
        case 3: rows8(type, 3, group, blocks, acts, act_stride, y + r, ldy); break;
        case 4: rows8(type, 4, group, blocks, acts, act_stride, y + r, ldy); break;
        default: break;
        }
    }
    for (int64_t r = row0; n > few_columns(type) && r < row1; r += 16) {
        const uint8_t *a = (const uint8_t *)w->data + r * row_bytes;
        const uint8_t *b = r + 8 < row1 ? a + 8 * row_bytes : a; /* its sums are dropped */
        __mmask16 rows = first_of_16(row1 - r);
        for (int64_t c = 0, count; c < n; c += count) {
            const char *x = acts + (size_t)c * act_stride;
            float *out = y + c * ldy + r;
            /* a constant column count keeps the sums in registers */
            if (n - c >= 4)
                rows16(type, count = 4, a, b, blocks, x, act_stride, out, ldy, rows);
            else if (n - c >= 2)
                rows16(type, count = 2, a, b, blocks, x, act_stride, out, ldy, rows);
            else
                rows16(type, count = 1, a, b, blocks, x, act_stride, out, ldy, rows);
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
