/* Checks of the ops of streams that exchange and of attention over rows, and of their planes. */
#include "image_check.h"

#include <math.h>

int ds4_check_row_plane(const ds4_image_plane *p, uint32_t page_tokens) {
    if (!p->dim || p->dim > DS4_MAX_HEAD_DIM || !p->ratio || page_tokens % p->ratio) return 0;
    switch (p->kind) {
    case DS4_PLANE_ROWS: return p->kv_heads == 1;
    case DS4_PLANE_TILES: return p->kv_heads == 1 && page_tokens / p->ratio % 8 == 0;
    case DS4_PLANE_STATE: return p->kv_heads == 3 || p->kv_heads == 6;
    default: return 0;
    }
}

int ds4_check_table(const checker *c, uint32_t index, uint32_t used) {
    const ds4_weight *table = weight(c, index);
    return table && table->type == DS4_I32 && table->layout == DS4_LAYOUT_RAW &&
           table->cols == used;
}

/* The plane at `index` when it is of that kind, else NULL. */
static const ds4_image_plane *plane(const checker *c, uint32_t index, uint32_t kind) {
    if (index >= c->image->header->n_planes) return NULL;
    const ds4_image_plane *p = c->image->planes + index;
    return p->kind == kind ? p : NULL;
}

static int takes_input(const ds4_image_op *op) {
    return op->out == op->in[0] || op->out == op->in[1] || op->out == op->in[2];
}

static int check_weights(const checker *c, const ds4_image_op *op, uint32_t space,
                         const ds4_image_slot *x) {
    uint32_t n = op->groups;
    if (!n || n > DS4_MAX_STREAMS || (x->width != n && x->width != n * (2 + n))) return 0;
    return is_vector(c, op->weight, x->width == n ? 1 : 3) && is_vector(c, op->bias, x->width) &&
           op->window >= 1 && op->window <= 1000 && op->value >= 0.0f && isfinite(op->value) &&
           slot(c, op->out, space, x->width, 0) != NULL;
}

static int check_read(const checker *c, const ds4_image_op *op, uint32_t space,
                      const ds4_image_slot *s) {
    uint32_t n = op->groups;
    if (!n || n > DS4_MAX_STREAMS || s->width % n || takes_input(op)) return 0;
    const ds4_image_slot *w = slot(c, op->in[1], space, 0, 0);
    return w && (w->width == n || w->width == n * (2 + n)) &&
           slot(c, op->out, space, s->width / n, 0) != NULL;
}

static int check_write(const checker *c, const ds4_image_op *op, uint32_t space,
                       const ds4_image_slot *y) {
    uint64_t n = op->groups;
    if (!n || n > DS4_MAX_STREAMS || takes_input(op)) return 0;
    return slot(c, op->in[1], space, n * y->width, 0) && slot(c, op->in[2], space, n * (2 + n), 0) &&
           slot(c, op->out, space, n * y->width, 0) != NULL;
}

/* With routes a scale for each expert, whose numbers are compared with their count where they are
 * read. */
static int check_scales(const checker *c, const ds4_image_op *op, uint32_t space,
                        const ds4_image_slot *x) {
    uint32_t used = 1;
    if (op->in[1] != DS4_NONE && (!routes(c, op->in[1], space, &used) || !used)) return 0;
    const ds4_weight *scales = weight(c, op->weight);
    if (!scales || x->width % used || op->out == op->in[1]) return 0;
    if (!is_vector(c, op->weight, op->in[1] == DS4_NONE ? 1 : (uint64_t)scales->cols)) return 0;
    return (op->bias == DS4_NONE || (op->in[1] == DS4_NONE && is_vector(c, op->bias, x->width))) &&
           slot(c, op->out, space, x->width, 0) != NULL;
}

