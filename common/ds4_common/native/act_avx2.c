/* Activation quantizer, AVX2: same bits as act.c (tests compare them). */
#if defined(__AVX2__)
#include "avx2.h"

/* Bits of the largest |x| in eight lanes of unsigned-comparable integers. */
DS4_INLINE __m256i abs_max(__m256i top, const float *x) {
    __m256i bits = _mm256_and_si256(load32(x), _mm256_set1_epi32(0x7fffffff));
    return _mm256_max_epi32(top, bits);
}

DS4_INLINE uint32_t top_lane(__m256i v) {
    __m128i a = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(a);
}

/* Scale of a block and the factor it is multiplied with; factor 0 for a zero or broken block. */
DS4_INLINE float block_scale(uint32_t top, float *factor) {
    float amax;
    memcpy(&amax, &top, 4);
    *factor = 0.0f;
    if (top >= 0x7f800000u) return __builtin_nanf("");
    if (amax < DS4_ACT_TINY) return 0.0f;
    *factor = 127.0f / amax;
    return amax / 127.0f;
}

/* 32 floats to int8, round to nearest even (the default rounding mode, which nobody changes). */
DS4_INLINE __m256i quantize32(const float *x, __m256 factor) {
    __m256i i0 = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factor));
    __m256i i1 = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), factor));
    __m256i i2 = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16), factor));
    __m256i i3 = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 24), factor));
    __m256i q = _mm256_packs_epi16(_mm256_packs_epi32(i0, i1), _mm256_packs_epi32(i2, i3));
    return _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Sums of the low and the high sixteen values, as two int32 in lanes 0 and 4 (others are parts). */
DS4_INLINE void sums_of_sixteen(__m256i q, int32_t *low, int32_t *high) {
    __m256i p = widen_pairs(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q));
    p = _mm256_add_epi32(p, _mm256_shuffle_epi32(p, 0x4e));
    p = _mm256_add_epi32(p, _mm256_shuffle_epi32(p, 0xb1));
    *low = _mm256_cvtsi256_si32(p);
    *high = _mm_cvtsi128_si32(_mm256_extracti128_si256(p, 1));
}

static void quantize_q8_32(const float *x, int64_t cols, void *out) {
    ds4_act32 view = ds4_act32_view(out, cols);
    float *d = (float *)view.d, *s = (float *)view.s;
    int32_t *sums = (int32_t *)view.sum;
    for (int64_t b = 0; b < cols / 32; b++, x += 32) {
        __m256i top = _mm256_setzero_si256();
        for (int i = 0; i < 4; i++) top = abs_max(top, x + 8 * i);
        float factor;
        d[b] = block_scale(top_lane(top), &factor);
        __m256i q = _mm256_setzero_si256();
        if (factor != 0.0f) q = quantize32(x, _mm256_set1_ps(factor));
        _mm256_storeu_si256((__m256i *)((char *)out + 32 * b), q);
        int32_t low, high;
        sums_of_sixteen(q, &low, &high);
        sums[b] = low + high;
        s[b] = d[b] * (float)sums[b];
    }
}

static void quantize_q8_256(const float *x, int64_t cols, void *out) {
    ds4_act256 view = ds4_act256_view(out, cols);
    float *d = (float *)view.d;
    int16_t *sums = (int16_t *)view.sums;
    for (int64_t b = 0; b < cols / 256; b++, x += 256, sums += 16) {
        __m256i top = _mm256_setzero_si256();
        for (int i = 0; i < 32; i++) top = abs_max(top, x + 8 * i);
        float factor;
        d[b] = block_scale(top_lane(top), &factor);
        for (int i = 0; i < 8; i++) {
            __m256i q = _mm256_setzero_si256();
            if (factor != 0.0f) q = quantize32(x + 32 * i, _mm256_set1_ps(factor));
            _mm256_storeu_si256((__m256i *)((char *)out + 256 * b + 32 * i), q);
            int32_t low, high;
            sums_of_sixteen(q, &low, &high);
            sums[i] = (int16_t)low;
            sums[8 + i] = (int16_t)high;
        }
    }
}

void ds4_act_quantize_avx2(int format, const float *x, int64_t cols, void *out) {
    if (format == DS4_ACT_Q8_32) quantize_q8_32(x, cols, out);
    if (format == DS4_ACT_Q8_256) quantize_q8_256(x, cols, out);
}
#else
typedef int ds4_act_avx2_is_for_x86;
#endif
