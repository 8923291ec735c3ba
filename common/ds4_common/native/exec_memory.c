/* The memory of an engine: the cache and all buffers, sized by the image and the configuration. Nothing is
 * taken later. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "exec.h"
#include "quants.h"

int ds4_fail(ds4_engine *e, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(e->error, sizeof e->error, format, arguments);
    va_end(arguments);
    return -1;
}

void *ds4_take(ds4_engine *e, uint64_t bytes, const char *what) {
    if (e->error[0]) return NULL;
    bytes = (bytes + 4095) / 4096 * 4096;
    void *data = MAP_FAILED; /* more than the machine has would only fail later, and worse */
    if (bytes < e->memory_bytes - e->taken_bytes && e->allocations < DS4_MAX_MAPPINGS)
        data = mmap(NULL, bytes ? bytes : 4096, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        ds4_fail(e, "no memory for %s: %llu bytes", what, (unsigned long long)bytes);
        return NULL;
    }
    e->taken_bytes += bytes;
    e->mappings[e->allocations].data = data;
    e->mappings[e->allocations++].bytes = bytes ? bytes : 4096;
    return data;
}

/* ---- the cache ------------------------------------------------------------------------------------ */

/* Blocks of Q8_0 do not cross heads. */
static int check_blocks(ds4_engine *e, uint32_t plane, const char *what, uint32_t dims) {
    if (e->kv_kernels->type != DS4_KV_Q8_0 || dims % DS4_KV_BLOCK == 0) return 0;
    return ds4_fail(e, "KV cache in q8_0: %s of cache plane %u have %u dims, expected a multiple of %d; "
                   "use f16, bf16 or f32",
                    what, plane, dims, DS4_KV_BLOCK);
}

/* Of a plane in one page. */
static uint64_t plane_bytes(const ds4_engine *e, const ds4_image_plane *p) {
    int64_t page_tokens = e->image.header->page_tokens;
    if (p->kind == DS4_PLANE_STATE) return (uint64_t)p->kv_heads * p->dim * 4;
    if (!ds4_plane_attends(p)) return (uint64_t)page_tokens / p->ratio * p->dim * 2;
    int type = e->kv_kernels->type;
    int64_t tiles = ds4_kv_tile_bytes(type, ds4_kv_width(p->value_dim), page_tokens);
    if (p->kind == DS4_PLANE_KV) tiles += ds4_kv_tile_bytes(type, p->dim, page_tokens);
    return p->kv_heads * (uint64_t)tiles;
}

/* The history that keeps that much; a window that no sequence outgrows keeps all. */
static int history_of(ds4_engine *e, uint32_t window) {
    if (window >= e->config.context_tokens) window = 0;
    for (uint32_t i = 0; i < e->n_histories; i++)
        if (e->histories[i].window == window) return (int)i;
    if (e->n_histories == DS4_MAX_HISTORIES)
        return ds4_fail(e, "windows: a layer of %u tokens and %d other lengths, expected at most %d",
                        window, DS4_MAX_HISTORIES - 1, DS4_MAX_HISTORIES - 1);
    e->histories[e->n_histories].window = window;
    return (int)e->n_histories++;
}

static int place_planes(ds4_engine *e) {
    const ds4_image_header *h = e->image.header;
    e->n_histories = 1; /* the one that keeps all, whether a plane wants that or not */
    for (uint32_t i = 0; i < h->n_planes; i++) {
        const ds4_image_plane *p = e->image.planes + i;
        int history = history_of(e, p->window);
        if (history < 0) return -1;
        uint64_t *stride = &e->histories[history].page_stride;
        int64_t width = ds4_kv_width(p->value_dim);
        e->plane_history[i] = (uint32_t)history;
        e->plane_offset[i] = *stride;
        *stride += (plane_bytes(e, p) + 63) & ~63ull;
        if (!ds4_plane_attends(p)) continue;
        if (check_blocks(e, i, "keys", p->dim) || check_blocks(e, i, "values", p->value_dim))
            return -1;
        if (p->dim > e->dim_max) e->dim_max = p->dim;
        if (width > e->value_pad_max) e->value_pad_max = width;
    }
    return 0;
}

