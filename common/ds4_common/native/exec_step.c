/* One step: check everything, then let the pool run the sections. */
#include <stdarg.h>
#include <stdio.h>

#include "exec.h"

#define BATCH 4 /* of few rows, tasks are over in microseconds: a thread may draw some at once */

static int refuse(ds4_engine *e, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(e->error, sizeof e->error, format, arguments);
    va_end(arguments);
    return DS4_STEP_REFUSED;
}

/* ---- checks --------------------------------------------------------------------------------------- */

static int check_slice(ds4_engine *e, uint32_t number, uint32_t n_outputs) {
    const ds4_slice *s = e->slices + number;
    if (s->bank < 0 || (uint32_t)s->bank >= e->config.banks)
        return refuse(e, "slice %u: bank: got %d, expected below %u", number, s->bank,
                      e->config.banks);
    if (e->bank_stamp[s->bank] == e->step_number)
        return refuse(e, "slice %u: bank %d has a slice in this step already", number, s->bank);
    e->bank_stamp[s->bank] = e->step_number;
    if (s->start < 0 || s->count < 1 || (uint32_t)s->count > e->config.batch_tokens ||
        (uint64_t)s->start + (uint64_t)s->count > e->config.context_tokens)
        return refuse(e, "slice %u (bank %d): got %d tokens at position %d, expected 1 or more within "
                         "the context of %u",
                      number, s->bank, s->count, s->start, e->config.context_tokens);
    if (s->first < 0 || (uint32_t)s->first != e->n_tokens ||
        (uint32_t)s->count > e->config.batch_tokens - e->n_tokens)
        return refuse(e, "slice %u (bank %d): tokens %d+%d, expected to follow %u within %u", number,
                      s->bank, s->first, s->count, e->n_tokens, e->config.batch_tokens);
    for (int32_t i = s->first; i < s->first + s->count; i++)
        if (e->tokens[i] < 0 || (uint32_t)e->tokens[i] >= e->input_vocabulary)
            return refuse(e, "slice %u (bank %d): token: got %d, expected below %u", number, s->bank,
                          e->tokens[i], e->input_vocabulary);
    if (s->rows < 0 || s->rows > s->count || (uint32_t)s->rows > n_outputs - e->n_outputs)
        return refuse(e, "slice %u (bank %d): output rows: got %d, expected 0 to %d within %u", number,
                      s->bank, s->rows, s->count, n_outputs);
    e->n_tokens += (uint32_t)s->count;
    e->n_outputs += (uint32_t)s->rows;
    return DS4_STEP_OK;
}

/* The first page that a slice reads or writes. */
static int32_t first_page(const ds4_engine *e, const ds4_history *h, const ds4_slice *s) {
    int64_t before = (int64_t)s->start + 1 - h->window;
    return h->window && before > 0 ? (int32_t)(before / e->image.header->page_tokens) : 0;
}

/* Every page up to the slice's end must be mapped, from the first one that its window reaches; those
 * it writes are stamped: no other slice may write or read them in the same step. */
static int check_written_pages(ds4_engine *e, const ds4_history *h, const ds4_slice *s) {
    int32_t page_tokens = (int32_t)e->image.header->page_tokens;
    const int32_t *table = ds4_bank_pages(e, h, s->bank);
    for (int32_t i = first_page(e, h, s); i <= (s->start + s->count - 1) / page_tokens; i++) {
        int32_t page = table[i];
        if (page < 0 || (uint32_t)page >= h->pages)
            return refuse(e, "bank %d: logical page %d is mapped to %d, expected below %u", s->bank, i,
                          page, h->pages);
        if (i < s->start / page_tokens) continue;
        if (h->page_stamp[page] == e->step_number)
            return refuse(e, "bank %d: logical page %d: physical page %d is written twice in this step",
                          s->bank, i, page);
        h->page_stamp[page] = e->step_number;
    }
    return DS4_STEP_OK;
}

/* State is that of a page's last token: a slice begins there, or where that can be taken back. */
static int runs_ahead(const ds4_engine *e, const ds4_slice *s) {
    return e->image.header->forward_only && !ds4_can_rewind(e, s);
}

