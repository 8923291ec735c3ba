/* Blocks of 32 weights against many columns, AVX-512 VNNI: thirty-two rows, six columns at a time.
 *
 * How: legacy_many.h. Fewer columns are served by matmul_legacy_avx512.c and matmul_blocks_avx512.c, which
 * also keeps NVFP4.
 */
#if defined(__AVX512F__)
#include "legacy_raw_avx512.h"
#include "legacy_x8_avx512.h"

/* ---- sixteen rows in a vector ---------------------------------------------------------------- */

#define LANES 16
typedef __m512i ints;
typedef __m512 floats;
typedef __mmask16 mask;

DS4_INLINE mask first_rows(int64_t count) { return first_of_16(count < 0 ? 0 : count); }
DS4_INLINE ints no_ints(void) { return _mm512_setzero_si512(); }
DS4_INLINE floats no_floats(void) { return _mm512_setzero_ps(); }
DS4_INLINE ints load_there(mask there, const void *p) { return _mm512_maskz_loadu_epi32(there, p); }
DS4_INLINE floats load_floats(const float *p) { return _mm512_load_ps(p); }
DS4_INLINE void store_ints(void *p, ints v) { _mm512_store_si512(p, v); }
DS4_INLINE void store_floats(float *p, floats v) { _mm512_store_ps(p, v); }
DS4_INLINE void store_there(float *p, mask there, floats v) { _mm512_mask_storeu_ps(p, there, v); }
DS4_INLINE ints all_dwords(const void *p) { return broadcast4_16(p); }
DS4_INLINE floats all_floats(const void *p) { return _mm512_set1_ps(*(const float *)p); }
DS4_INLINE floats to_floats(ints v) { return _mm512_cvtepi32_ps(v); }
DS4_INLINE floats product(floats a, floats b) { return _mm512_mul_ps(a, b); }
DS4_INLINE floats add_product(floats a, floats b, floats to) { return _mm512_fmadd_ps(a, b, to); }
DS4_INLINE ints dot4(ints sum, ints w, ints x) { return _mm512_dpbusd_epi32(sum, w, x); }
DS4_INLINE ints moved_up(ints v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }

DS4_INLINE ints minus_shifted(ints v, int shift) {
    return _mm512_sub_epi32(no_ints(), _mm512_sll_epi32(v, _mm_cvtsi32_si128(shift)));
}

/* Left to itself GCC reads it again with each use. */
DS4_INLINE ints held(ints v) {
    __asm__("" : "+v"(v));
    return v;
}

DS4_INLINE ints group_bytes(const uint8_t *const *groups, int64_t at) {
    return two_groups(groups[0] + at, groups[1] + at);
}

DS4_INLINE floats group_halves(const uint8_t *const *groups, int64_t at) {
    return two_half8(groups[0] + at, groups[1] + at);
}

DS4_INLINE void group_steps(uint32_t type, const uint8_t *const *groups, int64_t at, int j,
                            ints *low, ints *high) {
    steps16(type, groups[0] + at, groups[1] + at, j, low, high);
}

DS4_INLINE void unpacked_rows(uint32_t type, const uint8_t *const *rows, int64_t at, int part,
                              ints *q) {
    sixteen_rows(type, rows, at, part, q);
}

DS4_INLINE void scales_of_rows(uint32_t type, const uint8_t *const *rows, int64_t at, int part,
                               floats *d, floats *m) {
    scales16(type, rows, at, part, d, m);
}

#include "legacy_many.h"

/* NULL where another kernel serves. */
DS4_KERNELS(ds4_matmul_avx512_many, DS4_BLOCKS_BUT_NVFP4, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_many_avx512_is_for_x86;
#endif