/* Pages of a history: of a window what all banks can hold at once, and as many again for windows that
 * are kept for prompts to come. */
static void count_pages(const ds4_engine *e, ds4_history *h) {
    uint64_t page_tokens = e->image.header->page_tokens;
    h->most = e->pages_per_bank;
    h->pages = e->pages;
    if (!h->window) return;
    uint64_t most = (h->window + (uint64_t)e->config.batch_tokens + page_tokens - 3) / page_tokens + 1;
    if (most < h->most) h->most = (uint32_t)most;
    uint64_t pages = 2ull * e->config.banks * h->most;
    if (pages < h->pages) h->pages = (uint32_t)pages;
}

static int take_history(ds4_engine *e, ds4_history *h, int32_t *page_table) {
    count_pages(e, h);
    uint64_t bytes = h->page_stride * h->pages;
    if (h->page_stride >= DS4_MOST_BYTES || bytes / h->pages != h->page_stride) bytes = DS4_MOST_BYTES;
    h->kv = ds4_take(e, bytes, "the KV cache");
    h->page_fill = ds4_take(e, h->pages * sizeof *h->page_fill, "page states");
    h->page_stamp = ds4_take(e, h->pages * sizeof *h->page_stamp, "page states");
    h->page_table = page_table;
    if (!h->kv || !h->page_fill || !h->page_stamp) return -1;
#if defined(MADV_HUGEPAGE)
    madvise(h->kv, bytes, MADV_HUGEPAGE); /* a wish: without huge pages it is only slower */
#endif
    return 0;
}

static int take_cache(ds4_engine *e) {
    uint32_t planes = e->image.header->n_planes;
    e->kv_kernels = ds4_kv_table((int)e->config.kv_type, e->config.isa);
    if (!e->kv_kernels)
        return ds4_fail(e, "KV cache: got type %u, expected below %d", e->config.kv_type, DS4_KV_TYPES);
    e->row_kernels = ds4_kv_table(DS4_KV_F16, e->config.isa);
    e->plane_history = ds4_take(e, planes * sizeof *e->plane_history, "plane table");
    e->plane_offset = ds4_take(e, planes * sizeof *e->plane_offset, "plane table");
    if (!e->plane_history || !e->plane_offset || place_planes(e)) return -1;
    uint64_t entries = (uint64_t)e->config.banks * e->pages_per_bank;
    int32_t *page_table = ds4_take(e, e->n_histories * entries * sizeof *page_table, "the page table");
    if (!page_table) return -1;
    memset(page_table, 0xff, e->n_histories * entries * sizeof *page_table);
    for (uint32_t i = 0; i < e->n_histories; i++)
        if (take_history(e, e->histories + i, page_table + i * entries)) return -1;
    return 0;
}

/* ---- buffers -------------------------------------------------------------------------------------- */

static int take_step_buffers(ds4_engine *e) {
    const ds4_engine_config *c = &e->config;
    const ds4_image_header *h = e->image.header;
    e->scratch[DS4_SPACE_TOKENS] = ds4_take(e, h->token_bytes * c->batch_tokens, "activations");
    e->scratch[DS4_SPACE_OUTPUTS] = ds4_take(e, h->row_bytes * c->batch_outputs, "logits");
    e->slices = ds4_take(e, c->banks * sizeof *e->slices, "step buffers");
    e->tokens = ds4_take(e, c->batch_tokens * sizeof *e->tokens, "step buffers");
    e->positions = ds4_take(e, c->batch_tokens * sizeof *e->positions, "step buffers");
    e->banks = ds4_take(e, c->batch_tokens * sizeof *e->banks, "step buffers");
    e->tiles = ds4_take(e, c->batch_tokens * sizeof *e->tiles, "step buffers");
    e->output_rows = ds4_take(e, c->batch_outputs * sizeof *e->output_rows, "step buffers");
    e->samplings = ds4_take(e, c->batch_outputs * sizeof *e->samplings, "step buffers");
    e->sampled = ds4_take(e, c->batch_outputs * sizeof *e->sampled, "step buffers");
    e->bank_stamp = ds4_take(e, c->banks * sizeof *e->bank_stamp, "step buffers");
    e->row_parts = ds4_take(e, h->n_ops * sizeof *e->row_parts, "cuts of matrices");
    e->row_plans = ds4_take(e, h->n_sections * sizeof *e->row_plans, "cuts of matrices");
    e->next_weights = ds4_take(e, (uint64_t)h->n_sections * c->threads * sizeof *e->next_weights,
                               "shares of matrices");
    e->ahead = ds4_take(e, c->threads * sizeof *e->ahead, "shares of matrices");
    ds4_profile *p = &e->profile;
    p->stride = (h->n_sections + 2 + 3) / 4 * 4;
    p->started = ds4_take(e, (h->n_sections + 3) * sizeof *p->started, "profile");
    p->sums = ds4_take(e, (h->n_sections + 2) * sizeof *p->sums, "profile");
    p->spent = ds4_take(e, c->threads * p->stride * sizeof *p->spent, "profile");
    return e->scratch[0] && e->scratch[1] && e->slices && e->tokens && e->positions && e->banks &&
                   e->row_parts && e->row_plans && e->next_weights && e->ahead && e->tiles &&
                   e->output_rows && e->samplings && e->sampled && e->bank_stamp && p->started &&
                   p->sums && p->spent
               ? 0
               : -1;
}