/* What the slice reads must have been written: whole pages, then its first page up to its start. */
static int check_read_pages(ds4_engine *e, const ds4_history *h, const ds4_slice *s) {
    int32_t page_tokens = (int32_t)e->image.header->page_tokens;
    const int32_t *table = ds4_bank_pages(e, h, s->bank);
    int32_t whole = s->start / page_tokens;
    for (int32_t i = first_page(e, h, s); i <= whole; i++) {
        uint32_t needed = (uint32_t)(i < whole ? page_tokens : s->start % page_tokens);
        if (!needed) continue;
        uint32_t held = h->page_fill[table[i]];
        if (held < needed || (held > needed && h == e->histories && runs_ahead(e, s)))
            return refuse(e, "bank %d at position %d: logical page %d (physical %d) holds %u tokens, "
                             "expected %u",
                          s->bank, s->start, i, table[i], held, needed);
        if (i < whole && h->page_stamp[table[i]] == e->step_number)
            return refuse(e, "bank %d: logical page %d: physical page %d is read and written in this "
                             "step",
                          s->bank, i, table[i]);
    }
    return DS4_STEP_OK;
}

static int check_pages(ds4_engine *e, const ds4_history *h, uint32_t n_slices) {
    for (uint32_t i = 0; i < n_slices; i++)
        if (check_written_pages(e, h, e->slices + i)) return DS4_STEP_REFUSED;
    for (uint32_t i = 0; i < n_slices; i++)
        if (check_read_pages(e, h, e->slices + i)) return DS4_STEP_REFUSED;
    return DS4_STEP_OK;
}

static int check_step(ds4_engine *e, uint32_t n_slices, uint32_t n_outputs, uint32_t flags) {
    e->step_number++; /* also after a refusal: stamps of a refused step mean nothing */
    e->n_slices = n_slices;
    e->n_tokens = e->n_outputs = 0;
    e->flags = flags;
    if (!n_slices || n_slices > e->config.banks)
        return refuse(e, "slices: got %u, expected 1 to %u", n_slices, e->config.banks);
    if (n_outputs > e->config.batch_outputs)
        return refuse(e, "outputs: got %u, expected at most %u", n_outputs, e->config.batch_outputs);
    for (uint32_t i = 0; i < n_slices; i++)
        if (check_slice(e, i, n_outputs)) return DS4_STEP_REFUSED;
    if (e->n_outputs != n_outputs)
        return refuse(e, "outputs: got %u in the slices, expected %u", e->n_outputs, n_outputs);
    if (flags & DS4_STEP_ALL_ROWS && e->n_tokens > e->config.batch_outputs)
        return refuse(e, "outputs: got %u tokens, expected at most %u", e->n_tokens,
                      e->config.batch_outputs);
    for (uint32_t i = 0; i < e->n_histories; i++)
        if (check_pages(e, e->histories + i, n_slices)) return DS4_STEP_REFUSED;
    return DS4_STEP_OK;
}

/* ---- what the sections read ----------------------------------------------------------------------- */

static void mark_filled(ds4_engine *e, const ds4_history *h, const ds4_slice *s) {
    int32_t page_tokens = (int32_t)e->image.header->page_tokens, end = s->start + s->count;
    const int32_t *table = ds4_bank_pages(e, h, s->bank);
    for (int32_t i = s->start / page_tokens; i * page_tokens < end; i++) {
        int32_t held = end - i * page_tokens;
        h->page_fill[table[i]] = (uint32_t)(held < page_tokens ? held : page_tokens);
    }
}

static void unfold(ds4_engine *e) {
    int32_t tile_tokens = (int32_t)e->tile_tokens, row = 0;
    e->n_tiles = 0;
    for (uint32_t i = 0; i < e->n_slices; i++) {
        const ds4_slice *s = e->slices + i;
        for (int32_t j = 0; j < s->count; j++) {
            e->positions[s->first + j] = s->start + j;
            e->banks[s->first + j] = s->bank;
            if (e->flags & DS4_STEP_ALL_ROWS) e->output_rows[s->first + j] = s->first + j;
        }
        if (!(e->flags & DS4_STEP_ALL_ROWS))
            for (int32_t j = s->count - s->rows; j < s->count; j++)
                e->output_rows[row++] = s->first + j;
        for (int32_t j = 0; j < s->count; j += tile_tokens) {
            int32_t count = s->count - j < tile_tokens ? s->count - j : tile_tokens;
            e->tiles[e->n_tiles++] = (ds4_tile){s->bank, s->first + j, count, s->start + j};
        }
        for (uint32_t j = 0; j < e->n_histories; j++) mark_filled(e, e->histories + j, s);
    }
    if (e->flags & DS4_STEP_ALL_ROWS) e->n_outputs = e->n_tokens;
    ds4_note_slices(e);
}

