/* IQ2_XXS and IQ2_XS against few columns, AVX2: every layout, one row at a time.
 *
 * Four code book entries make 32 weights, which meet every column before the next ones are looked up: no
 * weight waits in memory. One or two columns: magnitudes times activations that took over the signs. More:
 * weights moved up to be positive, and sums that begin at what this gives too much. Many columns are served by
 * matmul_super_tile_avx2.c.
 */
#if defined(__AVX2__)
#include "kernel_list.h"
#include "super_places_avx2.h"

#define FEW 8 /* columns whose sums fit the registers */

/* Columns from which unpacking 32 rows at once pays: earlier where blocks have to be put together first. */
DS4_INLINE int most_columns(uint32_t layout) { return layout == DS4_LAYOUT_IQ2_PLANES ? FEW : 4; }

/* ---- one block --------------------------------------------------------------------------------- */

/* Where the parts of a block are, put together where they are packed. */
typedef struct {
    const uint8_t *index; /* IQ2_XXS: four of each 32 weights, `step` bytes apart */
    int step;
    uint32_t ninth; /* IQ2_XS, planes */
    const uint8_t *signs;
    __m256i sc; /* as in super_block */
    float d;
    uint16_t places[32]; /* IQ2_XS, but for planes */
    uint8_t made[32];    /* signs, but for planes */
} iq2_block;

DS4_INLINE __m256i odd_scales(__m256i s) {
    return _mm256_add_epi16(_mm256_add_epi16(s, s), _mm256_set1_epi16(1));
}

DS4_INLINE void open_block(uint32_t type, uint32_t layout, const super_places *p, int64_t r, int64_t b,
                           iq2_block *s) {
    const int64_t i = r * p->blocks + b;
    if (layout == DS4_LAYOUT_IQ2_PLANES) {
        const ds4_planes t = ds4_planes_of(type, p->raw + i * ds4_plane_bytes(type));
        s->index = t.index, s->step = 4, s->signs = t.signs;
        s->d = 0.125f * half_at(t.d);
        if (type == DS4_IQ2_XXS) {
            s->sc = spread_eight(_mm_loadl_epi64((const __m128i *)t.scales));
        } else {
            s->sc = odd_scales(nibble_scales(t.scales));
            s->ninth = t.ninth;
        }
        return;
    }
    const int aligned = layout != DS4_LAYOUT_RAW;
    const uint8_t *raw = p->raw + i * super_bytes(type);
    const uint8_t *codes = aligned ? p->sections.codes + 64 * i : raw + 2;
    s->d = 0.125f * half_at(aligned ? p->sections.scales + 2 * i : raw);
    s->index = codes, s->step = 8, s->signs = s->made;
    if (type == DS4_IQ2_XXS) {
        s->sc = odd_scales(iq2_xxs_tails(codes, s->made));
    } else {
        iq2_xs_places(codes, s->places, s->made);
        s->sc = odd_scales(nibble_scales(aligned ? p->sections.extra + 8 * i : raw + 66));
    }
}

/* Number g of 32 entries. */
DS4_INLINE uint32_t entry_of(uint32_t type, uint32_t layout, const iq2_block *s, int g) {
    if (type == DS4_IQ2_XXS) return s->index[g / 4 * s->step + g % 4];
    if (layout != DS4_LAYOUT_IQ2_PLANES) return s->places[g];
    return s->index[g] | (s->ninth >> g & 1) << 8;
}

/* Magnitudes of weights 32 i on. */
DS4_INLINE __m256i magnitudes(uint32_t type, uint32_t layout, const iq2_block *s, int i) {
    return gather4(type == DS4_IQ2_XXS ? ds4_iq2xxs_grid : ds4_iq2xs_grid,
                   entry_of(type, layout, s, 4 * i), entry_of(type, layout, s, 4 * i + 1),
                   entry_of(type, layout, s, 4 * i + 2), entry_of(type, layout, s, 4 * i + 3));
}

/* ---- against columns --------------------------------------------------------------------------- */

