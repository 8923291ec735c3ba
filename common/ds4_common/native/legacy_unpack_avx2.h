/* Blocks of 32 weights as vectors: facts of each type, X8 groups and raw blocks.
 *
 * Include only from the x86 kernel files of the types whose activations come in blocks of 32. A block
 * here is 32 weights: a part of a stored one where that is larger.
 */
#ifndef DS4_LEGACY_UNPACK_AVX2_H
#define DS4_LEGACY_UNPACK_AVX2_H

#include "avx2.h"

DS4_INLINE int is_five_bit(uint32_t type) { return type == DS4_Q5_0 || type == DS4_Q5_1; }
DS4_INLINE int has_min(uint32_t type) { return type == DS4_Q4_1 || type == DS4_Q5_1; }
DS4_INLINE int block_bytes_of(uint32_t type) {
    switch (type) {
    case DS4_Q4_0: return 18;
    case DS4_Q4_1: return 20;
    case DS4_Q5_0: return 22;
    case DS4_Q5_1: return 24;
    case DS4_IQ4_NL:
    case DS4_Q1_0: return 18;
    case DS4_MXFP4: return 17;
    case DS4_NVFP4: return 36;
    default: return 34;
    }
}

/* Blocks of 32 in a stored block. */
DS4_INLINE int parts_of(uint32_t type) {
    return type == DS4_Q1_0 ? 4 : type == DS4_NVFP4 ? 2 : 1;
}

/* Bytes from the row's start to the stored block that holds block b; of a row, for b past its end. */
DS4_INLINE int64_t raw_at(uint32_t type, int64_t b) {
    return b / parts_of(type) * block_bytes_of(type);
}

/* Types whose unpacked values are signed bytes. */
DS4_INLINE int is_signed(uint32_t type) {
    return type == DS4_Q8_0 || type == DS4_IQ4_NL || type == DS4_MXFP4 || type == DS4_NVFP4 ||
           type == DS4_Q1_0;
}

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

/* ---- X8: vectors of a group ------------------------------------------------------------------ */

/* Steps j (weights 4j..4j+3) and 4+j (16+4j..) of a nibble group, as unsigned bytes. */
DS4_INLINE void x8_steps(uint32_t type, const uint8_t *group, int j, __m256i *low, __m256i *high) {
    const __m256i nibble = _mm256_set1_epi8(15), fifth = _mm256_set1_epi8(16);
    __m256i v = load32(group + ds4_x8_quants_offset(type) + 32 * j);
    *low = _mm256_and_si256(v, nibble);
    *high = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
    if (is_five_bit(type)) { /* bit j and bit 4+j of the high plane become value 16 */
        __m256i h = load32(group + (has_min(type) ? 32 : 16));
        *low = _mm256_or_si256(*low, _mm256_and_si256(_mm256_slli_epi16(h, 4 - j), fifth));
        *high = _mm256_or_si256(*high, _mm256_and_si256(_mm256_srli_epi16(h, j), fifth));
    }
}

/* ---- raw blocks ------------------------------------------------------------------------------ */

DS4_INLINE __m256i lookup16(const int8_t *values, __m256i nibbles) {
    __m128i table = _mm_loadu_si128((const __m128i *)values);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
}

/* 0xff where bit i of the 32 bits at `bits` is set. */
DS4_INLINE __m256i bit_mask(const uint8_t *bits) {
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                              0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    __m256i v = _mm256_shuffle_epi8(broadcast4(bits), spread);
    return _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
}

