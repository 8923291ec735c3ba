/* Q2_K in the aligned layout, AVX-512: a pair of rows at a time, whose dwords take turns in memory.
 *
 * So lane 2 i + q of a vector is dword i of row q of the pair, and activations are taken with every dword twice.
 * Four products stay below 2^11: vpdpwssd multiplies them with the sub-scale and adds. Minima meet the sums of
 * the activations in the same order of lanes. More columns of too few rows for a panel go to the
 * AVX2 kernel.
 */
#if defined(__AVX512F__)
#include "aligned.h"
#include "avx512.h"

#define FEW 4 /* columns up to this share what was unpacked */

/* One block of a pair. q[4 h + k]: weights 128 h + 32 k .. + 31 of both rows; sc: their sub-scales, in the
 * low half of each lane. mn: lane 2 m + q has the minima of sixteens 2 m and 2 m + 1. */
typedef struct {
    __m512i q[8], sc[8], mn;
    __m128 d; /* of both rows, then minus their dmin */
} pair_block;

typedef struct {
    __m512i twice;  /* every dword of eight twice */
    __m512i scales; /* byte of the first sub-scale of each lane */
    __m512i minima; /* bytes of the minima, one per word */
    __m512i sums;   /* words of the activations' sums */
} pair_orders;

/* Sub-scale s of row q is byte 16 (s / 8) + 8 q + s % 8 of a pair's; ds4_sum_place says where sums lie. */
DS4_INLINE pair_orders orders(void) {
    uint32_t twice[16], scales[16], minima[16], sums[16];
    for (uint32_t i = 0; i < 8; i++)
        for (uint32_t q = 0; q < 2; q++) {
            uint32_t lane = 2 * i + q, first = 16 * (i / 4) + 8 * q + 2 * (i % 4);
            twice[lane] = i;
            scales[lane] = 8 * q + i / 4;
            minima[lane] = first | (first + 1) << 16;
            sums[lane] = i | (i + 8) << 16;
        }
    return (pair_orders){load64(twice), load64(scales), load64(minima), load64(sums)};
}

DS4_INLINE void load_pair(const uint8_t *d, const uint8_t *extra, const uint8_t *codes,
                          const pair_orders *order, pair_block *p) {
    const __m512i two = _mm512_set1_epi8(3), nibble = _mm512_set1_epi8(15);
    __m512i bytes = _mm512_zextsi256_si512(load32(extra));
    __m512i scales = _mm512_and_si512(bytes, nibble);
    __m512i minima = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i v = _mm512_srli_epi16(load64(codes + 64 * (i / 4)), 2 * (i % 4));
        __m512i at = _mm512_add_epi32(order->scales, _mm512_set1_epi32(16 * (i / 4) + 2 * (i % 4)));
        p->q[i] = _mm512_and_si512(v, two);
        p->sc[i] = _mm512_maskz_permutexvar_epi8(0x1111111111111111, at, scales);
    }
    p->mn = _mm512_maskz_permutexvar_epi8(0x5555555555555555, order->minima, minima);
    __m128 halves = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(const void *)d));
    halves = _mm_permute_ps(halves, 0xd8); /* d, d, dmin, dmin */
    p->d = _mm_xor_ps(halves, _mm_setr_ps(0.0f, 0.0f, -0.0f, -0.0f));
}

/* acc (two lanes) plus one block of both rows times one column. */
DS4_INLINE __m128 add_block(const pair_block *p, const pair_orders *order, ds4_act256 x, int64_t b,
                            __m128 acc) {
    __m512i isum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i q = _mm512_castsi256_si512(load32(x.q + DS4_SUPER * b + 32 * i));
        q = _mm512_permutexvar_epi32(order->twice, q);
        __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), p->q[i], q);
        isum = _mm512_dpwssd_epi32(isum, dot, p->sc[i]);
    }
    __m512i sums = _mm512_castsi256_si512(load32(x.sums + 16 * b));
    __m512i term = _mm512_madd_epi16(p->mn, _mm512_permutexvar_epi16(order->sums, sums));
    isum = _mm512_add_epi32(_mm512_unpacklo_epi64(isum, term), _mm512_unpackhi_epi64(isum, term));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(isum), _mm512_extracti64x4_epi64(isum, 1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    __m128 d = _mm_mul_ps(p->d, _mm_set1_ps(x.d[b])), s = _mm_cvtepi32_ps(four);
    acc = _mm_fmadd_ps(d, s, acc);
    return _mm_fmadd_ps(_mm_movehl_ps(d, d), _mm_movehl_ps(s, s), acc);
}

DS4_INLINE void rectangle(const ds4_weight *w, int64_t row0, int64_t row1, const char *acts,
                          size_t act_stride, const int n, float *y, int64_t ldy) {
    const int64_t blocks = w->cols / DS4_SUPER;
    const ds4_sections s = ds4_sections_of(w);
    const pair_orders order = orders();
    for (int64_t r = row0; r < row1; r += 2) {
        __m128 acc[FEW];
        for (int c = 0; c < n; c++) acc[c] = _mm_setzero_ps();
        for (int64_t b = 0, at = r / 2 * blocks; b < blocks; b++, at++) {
            pair_block p;
            prefetch_bytes(s.codes + 128 * at, 128, DS4_PREFETCH_AHEAD);
            prefetch_bytes(s.extra + 32 * at, 32, DS4_PREFETCH_AHEAD / 4);
            load_pair(s.scales + 8 * at, s.extra + 32 * at, s.codes + 128 * at, &order, &p);
            for (int c = 0; c < n; c++) {
                ds4_act256 x = ds4_act256_view(acts + (size_t)c * act_stride, w->cols);
                acc[c] = add_block(&p, &order, x, b, acc[c]);
            }
        }
        for (int c = 0; c < n; c++) _mm_storel_pi((__m64 *)(void *)(y + c * ldy + r), acc[c]);
    }
}

static void q2_k_pairs(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                       size_t act_stride, int64_t n, float *y, int64_t ldy) {
    if (n > FEW)
        ds4_matmul_avx2_super(w->type, w->layout)(w, row0, row1, acts, act_stride, n, y, ldy);
    else if (n == 1) /* a constant: the block stays in registers */
        rectangle(w, row0, row1, acts, act_stride, 1, y, ldy);
    else
        rectangle(w, row0, row1, acts, act_stride, (int)n, y, ldy);
}

ds4_matmul_fn ds4_matmul_avx512_q2_k_pairs(void) { return q2_k_pairs; }
#else
typedef int ds4_matmul_q2_k_pairs_avx512_is_for_x86;
#endif
