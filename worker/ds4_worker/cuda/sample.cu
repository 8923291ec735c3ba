/* Draws one token from each row of logits: rules, draws and records of native/sampler.h.
 *
 * Reference: native/sampler.c; same tokens and status for the same record. Weights are integers, so
 * sums over threads are exact in any order. Log-probabilities go through the double-precision log and
 * may in rare cases differ by one unit in the last place on a device.
 *
 * sample: parameter ds4_sample_rows, grid (rows), block (512), no dynamic shared memory. `samplings`:
 * records of 88 bytes (ds4_sampling) whose mask and biases are device addresses; in the places of the
 * list of tokens seen they have the counts of the bank (counts.cu), or 0, and how many drafts before
 * this row count as drawn: those are the last of `inputs`, the step's tokens, up to that of the row,
 * whose number is in `row_tokens`. `sampled`: records of 176 bytes (ds4_sampled); `tokens`: the tokens
 * again, or 0; `scratch`: 8 vocabulary bytes per row.
 */
#include "sample_draw.h"

#define TOP_LOGPROBS 20

struct ds4_sampled {
    int32_t token, status;
    float logprob;
    int32_t n_top;
    int32_t top_ids[TOP_LOGPROBS];
    float top_logprobs[TOP_LOGPROBS];
};

enum { STATUS_OK = 0, STATUS_NOT_FINITE = 1, STATUS_NOTHING_ALLOWED = 2, STATUS_BAD_ID = 3 };

struct ds4_sample_rows {
    uint64_t logits, samplings, sampled, tokens, scratch, live;
    uint64_t inputs, row_tokens; /* int32 */
    uint32_t logits_stride;
    int32_t rows, vocabulary, reserved;
};

/* ---- biases, penalties, mask ------------------------------------------------------------------------ */

struct bias_of { int32_t id; float bias; };

/* The logit of a token that was seen, `drawn` times in the output. */
static __device__ __forceinline__ float penalized(float logit, int drawn, const ds4_sampling &how) {
    logit = logit > 0.0f ? logit / how.repetition : logit * how.repetition;
    logit -= (float)drawn * how.frequency;
    return drawn ? logit - how.presence : logit;
}

/* Drafts count as drawn: thread i brings the logit of draft i, where that is the first of its kind;
 * else *token is -1. The logits are those before penalties. */
static __device__ float draft_logit(const float *x, const int *counts, const int *drafts,
                                    const ds4_sampling &how, int *token) {
    int own = (int)threadIdx.x, drawn = 0;
    *token = -1;
    if (!counts || own >= (int)how.n_drafts) return 0.0f;
    for (int i = 0; i < (int)how.n_drafts; i++) {
        if (drafts[i] != drafts[own]) continue;
        if (i < own) return 0.0f;
        drawn++;
    }
    *token = drafts[own];
    int before = counts[*token];
    return penalized(x[*token], (before ? before - 1 : 0) + drawn, how);
}

/* False for an id outside the vocabulary. */
static __device__ bool adjust(float *x, int n, const ds4_sampling &how, const int *drafts,
                              block_shared &s) {
    const bias_of *biases = (const bias_of *)how.biases;
    const int *counts = (const int *)how.counts;
    const uint32_t *mask = (const uint32_t *)how.mask;
    uint64_t bad = counts && counts[n];
    for (uint32_t i = threadIdx.x; i < how.n_biases; i += THREADS)
        if ((uint32_t)biases[i].id >= (uint32_t)n) bad = 1;
        else x[biases[i].id] += biases[i].bias;
    ds4_sync_block();
    int draft;
    float value = draft_logit(x, counts, drafts, how, &draft);
    ds4_sync_block();
    for (int i = threadIdx.x; counts && i < n; i += THREADS)
        if (counts[i]) x[i] = penalized(x[i], counts[i] - 1, how);
    ds4_sync_block();
    if (draft >= 0) x[draft] = value;
    ds4_sync_block();
    if (mask)
        for (int i = threadIdx.x; i < n; i += THREADS)
            if (!(mask[i / 32] >> (i % 32) & 1)) x[i] = -DS4_INFINITY;
    ds4_sync_block();
    return largest(bad, s) == 0;
}

