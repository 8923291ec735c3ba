/* COMPRESS sections: windows of consecutive tokens become one row each.
 *
 * A running softmax per dim goes through a sequence's tokens in order: maximum, sum, weighted sum. Its
 * state after the last token of a page lies in that page, so a sequence finds it wherever its pages
 * go. A step's slices and ranges of dims are independent; a thread takes one slice's range from its
 * first token to its last. So neither chunks nor threads change what is added to what. What a short
 * slice added is kept (exec_rewind.c): the next one may begin inside it.
 */
#include <math.h>
#include <string.h>

#include "exec.h"

#define WORK_PER_UNIT 16384 /* values: some microseconds */
#define LEAST_COLUMNS 64

uint64_t ds4_prepare_compress(ds4_engine *e) {
    const ds4_image_op *op = e->image.ops + e->section->first_op;
    uint64_t dim = op->dim, ranges = e->n_tokens * dim / WORK_PER_UNIT + 1;
    uint64_t most = (dim + LEAST_COLUMNS - 1) / LEAST_COLUMNS;
    if (ranges > most) ranges = most;
    if (ranges > 4 * e->config.threads) ranges = 4 * e->config.threads;
    uint64_t columns = (dim + ranges - 1) / ranges;
    e->rows_per_unit = (uint32_t)((columns + 7) / 8 * 8);
    ranges = (dim + e->rows_per_unit - 1) / e->rows_per_unit;
    return e->n_slices * ranges;
}

/* The three vectors of one running softmax, from column `first` on. */
static void clear(float *state, int64_t dim, int64_t n) {
    for (int64_t i = 0; i < n; i++) state[i] = -INFINITY;
    memset(state + dim, 0, (size_t)n * sizeof *state);
    memset(state + 2 * dim, 0, (size_t)n * sizeof *state);
}

static void copy(float *to, const float *from, int64_t dim, int64_t vectors, int64_t n) {
    for (int64_t v = 0; v < vectors; v++)
        memcpy(to + v * dim, from + v * dim, (size_t)n * sizeof *to);
}

/* The state that token `position` continues, in its own page. */
static float *state_of(const ds4_engine *e, const ds4_image_op *op, int32_t bank, int64_t position,
                       int64_t first, int64_t n) {
    const ds4_image_plane *plane = e->image.planes + op->plane;
    int64_t page_tokens = e->image.header->page_tokens, page = position / page_tokens;
    float *state = (float *)(void *)ds4_plane_page(e, op->plane, bank, page) + first;
    if (position % page_tokens) return state;
    if (position)
        copy(state, (float *)(void *)ds4_plane_page(e, op->plane, bank, page - 1) + first,
             plane->dim, plane->kv_heads, n);
    else
        clear(state, plane->dim, n);
    return state;
}

static int64_t copies_of(const ds4_engine *e, const ds4_image_op *op) {
    return e->image.planes[op->plane].kv_heads / 3;
}

/* Adds the token at `position`, whose values and gates of all dims are at k and gate. */
static void add_token(const ds4_engine *e, const ds4_image_op *op, int64_t position, const float *k,
                      const float *gate, float *state, int64_t first, int64_t n) {
    int64_t dim = op->dim, phase = position % op->window, copies = copies_of(e, op);
    if (phase == 0) {
        if (copies == 2) copy(state + 3 * dim, state, dim, 3, n);
        clear(state, dim, n);
    }
    for (int64_t part = 0; part < copies; part++) {
        float *to = state + 3 * part * dim;
        int64_t at = part * dim + first;
        e->vector->running_softmax(to, to + dim, to + 2 * dim, k + at, gate + at,
                                   e->vectors[op->bias] + phase * copies * dim + at, n);
    }
}

static void emit(const ds4_engine *e, const ds4_image_op *op, int64_t token, const float *state,
                 int64_t first, int64_t n) {
    const float *last = state + 3 * (copies_of(e, op) - 1) * op->dim;
    float *y = ds4_slot_floats(e, op->out, token) + first;
    if ((e->positions[token] + 1) % op->window)
        memset(y, 0, (size_t)n * sizeof *y);
    else
        for (int64_t i = 0; i < n; i++) y[i] = last[2 * op->dim + i] / last[op->dim + i];
}

/* ---- what a bank keeps of its last slice ---------------------------------------------------------------- */

static float *kept_state(const ds4_engine *e, const ds4_image_op *op, int32_t bank) {
    return e->rewind_floats + (uint64_t)bank * e->rewind_bank_floats +
           e->rewind_offset[op - e->image.ops];
}

/* Values, then gates, of its token i. */
static float *kept_token(const ds4_engine *e, const ds4_image_op *op, int32_t bank, int64_t i) {
    int64_t wide = copies_of(e, op) * op->dim;
    return kept_state(e, op, bank) + 3 * wide + i * 2 * wide;
}

/* The state before the last slice, and the tokens of it that stay. */
static void add_again(const ds4_engine *e, const ds4_image_op *op, int32_t bank, int64_t first,
                      int64_t n) {
    const ds4_rewind *r = e->rewinds + bank;
    int64_t wide = copies_of(e, op) * op->dim, page_tokens = e->image.header->page_tokens;
    for (int64_t i = 0; i < r->again; i++) {
        int64_t position = r->again_start + i;
        float *state = state_of(e, op, bank, position, first, n);
        if (i == 0 && position % page_tokens)
            copy(state, kept_state(e, op, bank) + first, op->dim, 3 * copies_of(e, op), n);
        const float *kept = kept_token(e, op, bank, i);
        add_token(e, op, position, kept, kept + wide, state, first, n);
    }
}

static void keep_token(const ds4_engine *e, const ds4_image_op *op, int32_t bank, int64_t i,
                       const float *k, const float *gate, int64_t first, int64_t n) {
    int64_t copies = copies_of(e, op), wide = copies * op->dim;
    float *kept = kept_token(e, op, bank, i) + first;
    copy(kept, k + first, op->dim, copies, n);
    copy(kept + wide, gate + first, op->dim, copies, n);
}

void ds4_run_compress(ds4_engine *e, uint64_t unit, int thread) {
    (void)thread;
    const ds4_image_op *op = e->image.ops + e->section->first_op;
    int64_t columns = e->rows_per_unit, ranges = (op->dim + columns - 1) / columns;
    const ds4_slice *slice = e->slices + (int64_t)unit / ranges;
    int64_t first = (int64_t)unit % ranges * columns, n = op->dim - first;
    if (n > columns) n = columns;
    int keeps = e->rewinds[slice->bank].count > 0;
    add_again(e, op, slice->bank, first, n);
    for (int64_t i = 0; i < slice->count; i++) {
        float *state = state_of(e, op, slice->bank, slice->start + i, first, n);
        const float *k = ds4_slot_floats(e, op->in[0], slice->first + i);
        const float *gate = ds4_slot_floats(e, op->in[1], slice->first + i);
        if (keeps && i == 0)
            copy(kept_state(e, op, slice->bank) + first, state, op->dim, 3 * copies_of(e, op), n);
        if (keeps) keep_token(e, op, slice->bank, i, k, gate, first, n);
        add_token(e, op, slice->start + i, k, gate, state, first, n);
        emit(e, op, slice->first + i, state, first, n);
    }
}
