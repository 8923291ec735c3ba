/* Weight matrices, activation formats and the matmul kernels.
 *
 * Owns: the seam between the quant kernels (who know block layouts) and the executor (who knows
 * programs and threads). A kernel computes a rectangle of outputs; it never spawns threads, never
 * allocates, and never looks outside its rectangle.
 *
 * The numerical contract (docs/design.md section 7): per output, exact integer sums inside a block,
 * then one fmaf per block in block order. So a result depends only on the weight row and the
 * activation column - not on ISA, layout, batch width, chunking or threads.
 */
#ifndef DS4_MATMUL_H
#define DS4_MATMUL_H

#include <stddef.h>
#include <stdint.h>

#define DS4_EXPORT __attribute__((visibility("default")))

/* AVXVNNI: AVX2 and VNNI on its vectors, as since Alder Lake and Zen 5. AVX512: with VNNI and VBMI, as
 * since Ice Lake and Zen 4. AMX: that and int8 tiles. NEON: with dot products (ARMv8.2). I8MM: that and
 * products of int8 matrices, as since Neoverse V1. Numbers of one machine's instruction sets ascend. */
typedef enum {
    DS4_ISA_SCALAR = 0,
    DS4_ISA_AVX2 = 1,
    DS4_ISA_NEON = 2,
    DS4_ISA_AVXVNNI = 3,
    DS4_ISA_AVX512 = 4,
    DS4_ISA_AMX = 5,
    DS4_ISA_I8MM = 6,
    DS4_ISAS
} ds4_isa;
/* docs/layouts.md; 4 to 8 have the numbers of the published artifacts. */
typedef enum {
    DS4_LAYOUT_RAW = 0,
    DS4_LAYOUT_X8 = 1,
    DS4_LAYOUT_IQ2_XXS_ALIGNED = 4,
    DS4_LAYOUT_Q2_K_ALIGNED = 6,
    DS4_LAYOUT_IQ2_XS_ALIGNED = 8,
    DS4_LAYOUT_IQ2_PLANES = 9
} ds4_layout;

/* rows = outputs (GGUF dims[1]), cols = inputs (GGUF dims[0]). RAW, X8 and planes: `data` is the first row. Aligned
 * layouts, whose rows have no address: `data` is the tensor of `all` rows (0: this is all of it), of which
 * these are [first, first + rows). */
typedef struct {
    const void *data;
    uint32_t type;   /* ggml_type */
    uint32_t layout; /* ds4_layout */
    int64_t rows, cols;
    int64_t first, all;
} ds4_weight;

/* Rows [first, first + rows) of a weight, as one of its own. `first` is a multiple of the granule. */
ds4_weight ds4_weight_rows(const ds4_weight *w, int64_t first, int64_t rows);

/* What a kernel wants its activation columns to look like. */
typedef enum {
    DS4_ACT_F32 = 0,   /* plain floats: float weight types */
    DS4_ACT_Q8_32 = 1, /* int8 blocks of 32 with scale and sum: legacy types */
    DS4_ACT_Q8_256 = 2 /* int8 blocks of 256 with scale and 16 sub-sums: K and IQ types */
} ds4_act;

/* y[c * ldy + r] = <weight row r, activation column c> for r in [row0,row1), c in [0,n).
 * acts points at n columns, act_stride bytes apart. row0 and row1 are multiples of the granule
 * (row1 may also be w->rows). */
typedef void (*ds4_matmul_fn)(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts,
                              size_t act_stride, int64_t n, float *y, int64_t ldy);

/* Best instruction set of this CPU, lowered by the environment variable
 * DS4_ISA=scalar|avx2|neon|avxvnni|avx512|amx|i8mm. -1 when that variable says something else. */
DS4_EXPORT int ds4_isa_best(void);

/* 1 when this build and CPU can run that instruction set. */
DS4_EXPORT int ds4_isa_runs(int isa);

/* Kernel for (type, layout, isa), or NULL when that combination does not exist. */
DS4_EXPORT ds4_matmul_fn ds4_matmul_kernel(uint32_t type, uint32_t layout, int isa);

/* Activation format wanted by weights of that type; -1 for an unknown type. */
DS4_EXPORT int ds4_act_format(uint32_t type);
/* Bytes of one activation column in that format: a multiple of 64. 0 for an unknown format, or cols
 * that are not a positive multiple of its block. */
DS4_EXPORT size_t ds4_act_bytes(int format, int64_t cols);
/* Quantizes one column. Bit-equal for every isa. x has cols floats. */
DS4_EXPORT void ds4_act_quantize(int format, const float *x, int64_t cols, void *out, int isa);

/* Whether weights of that type can lie in that layout. */
int ds4_layout_exists(uint32_t type, uint32_t layout);
/* Bytes of rows x cols weights of that type in that layout; 0 when they cannot lie so. Experts count
 * as one tall matrix. */
DS4_EXPORT int64_t ds4_layout_bytes(uint32_t type, uint32_t layout, int64_t rows, int64_t cols);

/* Rows must be split at multiples of this (8 for X8, 2 for Q2_K_ALIGNED, else 1). */
DS4_EXPORT int64_t ds4_row_granule(uint32_t type, uint32_t layout);

/* Dequantizes row r to cols floats (embedding gather, norms, tests). Returns 0, or -1 for an
 * unknown (type, layout). Bit-equal for every isa by being scalar. */
DS4_EXPORT int ds4_dequant_row(const ds4_weight *w, int64_t r, float *out);

/* Bytes of one block and weights per block of a ggml type; 0 for an unknown type. */
DS4_EXPORT int64_t ds4_block_bytes(uint32_t type);
DS4_EXPORT int64_t ds4_block_weights(uint32_t type);

/* 1 when rows x cols of that type can be stored in the X8 layout (same bytes as raw): Q4_0, Q4_1,
 * Q5_0, Q5_1, Q8_0, Q2_K .. Q6_K with rows a multiple of 8. */
DS4_EXPORT int ds4_pack_possible(uint32_t type, int64_t rows, int64_t cols);
/* Repacks raw rows [row0,row1) - src points at row0's raw bytes - into dst, which points at the
 * tensor's first packed byte. row0, row1 multiples of 8. Inverse: ds4_unpack_rows. 0 or -1. */
DS4_EXPORT int ds4_pack_rows(uint32_t type, const void *src, void *dst, int64_t row0, int64_t row1,
                             int64_t cols);
DS4_EXPORT int ds4_unpack_rows(uint32_t type, const void *src, void *dst, int64_t row0,
                               int64_t row1, int64_t cols);

/* Raw rows of IQ2_XXS or IQ2_XS as planes, and the inverse. Rows follow each other in both. 0 or -1. */
DS4_EXPORT int ds4_planes_pack(uint32_t type, const void *src, void *dst, int64_t rows, int64_t cols);
DS4_EXPORT int ds4_planes_unpack(uint32_t type, const void *src, void *dst, int64_t rows,
                                 int64_t cols);

#endif
