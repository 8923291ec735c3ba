/* What threads do while they wait for the others: ask for the weights that they will multiply next.
 *
 * Owns: where each thread's share of the next matrices begins, and how much of it is asked for. While one
 * thread runs the small ops between two products of few rows, the others have nothing to do and memory is
 * idle; so each asks for the beginning of its own share of the next one, into the second-level cache.
 * Refuses: experts, of which nobody knows yet which ones are meant, and layouts whose rows have no address.
 */
#include "aligned.h"
#include "exec.h"

enum {
    AHEAD_BYTES = 128 * 1024, /* a part of any second-level cache; a gap is seldom long enough for more */
    AT_ONCE = 256,            /* between two looks whether there is news */
};

/* Where a thread's share of a section begins that is cut for a single row; with a few rows about there. */
static const char *share_of(const ds4_engine *e, int64_t section, int64_t thread) {
    const ds4_row_plan *plan = e->row_plans + section;
    uint64_t unit = plan->units * (uint64_t)thread / e->config.threads;
    const ds4_part *part = plan->parts + e->image.sections[section].n_ops - 1;
    while (unit < part->first_unit) part--;
    const ds4_weight *w = e->weights + part->op->weight;
    if (ds4_is_aligned(w->layout)) return NULL;
    int64_t row_bytes = ds4_layout_bytes(w->type, w->layout, w->rows, w->cols) / w->rows;
    return (const char *)w->data + (int64_t)(unit - part->first_unit) * part->chunk_rows * row_bytes;
}

/* Backwards, twice: after the last section comes the first one of the next step. */
void ds4_plan_ahead(ds4_engine *e) {
    const int64_t sections = e->image.header->n_sections, threads = e->config.threads;
    for (int64_t turn = 2 * sections, next = -1; turn-- > 0;) {
        const int64_t i = turn % sections;
        for (int64_t t = 0; t < threads; t++)
            e->next_weights[i * threads + t] = next < 0 ? NULL : share_of(e, next, t);
        if (e->image.sections[i].kind == DS4_SECTION_MATMUL) next = i;
        if (e->image.sections[i].kind == DS4_SECTION_EXPERTS) next = -1;
    }
}

/* Before a thread's tasks of a section. */
void ds4_note_section(ds4_engine *e, int thread) {
    ds4_ahead *mine = e->ahead + thread;
    const int64_t section = e->stage - 1, sections = e->image.header->n_sections;
    if (mine->stage == e->stage || section < 0 || section >= sections) return;
    mine->stage = e->stage;
    const char *share = e->next_weights[section * e->config.threads + thread];
    mine->at = e->n_tokens < DS4_FEW_ROWS ? share : NULL;
    mine->end = mine->at ? mine->at + AHEAD_BYTES : NULL;
}

/* The pool's `meanwhile`. */
int ds4_ask_ahead(void *context, int thread) {
    ds4_ahead *mine = ((ds4_engine *)context)->ahead + thread;
    if (mine->at == mine->end) return 0;
    for (int line = 0; line < AT_ONCE; line += 64) __builtin_prefetch(mine->at + line, 0, 2);
    mine->at += AT_ONCE;
    return 1;
}
