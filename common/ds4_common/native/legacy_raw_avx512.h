/* Raw blocks of 32 weights, sixteen rows at a time: lanes are rows, as the X8 layout has them.
 *
 * vpdpbusd takes its left factors unsigned: values are moved up by a power of two. Stored dwords change
 * places before they are unpacked: there are half as many of them. Include only from *_avx512.c.
 */
#ifndef DS4_LEGACY_RAW_AVX512_H
#define DS4_LEGACY_RAW_AVX512_H

#include "avx512.h"
#include "legacy_unpack_avx2.h"

/* ---- dwords of sixteen rows ------------------------------------------------------------------ */

DS4_INLINE __m128i load16(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

/* Lane r of out[j] is dword j of the sixteen bytes at the same offset of row r. */
DS4_INLINE void dwords16(const uint8_t *const *rows, int64_t at, __m512i *out) {
    __m512i v[4], a, b, c, d;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* rows i, 4 + i, 8 + i and 12 + i */
        v[i] = _mm512_broadcast_i32x4(load16(rows[i] + at));
        v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x00f0, load16(rows[4 + i] + at));
        v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x0f00, load16(rows[8 + i] + at));
        v[i] = _mm512_mask_broadcast_i32x4(v[i], 0xf000, load16(rows[12 + i] + at));
    }
    a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

/* The same of 32 bytes: each row is read once. */
DS4_INLINE void eight_dwords16(const uint8_t *const *rows, int64_t at, __m512i *out) {
    __m512i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const int r = i < 2 ? 2 * i : 2 * i + 4; /* rows four further go to the upper halves */
        __m512i v = two_groups(rows[r] + at, rows[r + 4] + at);
        __m512i w = two_groups(rows[r + 1] + at, rows[r + 5] + at);
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

/* Four bytes at the same offset of each. */
DS4_INLINE __m512i one_dword16(const uint8_t *const *rows, int64_t at) {
    uint32_t all[16];
    for (int i = 0; i < 16; i++) all[i] = ds4_load_u32(rows[i] + at);
    return load64(all);
}

DS4_INLINE __m512 halves16(const uint8_t *const *rows, int64_t at) {
    uint16_t h[16];
    for (int i = 0; i < 16; i++) h[i] = ds4_load_u16(rows[i] + at);
    return _mm512_cvtph_ps(load32(h));
}

DS4_INLINE __m512i bytes16(const uint8_t *const *rows, int64_t at) {
    uint8_t e[16];
    for (int i = 0; i < 16; i++) e[i] = rows[i][at];
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)e));
}

/* ---- values ---------------------------------------------------------------------------------- */

/* Bits 4 step .. 4 step + 3 of each lane, one in each byte, at place `place` among others. */
DS4_INLINE __m512i spread_bits(__m512i bits, int step, int place) {
    const int64_t from = (4 * step - place) & 63;
    int64_t places = 0;
    for (int i = 0; i < 8; i++) /* the second lane of a qword: 32 bits further */
        places |= ((from + i % 4 + 32 * (i / 4)) & 63) << 8 * i;
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(places), bits);
}

/* Values of sixteen codes, moved up by 2^shift. */
DS4_INLINE __m512i lookup_moved(uint32_t type, __m512i codes) {
    const int8_t *values = type == DS4_IQ4_NL ? ds4_iq4_values : ds4_fp4_values;
    __m128i table = _mm_add_epi8(_mm_loadu_si128((const __m128i *)(const void *)values),
                                 _mm_set1_epi8((char)(1 << shift_of(type))));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}

/* Where the low nibbles of dword j go; the high ones follow so many steps later. */
DS4_INLINE int low_step(uint32_t type, int j) { return type == DS4_NVFP4 ? j + (j & 2) : j; }
DS4_INLINE int high_after(uint32_t type) { return type == DS4_NVFP4 ? 2 : 4; }

/* Bytes of a stored block before its nibbles. */
DS4_INLINE int nibbles_at(uint32_t type) {
    switch (type) {
    case DS4_MXFP4: return 1;
    case DS4_Q4_0:
    case DS4_IQ4_NL: return 2;
    case DS4_Q5_0: return 6;
    case DS4_Q5_1: return 8;
    default: return 4; /* Q4_1, NVFP4 */
    }
}

/* Lane r of out[j] is values 4 j .. 4 j + 3 of row r, of part `part` of a block. */
DS4_INLINE void sixteen_rows(uint32_t type, const uint8_t *const *rows, int64_t at, int part,
                             __m512i *out) {
    const __m512i nibble = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
    __m512i v[4];
    if (type == DS4_Q8_0) {
        eight_dwords16(rows, at + 2, out);
        for (int j = 0; j < 8; j++) out[j] = _mm512_xor_si512(out[j], _mm512_set1_epi8(-128));
        return;
    }
    if (type == DS4_Q1_0) {
        const __m512i bits = one_dword16(rows, at + 2 + 4 * part);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            out[j] = _mm512_and_si512(spread_bits(bits, j, 1), _mm512_set1_epi8(2));
        return;
    }
    dwords16(rows, at + nibbles_at(type) + (type == DS4_NVFP4 ? 16 * part : 0), v);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const int low = low_step(type, j), high = low + high_after(type);
        out[low] = _mm512_and_si512(v[j], nibble);
        out[high] = _mm512_and_si512(_mm512_srli_epi16(v[j], 4), nibble);
        if (type == DS4_MXFP4 || type == DS4_IQ4_NL || type == DS4_NVFP4) {
            out[low] = lookup_moved(type, out[low]);
            out[high] = lookup_moved(type, out[high]);
        }
    }
    if (!is_five_bit(type)) return;
    const __m512i bits = one_dword16(rows, at + nibbles_at(type) - 4);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) /* out | spread & fifth */
        out[j] = _mm512_ternarylogic_epi32(out[j], spread_bits(bits, j, 4), fifth, 0xf8);
}

/* ---- scales ---------------------------------------------------------------------------------- */

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

DS4_INLINE __m512 low_halves(__m512i v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); }

/* Scales and, where the type has them, minima of sixteen rows' blocks; NVFP4: the scales of the halves of a
 * part. */
DS4_INLINE void scales16(uint32_t type, const uint8_t *const *rows, int64_t at, int part, __m512 *d,
                         __m512 *m) {
    if (type == DS4_NVFP4) {
        *d = ue4m3_half16(bytes16(rows, at + 2 * part));
        *m = ue4m3_half16(bytes16(rows, at + 2 * part + 1));
    } else if (has_min(type)) { /* side by side */
        __m512i both = one_dword16(rows, at);
        *d = low_halves(both);
        *m = low_halves(_mm512_srli_epi32(both, 16));
    } else {
        *d = type == DS4_MXFP4 ? e8m0_half16(bytes16(rows, at)) : halves16(rows, at);
    }
}

#endif