/* The 32 values of part `part` of a stored block, in order. */
DS4_INLINE __m256i raw_values(uint32_t type, const uint8_t *block, int part) {
    if (type == DS4_Q8_0) return load32(block + 2);
    if (type == DS4_Q1_0) /* 1 where the bit is set, else -1 */
        return _mm256_or_si256(_mm256_xor_si256(bit_mask(block + 2 + 4 * part),
                                                _mm256_set1_epi8(-1)),
                               _mm256_set1_epi8(1));
    if (type == DS4_NVFP4) { /* eight bytes hold sixteen values: low nibbles first */
        __m128i v = _mm_loadu_si128((const __m128i *)(block + 4 + 16 * part));
        __m128i low = _mm_and_si128(v, _mm_set1_epi8(15));
        __m128i high = _mm_and_si128(_mm_srli_epi16(v, 4), _mm_set1_epi8(15));
        return lookup16(ds4_fp4_values, _mm256_set_m128i(_mm_unpackhi_epi64(low, high),
                                                         _mm_unpacklo_epi64(low, high)));
    }
    if (type == DS4_MXFP4 || type == DS4_IQ4_NL) {
        const int at = type == DS4_MXFP4 ? 1 : 2;
        __m128i v = _mm_loadu_si128((const __m128i *)(block + at));
        __m256i q = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v),
                                     _mm256_set1_epi8(15));
        return lookup16(type == DS4_MXFP4 ? ds4_fp4_values : ds4_iq4_values, q);
    }
    const int high_at = has_min(type) ? 4 : 2, quants_at = high_at + (is_five_bit(type) ? 4 : 0);
    __m128i v = _mm_loadu_si128((const __m128i *)(block + quants_at));
    __m256i q = _mm256_set_m128i(_mm_srli_epi16(v, 4), v);
    q = _mm256_and_si256(q, _mm256_set1_epi8(15));
    if (is_five_bit(type))
        q = _mm256_or_si256(q, _mm256_and_si256(bit_mask(block + high_at), _mm256_set1_epi8(16)));
    return q;
}

/* Half-precision fields at the same offset of eight rows' blocks. */
DS4_INLINE __m256 raw_halves(const uint8_t *const *rows, int64_t at) {
    uint16_t h[8];
    for (int i = 0; i < 8; i++) h[i] = ds4_load_u16(rows[i] + at);
    return load_half8(h);
}

/* Powers of two of E8M0, halved, as ds4_e8m0_half. */
DS4_INLINE __m256 e8m0_halves(__m256i e) {
    __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, is_tiny));
}

/* Unsigned E4M3, halved, as ds4_ue4m3_half. */
DS4_INLINE __m256 ue4m3_halves(__m256i x) {
    const __m256i nan = _mm256_cmpeq_epi32(x, _mm256_set1_epi32(0x7f)); /* with bit 7 it is a number */
    x = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
    __m256i normal = _mm256_slli_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(119 << 3)), 20);
    __m256 tiny = _mm256_mul_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(0x1p-10f));
    __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), x);
    __m256 v = _mm256_blendv_ps(_mm256_castsi256_ps(normal), tiny, _mm256_castsi256_ps(is_tiny));
    return _mm256_andnot_ps(_mm256_castsi256_ps(nan), v);
}

/* The block scales at the same offset of eight rows' blocks. `half`: which sixteen, for NVFP4. */
DS4_INLINE __m256 raw_scales(uint32_t type, const uint8_t *const *rows, int64_t at, int half) {
    if (type != DS4_MXFP4 && type != DS4_NVFP4) return raw_halves(rows, at);
    const int64_t place = at + (type == DS4_NVFP4 ? half : 0);
    __m256i bytes = _mm256_setr_epi32(rows[0][place], rows[1][place], rows[2][place], rows[3][place],
                                      rows[4][place], rows[5][place], rows[6][place], rows[7][place]);
    return type == DS4_MXFP4 ? e8m0_halves(bytes) : ue4m3_halves(bytes);
}

/* Pointers to eight rows from row r on; rows past the end repeat the last one. */
DS4_INLINE void raw_rows(const ds4_weight *w, int64_t r, int64_t row1, int64_t row_bytes,
                         const uint8_t **rows) {
    for (int64_t i = 0; i < 8; i++)
        rows[i] = (const uint8_t *)w->data + (r + i < row1 ? r + i : row1 - 1) * row_bytes;
}

#endif
