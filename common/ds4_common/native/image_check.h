/* What the checks of an image share: looking up slots and weights that an op may use.
 *
 * Owns: the questions. image.c checks the tables, image_ops.c the ops of plain decoders, image_rows.c those
 * of streams that exchange and of attention over rows. Nothing here is known outside these three.
 */
#ifndef DS4_IMAGE_CHECK_H
#define DS4_IMAGE_CHECK_H

#include "image.h"
#include "quants.h"

#define MAX_EXTENT (1ll << 31) /* rows or cols of a weight, width of a slot */

typedef struct {
    const ds4_image *image;
    const ds4_weight *weights;
    char *error;
    size_t error_bytes;
} checker;

/* A weight of one row of that width. */
static inline int is_vector(const checker *c, uint32_t index, uint64_t width) {
    if (index >= c->image->header->n_weights) return 0;
    const ds4_weight *w = c->weights + index;
    return w->rows == 1 && w->type != DS4_I32 && c->image->weight_records[index].experts == 1 &&
           (uint64_t)w->cols == width;
}

/* The slot at `index` when it has this space, format class and width; else NULL. width 0: any. */
static inline const ds4_image_slot *slot(const checker *c, uint32_t index, uint32_t space, uint64_t width,
                                  int quantized) {
    if (index >= c->image->header->n_slots) return NULL;
    const ds4_image_slot *s = c->image->slots + index;
    if (s->space != space || (s->format >= 0) != quantized || (width && s->width != width))
        return NULL;
    return s;
}

/* The single matrix at `index`, or NULL. */
static inline const ds4_weight *weight(const checker *c, uint32_t index) {
    return index < c->image->header->n_weights && c->image->weight_records[index].experts == 1
               ? c->weights + index
               : NULL;
}

/* The slots of a route: numbers of `used` experts, then their weights. Numbers are compared with the
 * count of experts where they are read. */
static inline const ds4_image_slot *routes(const checker *c, uint32_t index, uint32_t space,
                                    uint32_t *used) {
    const ds4_image_slot *s = slot(c, index, space, 0, 0);
    if (!s || s->width % 2 || s->width / 2 > DS4_MAX_USED) return NULL;
    *used = s->width / 2;
    return s;
}

/* image_ops.c: 1 when an op of that section fits its slots, weights, planes and the kernels of `isa`. */
int ds4_check_op(const checker *c, const ds4_image_section *s, const ds4_image_op *op, int isa);

/* image_rows.c: 1 when the op fits its slots, weights and planes. `x` is its first input. */
int ds4_check_stream_op(const checker *c, const ds4_image_op *op, uint32_t space,
                        const ds4_image_slot *x);
int ds4_check_compress(const checker *c, const ds4_image_op *op, uint32_t space);
int ds4_check_index(const checker *c, const ds4_image_op *op, uint32_t space);
int ds4_check_attend_rows(const checker *c, const ds4_image_op *op, uint32_t space);
/* A table that names `used` experts for each token. */
int ds4_check_table(const checker *c, uint32_t index, uint32_t used);
/* A plane of another kind than keys and values. */
int ds4_check_row_plane(const ds4_image_plane *p, uint32_t page_tokens);

#endif
