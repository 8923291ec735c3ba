/* The engine: one CPU image over mapped weights, run one step at a time.
 *
 * Owns: the exported calls (ctypes face: worker/ds4_worker/executor/cpu.py) and the engine's own
 * structure. All memory is taken when it opens; a step allocates nothing. A step is checked as a
 * whole before anything is written; then it cannot fail.
 */
#ifndef DS4_EXEC_H
#define DS4_EXEC_H

#include "attention.h"
#include "image.h"
#include "pool.h"
#include "sampler.h"

typedef struct {
    const void *image;
    uint64_t image_bytes, abi;
    const ds4_memory *allocations;
    uint32_t n_allocations;
    uint32_t threads; /* 0: one per core this process may use */
    uint32_t banks, context_tokens;
    uint32_t pages; /* 0: every bank can be full */
    uint32_t batch_tokens, batch_outputs;
    uint32_t kv_type; /* DS4_KV_F16 and so on (kv.h) */
    int32_t isa; /* -1: the best of this CPU */
} ds4_engine_config;

typedef struct {
    uint32_t vocabulary, page_tokens, pages_per_bank, threads, isa, sections, struct_bytes,
        logits_stride, /* floats between output rows */
        forward_only,  /* as in the image's header */
        histories,
        rewinds;       /* tokens that a slice may have for the next one to begin inside it */
} ds4_engine_facts;

/* Layers whose pages come and go together. The first history keeps all positions; each further one only
 * the last `window` ones, in `most` pages of a sequence at any time. */
typedef struct {
    uint32_t window, pages, most, reserved;
    uint64_t page_bytes;
} ds4_history_facts;

/* Consecutive tokens of one bank; tokens[first .. first + count) of the step. rows: how many of its last
 * tokens are output rows, of which the step has as many as its slices together, in their order. */
typedef struct {
    int32_t bank, start, first, count, rows;
} ds4_slice;

_Static_assert(sizeof(ds4_slice) == 20, "executor/cpu.py SLICE_RECORD");

enum { DS4_STEP_OK = 0, DS4_STEP_REFUSED = 1 };
/* Flags: every token is an output row, and nothing is sampled; with the second, row i is, by
 * sampling record i. */
enum { DS4_STEP_ALL_ROWS = 1, DS4_STEP_SAMPLE_ROWS = 2 };

typedef struct ds4_engine ds4_engine;

/* 0 and an engine, or -1 and a message. The image and the allocations must outlive the engine. */
DS4_EXPORT int ds4_engine_open(const ds4_engine_config *config, ds4_engine **engine, char *error,
                               size_t error_bytes);
DS4_EXPORT void ds4_engine_close(ds4_engine *engine);
/* Runs the slices that lie in the engine's buffers. */
DS4_EXPORT int ds4_engine_step(ds4_engine *engine, uint32_t slices, uint32_t outputs,
                               uint32_t flags);
/* Makes `target` hold the first `tokens` of page `source`, bit for bit. Only between steps. */
DS4_EXPORT int ds4_engine_copy_page(ds4_engine *engine, uint32_t history, int32_t source,
                                    int32_t target, int32_t tokens);
/* Why the last step or copy was refused. */
DS4_EXPORT const char *ds4_engine_error(const ds4_engine *engine);
DS4_EXPORT void ds4_engine_info(const ds4_engine *engine, ds4_engine_facts *info);
DS4_EXPORT void ds4_engine_history(const ds4_engine *engine, uint32_t history,
                                   ds4_history_facts *info);
/* The step's buffers, for the caller to fill and to read; they live as long as the engine. */
/* [histories][banks][pages_per_bank], -1 unmapped */
DS4_EXPORT int32_t *ds4_engine_page_table(ds4_engine *engine);
DS4_EXPORT ds4_slice *ds4_engine_slices(ds4_engine *engine);   /* [banks] */
DS4_EXPORT int32_t *ds4_engine_tokens(ds4_engine *engine);     /* [batch_tokens] */
DS4_EXPORT ds4_sampling *ds4_engine_samplings(ds4_engine *engine); /* [batch_outputs] */
DS4_EXPORT ds4_sampled *ds4_engine_sampled(ds4_engine *engine);    /* [batch_outputs] */
DS4_EXPORT float *ds4_engine_logits(ds4_engine *engine); /* [batch_outputs][logits_stride] */
/* How many times the engine has taken memory from the system. */
DS4_EXPORT uint64_t ds4_engine_allocations(const ds4_engine *engine);
/* Three figures per section since profiling was switched on (sections + 2 entries: the sampler, then
 * what lies around the sections), in nanoseconds without the profile's own readings of the clock: from its
 * beginning to the next one's; of that what the busiest thread spent in its tasks; what all threads did
 * together. The kinds are those of the sections (DS4_SECTION_KINDS: sampler, and one more: around).
 * Then switches it as asked and clears the sums. */
