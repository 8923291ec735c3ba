/* Compares what threads of an open engine ask for ahead with where the products of a single row begin.
 *
 * Linked with exec_matmul.c, so that the rows come from what a step runs: the kernels of the engine are
 * replaced by one that notes its rows. The engine can only be closed afterwards. Called by
 * tests/worker/test_executor_ahead.py.
 */
#include "aligned.h"
#include "exec.h"

static const ds4_weight *weight;
static int64_t row;

static void note(const ds4_weight *w, int64_t row0, int64_t row1, const void *acts, size_t act_stride,
                 int64_t n, float *y, int64_t ldy) {
    (void)row1, (void)acts, (void)act_stride, (void)n, (void)y, (void)ldy;
    weight = w;
    row = row0;
}

/* The section whose weights are asked for while section i runs, or -1. */
static int64_t next_of(const ds4_engine *e, int64_t i) {
    const int64_t sections = e->image.header->n_sections;
    for (int64_t step = 1; step <= sections; step++) {
        const int64_t next = (i + step) % sections;
        if (e->image.sections[next].kind == DS4_SECTION_MATMUL) return next;
        if (e->image.sections[next].kind == DS4_SECTION_EXPERTS) return -1;
    }
    return -1;
}

static const void *begin_of(ds4_engine *e, int64_t section, uint64_t thread) {
    e->section = e->image.sections + section;
    e->section_rows = 1;
    const uint64_t units = ds4_prepare_matmul(e);
    ds4_run_matmul(e, units * thread / e->config.threads, 0);
    if (ds4_is_aligned(weight->layout)) return NULL;
    return (const char *)weight->data +
           (row ? ds4_layout_bytes(weight->type, weight->layout, row, weight->cols) : 0);
}

/* -1 - (section * threads + thread) of the first that differs, or how many sections have a next one; of
 * those, how many have an end of the step in between, and the sections that have none. */
DS4_EXPORT int64_t ahead_check(ds4_engine *e, int64_t *around, int64_t *none) {
    int64_t found = 0;
    *around = *none = 0;
    for (uint32_t i = 0; i < e->image.header->n_weights; i++) e->kernels[i] = note;
    for (int64_t i = 0; i < e->image.header->n_sections; i++) {
        const int64_t next = next_of(e, i);
        for (uint32_t t = 0; t < e->config.threads; t++) {
            const int64_t at = i * e->config.threads + t;
            if (e->next_weights[at] != (next < 0 ? NULL : begin_of(e, next, t))) return -1 - at;
        }
        found += next >= 0;
        *around += next >= 0 && next <= i;
        *none += next < 0;
    }
    return found;
}