static int take_thread_scratch(ds4_engine *e) {
    uint32_t most_group = 1, most_heads = 1;
    for (uint32_t i = 0; i < e->image.header->n_ops; i++) {
        const ds4_image_op *op = e->image.ops + i;
        if (op->kind != DS4_OP_ATTEND) continue;
        uint32_t group = op->heads / e->image.planes[op->plane].kv_heads;
        if (group > most_group) most_group = group;
        if (op->heads > most_heads) most_heads = op->heads;
    }
    if (most_group > DS4_TILE_ROWS) most_group = DS4_TILE_ROWS; /* exec_attend.c, slabs */
    e->tile_tokens = DS4_TILE_ROWS / most_group;
    e->tile_rows = e->tile_tokens * most_group;
    e->part_tokens = ds4_part_tokens(e->image.header->page_tokens);
    uint64_t floats = (uint64_t)e->tile_rows *
                      (uint64_t)(e->dim_max + e->part_tokens + 2 * (e->value_pad_max + 2));
    floats = (floats + 15) / 16 * 16;
    float *at = ds4_take(e, floats * 4 * e->config.threads, "attention scratch");
    e->thread_floats = ds4_take(e, e->config.threads * sizeof *e->thread_floats, "thread table");
    uint64_t parts = (e->config.context_tokens - 1) / e->part_tokens + 1;
    e->split_rows = most_heads * parts + 64 * e->config.threads;
    e->split_floats = ds4_take(e, e->split_rows * (uint64_t)(e->value_pad_max + 2) * 4,
                               "attention parts");
    e->sample_scratch = ds4_take(e, DS4_SAMPLE_SCRATCH(e->image.header->vocabulary) * e->config.threads,
                                 "sampler scratch");
    if (!at || !e->thread_floats || !e->split_floats || !e->sample_scratch) return -1;
    for (uint32_t i = 0; i < e->config.threads; i++) e->thread_floats[i] = at + i * floats;
    return 0;
}

/* Room for indexes and for attention over rows, for the widest of each. */
static int take_row_scratch(ds4_engine *e) {
    const ds4_engine_config *c = &e->config;
    for (uint32_t i = 0; i < e->image.header->n_ops; i++) {
        const ds4_image_op *op = e->image.ops + i;
        if (op->kind != DS4_OP_INDEX_ROWS && op->kind != DS4_OP_ATTEND_ROWS) continue;
        const ds4_image_plane *plane = e->image.planes + op->plane;
        if (op->kind == DS4_OP_ATTEND_ROWS) {
            uint64_t floats = (ds4_attend_rows_floats(op->heads, plane->dim) + 15) / 16 * 16;
            if (floats > e->row_floats_each) e->row_floats_each = floats;
            continue;
        }
        uint64_t rows = c->context_tokens / plane->ratio + 1;
        uint64_t dots = (uint64_t)op->heads * (e->image.header->page_tokens / plane->ratio);
        if (rows > e->index_rows) e->index_rows = rows;
        if (dots > e->index_dots_floats) e->index_dots_floats = dots;
    }
    if (e->row_floats_each &&
        !(e->row_floats = ds4_take(e, e->row_floats_each * 4 * c->threads, "scratch of rows")))
        return -1;
    if (!e->index_rows) return 0;
    e->index_tokens = 4 * c->threads;
    e->index_scores = ds4_take(e, e->index_rows * 4 * e->index_tokens, "scores of rows");
    e->index_dots = ds4_take(e, e->index_dots_floats * 4 * c->threads, "scores of rows");
    return e->index_scores && e->index_dots ? 0 : -1;
}

