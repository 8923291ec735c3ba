/* MATMUL sections: several matrices cut into rectangles of outputs that threads draw from one pool.
 *
 * Rectangles are rows x columns (tokens). Rows: enough work to outweigh drawing a task, few enough
 * that threads finish together. Columns: so many that their activations stay in the second-level cache
 * while the rows pass by. The cut changes no bit of the result.
 */
#include "exec.h"

#define TASKS_PER_THREAD 8
#define LEAST_WORK (64 * 1024)       /* multiply-adds: a few microseconds */
#define MOST_WORK (8 * 1024 * 1024)
#define TILE_BYTES (128 * 1024)      /* activations of one column tile */
#define AMX_TILE_BYTES (768 * 1024)  /* products are cheap there: rows should be unpacked seldom */
#define ROW_STEP 32                  /* kernels like whole groups of rows */

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t bounded(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

/* Cuts one matrix for `work` multiply-adds per rectangle; returns how many there are. */
static uint64_t cut(const ds4_engine *e, ds4_part *part, int64_t work) {
    const ds4_weight *w = e->weights + part->op->weight;
    int64_t columns = e->section_rows;
    int64_t budget = e->config.isa == DS4_ISA_AMX ? AMX_TILE_BYTES : TILE_BYTES;
    int64_t fitting = budget / (int64_t)e->image.slots[part->op->in[0]].bytes / 8 * 8;
    part->tile_columns = bounded(fitting, 8, columns < 8 ? 8 : columns);
    part->column_tiles = (uint64_t)ceil_div(columns, part->tile_columns);
    int64_t across = part->tile_columns < columns ? part->tile_columns : columns;
    int64_t granule = ds4_row_granule(w->type, w->layout);
    int64_t step = granule > ROW_STEP ? granule : ROW_STEP / granule * granule;
    part->chunk_rows = bounded(work / (w->cols * across) / step * step, step, w->rows + step);
    return (uint64_t)ceil_div(w->rows, part->chunk_rows) * part->column_tiles;
}

uint64_t ds4_prepare_matmul(ds4_engine *e) {
    const ds4_image_op *ops = e->image.ops + e->section->first_op;
    int64_t total = 0;
    e->n_parts = e->section->n_ops;
    for (uint32_t i = 0; i < e->n_parts; i++) {
        const ds4_weight *w = e->weights + ops[i].weight;
        e->parts[i].op = ops + i;
        total += w->rows * w->cols * e->section_rows;
    }
    int64_t work = bounded(total / (e->config.threads * TASKS_PER_THREAD), LEAST_WORK, MOST_WORK);
    uint64_t units = 0;
    for (uint32_t i = 0; i < e->n_parts; i++) {
        e->parts[i].first_unit = units;
        units += cut(e, e->parts + i, work);
    }
    return units;
}

void ds4_run_matmul(ds4_engine *e, uint64_t unit, int thread) {
    (void)thread;
    uint32_t i = e->n_parts - 1;
    while (unit < e->parts[i].first_unit) i--;
    const ds4_part *part = e->parts + i;
    const ds4_weight *w = e->weights + part->op->weight;
    uint64_t local = unit - part->first_unit;
    int64_t row0 = (int64_t)(local / part->column_tiles) * part->chunk_rows;
    int64_t column0 = (int64_t)(local % part->column_tiles) * part->tile_columns;
    int64_t row1 = row0 + part->chunk_rows < w->rows ? row0 + part->chunk_rows : w->rows;
    int64_t columns = e->section_rows - column0;
    if (columns > part->tile_columns) columns = part->tile_columns;
    size_t act_stride = e->image.slots[part->op->in[0]].bytes;
    int64_t ldy = (int64_t)(e->image.slots[part->op->out].bytes / 4);
    float *y = ds4_slot_floats(e, part->op->out, column0);
    e->kernels[part->op->weight](w, row0, row1, ds4_slot_row(e, part->op->in[0], column0),
                                 act_stride, columns, y, ldy);
    if (part->op->bias == DS4_NONE) return;
    const float *bias = e->vectors[part->op->bias];
    for (int64_t c = 0; c < columns; c++)
        e->vector->add(y + c * ldy + row0, y + c * ldy + row0, bias + row0, row1 - row0);
}
