/* Eight rows of blocks of 32 weights in a vector, one lane per row. Include only from *_avxvnni.c.
 *
 * vpdpbusd takes its left factors unsigned: values are moved up by a power of two, and the sum of the
 * activations takes that off, exactly.
 */
#ifndef DS4_LEGACY_AVXVNNI_H
#define DS4_LEGACY_AVXVNNI_H

#include "avxvnni.h"
#include "group_stream.h"
#include "legacy_unpack_avx2.h"

#define LANES 8
typedef __m256i ints;
typedef __m256 floats;
typedef __m256i mask;

DS4_INLINE mask first_rows(int64_t count) { return first_lanes(count < 0 ? 0 : count); }
DS4_INLINE ints no_ints(void) { return _mm256_setzero_si256(); }
DS4_INLINE floats no_floats(void) { return _mm256_setzero_ps(); }
DS4_INLINE ints load_there(mask there, const void *p) { return _mm256_maskload_epi32(p, there); }
DS4_INLINE floats load_floats(const float *p) { return _mm256_load_ps(p); }
DS4_INLINE void store_ints(void *p, ints v) { _mm256_store_si256(p, v); }
DS4_INLINE void store_floats(float *p, floats v) { _mm256_store_ps(p, v); }
DS4_INLINE void store_there(float *p, mask there, floats v) { _mm256_maskstore_ps(p, there, v); }
DS4_INLINE ints all_dwords(const void *p) { return broadcast4(p); }
DS4_INLINE floats all_floats(const void *p) { return _mm256_broadcast_ss(p); }
DS4_INLINE floats to_floats(ints v) { return _mm256_cvtepi32_ps(v); }
DS4_INLINE floats product(floats a, floats b) { return _mm256_mul_ps(a, b); }
DS4_INLINE floats add_product(floats a, floats b, floats to) { return _mm256_fmadd_ps(a, b, to); }
DS4_INLINE ints moved_up(ints v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
DS4_INLINE ints held(ints v) { return pinned(v); }

DS4_INLINE ints minus_shifted(ints v, int shift) {
    return _mm256_sub_epi32(no_ints(), _mm256_sll_epi32(v, _mm_cvtsi32_si128(shift)));
}

DS4_INLINE ints group_bytes(const uint8_t *const *groups, int64_t at) {
    return load32(groups[0] + at);
}

DS4_INLINE floats group_halves(const uint8_t *const *groups, int64_t at) {
    return load_half8(groups[0] + at);
}

DS4_INLINE void group_steps(uint32_t type, const uint8_t *const *groups, int64_t at, int j,
                            ints *low, ints *high) {
    x8_steps(type, groups[0] + at, j, low, high);
}

/* The 32 values of part `part` of a stored block in order, unsigned: moved up by 2^shift_of(type). */
DS4_INLINE ints moved_values(uint32_t type, const uint8_t *block, int part) {
    ints v = raw_values(type, block, part);
    if (!is_signed(type)) return v; /* stored so */
    return _mm256_add_epi8(v, _mm256_set1_epi8((char)(1 << shift_of(type))));
}

/* Lane r of q[j] is values 4 j .. 4 j + 3 of row r. */
DS4_INLINE void unpacked_rows(uint32_t type, const uint8_t *const *rows, int64_t at, int part,
                              ints *q) {
    ints v[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) v[r] = moved_values(type, rows[r] + at, part);
    transpose8(v, q);
}

DS4_INLINE void scales_of_rows(uint32_t type, const uint8_t *const *rows, int64_t at, int part,
                               floats *d, floats *m) {
    *d = raw_scales(type, rows, at, part);
    if (has_min(type)) *m = raw_halves(rows, at + 2);
}

#endif