/* The token, or -1 with *status set. */
static __device__ int choose(const float *logits, int n, const ds4_sampling &how, const int *drafts,
                             float best, int at, float *weights, float *own, block_shared &s,
                             int *status) {
    *status = STATUS_OK;
    if (how.forced >= 0) {
        if (how.forced < n) return how.forced;
        *status = STATUS_BAD_ID;
        return -1;
    }
    const float *x = logits;
    if (how.mask || how.n_biases || how.counts) {
        each(logits, n, [&](int i, float value) { own[i] = value; });
        ds4_sync_block();
        bool finite, known = adjust(own, n, how, drafts, s);
        best = best_of(own, n, s, &at, &finite);
        *status = !known ? STATUS_BAD_ID : !finite ? STATUS_NOT_FINITE : STATUS_NOTHING_ALLOWED;
        if (!known || !finite || best == -DS4_INFINITY) return -1;
        *status = STATUS_OK;
        x = own;
    }
    if (how.temperature >= 1e-5f && how.top_k != 1) return draw(x, n, best, how, weights, s);
    return at;
}

/* ---- log-probabilities ------------------------------------------------------------------------------- */

static __device__ void log_probabilities(const float *logits, int n, float best, int wanted,
                                         ds4_sampled *out, int token, block_shared &s) {
    uint64_t total = 0;
    each(logits, n, [&](int, float value) { total += weight_of(ds4_exp(value - best)); });
    total = sum_of(total, s);
    double offset = (double)best + log((double)total / 1099511627776.0);
    wanted = wanted > TOP_LOGPROBS ? TOP_LOGPROBS : wanted;
    wanted = wanted > n ? n : wanted;
    /* those that can be among the best, unless they are too many: then the whole row is read again */
    uint32_t bound = wanted ? key_of_best(logits, n, (uint64_t)wanted, s) : 0;
    if (threadIdx.x == 0) s.count = 0;
    ds4_sync_block();
    each(logits, wanted ? n : 0, [&](int i, float value) {
        if (order_key(value) < bound) return;
        int at = ds4_atomic_add(&s.count, 1);
        if (at < DIGITS) s.amount[at] = rank_of(value, i);
    });
    ds4_sync_block();
    int listed = s.count;
    uint64_t last = ~0ull;
    for (int place = 0; place < wanted; place++) { /* the best below the last one */
        uint64_t own = 0;
        auto look = [&](uint64_t rank) { own = rank < last && rank > own ? rank : own; };
        if (listed <= DIGITS)
            for (int i = threadIdx.x; i < listed; i += THREADS) look(s.amount[i]);
        else
            each(logits, n, [&](int i, float value) { look(rank_of(value, i)); });
        last = largest(own, s);
        int id = (int)(0xffffffffu - (uint32_t)last);
        if (threadIdx.x == 0) {
            out->top_ids[place] = id;
            out->top_logprobs[place] = (float)((double)logits[id] - offset);
        }
    }
    if (threadIdx.x == 0) {
        out->logprob = (float)((double)logits[token] - offset);
        out->n_top = wanted;
    }
}

DS4_KERNEL(sample, ds4_sample_rows, 512, 1) {
    __shared__ block_shared shared;
    int row = blockIdx.x, n = p.vocabulary, at, status = STATUS_NOT_FINITE, token = -1;
    if (row >= ds4_rows(p.live, p.rows)) return;
    const float *logits = ds4_row<const float>(p.logits, p.logits_stride, row);
    const ds4_sampling how = ((const ds4_sampling *)p.samplings)[row];
    ds4_sampled *out = (ds4_sampled *)p.sampled + row;
    float *weights = (float *)p.scratch + (int64_t)row * 2 * n, *own = weights + n;
    bool finite;
    float best = best_of(logits, n, shared, &at, &finite);
    if (finite && best > -DS4_INFINITY) {
        const int *drafts = (const int *)p.inputs; /* any address where there are none */
        if (how.n_drafts) drafts += ((const int *)p.row_tokens)[row] + 1 - (int)how.n_drafts;
        token = choose(logits, n, how, drafts, best, at, weights, own, shared, &status);
    }
    if (threadIdx.x == 0) {
        out->token = token;
        out->status = status;
        out->logprob = 0.0f;
        out->n_top = 0;
        if (p.tokens) ((int32_t *)p.tokens)[row] = token;
    }
    ds4_sync_block();
    if (token >= 0 && how.logprobs >= 0)
        log_probabilities(logits, n, best, how.logprobs, out, token, shared);
}
