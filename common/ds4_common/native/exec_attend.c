/* ATTEND sections: tiles of query tokens times kv heads, and of many heads over one kv head some at a
 * time (a slab).
 *
 * Many tiles (prefill): a task is a tile of one kv head through all parts of its context. Few tiles
 * (decode): a task is one part of one tile, and a second round folds the parts; both ways give the same
 * bits, because parts and their order are fixed (attention.h).
 */
#include "exec.h"

#define UNITS_PER_THREAD 4
#define SHORT_WORK (64 * 1024) /* multiply-adds: a few microseconds */

/* Scratch of one thread: scaled queries, scores, one part's state, the running state. */
typedef struct {
    float *q, *scores;
    ds4_softmax_state part, state;
} scratch;

static ds4_softmax_state state_at(float *at, int64_t rows) {
    return (ds4_softmax_state){at, at + rows, at + 2 * rows};
}

static scratch thread_scratch(const ds4_engine *e, int thread) {
    float *at = e->thread_floats[thread];
    int64_t rows = e->tile_rows;
    scratch s = {.q = at, .scores = at + rows * e->dim_max};
    at = s.scores + rows * e->part_tokens;
    s.part = state_at(at, rows);
    s.state = state_at(at + rows * (e->value_pad_max + 2), rows);
    return s;
}

static const ds4_image_op *attend_op(const ds4_engine *e) {
    return e->image.ops + e->section->first_op;
}

static uint32_t parts_of(const ds4_engine *e, const ds4_tile *tile) {
    return (uint32_t)((tile->position + tile->count - 1) / e->part_tokens) + 1;
}

/* Query heads of one kv head that run together: all, or a tile's worth of them. */
static uint32_t slab_heads(const ds4_engine *e, const ds4_image_op *op) {
    uint32_t group = op->heads / e->image.planes[op->plane].kv_heads;
    return group < DS4_TILE_ROWS ? group : DS4_TILE_ROWS;
}

/* Slabs of all kv heads. */
static uint32_t slabs(const ds4_engine *e, const ds4_image_op *op) {
    uint32_t kv_heads = e->image.planes[op->plane].kv_heads, some = slab_heads(e, op);
    return kv_heads * ((op->heads / kv_heads + some - 1) / some);
}

uint64_t ds4_prepare_attend(ds4_engine *e) {
    const ds4_image_op *op = attend_op(e);
    uint64_t units = (uint64_t)e->n_tiles * slabs(e, op);
    if (e->split == DS4_SPLIT_PARTS) { /* the parts are done: fold them */
        e->split = DS4_SPLIT_FOLD;
        return units;
    }
    uint64_t rows = 0, scores = 0;
    e->max_parts = 1;
    for (uint32_t i = 0; i < e->n_tiles; i++) {
        const ds4_tile *tile = e->tiles + i;
        uint32_t parts = parts_of(e, tile);
        if (parts > e->max_parts) e->max_parts = parts;
        rows += (uint64_t)tile->count * op->heads;
        scores += (uint64_t)tile->count * op->heads * (uint64_t)(tile->position + tile->count);
    }
    e->split = DS4_SPLIT_WHOLE;
    e->is_short = scores * (e->image.planes[op->plane].dim + op->width) < SHORT_WORK;
    if (e->max_parts > 1 && units < e->config.threads * UNITS_PER_THREAD &&
        rows * e->max_parts <= e->split_rows) {
        e->split = DS4_SPLIT_PARTS;
        units *= e->max_parts;
    }
    return units;
}

/* Returns the first query head of the slab. */
static uint32_t describe(const ds4_engine *e, const ds4_tile *tile, uint32_t slab, ds4_attend *a) {
    const ds4_image_op *op = attend_op(e);
    const ds4_image_plane *plane = e->image.planes + op->plane;
    uint32_t group = op->heads / plane->kv_heads, some = slab_heads(e, op);
    uint32_t each = (group + some - 1) / some, head = slab / each, first = slab % each * some;
    int64_t page_tokens = e->image.header->page_tokens, value_width = ds4_kv_width(plane->value_dim);
    int64_t key_tile = ds4_kv_tile_bytes(e->kv_kernels->type, plane->dim, page_tokens);
    int64_t value_tile = ds4_kv_tile_bytes(e->kv_kernels->type, value_width, page_tokens);
    int latent = plane->kind == DS4_PLANE_LATENT;
    int64_t value_pad = ds4_kv_width(op->width); /* of a latent in blocks: whole ones */
    if (e->kv_kernels->type == DS4_KV_Q8_0)
        value_pad = (value_pad + DS4_KV_BLOCK - 1) / DS4_KV_BLOCK * DS4_KV_BLOCK;
    const ds4_history *history = e->histories + e->plane_history[op->plane];
    const char *keys = history->kv + e->plane_offset[op->plane];
    *a = (ds4_attend){
        .vector = e->vector,
        .kv = e->kv_kernels,
        .pages = ds4_bank_pages(e, history, tile->bank),
        .keys = keys + head * key_tile,
        .values = latent ? keys : keys + plane->kv_heads * key_tile + head * value_tile,
        .latent = latent,
        .page_stride = history->page_stride,
        .dim = plane->dim,
        .value_pad = value_pad,
        .value_width = value_width,
        .page_tokens = page_tokens,
        .part_tokens = e->part_tokens,
        .positions = tile->position + tile->count,
        .window = op->window,
        .soft_cap = op->limit,
        .group = (int)(group - first < some ? group - first : some),
    };
    return head * group + first;
}