/* ---- running -------------------------------------------------------------------------------------- */

static void run_sample(ds4_engine *e, uint64_t unit, int thread) {
    const ds4_image_header *h = e->image.header;
    char *scratch = e->sample_scratch + (size_t)thread * DS4_SAMPLE_SCRATCH(h->vocabulary);
    ds4_sample(e->vector, ds4_slot_floats(e, h->logits_slot, (int64_t)unit), h->vocabulary,
               e->samplings + unit, scratch, e->sampled + unit);
}

/* Rows in chunks: a few per thread, so that a slow thread does not hold up the rest. */
static uint64_t by_rows(ds4_engine *e) {
    uint32_t tasks = e->config.threads * 4;
    e->rows_per_unit = e->section_rows < tasks ? 1 : (e->section_rows + tasks - 1) / tasks;
    return (e->section_rows + e->rows_per_unit - 1) / e->rows_per_unit;
}

/* Stage 0 computes the rope angles, stage i + 1 runs section i, the last one samples. */
static uint64_t prepare(ds4_engine *e) {
    int32_t sections = (int32_t)e->image.header->n_sections;
    e->is_short = 0;
    if (e->stage == 0) {
        e->section_rows = e->n_tokens;
        e->run = ds4_run_angles;
        return by_rows(e);
    }
    if (e->stage == sections + 1) {
        e->run = run_sample;
        return e->flags & DS4_STEP_ALL_ROWS && !(e->flags & DS4_STEP_SAMPLE_ROWS) ? 0 : e->n_outputs;
    }
    e->section = e->image.sections + e->stage - 1;
    e->section_rows = e->section->space == DS4_SPACE_TOKENS ? e->n_tokens : e->n_outputs;
    if (!e->section_rows) return 0;
    e->parts = e->cut_parts;
    switch (e->section->kind) {
    case DS4_SECTION_MATMUL: e->run = ds4_run_matmul; return ds4_prepare_matmul(e);
    case DS4_SECTION_EXPERTS: e->run = ds4_run_experts; return ds4_prepare_experts(e);
    case DS4_SECTION_ATTEND: e->run = ds4_run_attend; return ds4_prepare_attend(e);
    case DS4_SECTION_COMPRESS: e->run = ds4_run_compress; return ds4_prepare_compress(e);
    case DS4_SECTION_INDEX: e->run = ds4_run_index; return ds4_prepare_index(e);
    case DS4_SECTION_ATTEND_ROWS: e->run = ds4_run_attend_rows; return ds4_prepare_attend_rows(e);
    default: e->run = ds4_run_rows; return by_rows(e);
    }
}

/* A long prompt over many heads is more work than the pool counts: neighbours share a task. A section that
 * is over sooner than another thread hears of it is a single one. */
static uint32_t group_units(ds4_engine *e, uint64_t units) {
    e->units = units;
    e->units_per_task = (units + DS4_POOL_MAX_TASKS - 1) / DS4_POOL_MAX_TASKS;
    if (e->is_short) e->units_per_task = units;
    return units ? (uint32_t)((units + e->units_per_task - 1) / e->units_per_task) : 0;
}

static void run_tasks(void *context, uint32_t first, uint32_t count, int thread) {
    ds4_engine *e = context;
    uint64_t unit = first * e->units_per_task, end = (first + count) * e->units_per_task;
    if (end > e->units) end = e->units;
    ds4_note_section(e, thread);
    uint64_t started = e->profile.enabled ? ds4_ticks() : 0;
    for (; unit < end; unit++) e->run(e, unit, thread);
    if (!e->profile.enabled) return;
    ds4_spent *spent = e->profile.spent + (uint64_t)thread * e->profile.stride + e->stage;
    spent->ticks += ds4_ticks() - started;
    spent->spans++;
}

/* The records of a section are read once per step, and all weights pass through the caches meanwhile. So
 * those of the next section are asked for while this one begins, and the ops of the one after it. */