DS4_EXPORT void ds4_engine_profile(ds4_engine *engine, int enabled, double *times, int32_t *kinds);

/* ---- inside ---------------------------------------------------------------------------------------- */

#define DS4_MAX_MAPPINGS 64
#define DS4_MAX_HISTORIES 4
#define DS4_FEW_ROWS 8 /* fewer wait for memory for longer than they compute */

/* Page p of a history lies at kv + p * page_stride; inside, plane after plane. Of keys and values, kv
 * head after kv head, first the tiles of keys (across), then those of values (along; kv.h); the other
 * planes as image.h says. A history may have no plane: its pages then are numbers only. */
typedef struct {
    uint32_t window, pages, most;
    char *kv;
    uint64_t page_stride;
    uint32_t *page_fill;  /* tokens of the page that hold data, from its start */
    uint64_t *page_stamp; /* step that last wrote the page */
    int32_t *page_table;
} ds4_history;

/* Angles of one rope configuration: frequencies fixed at load, cos and sin of this step's positions. */
typedef struct {
    double *frequency; /* [rope_dim / 2] */
    float *cosine, *sine; /* [batch_tokens][rope_dim / 2] */
    double magnitude;
} ds4_rope_table;

/* One matmul of the current section as rectangles of outputs. */
typedef struct {
    const ds4_image_op *op;
    uint64_t first_unit, column_tiles;
    int64_t chunk_rows, tile_columns;
} ds4_part;

/* A matmul section cut for a single row. */
typedef struct {
    ds4_part *parts;
    uint64_t units;
} ds4_row_plan;

/* What a thread asks for while it waits (exec_ahead.c); on a line of its own. */
typedef struct {
    _Alignas(64) const char *at;
    const char *end;
    int32_t stage; /* in which it last had a task */
} ds4_ahead;

/* How the current attention is cut: whole tiles, or parts of them and then a round that folds. */
typedef enum { DS4_SPLIT_WHOLE = 0, DS4_SPLIT_PARTS = 1, DS4_SPLIT_FOLD = 2 } ds4_split;

/* Tokens of one slice that attend together. */
typedef struct {
    int32_t bank, token, count, position; /* token: index in the step */
} ds4_tile;

/* Columns that meet one matrix of a tensor of many; first: into expert_columns, or a token. */
typedef struct {
    uint32_t expert, first, count;
} ds4_expert_tile;

#define DS4_EXPERT_TILE 128u /* columns of a tile */
#define DS4_EXPERT_ROWS 512 /* most outputs of a task */

/* exec_profile.c: of one thread in one stage of a step; of one stage in all steps, in ticks. */
typedef struct {
    uint64_t ticks, spans; /* spans: of tasks that follow each other */
} ds4_spent;
typedef struct {
    double whole, busiest, work;
} ds4_section_time;

typedef struct {
    int enabled;
    double reading; /* ticks that one reading of the clock takes */
    uint64_t enabled_ticks, enabled_nanoseconds;
    uint64_t *started; /* per stage of this step, and its end */
    ds4_spent *spent;  /* [threads][stride], whole cache lines each */
    uint64_t stride;
    ds4_section_time *sums;
} ds4_profile;

#define DS4_REWIND 64 /* most tokens of a slice that a later one may compute again */

/* What runs along a bank's sequence as it was before the last slice, and what that slice added: the
 * next slice may begin inside it. Of a step: the tokens of `start` on that are added once more. */
typedef struct {
    int32_t start, count; /* of the last slice; 0 tokens: it cannot be taken back */
    int32_t pages[2];     /* that it wrote, physical: DS4_REWIND tokens lie in two at most */
    int32_t again_start, again;
} ds4_rewind;

