/* ATTEND_ROWS sections: attention over a token's last rows and over compressed ones.
 *
 * All heads meet the same rows, which are key and value in one. A task is a token and some of its heads:
 * the rows are gathered, 64 at a time, into a tile (kv.h: along), and then it is the attention of
 * attention.h: maximum, exponentials, sum, weighted values; parts folded in order. The order is that
 * of positions, then of compressed rows: a sequence's own, whatever the step holds.
 */
#include <string.h>

#include "attention.h"
#include "exec.h"

#define PART_ROWS 64
#define LEAST_HEADS 8 /* of a task: fewer would gather too much for too little */

static const ds4_image_op *rows_op(const ds4_engine *e) {
    return e->image.ops + e->section->first_op;
}

static int64_t dim_of(const ds4_engine *e) { return e->image.planes[rows_op(e)->plane].dim; }

/* Floats of scratch for one thread: queries, scores, two states, and the tile of halves. */
uint64_t ds4_attend_rows_floats(uint32_t heads, uint32_t dim) {
    return (uint64_t)heads * (3 * dim + PART_ROWS + 4) + (uint64_t)PART_ROWS * dim / 2 + 16;
}

uint64_t ds4_prepare_attend_rows(ds4_engine *e) {
    const ds4_image_op *op = rows_op(e);
    uint64_t wanted = 4 * e->config.threads, groups = 1;
    if (e->n_tokens < wanted) groups = (wanted + e->n_tokens - 1) / e->n_tokens;
    uint64_t most = (op->heads + LEAST_HEADS - 1) / LEAST_HEADS;
    if (groups > e->config.threads) groups = e->config.threads; /* each gathers all rows */
    if (groups > most) groups = most;
    e->rows_per_unit = (uint32_t)((op->heads + groups - 1) / groups);
    return e->n_tokens * ((op->heads + e->rows_per_unit - 1) / e->rows_per_unit);
}

/* The rows that one token sees: `recent` from position `first` on, then compressed ones. */
typedef struct {
    const ds4_engine *e;
    const ds4_image_op *op;
    int32_t bank;
    int64_t first, recent, compressed;
    const float *chosen; /* NULL: all of them */
} row_list;

static const uint16_t *row_at(const row_list *l, int64_t i) {
    const ds4_engine *e = l->e;
    uint32_t plane = l->op->plane;
    int64_t row = l->first + i;
    if (i >= l->recent) {
        plane = l->op->other_plane;
        row = l->chosen ? (int64_t)l->chosen[i - l->recent] : i - l->recent;
    }
    int64_t records = e->image.header->page_tokens / e->image.planes[plane].ratio;
    const char *page = ds4_plane_page(e, plane, l->bank, row / records);
    return (const uint16_t *)(const void *)page + row % records * e->image.planes[plane].dim;
}

static row_list rows_of(const ds4_engine *e, const ds4_image_op *op, int64_t token) {
    int64_t position = e->positions[token];
    row_list l = {.e = e, .op = op, .bank = e->banks[token]};
    l.first = position + 1 > op->window ? position + 1 - op->window : 0;
    l.recent = position + 1 - l.first;
    if (op->other_plane == DS4_NONE) return l;
    int64_t visible = (position + 1) / e->image.planes[op->other_plane].ratio;
    l.compressed = visible;
    if (op->in[1] == DS4_NONE) return l;
    l.chosen = ds4_slot_floats(e, op->in[1], token);
    int64_t most = e->image.slots[op->in[1]].width, n = 0;
    while (n < most && l.chosen[n] >= 0.0f && l.chosen[n] < (float)visible) n++;
    l.compressed = n;
    return l;
}

static void gather(const row_list *l, int64_t first, int64_t n, int64_t dim, uint16_t *rows) {
    for (int64_t i = 0; i < n; i++)
        memcpy(rows + i * dim, row_at(l, first + i), (size_t)dim * sizeof *rows);
}

typedef struct {
    float *q, *scores;
    ds4_softmax_state part, state;
    uint16_t *rows; /* [PART_ROWS][dim] */
} scratch;

static ds4_softmax_state state_at(float **at, int64_t heads, int64_t dim) {
    ds4_softmax_state s = {*at, *at + heads, *at + 2 * heads};
    *at += heads * (dim + 2);
    return s;
}

static void attend_part(const ds4_engine *e, const scratch *s, int heads, int64_t dim, int64_t n) {
    for (int h = 0; h < heads; h += DS4_SCORE_ROWS) {
        int rows = heads - h < DS4_SCORE_ROWS ? heads - h : DS4_SCORE_ROWS;
        e->row_kernels->score_along(s->q + h * dim, rows, dim, s->rows, s->rows, PART_ROWS, dim, n,
                                    s->scores + h * PART_ROWS, PART_ROWS);
    }
    ds4_softmax_clear(s->part, heads, dim);
    for (int h = 0; h < heads; h++) {
        float *row = s->scores + h * PART_ROWS;
        s->part.max[h] = e->vector->max(row, n);
        s->part.sum[h] = e->vector->softmax(row, s->part.max[h], n);
    }
    for (int h = 0; h < heads; h += DS4_VALUE_ROWS) {
        int rows = heads - h < DS4_VALUE_ROWS ? heads - h : DS4_VALUE_ROWS;
        e->row_kernels->accumulate(s->scores + h * PART_ROWS, PART_ROWS, rows, 0, n, s->rows,
                                   s->rows, PART_ROWS, dim, dim, s->part.values + h * dim);
    }
    ds4_softmax_fold(e->vector, s->state, s->part, heads, dim);
}

void ds4_run_attend_rows(ds4_engine *e, uint64_t unit, int thread) {
    const ds4_image_op *op = rows_op(e);
    int64_t dim = dim_of(e), groups = (op->heads + e->rows_per_unit - 1) / e->rows_per_unit;
    int64_t token = (int64_t)unit / groups, first = (int64_t)unit % groups * e->rows_per_unit;
    int heads = (int)(op->heads - first < e->rows_per_unit ? op->heads - first : e->rows_per_unit);
    float *at = e->row_floats + (uint64_t)thread * e->row_floats_each;
    scratch s = {.q = at, .scores = at + heads * dim};
    at = s.scores + heads * PART_ROWS;
    s.part = state_at(&at, heads, dim);
    s.state = state_at(&at, heads, dim);
    s.rows = (uint16_t *)(void *)at;
    const float *x = ds4_slot_floats(e, op->in[0], token) + first * dim;
    for (int64_t i = 0; i < heads * dim; i++) s.q[i] = x[i] * op->value;
    ds4_softmax_clear(s.state, heads, dim);
    row_list list = rows_of(e, op, token);
    int64_t total = list.recent + list.compressed;
    for (int64_t i = 0; i < total; i += PART_ROWS) {
        int64_t n = total - i < PART_ROWS ? total - i : PART_ROWS;
        gather(&list, i, n, dim, s.rows);
        attend_part(e, &s, heads, dim, n);
    }
    float *y = ds4_slot_floats(e, op->out, token) + first * dim;
    for (int h = 0; h < heads; h++, y += dim) {
        if (op->weight != DS4_NONE)
            ds4_softmax_sink(s.state, h, e->vectors[op->weight][first + h], dim);
        ds4_softmax_finish(s.state, h, dim, dim, y);
    }
}
