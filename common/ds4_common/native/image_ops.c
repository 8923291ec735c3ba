/* Checks of the ops of plain decoders, and which check an op of a section goes to. */
#include "image_check.h"

#include <math.h>

#include "op_math.h"

static int check_join(const checker *c, const ds4_image_op *op, uint32_t space,
                      const ds4_image_slot *a) {
    const ds4_image_slot *b = slot(c, op->in[1], space, 0, 0), *y = slot(c, op->out, space, 0, 0);
    if (!b || !y || !op->heads || a->width % op->heads || op->out == op->in[0] ||
        op->out == op->in[1])
        return 0;
    int one_for_all = y->width == (uint64_t)a->width + (uint64_t)op->heads * b->width;
    return one_for_all ||
           (b->width % op->heads == 0 && y->width == (uint64_t)a->width + b->width);
}

static int check_route(const checker *c, const ds4_image_op *op, uint32_t space,
                       const ds4_image_slot *logits) {
    uint32_t used, experts = logits->width;
    if (!routes(c, op->out, space, &used) || op->in[0] == op->out || op->mode >= DS4_SCORE_KINDS ||
        experts > DS4_MAX_EXPERTS || !isfinite(op->value) || op->normalize > 1)
        return 0;
    if (!op->groups || experts % op->groups || !op->groups_used || op->groups_used > op->groups)
        return 0;
    uint32_t size = experts / op->groups;
    if (!op->width || op->width > size || used > size * op->groups_used) return 0;
    if (op->bias != DS4_NONE && (space != DS4_SPACE_TOKENS || !ds4_check_table(c, op->bias, used)))
        return 0;
    return op->weight == DS4_NONE || is_vector(c, op->weight, experts);
}

static int check_combine(const checker *c, const ds4_image_op *op, uint32_t space,
                         const ds4_image_slot *x) {
    uint32_t used;
    if (!routes(c, op->in[1], space, &used) || x->width % used || op->in[0] == op->out) return 0;
    return slot(c, op->out, space, x->width / used, 0) != NULL;
}

static int check_rotation(const checker *c, const ds4_image_op *op, uint32_t space,
                          const ds4_image_slot *x) {
    if (space != DS4_SPACE_TOKENS || op->rope >= c->image->header->n_ropes || !op->dim ||
        op->dim > DS4_MAX_HEAD_DIM || (uint64_t)op->heads * op->dim != x->width)
        return 0;
    uint32_t rope_dim = c->image->ropes[op->rope].rope_dim;
    return rope_dim <= op->dim && op->first <= op->dim - rope_dim &&
           slot(c, op->out, space, x->width, 0) != NULL;
}

static int check_store(const checker *c, const ds4_image_op *op, uint32_t space,
                       const ds4_image_slot *k) {
    if (space != DS4_SPACE_TOKENS || op->plane >= c->image->header->n_planes) return 0;
    const ds4_image_plane *p = c->image->planes + op->plane;
    if (!ds4_plane_attends(p) || k->width != p->kv_heads * p->dim) return 0;
    return p->kind == DS4_PLANE_LATENT
               ? op->in[1] == DS4_NONE
               : slot(c, op->in[1], space, (uint64_t)p->kv_heads * p->value_dim, 0) != NULL;
}

static int check_rows_op(const checker *c, const ds4_image_op *op, uint32_t space) {
    if (op->kind == DS4_OP_EMBED) {
        const ds4_weight *table = weight(c, op->weight);
        return table && space == DS4_SPACE_TOKENS && isfinite(op->value) &&
               slot(c, op->out, space, (uint64_t)table->cols, 0);
    }
    if (op->kind == DS4_OP_GATHER) {
        const ds4_image_slot *x = slot(c, op->in[0], DS4_SPACE_TOKENS, 0, 0);
        return x && space == DS4_SPACE_OUTPUTS && slot(c, op->out, space, x->width, 0);
    }
    const ds4_image_slot *x = slot(c, op->in[0], space, 0, 0);
    if (!x) return 0;
    switch (op->kind) {
    case DS4_OP_RMS_NORM:
        return op->value >= 0.0f && isfinite(op->value) && op->heads &&
               x->width % op->heads == 0 &&
               (op->weight == DS4_NONE || is_vector(c, op->weight, x->width / op->heads)) &&
               slot(c, op->out, space, x->width, 0);
    case DS4_OP_GLU:
        if (op->mode >= DS4_GLU_KINDS || !isfinite(op->alpha) || !(op->limit >= 0.0f)) return 0;
        return slot(c, op->in[1], space, x->width, 0) && slot(c, op->out, space, x->width, 0);
    case DS4_OP_ADD:
        return slot(c, op->in[1], space, x->width, 0) && slot(c, op->out, space, x->width, 0);
    case DS4_OP_SOFT_CAP:
        return op->value > 0.0f && isfinite(op->value) && slot(c, op->out, space, x->width, 0);
    case DS4_OP_GATE_ROW:
        return slot(c, op->in[1], space, 1, 0) && slot(c, op->out, space, x->width, 0);
    case DS4_OP_SLICE_HEADS:
        return (uint64_t)op->heads * op->dim == x->width && op->width && op->width <= op->dim &&
               op->first <= op->dim - op->width && op->in[0] != op->out &&
               slot(c, op->out, space, (uint64_t)op->heads * op->width, 0);
    case DS4_OP_JOIN_HEADS: return check_join(c, op, space, x);
    case DS4_OP_ROUTE: return check_route(c, op, space, x);
    case DS4_OP_COMBINE: return check_combine(c, op, space, x);
    case DS4_OP_ROPE: return check_rotation(c, op, space, x);
    case DS4_OP_KV_STORE: return check_store(c, op, space, x);
    case DS4_OP_QUANTIZE: {
        const ds4_image_slot *act = slot(c, op->out, space, 0, 1);
        return act && (uint64_t)act->width * act->columns == x->width;
    }
    default: return ds4_check_stream_op(c, op, space, x);
    }
}