/* Room for the columns of every token's experts, and per thread for one rectangle. */
static int take_expert_scratch(ds4_engine *e) {
    uint64_t most_columns = 0, most_tiles = 0, act_bytes = 0;
    uint32_t most_experts = 0;
    for (uint32_t i = 0; i < e->image.header->n_ops; i++) {
        const ds4_image_op *op = e->image.ops + i;
        if (op->kind != DS4_OP_MATMUL_EXPERTS) continue;
        const ds4_image_slot *act = e->image.slots + op->in[0];
        uint32_t experts = e->image.weight_records[op->weight].experts;
        uint64_t rows = act->space == DS4_SPACE_TOKENS ? e->config.batch_tokens
                                                       : e->config.batch_outputs;
        uint64_t columns = rows, tiles;
        if (op->in[1] == DS4_NONE) {
            tiles = experts * ((rows - 1) / DS4_EXPERT_TILE + 1);
        } else {
            columns *= e->image.slots[op->in[1]].width / 2;
            tiles = columns; /* one each at most */
        }
        if (columns > most_columns) most_columns = columns;
        if (tiles > most_tiles) most_tiles = tiles;
        if (experts > most_experts) most_experts = experts;
        size_t bytes = ds4_act_bytes(act->format, act->width);
        if (bytes > act_bytes) act_bytes = bytes;
    }
    if (!most_experts) return 0;
    e->expert_scratch_bytes = DS4_EXPERT_TILE * (DS4_EXPERT_ROWS * sizeof(float) + act_bytes);
    e->expert_tiles = ds4_take(e, most_tiles * sizeof *e->expert_tiles, "expert tiles");
    e->expert_columns = ds4_take(e, most_columns * sizeof *e->expert_columns, "expert columns");
    e->expert_starts = ds4_take(e, (most_experts + 1) * sizeof *e->expert_starts, "expert counts");
    e->expert_scratch = ds4_take(e, e->expert_scratch_bytes * e->config.threads, "expert scratch");
    return e->expert_tiles && e->expert_columns && e->expert_starts && e->expert_scratch ? 0 : -1;
}

/* What every bank keeps of its last slice, where state runs along. */
static int take_rewinds(ds4_engine *e) {
    const ds4_image_header *h = e->image.header;
    e->rewind_offset = ds4_take(e, h->n_ops * sizeof *e->rewind_offset, "what slices add to state");
    if (!e->rewind_offset) return -1;
    for (uint32_t i = 0; i < h->n_ops; i++) {
        const ds4_image_op *op = e->image.ops + i;
        if (op->kind != DS4_OP_COMPRESS) continue;
        uint64_t wide = (uint64_t)e->image.planes[op->plane].kv_heads / 3 * op->dim;
        e->rewind_offset[i] = e->rewind_bank_floats;
        e->rewind_bank_floats += (3 + 2 * DS4_REWIND) * wide;
    }
    if (!e->rewind_bank_floats) return 0;
    e->rewinds = ds4_take(e, e->config.banks * sizeof *e->rewinds, "what slices add to state");
    e->rewind_floats = ds4_take(e, e->rewind_bank_floats * 4 * e->config.banks,
                                "what slices add to state");
    return e->rewinds && e->rewind_floats ? 0 : -1;
}

int ds4_take_memory(ds4_engine *e) {
    return take_cache(e) || take_step_buffers(e) || take_thread_scratch(e) || take_expert_scratch(e) ||
                   take_row_scratch(e) || take_rewinds(e)
               ? -1
               : 0;
}
