/* Which types and layouts there are kernels of, listed once; and the kernels of a file, of which what is
 * defined and what is found cannot differ.
 *
 * A file has `rectangle(type, layout, ...)`, or `fill` of a panel, which want constants, and names its list;
 * where it knows raw and X8 only, the layout is whether it is X8. Include only from kernel files.
 */
#ifndef DS4_KERNEL_LIST_H
#define DS4_KERNEL_LIST_H

#include "matmul.h"

/* ---- types and their layouts: each(name, type, layout) ----------------------------------------- */

/* Blocks of 32 weights; NVFP4, which has two scales in one, apart. */
#define DS4_BLOCKS_X8(each)                                                                        \
    each(q4_0_x8, DS4_Q4_0, DS4_LAYOUT_X8)                                                         \
    each(q4_1_x8, DS4_Q4_1, DS4_LAYOUT_X8)                                                         \
    each(q5_0_x8, DS4_Q5_0, DS4_LAYOUT_X8)                                                         \
    each(q5_1_x8, DS4_Q5_1, DS4_LAYOUT_X8)                                                         \
    each(q8_0_x8, DS4_Q8_0, DS4_LAYOUT_X8)
#define DS4_BLOCKS_RAW(each)                                                                       \
    each(q4_0_raw, DS4_Q4_0, DS4_LAYOUT_RAW)                                                       \
    each(q4_1_raw, DS4_Q4_1, DS4_LAYOUT_RAW)                                                       \
    each(q5_0_raw, DS4_Q5_0, DS4_LAYOUT_RAW)                                                       \
    each(q5_1_raw, DS4_Q5_1, DS4_LAYOUT_RAW)                                                       \
    each(q8_0_raw, DS4_Q8_0, DS4_LAYOUT_RAW)                                                       \
    each(q1_0_raw, DS4_Q1_0, DS4_LAYOUT_RAW)                                                       \
    each(iq4_nl_raw, DS4_IQ4_NL, DS4_LAYOUT_RAW)                                                   \
    each(mxfp4_raw, DS4_MXFP4, DS4_LAYOUT_RAW)
#define DS4_BLOCKS_NVFP4(each)                                                                     \
    each(nvfp4_raw, DS4_NVFP4, DS4_LAYOUT_RAW)
#define DS4_BLOCKS_BUT_NVFP4(each)                                                                 \
    DS4_BLOCKS_X8(each)                                                                            \
    DS4_BLOCKS_RAW(each)
#define DS4_BLOCKS_ALL(each)                                                                       \
    DS4_BLOCKS_BUT_NVFP4(each)                                                                     \
    DS4_BLOCKS_NVFP4(each)
#define DS4_BLOCKS_RAW_ALL(each)                                                                   \
    DS4_BLOCKS_RAW(each)                                                                           \
    DS4_BLOCKS_NVFP4(each)

/* Blocks of 256 weights; IQ2 here means IQ2_XXS and IQ2_XS, which have layouts of their own. */
#define DS4_SUPER_X8(each)                                                                         \
    each(q2_k_x8, DS4_Q2_K, DS4_LAYOUT_X8)                                                         \
    each(q3_k_x8, DS4_Q3_K, DS4_LAYOUT_X8)                                                         \
    each(q4_k_x8, DS4_Q4_K, DS4_LAYOUT_X8)                                                         \
    each(q5_k_x8, DS4_Q5_K, DS4_LAYOUT_X8)                                                         \
    each(q6_k_x8, DS4_Q6_K, DS4_LAYOUT_X8)
