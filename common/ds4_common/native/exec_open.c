/* Opening and closing an engine: all checks of the image, all memory, all threads. */
#define _GNU_SOURCE
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "exec.h"
#include "quants.h"

#define MOST_BANKS 4096u
#define MOST_BATCH 65536u
#define MOST_BYTES (1ull << 46) /* of one mapping, so that sums cannot overflow */

static int fail(ds4_engine *e, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(e->error, sizeof e->error, format, arguments);
    va_end(arguments);
    return -1;
}

/* Zeroed memory from the system, present only once touched. NULL with e->error set; then all further
 * calls return NULL too, so that callers may look at several results at once. */
static void *take(ds4_engine *e, uint64_t bytes, const char *what) {
    if (e->error[0]) return NULL;
    bytes = (bytes + 4095) / 4096 * 4096;
    void *data = MAP_FAILED; /* more than the machine has would only fail later, and worse */
    if (bytes < e->memory_bytes - e->taken_bytes && e->allocations < DS4_MAX_MAPPINGS)
        data = mmap(NULL, bytes ? bytes : 4096, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        fail(e, "no memory for %s: %llu bytes", what, (unsigned long long)bytes);
        return NULL;
    }
    e->taken_bytes += bytes;
    e->mappings[e->allocations].data = data;
    e->mappings[e->allocations++].bytes = bytes ? bytes : 4096;
    return data;
}

/* ---- capacities ----------------------------------------------------------------------------------- */

static uint32_t cores(void) {
#if defined(__linux__)
    cpu_set_t mine;
    if (!sched_getaffinity(0, sizeof mine, &mine)) return (uint32_t)CPU_COUNT(&mine);
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : (uint32_t)n;
}

static int check_capacities(ds4_engine *e) {
    ds4_engine_config *c = &e->config;
    const ds4_image_header *h = e->image.header;
    if (!c->threads) c->threads = cores() < DS4_POOL_MAX_THREADS ? cores() : DS4_POOL_MAX_THREADS;
    if (c->threads > DS4_POOL_MAX_THREADS)
        return fail(e, "threads: got %u, expected at most %d", c->threads, DS4_POOL_MAX_THREADS);
    if (!c->banks || c->banks > MOST_BANKS)
        return fail(e, "banks: got %u, expected 1 to %u", c->banks, MOST_BANKS);
    if (!c->batch_tokens || c->batch_tokens > MOST_BATCH || !c->batch_outputs ||
        c->batch_outputs > MOST_BATCH)
        return fail(e, "batch_tokens %u, batch_outputs %u: expected 1 to %u each", c->batch_tokens,
                    c->batch_outputs, MOST_BATCH);
    if (!c->context_tokens || c->context_tokens > h->context_tokens)
        return fail(e, "context_tokens: got %u, expected 1 to the model's %u", c->context_tokens,
                    h->context_tokens);
    e->pages_per_bank = (c->context_tokens - 1) / h->page_tokens + 1;
    uint64_t all = (uint64_t)e->pages_per_bank * c->banks;
    if (all > INT32_MAX) return fail(e, "page table of %llu entries", (unsigned long long)all);
    e->pages = c->pages ? c->pages : (uint32_t)all;
    if (e->pages > INT32_MAX) return fail(e, "pages: got %u", e->pages);
    if (c->isa < 0) c->isa = ds4_isa_best();
    if (c->isa > ds4_isa_best() || !ds4_isa_runs(c->isa))
        return fail(e, "isa: got %d, this CPU (and DS4_ISA) allow 0 to %d", c->isa, ds4_isa_best());
    return 0;
}

/* ---- tables --------------------------------------------------------------------------------------- */

static int is_vector(const ds4_engine *e, uint32_t i) {
    return e->weights[i].rows == 1 && e->image.weight_records[i].experts == 1 &&
           e->weights[i].type != DS4_I32;
}

/* One-row weights (norms, biases, rope factors) as floats. */
static int load_vectors(ds4_engine *e) {
    uint32_t n = e->image.header->n_weights;
    uint64_t floats = 0;
    for (uint32_t i = 0; i < n; i++)
        if (is_vector(e, i)) floats += (uint64_t)ds4_pad8(e->weights[i].cols);
    e->vectors = take(e, n * sizeof *e->vectors, "vector table");
    float *at = take(e, floats * 4, "norm weights and biases");
    if (!e->vectors || !at) return -1;
    for (uint32_t i = 0; i < n; i++) {
        if (!is_vector(e, i)) continue;
        if (ds4_dequant_row(e->weights + i, 0, at))
            return fail(e, "weight %u: cannot be read as floats (ggml type %u, layout %u)", i,
                        e->weights[i].type, e->weights[i].layout);
        e->vectors[i] = at;
        at += ds4_pad8(e->weights[i].cols);
    }
    return 0;
}

