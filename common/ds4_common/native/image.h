/* The CPU image: a lowered program as a worker maps it.
 *
 * Owns: the record formats (written by contract/image.py, little-endian) and the promise that an
 * image which ds4_image_open accepted can be run without a single further check of its contents.
 * Tables follow the header in the order of its counts; every record is a multiple of 8 bytes.
 */
#ifndef DS4_IMAGE_H
#define DS4_IMAGE_H

#include "matmul.h"

#define DS4_IMAGE_MAGIC "DS4CPU\0\1"
#define DS4_IMAGE_FORMAT 4
#define DS4_NONE 0xffffffffu
#define DS4_MAX_PARTS 16 /* matmuls in one section */
#define DS4_MAX_CONTEXT (1u << 24)
#define DS4_MAX_HEAD_DIM 4096u
#define DS4_MAX_EXPERTS 4096u
#define DS4_MAX_USED 256u /* experts per token, heads of one matrix each */
#define DS4_MAX_STREAMS 16u /* residual streams of a row */
#define DS4_MAX_CHOSEN 4096u /* rows that an index picks */

typedef struct {
    char magic[8];
    uint32_t format, header_bytes;
    uint64_t abi, bytes;
    uint32_t vocabulary, context_tokens, page_tokens, logits_slot;
    uint32_t n_allocations, n_weights, n_slots, n_ropes, n_planes, n_ops, n_sections;
    uint32_t forward_only; /* 1: some history cannot be computed again from an earlier position */
    uint64_t token_bytes, row_bytes; /* scratch per token, per output row */
} ds4_image_header;

typedef struct {
    uint32_t id, reserved;
    uint64_t bytes;
} ds4_image_allocation;

typedef struct {
    uint32_t allocation, type, layout, experts; /* that many matrices of rows x cols */
    uint64_t offset;
    int64_t rows, cols;
    uint64_t bytes;
} ds4_image_weight;

/* Rows of a slot: the step's tokens, or its outputs. */
enum { DS4_SPACE_TOKENS = 0, DS4_SPACE_OUTPUTS = 1 };

typedef struct {
    uint32_t space, width;
    int32_t format;   /* ds4_act of quantized columns, -1: floats */
    uint32_t columns; /* quantized columns of `width` values in a row; 1 for floats */
    uint64_t offset, bytes; /* per row, both multiples of 64 */
} ds4_image_slot;

typedef struct {
    uint32_t rope_dim, style, factors;
    uint32_t long_factors; /* instead of factors in a context longer than original_context */
    uint32_t truncate;
    int32_t shift; /* added to every position */
    double base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow, original_context;
} ds4_image_rope;

/* KV: keys and values of every token. ROWS: one f16 row of `dim` for each `ratio` tokens; TILES: the
 * same as [dim][rows of a page]. STATE: `kv_heads` float vectors of `dim`, of the page's last token.
 * LATENT: one vector of every token, key and value of all heads. */
enum { DS4_PLANE_KV = 0, DS4_PLANE_ROWS, DS4_PLANE_TILES, DS4_PLANE_STATE, DS4_PLANE_LATENT };

typedef struct {
    uint32_t kind, kv_heads, dim, value_dim, ratio;
    uint32_t window; /* positions before the last so many are read no more; 0: all are kept */
} ds4_image_plane;

/* Whether OP_KV_STORE writes it and OP_ATTEND reads it. */
static inline int ds4_plane_attends(const ds4_image_plane *p) {
    return p->kind == DS4_PLANE_KV || p->kind == DS4_PLANE_LATENT;
}

enum {
    DS4_OP_EMBED = 0,
    DS4_OP_RMS_NORM,
    DS4_OP_ROPE,
    DS4_OP_KV_STORE,
    DS4_OP_ADD,
    DS4_OP_GLU,
    DS4_OP_GATHER,
    DS4_OP_QUANTIZE,
    DS4_OP_SOFT_CAP,
    DS4_OP_GATE_ROW,
    DS4_OP_SLICE_HEADS,
    DS4_OP_JOIN_HEADS,
    DS4_OP_ROUTE,
    DS4_OP_COMBINE,
    DS4_OP_MATMUL,
    DS4_OP_ATTEND,
    DS4_OP_MATMUL_EXPERTS,
    DS4_OP_HYPER_WEIGHTS,
    DS4_OP_HYPER_READ,
    DS4_OP_HYPER_WRITE,
    DS4_OP_HADAMARD,
    DS4_OP_ROUND_FLOATS,
    DS4_OP_STORE_ROWS,
    DS4_OP_COMPRESS,
    DS4_OP_INDEX_ROWS,
    DS4_OP_ATTEND_ROWS,
    DS4_OP_SCALE_PARTS,
    DS4_OP_KINDS
};