static int check_matmul(const checker *c, const ds4_image_op *op, uint32_t space, int isa) {
    const ds4_weight *w = weight(c, op->weight);
    if (op->kind != DS4_OP_MATMUL || !w || !ds4_matmul_kernel(w->type, w->layout, isa)) return 0;
    const ds4_image_slot *act = slot(c, op->in[0], space, (uint64_t)w->cols, 1);
    if (!act || act->columns != 1 || act->format != ds4_act_format(w->type) ||
        op->in[0] == op->out)
        return 0;
    if (op->bias != DS4_NONE && !is_vector(c, op->bias, (uint64_t)w->rows)) return 0;
    return slot(c, op->out, space, (uint64_t)w->rows, 0) != NULL;
}

/* Matrices of experts: one activation column per token, or one per expert of the token. Without a
 * route, matrix h meets column h of every token. */
static int check_experts(const checker *c, const ds4_image_op *op, uint32_t space, int isa) {
    if (op->kind != DS4_OP_MATMUL_EXPERTS || op->weight >= c->image->header->n_weights) return 0;
    const ds4_weight *w = c->weights + op->weight;
    uint32_t experts = c->image->weight_records[op->weight].experts, used = experts;
    if (!ds4_matmul_kernel(w->type, w->layout, isa) || w->rows % ds4_row_granule(w->type, w->layout))
        return 0;
    if (op->in[1] == DS4_NONE ? experts > DS4_MAX_USED : !routes(c, op->in[1], space, &used))
        return 0;
    const ds4_image_slot *act = slot(c, op->in[0], space, (uint64_t)w->cols, 1);
    if (!act || act->format != ds4_act_format(w->type) || op->in[0] == op->out ||
        op->in[1] == op->out || (act->columns != used && (act->columns != 1 || op->in[1] == DS4_NONE)))
        return 0;
    if (op->bias != DS4_NONE) {
        if (op->in[1] == DS4_NONE) return 0;
        const ds4_weight *bias = weight(c, op->bias);
        if (!bias || bias->type != 0 || bias->rows != experts || bias->cols != w->rows ||
            (uintptr_t)bias->data % 4)
            return 0;
    }
    return slot(c, op->out, space, (uint64_t)used * (uint64_t)w->rows, 0) != NULL;
}

/* Ops of an EXPERTS section look at one choice among equally many experts. */
static int same_company(const checker *c, const ds4_image_op *a, const ds4_image_op *b) {
    return a->in[1] == b->in[1] && c->image->weight_records[a->weight].experts ==
                                       c->image->weight_records[b->weight].experts;
}

static int check_attend(const checker *c, const ds4_image_op *op, uint32_t space) {
    if (op->kind != DS4_OP_ATTEND || space != DS4_SPACE_TOKENS ||
        op->plane >= c->image->header->n_planes)
        return 0;
    const ds4_image_plane *p = c->image->planes + op->plane;
    if (!ds4_plane_attends(p)) return 0;
    if (p->window && (!op->window || op->window > p->window)) return 0;
    if (op->weight != DS4_NONE && !is_vector(c, op->weight, op->heads)) return 0;
    if (!(op->limit >= 0.0f) || !isfinite(op->limit)) return 0;
    if (!op->width || op->width > p->value_dim || (p->kind == DS4_PLANE_KV && op->width != p->value_dim))
        return 0;
    return op->heads && op->heads <= 65536 && op->heads % p->kv_heads == 0 && isfinite(op->value) &&
           slot(c, op->in[0], space, (uint64_t)op->heads * p->dim, 0) &&
           slot(c, op->out, space, (uint64_t)op->heads * op->width, 0);
}

int ds4_check_op(const checker *c, const ds4_image_section *s, const ds4_image_op *op, int isa) {
    switch (s->kind) {
    case DS4_SECTION_ROWS: return check_rows_op(c, op, s->space);
    case DS4_SECTION_MATMUL: return check_matmul(c, op, s->space, isa);
    case DS4_SECTION_ATTEND: return check_attend(c, op, s->space);
    case DS4_SECTION_COMPRESS: return ds4_check_compress(c, op, s->space);
    case DS4_SECTION_INDEX: return ds4_check_index(c, op, s->space);
    case DS4_SECTION_ATTEND_ROWS: return ds4_check_attend_rows(c, op, s->space);
    default:
        return check_experts(c, op, s->space, isa) &&
               same_company(c, c->image->ops + s->first_op, op);
    }
}