/* What the positions of a window add to their scores, as floats. */
static int load_window_biases(ds4_engine *e) {
    const ds4_image_header *h = e->image.header;
    uint64_t floats = 0;
    for (int round = 0; round < 2; round++) {
        float *at = round ? take(e, floats * 4, "biases of windows") : NULL;
        if (round && !at) return -1;
        for (uint32_t i = 0; i < h->n_ops; i++) {
            const ds4_image_op *op = e->image.ops + i;
            if (op->kind != DS4_OP_COMPRESS || e->vectors[op->bias]) continue;
            const ds4_weight *w = e->weights + op->bias;
            floats += (uint64_t)(w->rows * w->cols);
            if (!round) continue;
            for (int64_t r = 0; r < w->rows; r++)
                if (ds4_dequant_row(w, r, at + r * w->cols))
                    return fail(e, "weight %u: cannot be read as floats (ggml type %u, layout %u)",
                                op->bias, w->type, w->layout);
            e->vectors[op->bias] = at;
            at += w->rows * w->cols;
        }
    }
    return 0;
}

static double ramp_end(const ds4_image_rope *r, double beta) {
    return r->rope_dim * log(r->original_context / (2.0 * M_PI * beta)) / (2.0 * log(r->base));
}

/* theta = position * frequency, with linear or YaRN scaling and factors folded in (contract/ops.py). */
static void load_frequencies(const ds4_image_rope *r, const float *factors, ds4_rope_table *table) {
    double low = 0.0, high = 0.0;
    int yarn = r->ext_factor > 0.0;
    table->magnitude = r->attn_factor;
    if (yarn) {
        low = ramp_end(r, r->beta_fast);
        high = ramp_end(r, r->beta_slow);
        low = fmax(0.0, r->truncate ? floor(low) : low);
        high = fmin(r->rope_dim - 1.0, r->truncate ? ceil(high) : high);
        table->magnitude *= 1.0 + 0.1 * log(1.0 / r->freq_scale);
    }
    for (uint32_t i = 0; i < r->rope_dim / 2; i++) {
        double frequency = pow(r->base, -2.0 * i / r->rope_dim) / (factors ? (double)factors[i] : 1.0);
        double ramp = fmin(1.0, fmax(0.0, (i - low) / fmax(0.001, high - low)));
        double mix = yarn ? r->ext_factor * (1.0 - ramp) : 0.0;
        table->frequency[i] = frequency * (r->freq_scale * (1.0 - mix) + mix);
    }
}

static int load_ropes(ds4_engine *e) {
    uint32_t n = e->image.header->n_ropes;
    uint64_t pairs = 0;
    for (uint32_t i = 0; i < n; i++) pairs += e->image.ropes[i].rope_dim / 2;
    e->ropes = take(e, n * sizeof *e->ropes, "rope tables");
    double *frequency = take(e, pairs * 8, "rope frequencies");
    float *angles = take(e, pairs * 8 * e->config.batch_tokens, "rope angles");
    if (!e->ropes || !frequency || !angles) return -1;
    for (uint32_t i = 0; i < n; i++) {
        const ds4_image_rope *r = e->image.ropes + i;
        uint64_t half = r->rope_dim / 2;
        e->ropes[i] = (ds4_rope_table){frequency, angles, angles + half * e->config.batch_tokens, 0};
        uint32_t factors = r->factors;
        if (r->long_factors != DS4_NONE && e->config.context_tokens > r->original_context)
            factors = r->long_factors;
        load_frequencies(r, factors == DS4_NONE ? NULL : e->vectors[factors], e->ropes + i);
        frequency += half;
        angles += 2 * half * e->config.batch_tokens;
    }
    return 0;
}

static int load_kernels(ds4_engine *e) {
    uint32_t n = e->image.header->n_weights;
    e->kernels = take(e, n * sizeof *e->kernels, "kernel table");
    if (!e->kernels) return -1;
    for (uint32_t i = 0; i < n; i++)
        e->kernels[i] = ds4_matmul_kernel(e->weights[i].type, e->weights[i].layout, e->config.isa);
    e->vector = ds4_vector_table(e->config.isa);
    e->input_vocabulary = e->image.header->vocabulary;
    for (uint32_t i = 0; i < e->image.header->n_ops; i++) {
        const ds4_image_op *op = e->image.ops + i;
        uint32_t table = op->kind == DS4_OP_EMBED   ? op->weight
                         : op->kind == DS4_OP_ROUTE ? op->bias
                                                    : DS4_NONE;
        if (table != DS4_NONE && e->weights[table].rows < e->input_vocabulary)
            e->input_vocabulary = (uint32_t)e->weights[table].rows;
    }
    return 0;
}