#define DS4_SUPER_RAW(each)                                                                        \
    each(q2_k_raw, DS4_Q2_K, DS4_LAYOUT_RAW)                                                       \
    each(q3_k_raw, DS4_Q3_K, DS4_LAYOUT_RAW)                                                       \
    each(q4_k_raw, DS4_Q4_K, DS4_LAYOUT_RAW)                                                       \
    each(q5_k_raw, DS4_Q5_K, DS4_LAYOUT_RAW)                                                       \
    each(q6_k_raw, DS4_Q6_K, DS4_LAYOUT_RAW)                                                       \
    each(iq1_s_raw, DS4_IQ1_S, DS4_LAYOUT_RAW)                                                     \
    each(iq1_m_raw, DS4_IQ1_M, DS4_LAYOUT_RAW)                                                     \
    each(iq2_s_raw, DS4_IQ2_S, DS4_LAYOUT_RAW)                                                     \
    each(iq3_xxs_raw, DS4_IQ3_XXS, DS4_LAYOUT_RAW)                                                 \
    each(iq3_s_raw, DS4_IQ3_S, DS4_LAYOUT_RAW)                                                     \
    each(iq4_xs_raw, DS4_IQ4_XS, DS4_LAYOUT_RAW)                                                   \
    each(tq1_0_raw, DS4_TQ1_0, DS4_LAYOUT_RAW)                                                     \
    each(tq2_0_raw, DS4_TQ2_0, DS4_LAYOUT_RAW)
#define DS4_IQ2_RAW(each)                                                                          \
    each(iq2_xxs_raw, DS4_IQ2_XXS, DS4_LAYOUT_RAW)                                                 \
    each(iq2_xs_raw, DS4_IQ2_XS, DS4_LAYOUT_RAW)
#define DS4_IQ2(each)                                                                              \
    DS4_IQ2_RAW(each)                                                                              \
    each(iq2_xxs_aligned, DS4_IQ2_XXS, DS4_LAYOUT_IQ2_XXS_ALIGNED)                                 \
    each(iq2_xs_aligned, DS4_IQ2_XS, DS4_LAYOUT_IQ2_XS_ALIGNED)                                    \
    each(iq2_xxs_planes, DS4_IQ2_XXS, DS4_LAYOUT_IQ2_PLANES)                                       \
    each(iq2_xs_planes, DS4_IQ2_XS, DS4_LAYOUT_IQ2_PLANES)
#define DS4_SUPER_BUT_IQ2(each)                                                                    \
    DS4_SUPER_X8(each)                                                                             \
    DS4_SUPER_RAW(each)                                                                            \
    each(q2_k_aligned, DS4_Q2_K, DS4_LAYOUT_Q2_K_ALIGNED)
#define DS4_SUPER_RAW_AND_X8(each)                                                                 \
    DS4_SUPER_RAW(each)                                                                            \
    DS4_IQ2_RAW(each)                                                                              \
    DS4_SUPER_X8(each)
#define DS4_SUPER_ALL(each)                                                                        \
    DS4_SUPER_BUT_IQ2(each)                                                                        \
    DS4_IQ2(each)

/* ---- functions of a list ------------------------------------------------------------------------- */

#define DS4_CASE(name, type, layout)                                                               \
    case (uint64_t)(type) << 8 | (layout): return name;

/* find(type, layout): the function of that type and of what `wanted`, of `layout`, says; NULL where there is
 * none. */
#define DS4_FIND(function, find, list, wanted)                                                     \
    function find(uint32_t type, uint32_t layout) {                                                \
        switch ((uint64_t)type << 8 | (uint64_t)(wanted)) {                                        \
            list(DS4_CASE)                                                                         \
        default: return NULL;                                                                      \
        }                                                                                          \
    }

#define DS4_DEFINE_KERNEL(name, type, layout)                                                      \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,            \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                        \
        rectangle(type, layout, w, row0, row1, acts, act_stride, n, y, ldy);                       \
    }

/* Kernels, and what finds them. */
#define DS4_KERNELS(find, list, wanted)                                                            \
    list(DS4_DEFINE_KERNEL)                                                                        \
    DS4_FIND(ds4_matmul_fn, find, list, wanted)

#define DS4_DEFINE_FILL(name, type, layout)                                                        \
    static void name(const ds4_weight *w, int64_t r, int64_t row1, int64_t b, super_panel *t) {    \
        fill(type, layout, w, r, row1, b, t);                                                      \
    }

/* What unpacks a block of rows into a panel, and what finds it. */
#define DS4_FILLS(find, list)                                                                      \
    list(DS4_DEFINE_FILL)                                                                          \
    DS4_FIND(super_fill, find, list, layout)

#endif