/* Query rows of the tile from `head` on, token-major, times the attention scale. */
static void load_queries(const ds4_engine *e, const ds4_tile *tile, uint32_t head,
                         const ds4_attend *a, float *q) {
    const ds4_image_op *op = attend_op(e);
    for (int64_t token = 0; token < tile->count; token++) {
        const float *x = ds4_slot_floats(e, op->in[0], tile->token + token) + head * a->dim;
        for (int64_t i = 0; i < a->group * a->dim; i++) *q++ = x[i] * op->value;
    }
}

static void store(const ds4_engine *e, const ds4_tile *tile, uint32_t head, const ds4_attend *a,
                  ds4_softmax_state state) {
    const ds4_image_op *op = attend_op(e);
    int64_t value_dim = op->width;
    for (int row = 0; row < tile->count * a->group; row++) {
        uint32_t number = head + (uint32_t)(row % a->group);
        float *y = ds4_slot_floats(e, op->out, tile->token + row / a->group) + number * value_dim;
        if (op->weight != DS4_NONE)
            ds4_softmax_sink(state, row, e->vectors[op->weight][number], a->value_pad);
        ds4_softmax_finish(state, row, a->value_pad, value_dim, y);
    }
}

/* Where part `part` of a tile's slab keeps its state in split mode: rows of tiles before it, then of
 * heads before it, each with room for max_parts. */
static ds4_softmax_state split_state(const ds4_engine *e, uint32_t tile, uint32_t head,
                                     uint32_t part, const ds4_attend *a) {
    int64_t heads = attend_op(e)->heads, rows = 0, mine = (int64_t)e->tiles[tile].count * a->group;
    for (uint32_t i = 0; i < tile; i++) rows += e->tiles[i].count * heads;
    rows = (rows + head * (int64_t)e->tiles[tile].count) * e->max_parts + part * mine;
    return state_at(e->split_floats + rows * (e->value_pad_max + 2), mine);
}

void ds4_run_attend(ds4_engine *e, uint64_t unit, int thread) {
    uint32_t of_tile = slabs(e, attend_op(e)), part = 0;
    if (e->split == DS4_SPLIT_PARTS) {
        part = (uint32_t)(unit % e->max_parts);
        unit /= e->max_parts;
    }
    uint32_t number = (uint32_t)(unit / of_tile);
    const ds4_tile *tile = e->tiles + number;
    uint32_t parts = parts_of(e, tile);
    ds4_attend a;
    uint32_t head = describe(e, tile, (uint32_t)(unit % of_tile), &a);
    uint32_t first_part = (uint32_t)ds4_first_part(&a, tile->position);
    if (e->split == DS4_SPLIT_PARTS && (part < first_part || part >= parts)) return;
    scratch s = thread_scratch(e, thread);
    int rows = tile->count * a.group;
    if (e->split != DS4_SPLIT_FOLD) load_queries(e, tile, head, &a, s.q);
    if (e->split == DS4_SPLIT_PARTS) {
        ds4_attend_part(&a, s.q, rows, tile->position, part, s.scores,
                        split_state(e, number, head, part, &a));
        return;
    }
    ds4_softmax_clear(s.state, rows, a.value_pad);
    for (part = first_part; part < parts; part++) {
        ds4_softmax_state done = s.part;
        if (e->split == DS4_SPLIT_FOLD)
            done = split_state(e, number, head, part, &a);
        else
            ds4_attend_part(&a, s.q, rows, tile->position, part, s.scores, done);
        ds4_softmax_fold(a.vector, s.state, done, rows, a.value_pad);
    }
    store(e, tile, head, &a, s.state);
}
