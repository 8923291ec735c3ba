/* Raw Q6_K and IQ3_XXS against few columns, AVX-512: one row at a time.
 *
 * Memory is read in order; a block is unpacked into four vectors of 64 and multiplied with every column.
 * A lane's four products stay below 2^15, so vpdpwssd multiplies them with the sub-scale and adds.
 * Signs of a code book are bits already: they mask a subtraction of the activations.
 */
#if defined(__AVX512F__)
#include <math.h>

#include "avx512.h"
#include "super_unpack_avx2.h"

#define FEW 8 /* columns up to this go row by row */

typedef struct {
    __m512i q[4];       /* weights 64 k .. 64 k + 63, unsigned */
    __mmask64 minus[4]; /* where they are negative */
    __m512i sc[4];      /* the sub-scale of each four in the low half of its lane, the upper one zero */
    __m256i mn;         /* per sixteen, times the sums of the activations; Q6_K */
    float d;
} row_block;

/* Where scales 4 k .. 4 k + 3 of sixteen go: four lanes each. */
DS4_INLINE __m512i lanes_of(int k) {
    const __m512i quarter = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_add_epi32(quarter, _mm512_set1_epi32(4 * k));
}

DS4_INLINE void scales_of_16(__m512i sixteen, row_block *s) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) s->sc[k] = _mm512_permutexvar_epi32(lanes_of(k), sixteen);
}

DS4_INLINE void load_rows_q6_k(const uint8_t *b, row_block *s) {
    const __m512i nibble = _mm512_set1_epi8(15), high = _mm512_set1_epi8(48);
    const __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    const __m512i right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    __m128i scales = _mm_loadu_si128((const __m128i *)(const void *)(b + 192));
    __m256i spread = spread_sixteen(scales);
    s->mn = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(spread, 5));
    s->d = half_at(b + 208);
    scales_of_16(_mm512_and_si512(_mm512_cvtepi8_epi32(scales), _mm512_set1_epi32(0xffff)), s);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m512i low = load64(b + 64 * half);
        __m512i bits = _mm512_broadcast_i64x4(load32(b + 128 + 32 * half));
        s->q[2 * half] = _mm512_or_si512(_mm512_and_si512(low, nibble),
                                         _mm512_and_si512(_mm512_sllv_epi16(bits, left), high));
        s->q[2 * half + 1] =
            _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(low, 4), nibble),
                            _mm512_and_si512(_mm512_srlv_epi16(bits, right), high));
    }
}

/* Completed sign bytes and odd scales of eight tails, as IQ3_XXS packs them. */
DS4_INLINE void signs_of_tails(__m256i tails, row_block *s) {
    uint8_t signs[32];
    signs_and_scales(tails, signs);
    memcpy(s->minus, signs, 32);
    __m256i scales = _mm256_srli_epi32(tails, 28);
    scales = _mm256_add_epi32(_mm256_add_epi32(scales, scales), _mm256_set1_epi32(1));
    const __m512i eighth = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        s->sc[k] = _mm512_permutexvar_epi32(_mm512_add_epi32(eighth, _mm512_set1_epi32(2 * k)),
                                            _mm512_castsi256_si512(scales));
}

DS4_INLINE void load_rows_iq3_xxs(const uint8_t *b, row_block *s) {
    signs_of_tails(load32(b + 66), s);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m128i sixteen = _mm_loadu_si128((const __m128i *)(const void *)(b + 2 + 16 * k));
        s->q[k] = _mm512_i32gather_epi32(_mm512_cvtepu8_epi32(sixteen), ds4_iq3xxs_grid, 4);
    }
    s->d = 0.25f * half_at(b);
}

DS4_INLINE void load_rows(uint32_t type, const uint8_t *block, row_block *s) {
    switch (type) {
    case DS4_Q6_K: load_rows_q6_k(block, s); break;
    default: load_rows_iq3_xxs(block, s); break;
    }
}

/* acc plus one block times one column. */
DS4_INLINE float add_block(uint32_t type, const row_block *s, ds4_act256 x, int64_t b, float acc) {
    __m512i isum = _mm512_setzero_si512();
    if (type == DS4_Q6_K) {
        __m256i term = _mm256_madd_epi16(s->mn, load32(x.sums + 16 * b));
        isum = _mm512_zextsi256_si512(term);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i q = load64(x.q + 256 * b + 64 * k);
        if (type != DS4_Q6_K) q = _mm512_mask_sub_epi8(q, s->minus[k], _mm512_setzero_si512(), q);
        __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), s->q[k], q);
        isum = _mm512_dpwssd_epi32(isum, dot, s->sc[k]);
    }
    return fmaf(s->d * x.d[b], (float)_mm512_reduce_add_epi32(isum), acc);
}

DS4_INLINE void rectangle(uint32_t type, const ds4_weight *w, int64_t row0, int64_t row1,
                          const char *acts, size_t act_stride, const int n, float *y, int64_t ldy) {
    const int64_t blocks = w->cols / DS4_SUPER, bytes = super_bytes(type);
    const uint8_t *row = (const uint8_t *)w->data + row0 * blocks * bytes;
    for (int64_t r = row0; r < row1; r++) {
        float acc[FEW] = {0};
        for (int64_t b = 0; b < blocks; b++, row += bytes) {
            row_block s;
            prefetch_bytes(row, super_bytes(type), DS4_PREFETCH_AHEAD);
            load_rows(type, row, &s);
            for (int c = 0; c < n; c++) {
                ds4_act256 x = ds4_act256_view(acts + (size_t)c * act_stride, w->cols);
                acc[c] = add_block(type, &s, x, b, acc[c]);
            }
        }
        for (int c = 0; c < n; c++) y[c * ldy + r] = acc[c];
    }
}

#define KERNEL(name, type)                                                                         \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,           \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                       \
        if (n > FEW)                                                                               \
            ds4_matmul_avx2_super(type, DS4_LAYOUT_RAW)(w, row0, row1, acts, act_stride, n, y,    \
                                                        ldy);                                     \
        else if (n == 1) /* a constant: the block stays in registers */                            \
            rectangle(type, w, row0, row1, acts, act_stride, 1, y, ldy);                          \
        else                                                                                       \
            rectangle(type, w, row0, row1, acts, act_stride, (int)n, y, ldy);                     \
    }

KERNEL(q6_k, DS4_Q6_K)
KERNEL(iq3_xxs, DS4_IQ3_XXS)

/* NULL where the AVX2 kernel serves. */
ds4_matmul_fn ds4_matmul_avx512_rows(uint32_t type) {
    switch (type) {
    case DS4_Q6_K: return q6_k;
    case DS4_IQ3_XXS: return iq3_xxs;
    default: return NULL;
    }
}
#else
typedef int ds4_matmul_rows_avx512_is_for_x86;
#endif