/* ---- memory --------------------------------------------------------------------------------------- */

/* Blocks of Q8_0 do not cross heads. */
static int check_blocks(ds4_engine *e, uint32_t plane, const char *what, uint32_t dims) {
    if (e->kv_kernels->type != DS4_KV_Q8_0 || dims % DS4_KV_BLOCK == 0) return 0;
    return fail(e, "KV cache in q8_0: %s of cache plane %u have %u dims, expected a multiple of %d; "
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
        return fail(e, "windows: a layer of %u tokens and %d other lengths, expected at most %d",
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
    if (h->page_stride >= MOST_BYTES || bytes / h->pages != h->page_stride) bytes = MOST_BYTES;
    h->kv = take(e, bytes, "the KV cache");
    h->page_fill = take(e, h->pages * sizeof *h->page_fill, "page states");
    h->page_stamp = take(e, h->pages * sizeof *h->page_stamp, "page states");
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
        return fail(e, "KV cache: got type %u, expected below %d", e->config.kv_type, DS4_KV_TYPES);
    e->row_kernels = ds4_kv_table(DS4_KV_F16, e->config.isa);
    e->plane_history = take(e, planes * sizeof *e->plane_history, "plane table");
    e->plane_offset = take(e, planes * sizeof *e->plane_offset, "plane table");
    if (!e->plane_history || !e->plane_offset || place_planes(e)) return -1;
    uint64_t entries = (uint64_t)e->config.banks * e->pages_per_bank;
    int32_t *page_table = take(e, e->n_histories * entries * sizeof *page_table, "the page table");
    if (!page_table) return -1;
    memset(page_table, 0xff, e->n_histories * entries * sizeof *page_table);
    for (uint32_t i = 0; i < e->n_histories; i++)
        if (take_history(e, e->histories + i, page_table + i * entries)) return -1;
    return 0;
}

static int take_step_buffers(ds4_engine *e) {
    const ds4_engine_config *c = &e->config;
    const ds4_image_header *h = e->image.header;
    e->scratch[DS4_SPACE_TOKENS] = take(e, h->token_bytes * c->batch_tokens, "activations");
    e->scratch[DS4_SPACE_OUTPUTS] = take(e, h->row_bytes * c->batch_outputs, "logits");
    e->slices = take(e, c->banks * sizeof *e->slices, "step buffers");
    e->tokens = take(e, c->batch_tokens * sizeof *e->tokens, "step buffers");
    e->positions = take(e, c->batch_tokens * sizeof *e->positions, "step buffers");
    e->banks = take(e, c->batch_tokens * sizeof *e->banks, "step buffers");
    e->tiles = take(e, c->batch_tokens * sizeof *e->tiles, "step buffers");
    e->output_rows = take(e, c->batch_outputs * sizeof *e->output_rows, "step buffers");
    e->samplings = take(e, c->batch_outputs * sizeof *e->samplings, "step buffers");
    e->sampled = take(e, c->batch_outputs * sizeof *e->sampled, "step buffers");
    e->bank_stamp = take(e, c->banks * sizeof *e->bank_stamp, "step buffers");
    e->row_parts = take(e, h->n_ops * sizeof *e->row_parts, "cuts of matrices");
    e->row_plans = take(e, h->n_sections * sizeof *e->row_plans, "cuts of matrices");
    ds4_profile *p = &e->profile;
    p->stride = (h->n_sections + 2 + 3) / 4 * 4;
    p->started = take(e, (h->n_sections + 3) * sizeof *p->started, "profile");
    p->sums = take(e, (h->n_sections + 2) * sizeof *p->sums, "profile");
    p->spent = take(e, c->threads * p->stride * sizeof *p->spent, "profile");
    return e->scratch[0] && e->scratch[1] && e->slices && e->tokens && e->positions && e->banks &&
                   e->row_parts && e->row_plans && e->tiles && e->output_rows && e->samplings && e->sampled && e->bank_stamp &&
                   p->started && p->sums && p->spent
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
    float *at = take(e, floats * 4 * e->config.threads, "attention scratch");
    e->thread_floats = take(e, e->config.threads * sizeof *e->thread_floats, "thread table");
    uint64_t parts = (e->config.context_tokens - 1) / e->part_tokens + 1;
    e->split_rows = most_heads * parts + 64 * e->config.threads;
    e->split_floats = take(e, e->split_rows * (uint64_t)(e->value_pad_max + 2) * 4,
                           "attention parts");
    e->sample_scratch = take(e, DS4_SAMPLE_SCRATCH(e->image.header->vocabulary) * e->config.threads,
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
        !(e->row_floats = take(e, e->row_floats_each * 4 * c->threads, "scratch of rows")))
        return -1;
    if (!e->index_rows) return 0;
    e->index_tokens = 4 * c->threads;
    e->index_scores = take(e, e->index_rows * 4 * e->index_tokens, "scores of rows");
    e->index_dots = take(e, e->index_dots_floats * 4 * c->threads, "scores of rows");
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
    e->expert_tiles = take(e, most_tiles * sizeof *e->expert_tiles, "expert tiles");
    e->expert_columns = take(e, most_columns * sizeof *e->expert_columns, "expert columns");
    e->expert_starts = take(e, (most_experts + 1) * sizeof *e->expert_starts, "expert counts");
    e->expert_scratch = take(e, e->expert_scratch_bytes * e->config.threads, "expert scratch");
    return e->expert_tiles && e->expert_columns && e->expert_starts && e->expert_scratch ? 0 : -1;
}

/* What every bank keeps of its last slice, where state runs along. */
static int take_rewinds(ds4_engine *e) {
    const ds4_image_header *h = e->image.header;
    e->rewind_offset = take(e, h->n_ops * sizeof *e->rewind_offset, "what slices add to state");
    if (!e->rewind_offset) return -1;
    for (uint32_t i = 0; i < h->n_ops; i++) {
        const ds4_image_op *op = e->image.ops + i;
        if (op->kind != DS4_OP_COMPRESS) continue;
        uint64_t wide = (uint64_t)e->image.planes[op->plane].kv_heads / 3 * op->dim;
        e->rewind_offset[i] = e->rewind_bank_floats;
        e->rewind_bank_floats += (3 + 2 * DS4_REWIND) * wide;
    }
    if (!e->rewind_bank_floats) return 0;
    e->rewinds = take(e, e->config.banks * sizeof *e->rewinds, "what slices add to state");
    e->rewind_floats = take(e, e->rewind_bank_floats * 4 * e->config.banks,
                            "what slices add to state");
    return e->rewinds && e->rewind_floats ? 0 : -1;
}

static int open_engine(ds4_engine *e) {
    const ds4_engine_config *c = &e->config;
    if (ds4_image_map(c->image, c->image_bytes, c->abi, &e->image, e->error, sizeof e->error) ||
        check_capacities(e))
        return -1;
    uint32_t n = e->image.header->n_weights;
    e->weights = take(e, n * sizeof *e->weights, "weight table");
    if (!e->weights || ds4_image_check(&e->image, c->allocations, c->n_allocations, c->isa,
                                       e->weights, e->error, sizeof e->error))
        return -1;
    if (load_kernels(e) || load_vectors(e) || load_window_biases(e) || load_ropes(e) || take_cache(e) ||
        take_step_buffers(e) || take_thread_scratch(e) || take_expert_scratch(e) ||
        take_row_scratch(e) || take_rewinds(e))
        return -1;
    ds4_plan_matmuls(e);
    e->pool = ds4_open_pool(e);
    return e->pool ? 0 : fail(e, "cannot start %u threads", c->threads);
}

int ds4_engine_open(const ds4_engine_config *config, ds4_engine **engine, char *error,
                    size_t error_bytes) {
    *engine = NULL;
    ds4_engine *e = aligned_alloc(64, (sizeof *e + 63) / 64 * 64);
    if (e) memset(e, 0, sizeof *e);
    if (!e) {
        snprintf(error, error_bytes, "no memory for the engine");
        return -1;
    }
    e->config = *config;
    e->memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    if (e->memory_bytes > MOST_BYTES) e->memory_bytes = MOST_BYTES;
    if (open_engine(e)) {
        snprintf(error, error_bytes, "%s", e->error);
        ds4_engine_close(e);
        return -1;
    }
    *engine = e;
    return 0;
}

void ds4_engine_close(ds4_engine *e) {
    if (!e) return;
    ds4_pool_close(e->pool);
    for (uint64_t i = 0; i < e->allocations; i++)
        munmap(e->mappings[i].data, e->mappings[i].bytes);
    free(e);
}