/* Modes of gated units are in op_math.h; these are the scores of a route (contract/ops.py). */
enum {
    DS4_SCORE_SOFTMAX = 0,
    DS4_SCORE_SIGMOID = 1,
    DS4_SCORE_SQRT_SOFTPLUS = 2,
    DS4_SCORE_LOGITS = 3,
    DS4_SCORE_KINDS
};

/* Formats of round_floats (contract/ops.py). */
enum { DS4_SMALL_E4M3 = 0, DS4_SMALL_E2M1, DS4_SMALL_KINDS };

typedef struct {
    uint32_t kind, in[3], out, weight, bias, rope, plane;
    uint32_t heads, dim, first, width; /* width of a route: the scores that a group counts as */
    uint32_t mode, window, groups, groups_used, normalize, other_plane;
    float value; /* eps, cap, or a scale */
    float limit; /* of a gated unit; soft cap of an attention */
    float alpha;
} ds4_image_op;

/* ROWS: ops that look only at their own row, run one after the other for each row.
 * MATMUL: ops that share one pool of output rectangles.
 * EXPERTS: matrices that the same choice of experts meets, or that belong to as many heads.
 * The others: a single op. */
enum {
    DS4_SECTION_ROWS = 0,
    DS4_SECTION_MATMUL,
    DS4_SECTION_ATTEND,
    DS4_SECTION_EXPERTS,
    DS4_SECTION_COMPRESS,
    DS4_SECTION_INDEX,
    DS4_SECTION_ATTEND_ROWS,
    DS4_SECTION_KINDS
};

typedef struct {
    uint32_t kind, space, first_op, n_ops;
} ds4_image_section;

_Static_assert(sizeof(ds4_image_header) == 96, "contract/image.py HEADER");
_Static_assert(sizeof(ds4_image_allocation) == 16, "contract/image.py ALLOCATION");
_Static_assert(sizeof(ds4_image_weight) == 48, "contract/image.py WEIGHT");
_Static_assert(sizeof(ds4_image_slot) == 32, "contract/image.py SLOT");
_Static_assert(sizeof(ds4_image_rope) == 80, "contract/image.py ROPE");
_Static_assert(sizeof(ds4_image_plane) == 24, "contract/image.py PLANE");
_Static_assert(sizeof(ds4_image_op) == 88, "contract/image.py OP");
_Static_assert(sizeof(ds4_image_section) == 16, "contract/image.py SECTION");

/* One mapped allocation, as the worker attached it. */
typedef struct {
    uint64_t id;
    const void *data;
    uint64_t bytes;
} ds4_memory;

/* Views into the tables of an image. */
typedef struct {
    const ds4_image_header *header;
    const ds4_image_allocation *allocations;
    const ds4_image_weight *weight_records;
    const ds4_image_slot *slots;
    const ds4_image_rope *ropes;
    const ds4_image_plane *planes;
    const ds4_image_op *ops;
    const ds4_image_section *sections;
} ds4_image;

/* Checks the header, its limits and the table sizes; fills the views. 0, or -1 with a message. */
int ds4_image_map(const void *data, uint64_t bytes, uint64_t abi, ds4_image *image, char *error,
                  size_t error_bytes);
/* Checks every record against the others and against the mapped memory, and writes one ds4_weight
 * per record. 0, or -1 with a message. */
int ds4_image_check(const ds4_image *image, const ds4_memory *memory, uint32_t n_memory, int isa,
                    ds4_weight *weights, char *error, size_t error_bytes);

/* Changes whenever images lowered for another build of this library must not be run. */
DS4_EXPORT uint32_t ds4_image_abi(void);

#endif
