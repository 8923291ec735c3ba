/* EXPERTS sections: many matrices of one tensor, each met by the columns that chose it.
 *
 * Columns (a token and one of its experts) are sorted by expert, so that an expert's weights are read
 * once per tile of columns however many tokens want them; an expert that nobody chose costs nothing.
 * Without a route there is one matrix per head, and every token meets all of them. Neither the order
 * of columns nor the cut changes a bit: an output depends on its own column and matrix only.
 */
#include <string.h>

#include "exec.h"

#define TASKS_PER_THREAD 8
#define LEAST_WORK (64 * 1024) /* multiply-adds: a few microseconds */
#define ROW_STEP 32            /* kernels like whole groups of rows */

static const ds4_image_op *ops_of(const ds4_engine *e) {
    return e->image.ops + e->section->first_op;
}

static uint32_t experts_of(const ds4_engine *e, const ds4_image_op *op) {
    return e->image.weight_records[op->weight].experts;
}

/* Expert number `slot` of a token. A number that is none - only a damaged image has one - is 0. */
static uint32_t chosen(const ds4_engine *e, const ds4_image_op *op, int64_t token, uint32_t slot,
                       uint32_t experts) {
    float number = ds4_slot_floats(e, op->in[1], token)[slot];
    return number >= 0.0f && number < (float)experts ? (uint32_t)number : 0;
}

static void add_tiles(ds4_engine *e, uint32_t expert, uint32_t first, uint32_t count) {
    for (uint32_t i = 0; i < count; i += DS4_EXPERT_TILE) {
        uint32_t columns = count - i < DS4_EXPERT_TILE ? count - i : DS4_EXPERT_TILE;
        e->expert_tiles[e->n_expert_tiles++] = (ds4_expert_tile){expert, first + i, columns};
    }
}

/* Sorts the section's columns by expert, in order of tokens, and cuts them into tiles. */
static void sort_columns(ds4_engine *e, const ds4_image_op *op) {
    uint32_t experts = experts_of(e, op), used = e->image.slots[op->in[1]].width / 2;
    uint32_t *start = e->expert_starts;
    memset(start, 0, (experts + 1) * sizeof *start);
    for (int64_t token = 0; token < e->section_rows; token++)
        for (uint32_t j = 0; j < used; j++) start[chosen(e, op, token, j, experts) + 1]++;
    for (uint32_t i = 0; i < experts; i++) {
        uint32_t count = start[i + 1];
        start[i + 1] += start[i];
        add_tiles(e, i, start[i], count);
    }
    for (int64_t token = 0; token < e->section_rows; token++)
        for (uint32_t j = 0; j < used; j++)
            e->expert_columns[start[chosen(e, op, token, j, experts)]++] =
                (uint32_t)token * used + j;
}

uint64_t ds4_prepare_experts(ds4_engine *e) {
    const ds4_image_op *ops = ops_of(e);
    uint32_t experts = experts_of(e, ops);
    e->n_expert_tiles = 0;
    if (ops->in[1] != DS4_NONE)
        sort_columns(e, ops);
    else
        for (uint32_t i = 0; i < experts; i++) add_tiles(e, i, 0, e->section_rows);
    uint64_t columns = ops->in[1] == DS4_NONE ? experts : e->image.slots[ops->in[1]].width / 2;
    columns *= e->section_rows;
    int64_t total = 0;
    e->n_parts = e->section->n_ops;
    for (uint32_t i = 0; i < e->n_parts; i++) {
        const ds4_weight *w = e->weights + ops[i].weight;
        total += w->rows * w->cols * (int64_t)columns;
    }
    int64_t work = total / (e->config.threads * TASKS_PER_THREAD);
    if (work < LEAST_WORK) work = LEAST_WORK;
    uint64_t units = 0;
    for (uint32_t i = 0; i < e->n_parts; i++) {
        const ds4_weight *w = e->weights + ops[i].weight;
        int64_t across = (int64_t)(columns + e->n_expert_tiles - 1) / e->n_expert_tiles;
        int64_t rows = work / (w->cols * across) / ROW_STEP * ROW_STEP;
        e->parts[i].op = ops + i;
        e->parts[i].first_unit = units;
        e->parts[i].chunk_rows = rows < ROW_STEP           ? ROW_STEP
                                 : rows > DS4_EXPERT_ROWS ? DS4_EXPERT_ROWS
                                                          : rows;
        units += (uint64_t)((w->rows - 1) / e->parts[i].chunk_rows + 1) * e->n_expert_tiles;
    }
    return units;
}

