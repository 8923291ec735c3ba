/* Blocks of 32 weights against many columns, AVX-VNNI: sixteen rows, six columns at a time.
 *
 * How: legacy_many.h. Fewer columns are served by matmul_legacy_avxvnni.c, which also keeps NVFP4.
 */
#if defined(__AVXVNNI__)
#include "legacy_avxvnni.h"

#include "legacy_many.h"

/* NULL where another kernel serves. */
DS4_KERNELS(ds4_matmul_avxvnni_many, DS4_BLOCKS_BUT_NVFP4, layout == DS4_LAYOUT_X8)
#else
typedef int ds4_matmul_many_avxvnni_is_for_x86;
#endif
