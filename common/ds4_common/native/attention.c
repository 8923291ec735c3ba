#include "attention.h"

#include <math.h>
#include <string.h>

#include "op_math.h"

static int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

void ds4_softmax_clear(ds4_softmax_state state, int rows, int64_t value_pad) {
    for (int r = 0; r < rows; r++) {
        state.max[r] = -INFINITY;
        state.sum[r] = 0.0f;
    }
    memset(state.values, 0, (size_t)rows * (size_t)value_pad * sizeof(float));
}

/* Positions of the part that row r may see. */
static int64_t visible(const ds4_attend *a, int64_t first, int64_t base, int r) {
    return clamp(first + r / a->group + 1 - base, 0, a->part_tokens);
}

/* Positions of the part that lie before the window of row r. */
static int64_t hidden(const ds4_attend *a, int64_t first, int64_t base, int r) {
    if (!a->window) return 0;
    return clamp(first + r / a->group + 1 - a->window - base, 0, a->part_tokens);
}

int64_t ds4_first_part(const ds4_attend *a, int64_t first) {
    return a->window && first >= a->window ? (first + 1 - a->window) / a->part_tokens : 0;
}

/* The tile of the page that holds a position. */
static const char *tile_at(const ds4_attend *a, const char *first, int64_t position) {
    return first + (uint64_t)a->pages[position / a->page_tokens] * a->page_stride;
}

/* `next` is what the part reads after its last tile of keys. */
static void score_pages(const ds4_attend *a, const float *q, int rows, int64_t base, int64_t start,
                        int64_t count, const char *last, float *scores) {
    int64_t ld = a->part_tokens;
    for (int64_t t = start / a->page_tokens * a->page_tokens; t < count; t += a->page_tokens) {
        const char *keys = tile_at(a, a->keys, base + t), *next = last;
        if (t + a->page_tokens < count) next = tile_at(a, a->keys, base + t + a->page_tokens);
        int64_t tokens = clamp(count - t, 0, a->page_tokens), tokens8 = (tokens + 7) / 8 * 8;
        for (int r = 0; r < rows; r += DS4_SCORE_ROWS) {
            int some = (int)clamp(rows - r, 0, DS4_SCORE_ROWS);
            if (a->latent)
                a->kv->score_along(q + r * a->dim, some, a->dim, keys, next, a->page_tokens,
                                   a->value_width, tokens, scores + r * ld + t, ld);
            else
                a->kv->score(q + r * a->dim, some, a->dim, keys, next, a->page_tokens, tokens8,
                             scores + r * ld + t, ld);
        }
    }
}

/* The positions of a part that its rows see. */
typedef struct {
    int64_t from[DS4_TILE_ROWS], to[DS4_TILE_ROWS];
} row_reach;

static void accumulate_pages(const ds4_attend *a, int rows, const row_reach *reach, int64_t base,
                             const char *last, const float *scores, float *out) {
    int64_t ld = a->part_tokens, count = reach->to[rows - 1];
    for (int64_t t = reach->from[0] / a->page_tokens * a->page_tokens; t < count;
         t += a->page_tokens) {
        const char *values = tile_at(a, a->values, base + t), *next = last;
        if (t + a->page_tokens < count) next = tile_at(a, a->values, base + t + a->page_tokens);
        for (int r = 0, run; r < rows; r += run) { /* rows that see the same part of the page */
            int64_t seen = clamp(reach->to[r] - t, 0, a->page_tokens);
            int64_t from = clamp(reach->from[r] - t, 0, a->page_tokens);
            for (run = 1; run < DS4_VALUE_ROWS && r + run < rows; run++)
                if (clamp(reach->to[r + run] - t, 0, a->page_tokens) != seen ||
                    clamp(reach->from[r + run] - t, 0, a->page_tokens) != from)
                    break;
            if (seen > from)
                a->kv->accumulate(scores + r * ld + t + from, ld, run, from, seen - from, values,
                                  next, a->page_tokens, a->value_width, a->value_pad,
                                  out + r * a->value_pad);
        }
    }
}

void ds4_attend_part(const ds4_attend *a, const float *q, int rows, int64_t first, int64_t part,
                     float *scores, ds4_softmax_state out) {
    row_reach reach;
    int64_t base = part * a->part_tokens, ld = a->part_tokens, after = base + a->part_tokens;
    for (int r = 0; r < rows; r++) {
        reach.from[r] = hidden(a, first, base, r);
        reach.to[r] = visible(a, first, base, r);
    }
    int64_t start = reach.from[0];
    score_pages(a, q, rows, base, start, reach.to[rows - 1], tile_at(a, a->values, base + start),
                scores);
    ds4_softmax_clear(out, rows, a->value_pad);
    for (int r = 0; r < rows; r++) {
        int64_t from = reach.from[r], n = reach.to[r] - from;
        if (n <= 0) continue;
        float *s = scores + r * ld + from;
        if (a->soft_cap != 0.0f) a->vector->soft_cap(s, s, a->soft_cap, n);
        out.max[r] = a->vector->max(s, n);
        out.sum[r] = a->vector->softmax(s, out.max[r], n);
    }
    const char *next = tile_at(a, a->keys, after < a->positions ? after : base + start);
    accumulate_pages(a, rows, &reach, base, next, scores, out.values);
}

void ds4_softmax_fold(const ds4_vector *vector, ds4_softmax_state state, ds4_softmax_state part,
                      int rows, int64_t value_pad) {
    float scale[2 * DS4_TILE_ROWS]; /* of each row: what is kept of the state, what is taken of the part */
    for (int r0 = 0, some; r0 < rows; r0 += some) {
        some = rows - r0 < DS4_TILE_ROWS ? rows - r0 : DS4_TILE_ROWS;
        for (int i = 0; i < some; i++) {
            float old = state.max[r0 + i], fresh = part.max[r0 + i], top = fresh > old ? fresh : old;
            scale[2 * i] = old - top;
            scale[2 * i + 1] = fresh - top;
        }
        vector->exp_scaled(scale, scale, 0.0f, 1.0f, 2 * some);
        for (int i = 0; i < some; i++) {
            const int r = r0 + i;
            if (part.sum[r] == 0.0f) continue; /* the part does not reach this row; NaN goes on */
            if (part.max[r] > state.max[r]) state.max[r] = part.max[r];
            state.sum[r] = state.sum[r] * scale[2 * i] + part.sum[r] * scale[2 * i + 1];
            vector->join(state.values + r * value_pad, part.values + r * value_pad, scale[2 * i],
                         scale[2 * i + 1], value_pad);
        }
    }
}

void ds4_softmax_sink(ds4_softmax_state state, int row, float sink, int64_t value_pad) {
    float top = sink > state.max[row] ? sink : state.max[row];
    float keep = ds4_exp(state.max[row] - top);
    state.sum[row] = state.sum[row] * keep + ds4_exp(sink - top);
    for (int64_t d = 0; d < value_pad; d++) state.values[row * value_pad + d] *= keep;
}

void ds4_softmax_finish(ds4_softmax_state state, int row, int64_t value_pad, int64_t value_dim,
                        float *y) {
    float inverse = 1.0f / state.sum[row];
    for (int64_t d = 0; d < value_dim; d++) y[d] = state.values[row * value_pad + d] * inverse;
}