/* ---- a rectangle -------------------------------------------------------------------------------- */

typedef struct {
    const ds4_engine *e;
    const ds4_image_op *op;
    const ds4_expert_tile *tile;
    ds4_weight weight; /* the rows [row0, row0 + rows) of the tile's matrix */
    int64_t row0;
    uint32_t used;     /* columns of a token */
    int64_t all_rows;
} rectangle;

/* Which (token, place) column number c of the tile is. */
static void locate(const rectangle *r, uint32_t c, uint32_t *token, uint32_t *place) {
    if (r->op->in[1] == DS4_NONE) {
        *token = r->tile->first + c;
        *place = r->tile->expert;
        return;
    }
    uint32_t column = r->e->expert_columns[r->tile->first + c];
    *token = column / r->used;
    *place = column % r->used;
}

static const char *act_column(const rectangle *r, uint32_t token, uint32_t place) {
    const ds4_image_slot *act = r->e->image.slots + r->op->in[0];
    size_t step = act->columns > 1 ? ds4_act_bytes(act->format, act->width) : 0;
    return ds4_slot_row(r->e, r->op->in[0], token) + place * step;
}

static void store(const rectangle *r, uint32_t token, uint32_t place, const float *from) {
    float *y = ds4_slot_floats(r->e, r->op->out, token) + place * r->all_rows + r->row0;
    if (r->op->bias == DS4_NONE) {
        memcpy(y, from, (size_t)r->weight.rows * sizeof *y);
        return;
    }
    const float *bias = (const float *)r->e->weights[r->op->bias].data +
                        r->tile->expert * r->all_rows + r->row0;
    r->e->vector->add(y, from, bias, r->weight.rows);
}

static void multiply(const rectangle *r, char *scratch) {
    const ds4_image_slot *act = r->e->image.slots + r->op->in[0];
    size_t bytes = ds4_act_bytes(act->format, act->width);
    uint32_t count = r->tile->count, token, place;
    float *y = (float *)(void *)scratch;
    char *gathered = scratch + DS4_EXPERT_TILE * DS4_EXPERT_ROWS * sizeof *y;
    const char *acts = gathered;
    if (count == 1) {
        locate(r, 0, &token, &place);
        acts = act_column(r, token, place);
    } else {
        for (uint32_t c = 0; c < count; c++) {
            locate(r, c, &token, &place);
            memcpy(gathered + c * bytes, act_column(r, token, place), bytes);
        }
    }
    r->e->kernels[r->op->weight](&r->weight, 0, r->weight.rows, acts, bytes, count, y,
                                 r->weight.rows);
    for (uint32_t c = 0; c < count; c++) {
        locate(r, c, &token, &place);
        store(r, token, place, y + c * r->weight.rows);
    }
}

void ds4_run_experts(ds4_engine *e, uint64_t unit, int thread) {
    uint32_t i = e->n_parts - 1;
    while (unit < e->parts[i].first_unit) i--;
    const ds4_part *part = e->parts + i;
    const ds4_weight *w = e->weights + part->op->weight;
    uint64_t local = unit - part->first_unit;
    rectangle r = {.e = e, .op = part->op, .all_rows = w->rows};
    r.tile = e->expert_tiles + local % e->n_expert_tiles;
    r.row0 = (int64_t)(local / e->n_expert_tiles) * part->chunk_rows;
    r.used = part->op->in[1] == DS4_NONE ? 1 : e->image.slots[part->op->in[1]].width / 2;
    int64_t rows = w->rows - r.row0 < part->chunk_rows ? w->rows - r.row0 : part->chunk_rows;
    r.weight = ds4_weight_rows(w, r.tile->expert * w->rows + r.row0, rows);
    multiply(&r, e->expert_scratch + (uint64_t)thread * e->expert_scratch_bytes);
}