/* Lane c: the sum of the lanes of v[c]. */
DS4_INLINE __m256i sums_of_columns(const int columns, const __m256i *v) {
    __m256i all[8];
    for (int c = 0; c < 8; c++) all[c] = c < columns ? v[c] : _mm256_setzero_si256();
    if (columns > 4) return sum_lanes8(all);
    __m256i a = columns > 2 ? _mm256_hadd_epi32(all[2], all[3]) : _mm256_setzero_si256();
    a = _mm256_hadd_epi32(_mm256_hadd_epi32(all[0], all[1]), a);
    return _mm256_castsi128_si256(
        _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
}

/* Scales of columns, one per lane. */
DS4_INLINE __m256 scales_of_columns(const int columns, const char *d, size_t act_stride) {
    __m128 four[2] = {_mm_setzero_ps(), _mm_setzero_ps()};
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) {
        const __m128 v = _mm_load_ss((const float *)(const void *)(d + (size_t)c * act_stride));
        four[c / 4] = c % 4 == 0   ? v
                      : c % 4 == 1 ? _mm_insert_ps(four[c / 4], v, 0x10)
                      : c % 4 == 2 ? _mm_insert_ps(four[c / 4], v, 0x20)
                                   : _mm_insert_ps(four[c / 4], v, 0x30);
    }
    return _mm256_set_m128(four[1], four[0]);
}

/* acc (lane c: column c) plus one block times columns, whose quants are at q. */
DS4_INLINE __m256 add_block(uint32_t type, uint32_t layout, const int columns, const iq2_block *s,
                            const char *q, const char *sums, const char *d, size_t act_stride,
                            __m256 acc) {
    const int take_signs = columns <= 2;
    const __m256i minus = _mm256_mullo_epi16(s->sc, _mm256_set1_epi16(-43));
    __m256i isum[FEW];
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++)
        isum[c] = take_signs ? _mm256_setzero_si256()
                             : _mm256_madd_epi16(minus, load32(sums + (size_t)c * act_stride));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m256i scale = lane_scale(s->sc, i);
        __m256i w = magnitudes(type, layout, s, i), signs = w;
        if (take_signs)
            signs = _mm256_or_si256(sign_mask(s->signs + 4 * i), _mm256_set1_epi8(1));
        else
            w = apply_signs(w, s->signs + 4 * i, 43);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            __m256i x = load32(q + (size_t)c * act_stride + 32 * i);
            if (take_signs) x = _mm256_sign_epi8(x, signs);
            __m256i p = _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), scale);
            isum[c] = pinned(_mm256_add_epi32(isum[c], p));
        }
    }
    const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(s->d), scales_of_columns(columns, d, act_stride));
    return _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums_of_columns(columns, isum)), acc);
}

DS4_INLINE void row_columns(uint32_t type, uint32_t layout, const int columns, const super_places *p,
                            int64_t r, const char *acts, size_t act_stride, float *y, int64_t ldy) {
    __m256 acc = _mm256_setzero_ps();
    for (int64_t b = 0; b < p->blocks; b++) {
        iq2_block s;
        prefetch_codes(type, layout, p, r * p->blocks + b, DS4_PREFETCH_AHEAD);
        open_block(type, layout, p, r, b, &s);
        acc = add_block(type, layout, columns, &s, acts + 256 * b, acts + 256 * p->blocks + 32 * b,
                        acts + 288 * p->blocks + 4 * b, act_stride, acc);
    }
    float out[8];
    _mm256_storeu_ps(out, acc);
    for (int c = 0; c < columns; c++) y[c * ldy] = out[c];
}

/* ---- rectangles -------------------------------------------------------------------------------- */

DS4_INLINE void rectangle(uint32_t type, uint32_t layout, const ds4_weight *w, int64_t row0,
                          int64_t row1, const char *acts, size_t act_stride, int64_t n, float *y,
                          int64_t ldy) {
    if (n > most_columns(layout)) {
        ds4_matmul_avx2_super_many(type, layout)(w, row0, row1, acts, act_stride, n, y, ldy);
        return;
    }
    const super_places p = places_of(layout, w);
    for (int64_t r = row0; r < row1; r++) {
        float *out = y + r;
        switch (n) { /* constants keep the sums in registers */
        case 1: row_columns(type, layout, 1, &p, r, acts, act_stride, out, ldy); break;
        case 2: row_columns(type, layout, 2, &p, r, acts, act_stride, out, ldy); break;
        case 3: row_columns(type, layout, 3, &p, r, acts, act_stride, out, ldy); break;
        case 4: row_columns(type, layout, 4, &p, r, acts, act_stride, out, ldy); break;
        case 5: row_columns(type, layout, 5, &p, r, acts, act_stride, out, ldy); break;
        case 6: row_columns(type, layout, 6, &p, r, acts, act_stride, out, ldy); break;
        case 7: row_columns(type, layout, 7, &p, r, acts, act_stride, out, ldy); break;
        default: row_columns(type, layout, 8, &p, r, acts, act_stride, out, ldy);
        }
    }
}

DS4_KERNELS(ds4_matmul_avx2_iq2, DS4_IQ2, (int)layout)
#else
typedef int ds4_matmul_iq2_avx2_is_for_x86;
#endif
