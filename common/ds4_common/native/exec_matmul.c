/* MATMUL sections: several matrices cut into rectangles of outputs that threads draw from one pool.
 *
 * Rectangles are rows x columns (tokens). Rows: enough work to outweigh drawing a task, few enough
 * that threads finish together. Columns: so many that their activations stay in the second-level cache
 * while the rows pass by: of one such tile all rows come before the next. The cut changes no bit of the result.
 */
#include "exec.h"

#define TASKS_PER_THREAD 12
#define LEAST_WORK (16 * 1024)       /* multiply-adds: a microsecond or two */
#define MOST_WORK (8 * 1024 * 1024)
#define MOST_WORK_FEW (256 * 1024)   /* of each of few columns, lest threads wait for the last task */
#define TILE_BYTES (384 * 1024)      /* activations of one column tile: most of a small second level */
#define WIDE_TILE_BYTES (768 * 1024) /* AVX-512, AMX, I8MM: products are cheap, rows are unpacked seldom */
#define ROW_STEP 16                  /* kernels like whole groups of rows, */
#define ROW_STEP_MANY 32             /* ... and with several columns larger ones */

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t bounded(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

/* Cuts one matrix for `work` multiply-adds per rectangle; returns how many there are. */
static uint64_t cut(const ds4_engine *e, ds4_part *part, int64_t work) {
    const ds4_weight *w = e->weights + part->op->weight;
    int64_t columns = e->section_rows;
    int64_t budget = e->config.isa >= DS4_ISA_AVX512 ? WIDE_TILE_BYTES : TILE_BYTES;
    int64_t fitting = budget / (int64_t)e->image.slots[part->op->in[0]].bytes / 8 * 8;
    int64_t tiles = ceil_div(columns, bounded(fitting, 8, columns < 8 ? 8 : columns));
    part->tile_columns = ceil_div(ceil_div(columns, tiles), 8) * 8; /* as good as equal */
    part->column_tiles = (uint64_t)ceil_div(columns, part->tile_columns);
    int64_t across = part->tile_columns < columns ? part->tile_columns : columns;
    int64_t least = columns == 1 ? ROW_STEP : ROW_STEP_MANY;
    int64_t granule = ds4_row_granule(w->type, w->layout);
    int64_t step = granule > least ? granule : least / granule * granule;
    part->chunk_rows = bounded(work / (w->cols * across) / step * step, step, w->rows + step);
    return (uint64_t)ceil_div(w->rows, part->chunk_rows) * part->column_tiles;
}

/* Cuts the section that runs, into `parts`; returns the number of rectangles. */
static uint64_t cut_section(const ds4_engine *e, ds4_part *parts) {
    const ds4_image_op *ops = e->image.ops + e->section->first_op;
    int64_t total = 0;
    for (uint32_t i = 0; i < e->section->n_ops; i++) {
        const ds4_weight *w = e->weights + ops[i].weight;
        parts[i].op = ops + i;
        total += w->rows * w->cols * e->section_rows;
    }
    int64_t most = e->section_rows < DS4_FEW_ROWS ? e->section_rows * MOST_WORK_FEW : MOST_WORK;
    int64_t work = bounded(total / (e->config.threads * TASKS_PER_THREAD), LEAST_WORK, most);
    uint64_t units = 0;
    for (uint32_t i = 0; i < e->section->n_ops; i++) {
        parts[i].first_unit = units;
        units += cut(e, parts + i, work);
    }
    return units;
}

/* The cuts for a single row, once: sections of a decode step should begin at once, and what nobody writes
 * stays in the caches of all threads. */
void ds4_plan_matmuls(ds4_engine *e) {
    ds4_part *parts = e->row_parts;
    e->section_rows = 1;
    for (uint32_t i = 0; i < e->image.header->n_sections; i++) {
        e->section = e->image.sections + i;
        if (e->section->kind != DS4_SECTION_MATMUL) continue;
        e->row_plans[i] = (ds4_row_plan){parts, cut_section(e, parts)};
        parts += e->section->n_ops;
    }
}

uint64_t ds4_prepare_matmul(ds4_engine *e) {
    const ds4_row_plan *plan = e->row_plans + (e->section - e->image.sections);
    e->n_parts = e->section->n_ops;
    if (e->section_rows != 1) return cut_section(e, e->parts);
    e->parts = plan->parts;
    return plan->units;
}

void ds4_run_matmul(ds4_engine *e, uint64_t unit, int thread) {
    (void)thread;
    uint32_t i = e->n_parts - 1;
    while (unit < e->parts[i].first_unit) i--;
    const ds4_part *part = e->parts + i;
    const ds4_weight *w = e->weights + part->op->weight;
    uint64_t local = unit - part->first_unit;
    uint64_t chunks = (uint64_t)ceil_div(w->rows, part->chunk_rows);
    int64_t row0 = (int64_t)(local % chunks) * part->chunk_rows;
    int64_t column0 = (int64_t)(local / chunks) * part->tile_columns;
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