struct ds4_engine {
    ds4_engine_config config;
    ds4_image image;
    ds4_weight *weights;       /* per weight record */
    float **vectors;           /* same index: dequantized, for one-row weights */
    ds4_matmul_fn *kernels;    /* same index */
    ds4_rope_table *ropes;
    const ds4_vector *vector;
    const ds4_kv *kv_kernels, *row_kernels; /* of the cache's type; of planes of rows: halves */
    ds4_pool *pool;
    char *scratch[2];          /* per space */
    ds4_history histories[DS4_MAX_HISTORIES];
    uint32_t n_histories;
    uint32_t *plane_history; /* of each plane */
    uint64_t *plane_offset;  /* in its page */
    uint32_t pages, pages_per_bank, input_vocabulary;
    uint64_t step_number, *bank_stamp;
    /* buffers shared with the caller */
    ds4_slice *slices;
    int32_t *tokens;
    ds4_sampling *samplings;
    ds4_sampled *sampled;
    /* this step */
    uint32_t n_slices, n_tokens, n_outputs, flags;
    int32_t *positions, *banks, *output_rows;
    ds4_tile *tiles;
    uint32_t n_tiles;
    /* what tasks of the section that runs read first, on as few cache lines as it takes */
    _Alignas(64) const ds4_image_section *section;
    uint64_t units, units_per_task; /* the section's work; the pool counts fewer tasks than that */
    void (*run)(ds4_engine *, uint64_t unit, int thread);
    int32_t stage;             /* 0: angles, i + 1: section i, then the sampler */
    uint32_t section_rows, rows_per_unit, n_parts, max_parts;
    ds4_split split;
    ds4_part *parts;           /* of the section's matrices: cut_parts, or what was cut before */
    _Alignas(64) ds4_part cut_parts[DS4_MAX_PARTS];
    int is_short;              /* all of the section is one task */
    ds4_part *row_parts;       /* of all matmuls, cut for a single row */
    ds4_row_plan *row_plans;   /* per section */
    const char **next_weights; /* per section and thread: its share of the next matrices */
    ds4_ahead *ahead;          /* per thread */
    ds4_expert_tile *expert_tiles;
    uint32_t n_expert_tiles, *expert_columns, *expert_starts;
    ds4_rewind *rewinds;       /* per bank, where state runs along */
    float *rewind_floats;      /* per bank, of every compress op: state, then k and gate of each token */
    uint64_t rewind_bank_floats, *rewind_offset; /* the latter per op */
    /* scratch of indexes and of attention over rows; see exec_index.c, exec_attend_rows.c */
    float *index_scores, *index_dots, *row_floats;
    uint64_t index_rows, index_tokens, index_dots_floats, row_floats_each;
    char *expert_scratch;      /* per thread: outputs of a tile, then its gathered columns */
    uint64_t expert_scratch_bytes;
    /* scratch of attention and sampler */
    float **thread_floats;     /* per thread */
    int64_t tile_tokens, tile_rows, value_pad_max, dim_max, part_tokens;
    float *split_floats;
    uint64_t split_rows;       /* capacity: rows x parts */
    char *sample_scratch;      /* per thread */
    /* bookkeeping */
    ds4_profile profile;
    uint64_t allocations, taken_bytes, memory_bytes; /* so far, and this machine has */
    struct {
        void *data;
        size_t bytes;
    } mappings[DS4_MAX_MAPPINGS];
    char error[256];
};

static inline int64_t ds4_pad8(int64_t n) { return (n + 7) / 8 * 8; }

/* Row `row` of a slot. */
static inline char *ds4_slot_row(const ds4_engine *e, uint32_t index, int64_t row) {
    const ds4_image_slot *s = e->image.slots + index;
    uint64_t capacity = s->space == DS4_SPACE_TOKENS ? e->config.batch_tokens
                                                     : e->config.batch_outputs;
    return e->scratch[s->space] + s->offset * capacity + (uint64_t)row * s->bytes;
}

static inline float *ds4_slot_floats(const ds4_engine *e, uint32_t index, int64_t row) {
    return (float *)(void *)ds4_slot_row(e, index, row);
}