static void look_ahead(const ds4_engine *e) {
    const ds4_image *image = &e->image;
    uint32_t sections = image->header->n_sections, next = (uint32_t)e->stage; /* stage i + 1 runs i */
    if (next + 1 < sections) {
        const ds4_image_section *after = image->sections + next + 1;
        const char *ops = (const char *)(image->ops + after->first_op);
        for (size_t at = 0; at < after->n_ops * sizeof *image->ops; at += 64)
            __builtin_prefetch(ops + at);
        __builtin_prefetch(after + 2);
    }
    if (next >= sections) return;
    const ds4_image_op *op = image->ops + image->sections[next].first_op;
    for (uint32_t i = 0; i < image->sections[next].n_ops; i++, op++) {
        __builtin_prefetch(image->slots + op->in[0]);
        if (op->out != DS4_NONE) __builtin_prefetch(image->slots + op->out);
        if (op->weight == DS4_NONE) continue;
        __builtin_prefetch(e->weights + op->weight);
        __builtin_prefetch(e->kernels + op->weight);
        __builtin_prefetch(e->vectors + op->weight);
    }
}

/* The pool's `advance`: single tasks run here and now, without waking anybody. */
static ds4_pool_section next_section(void *context, int thread) {
    ds4_engine *e = context;
    for (;;) {
        if (e->split != DS4_SPLIT_PARTS) { /* parts come back to be folded */
            e->stage++;
            if (e->profile.enabled) e->profile.started[e->stage] = ds4_ticks();
        }
        if (e->stage > (int32_t)e->image.header->n_sections + 1) return (ds4_pool_section){0, 0};
        uint32_t tasks = group_units(e, prepare(e));
        look_ahead(e);
        if (tasks > 1) return (ds4_pool_section){tasks, e->section_rows < DS4_FEW_ROWS ? BATCH : 1};
        if (tasks) run_tasks(e, 0, 1, thread);
    }
}

ds4_pool *ds4_open_pool(ds4_engine *e) {
    return ds4_pool_open((int)e->config.threads, &(ds4_pool_job){
        .advance = next_section,
        .task = run_tasks,
        .meanwhile = ds4_ask_ahead,
        .context = e,
        .notes = &e->section,
        .notes_bytes = offsetof(ds4_engine, cut_parts) - offsetof(ds4_engine, section),
    });
}

int ds4_engine_step(ds4_engine *e, uint32_t slices, uint32_t outputs, uint32_t flags) {
    uint64_t entered = e->profile.enabled ? ds4_ticks() : 0;
    if (check_step(e, slices, outputs, flags)) return DS4_STEP_REFUSED;
    unfold(e);
    e->stage = -1;
    e->split = DS4_SPLIT_WHOLE;
    ds4_pool_run(e->pool);
    if (e->profile.enabled) ds4_profile_step(e, entered);
    return DS4_STEP_OK;
}

/* ---- what the caller sees ------------------------------------------------------------------------- */

const char *ds4_engine_error(const ds4_engine *e) { return e->error; }
int32_t *ds4_engine_page_table(ds4_engine *e) { return e->histories[0].page_table; }
ds4_slice *ds4_engine_slices(ds4_engine *e) { return e->slices; }
int32_t *ds4_engine_tokens(ds4_engine *e) { return e->tokens; }
ds4_sampling *ds4_engine_samplings(ds4_engine *e) { return e->samplings; }
ds4_sampled *ds4_engine_sampled(ds4_engine *e) { return e->sampled; }
float *ds4_engine_logits(ds4_engine *e) {
    return ds4_slot_floats(e, e->image.header->logits_slot, 0);
}
uint64_t ds4_engine_allocations(const ds4_engine *e) { return e->allocations; }

void ds4_engine_info(const ds4_engine *e, ds4_engine_facts *info) {
    const ds4_image_header *h = e->image.header;
    *info = (ds4_engine_facts){
        .vocabulary = h->vocabulary,
        .page_tokens = h->page_tokens,
        .pages_per_bank = e->pages_per_bank,
        .threads = e->config.threads,
        .isa = (uint32_t)e->config.isa,
        .sections = h->n_sections,
        .struct_bytes = sizeof(ds4_slice) + sizeof(ds4_sampling) + sizeof(ds4_sampled),
        .logits_stride = (uint32_t)(e->image.slots[h->logits_slot].bytes / 4),
        .forward_only = h->forward_only,
        .rewinds = ds4_most_rewind(e),
        .histories = e->n_histories,
    };
}
