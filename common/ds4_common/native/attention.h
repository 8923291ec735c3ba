/* Causal attention of consecutive query tokens over a paged KV cache.
 *
 * Owns: the order of the softmax. Positions are cut into parts of fixed size; inside a part: maximum,
 * exponentials, sum, weighted values; parts are folded in ascending order by the usual rescaling. So
 * the result of a query depends on its own sequence only - tiles, batch, chunks and threads change
 * who computes a part, never how.
 */
#ifndef DS4_ATTENTION_H
#define DS4_ATTENTION_H

#include "kv.h"
#include "op_vector.h"

#define DS4_TILE_ROWS 24     /* query rows (tokens x heads of a group) that share a pass over K and V */
#define DS4_PART_TOKENS 256  /* rounded down to whole pages, at least one */

/* One (layer, kv head) of a sequence. */
typedef struct {
    const ds4_vector *vector;
    const ds4_kv *kv;
    const int32_t *pages; /* physical page of each logical one */
    const char *keys, *values; /* tiles of this head in physical page 0 */
    int latent; /* keys lie along, in the same tile as the values */
    uint64_t page_stride;
    int64_t dim, page_tokens, part_tokens;
    int64_t value_pad, value_width; /* dims of a value, rounded up to 8, and of its row in the tile */
    int64_t positions; /* that the last query of all sees: their pages are mapped */
    int64_t window;  /* positions that a query sees, its own included; 0: all before it */
    float soft_cap;  /* 0: none */
    int group; /* query heads per kv head: rows are token-major, heads inside */
} ds4_attend;

/* Softmax state of `rows` queries: maximum, sum, and values [rows][value_pad]. */
typedef struct {
    float *max, *sum, *values;
} ds4_softmax_state;

static inline int64_t ds4_part_tokens(int64_t page_tokens) {
    return page_tokens * (page_tokens < DS4_PART_TOKENS ? DS4_PART_TOKENS / page_tokens : 1);
}

void ds4_softmax_clear(ds4_softmax_state state, int rows, int64_t value_pad);

/* One part: q is [rows][dim], already scaled; row r sits at position first + r / group. scores has
 * rows * part_tokens floats. Rows that the part does not reach keep sum = 0. */
void ds4_attend_part(const ds4_attend *a, const float *q, int rows, int64_t first, int64_t part,
                     float *scores, ds4_softmax_state out);

/* The part that holds the first position which a query at `first` sees. */
int64_t ds4_first_part(const ds4_attend *a, int64_t first);

/* Folds the next part into the state. */
void ds4_softmax_fold(const ds4_vector *vector, ds4_softmax_state state, ds4_softmax_state part,
                      int rows, int64_t value_pad);

/* A score that takes its share of the denominator and brings no value: exp(sink). */
void ds4_softmax_sink(ds4_softmax_state state, int row, float sink, int64_t value_pad);

/* y[d] = values[d] / sum for one row. */
void ds4_softmax_finish(ds4_softmax_state state, int row, int64_t value_pad, int64_t value_dim,
                        float *y);

#endif