static inline const int32_t *ds4_bank_pages(const ds4_engine *e, const ds4_history *h, int32_t bank) {
    return h->page_table + (int64_t)bank * e->pages_per_bank;
}

/* Where a plane lies in a bank's logical page, which is mapped. */
static inline char *ds4_plane_page(const ds4_engine *e, uint32_t plane, int32_t bank, int64_t index) {
    const ds4_history *h = e->histories + e->plane_history[plane];
    int32_t page = ds4_bank_pages(e, h, bank)[index];
    return h->kv + (uint64_t)page * h->page_stride + e->plane_offset[plane];
}

#define DS4_MOST_BYTES (1ull << 46) /* of one mapping, so that sums cannot overflow */

/* exec_memory.c: writes e->error and returns -1. */
int ds4_fail(ds4_engine *e, const char *format, ...);
/* Zeroed memory from the system, present only once touched. NULL with e->error set; then all further
 * calls return NULL too, so that callers may look at several results at once. */
void *ds4_take(ds4_engine *e, uint64_t bytes, const char *what);
/* The cache and all buffers. 0, or -1 with e->error set. */
int ds4_take_memory(ds4_engine *e);
/* exec_step.c: the threads that run steps. NULL when they cannot be started. */
ds4_pool *ds4_open_pool(ds4_engine *e);
/* exec_profile.c: the clock, in ticks of no fixed length; the sums of a step that was entered then. */
uint64_t ds4_ticks(void);
void ds4_profile_step(ds4_engine *e, uint64_t entered);
/* exec_rows.c: every op of a ROWS section for one row; the angles of one token. */
void ds4_run_rows(ds4_engine *e, uint64_t unit, int thread);
void ds4_run_angles(ds4_engine *e, uint64_t unit, int thread);
/* exec_route.c */
void ds4_route(const ds4_engine *e, const ds4_image_op *op, int64_t row);
/* exec_hyper.c */
void ds4_hyper_weights(const ds4_engine *e, const ds4_image_op *op, int64_t row);
void ds4_hyper_read(const ds4_engine *e, const ds4_image_op *op, int64_t row);
void ds4_hyper_write(const ds4_engine *e, const ds4_image_op *op, int64_t row);
void ds4_hadamard(const ds4_engine *e, const ds4_image_op *op, int64_t row);
void ds4_round_floats(const ds4_engine *e, const ds4_image_op *op, int64_t row);
/* exec_compress.c */
uint64_t ds4_prepare_compress(ds4_engine *e);
void ds4_run_compress(ds4_engine *e, uint64_t unit, int thread);
/* exec_rewind.c: whether a slice may begin inside the last one; what a step means for that. */
int ds4_can_rewind(const ds4_engine *e, const ds4_slice *s);
uint32_t ds4_most_rewind(const ds4_engine *e);
void ds4_note_slices(ds4_engine *e);
void ds4_forget_rewinds(ds4_engine *e, int32_t bank, int32_t page);
/* exec_index.c */
uint64_t ds4_prepare_index(ds4_engine *e);
void ds4_run_index(ds4_engine *e, uint64_t unit, int thread);
/* exec_attend_rows.c */
uint64_t ds4_attend_rows_floats(uint32_t heads, uint32_t dim);
uint64_t ds4_prepare_attend_rows(ds4_engine *e);
void ds4_run_attend_rows(ds4_engine *e, uint64_t unit, int thread);
/* exec_experts.c */
uint64_t ds4_prepare_experts(ds4_engine *e);
void ds4_run_experts(ds4_engine *e, uint64_t unit, int thread);
/* exec_matmul.c */
void ds4_plan_matmuls(ds4_engine *e);
uint64_t ds4_prepare_matmul(ds4_engine *e);
void ds4_run_matmul(ds4_engine *e, uint64_t unit, int thread);
/* exec_ahead.c: after the cuts; before a thread's tasks; while it waits. */
void ds4_plan_ahead(ds4_engine *e);
void ds4_note_section(ds4_engine *e, int thread);
int ds4_ask_ahead(void *context, int thread);
/* exec_attend.c */
uint64_t ds4_prepare_attend(ds4_engine *e);
void ds4_run_attend(ds4_engine *e, uint64_t unit, int thread);

#endif