int ds4_check_stream_op(const checker *c, const ds4_image_op *op, uint32_t space,
                        const ds4_image_slot *x) {
    uint32_t dim = op->heads ? x->width / op->heads : 0;
    int in_heads = op->heads && x->width % op->heads == 0 && slot(c, op->out, space, x->width, 0);
    switch (op->kind) {
    case DS4_OP_HYPER_WEIGHTS: return check_weights(c, op, space, x);
    case DS4_OP_HYPER_READ: return check_read(c, op, space, x);
    case DS4_OP_HYPER_WRITE: return check_write(c, op, space, x);
    case DS4_OP_SCALE_PARTS: return check_scales(c, op, space, x);
    case DS4_OP_HADAMARD: return in_heads && !(dim & (dim - 1));
    case DS4_OP_ROUND_FLOATS:
        return in_heads && op->mode < DS4_SMALL_KINDS && op->width && op->dim && op->dim <= dim &&
               op->dim % op->width == 0;
    case DS4_OP_STORE_ROWS: {
        const ds4_image_plane *p = plane(c, op->plane, DS4_PLANE_ROWS);
        if (!p) p = plane(c, op->plane, DS4_PLANE_TILES);
        return p && space == DS4_SPACE_TOKENS && x->width == p->dim;
    }
    default: return 0;
    }
}

int ds4_check_compress(const checker *c, const ds4_image_op *op, uint32_t space) {
    const ds4_image_plane *p = plane(c, op->plane, DS4_PLANE_STATE);
    const ds4_weight *bias = weight(c, op->bias);
    if (op->kind != DS4_OP_COMPRESS || space != DS4_SPACE_TOKENS || !p || !bias || takes_input(op))
        return 0;
    uint64_t width = (uint64_t)p->kv_heads / 3 * p->dim;
    return op->dim == p->dim && op->window && c->image->header->page_tokens % op->window == 0 &&
           bias->type != DS4_I32 && (uint64_t)bias->cols == width &&
           bias->rows == op->window && slot(c, op->in[0], space, width, 0) &&
           slot(c, op->in[1], space, width, 0) && slot(c, op->out, space, p->dim, 0) != NULL;
}

int ds4_check_index(const checker *c, const ds4_image_op *op, uint32_t space) {
    const ds4_image_plane *p = plane(c, op->plane, DS4_PLANE_TILES);
    if (op->kind != DS4_OP_INDEX_ROWS || space != DS4_SPACE_TOKENS || !p || takes_input(op)) return 0;
    const ds4_image_slot *chosen = slot(c, op->out, space, 0, 0);
    return op->heads && op->heads <= 65536 && isfinite(op->value) && chosen &&
           chosen->width <= DS4_MAX_CHOSEN &&
           slot(c, op->in[0], space, (uint64_t)op->heads * p->dim, 0) &&
           slot(c, op->in[1], space, op->heads, 0) != NULL;
}

int ds4_check_attend_rows(const checker *c, const ds4_image_op *op, uint32_t space) {
    const ds4_image_plane *p = plane(c, op->plane, DS4_PLANE_ROWS);
    if (op->kind != DS4_OP_ATTEND_ROWS || space != DS4_SPACE_TOKENS || !p || p->ratio != 1 ||
        p->dim % 8 || takes_input(op) || (p->window && op->window > p->window))
        return 0;
    if (op->other_plane != DS4_NONE) {
        const ds4_image_plane *other = plane(c, op->other_plane, DS4_PLANE_ROWS);
        if (!other || other->dim != p->dim || other->window) return 0;
    }
    if (op->in[1] != DS4_NONE &&
        (op->other_plane == DS4_NONE || !slot(c, op->in[1], space, 0, 0)))
        return 0;
    if (op->weight != DS4_NONE && !is_vector(c, op->weight, op->heads)) return 0;
    return op->heads && op->heads <= 65536 && isfinite(op->value) && op->window &&
           op->window <= DS4_MAX_CONTEXT &&
           slot(c, op->in[0], space, (uint64_t)op->heads * p->dim, 0) &&
           slot(c, op->out, space, (uint64_t)op->heads * p->dim, 0) != NULL;
}
