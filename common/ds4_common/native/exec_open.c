/* Opening and closing an engine: all checks of the image, its tables, all threads. */
#define _GNU_SOURCE
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "exec.h"
#include "quants.h"

#define MOST_BANKS 4096u
#define MOST_BATCH 65536u

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
        return ds4_fail(e, "threads: got %u, expected at most %d", c->threads, DS4_POOL_MAX_THREADS);
    if (!c->banks || c->banks > MOST_BANKS)
        return ds4_fail(e, "banks: got %u, expected 1 to %u", c->banks, MOST_BANKS);
    if (!c->batch_tokens || c->batch_tokens > MOST_BATCH || !c->batch_outputs ||
        c->batch_outputs > MOST_BATCH)
        return ds4_fail(e, "batch_tokens %u, batch_outputs %u: expected 1 to %u each", c->batch_tokens,
                        c->batch_outputs, MOST_BATCH);
    if (!c->context_tokens || c->context_tokens > h->context_tokens)
        return ds4_fail(e, "context_tokens: got %u, expected 1 to the model's %u", c->context_tokens,
                        h->context_tokens);
    e->pages_per_bank = (c->context_tokens - 1) / h->page_tokens + 1;
    uint64_t all = (uint64_t)e->pages_per_bank * c->banks;
    if (all > INT32_MAX) return ds4_fail(e, "page table of %llu entries", (unsigned long long)all);
    e->pages = c->pages ? c->pages : (uint32_t)all;
    if (e->pages > INT32_MAX) return ds4_fail(e, "pages: got %u", e->pages);
    if (c->isa < 0) c->isa = ds4_isa_best();
    if (c->isa > ds4_isa_best() || !ds4_isa_runs(c->isa))
        return ds4_fail(e, "isa: got %d, this CPU (and DS4_ISA) allow 0 to %d", c->isa, ds4_isa_best());
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
    e->vectors = ds4_take(e, n * sizeof *e->vectors, "vector table");
    float *at = ds4_take(e, floats * 4, "norm weights and biases");
    if (!e->vectors || !at) return -1;
    for (uint32_t i = 0; i < n; i++) {
        if (!is_vector(e, i)) continue;
        if (ds4_dequant_row(e->weights + i, 0, at))
            return ds4_fail(e, "weight %u: cannot be read as floats (ggml type %u, layout %u)", i,
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
        float *at = round ? ds4_take(e, floats * 4, "biases of windows") : NULL;
        if (round && !at) return -1;
        for (uint32_t i = 0; i < h->n_ops; i++) {
            const ds4_image_op *op = e->image.ops + i;
            if (op->kind != DS4_OP_COMPRESS || e->vectors[op->bias]) continue;
            const ds4_weight *w = e->weights + op->bias;
            floats += (uint64_t)(w->rows * w->cols);
            if (!round) continue;
            for (int64_t r = 0; r < w->rows; r++)
                if (ds4_dequant_row(w, r, at + r * w->cols))
                    return ds4_fail(e, "weight %u: cannot be read as floats (ggml type %u, layout %u)",
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
    e->ropes = ds4_take(e, n * sizeof *e->ropes, "rope tables");
    double *frequency = ds4_take(e, pairs * 8, "rope frequencies");
    float *angles = ds4_take(e, pairs * 8 * e->config.batch_tokens, "rope angles");
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
    e->kernels = ds4_take(e, n * sizeof *e->kernels, "kernel table");
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

/* ---- opening and closing --------------------------------------------------------------------------- */

static int open_engine(ds4_engine *e) {
    const ds4_engine_config *c = &e->config;
    if (ds4_image_map(c->image, c->image_bytes, c->abi, &e->image, e->error, sizeof e->error) ||
        check_capacities(e))
        return -1;
    uint32_t n = e->image.header->n_weights;
    e->weights = ds4_take(e, n * sizeof *e->weights, "weight table");
    if (!e->weights || ds4_image_check(&e->image, c->allocations, c->n_allocations, c->isa,
                                       e->weights, e->error, sizeof e->error))
        return -1;
    if (load_kernels(e) || load_vectors(e) || load_window_biases(e) || load_ropes(e) || ds4_take_memory(e))
        return -1;
    ds4_plan_matmuls(e);
    ds4_plan_ahead(e);
    e->pool = ds4_open_pool(e);
    return e->pool ? 0 : ds4_fail(e, "cannot start %u threads", c->threads);
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
    if (e->memory_bytes > DS4_MOST_BYTES) e->memory_bytes = DS4_MOST_BYTES;
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
