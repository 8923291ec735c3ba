/* The kernels of a file, listed once: what is defined and what is found cannot differ.
 *
 * A file has `rectangle(type, variant, ...)`, which wants constants, and a list of
 * each(name, type, variant). `variant` tells layouts apart as the file likes. Include only from matmul_*.c.
 */
#ifndef DS4_KERNEL_LIST_H
#define DS4_KERNEL_LIST_H

#include "matmul.h"

#define DS4_DEFINE_KERNEL(name, type, variant)                                                     \
    static void name(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,            \
                     size_t act_stride, int64_t n, float *y, int64_t ldy) {                        \
        rectangle(type, variant, w, row0, row1, acts, act_stride, n, y, ldy);                      \
    }

#define DS4_KERNEL_CASE(name, type, variant) case (uint64_t)(type) << 8 | (variant): return name;

/* Defines the kernels of `list` and `find(type, layout)`: the one of that type and of the variant that
 * `wanted`, of `layout`, says; NULL where there is none. */
#define DS4_KERNELS(find, list, wanted)                                                            \
    list(DS4_DEFINE_KERNEL)                                                                        \
    ds4_matmul_fn find(uint32_t type, uint32_t layout) {                                           \
        switch ((uint64_t)type << 8 | (uint64_t)(wanted)) {                                        \
            list(DS4_KERNEL_CASE)                                                                  \
        default: return NULL;                                                                      \
        }                                                                                          \
    }

#endif
