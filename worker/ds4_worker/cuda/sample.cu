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
#include "op_math.h"

#define THREADS 512
#define DIGITS 2048
#define TOP_LOGPROBS 20

struct ds4_sampling {
    float temperature, top_p, min_p;
    int32_t top_k;
    uint64_t seed, index, mask;
    int32_t logprobs, forced;
    uint64_t biases, counts;
    uint32_t n_biases, n_drafts;
    float repetition, frequency, presence;
    int32_t reserved;
};

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

/* Tokens kept so far: those whose key is above `key`, and the first `ties` that equal it. */
struct cut {
    uint32_t key;
    uint64_t ties;
};

struct block_shared {
    uint64_t amount[DIGITS];
    uint64_t warps[THREADS / 32];
    uint64_t found[4];
};

/* Orders like the floats; -0 and +0 are the same number. */
static __device__ __forceinline__ uint32_t order_key(float x) {
    uint32_t bits = ds4_bits(x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
static __device__ __forceinline__ uint64_t weight_of(float e) {
    return (uint64_t)(e * 1099511627776.0f); /* 2^40 */
}

/* 64 random bits of (seed, index): Philox4x32-10. */
static __device__ uint64_t random_of(uint64_t seed, uint64_t index) {
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (uint64_t)c1 << 32 | c0;
}

/* ---- the whole block ------------------------------------------------------------------------------ */

/* Sum over the threads before this one; *total over all. Begins and ends with the block together. */
static __device__ uint64_t scan(uint64_t value, block_shared &s, uint64_t *total) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    uint64_t sum = value;
    for (int step = 1; step < 32; step <<= 1) {
        uint64_t below = ds4_shuffle_up(sum, step);
        if (lane >= step) sum += below;
    }
    ds4_sync_block();
    if (lane == 31) s.warps[warp] = sum;
    ds4_sync_block();
    uint64_t before = 0, all = 0;
    for (int i = 0; i < THREADS / 32; i++) {
        if (i < warp) before += s.warps[i];
        all += s.warps[i];
    }
    *total = all;
    return before + sum - value;
}

static __device__ uint64_t sum_of(uint64_t value, block_shared &s) {
    uint64_t total;
    scan(value, s, &total);
    return total;
}

/* The largest over all threads. */
static __device__ uint64_t largest(uint64_t value, block_shared &s) {
    for (int step = 16; step; step >>= 1) {
        uint64_t other = ds4_shuffle_xor(value, step);
        value = other > value ? other : value;
    }
    ds4_sync_block();
    if ((threadIdx.x & 31) == 0) s.warps[threadIdx.x / 32] = value;
    ds4_sync_block();
    for (int i = 0; i < THREADS / 32; i++) value = s.warps[i] > value ? s.warps[i] : value;
    return value;
}

/* The key of the largest value and the first id that has it; *finite as in max_finite. */
static __device__ float best_of(const float *x, int n, block_shared &s, int *at, bool *finite) {
    uint64_t best = 0, bad = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        if (!(x[i] < DS4_INFINITY)) bad = 1;
        uint64_t own = (uint64_t)order_key(x[i]) << 32 | (0xffffffffu - (uint32_t)i);
        if (x[i] == x[i] && own > best) best = own;
    }
    best = largest(best, s);
    *finite = largest(bad, s) == 0;
    *at = (int)(0xffffffffu - (uint32_t)best);
    uint32_t key = (uint32_t)(best >> 32);
    return best ? ds4_float(key >> 31 ? key ^ 0x80000000u : ~key) : -DS4_INFINITY;
}

/* ---- selection without sorting --------------------------------------------------------------------- */

static __device__ cut fewer_ties(const float *x, const float *weights, int n, cut kept,
                                 uint64_t missing, block_shared &s) {
    uint64_t each = 0;
    for (int i = threadIdx.x; i < n; i += THREADS)
        if (kept.ties && weights && order_key(x[i]) == kept.key) each = weight_of(weights[i]);
    each = largest(each, s); /* equal keys have equal weights */
    if (each && (missing + each - 1) / each < kept.ties) kept.ties = (missing + each - 1) / each;
    return kept;
}

/* Among tokens above `kept` (plus its ties) the smallest set, best first, whose amounts reach `target`;
 * the amount of a token is its weight, or 1 without weights. Three passes over digits of the keys. */
static __device__ cut select_best(const float *x, const float *weights, int n, cut kept,
                                  uint64_t target, block_shared &s) {
    uint64_t reached = 0;
    uint32_t prefix = 0;
    for (int pass = 0; pass < 3; pass++) {
        int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, above = pass == 1 ? 21 : 10;
        int digits = pass < 2 ? DIGITS : DIGITS / 2, per = digits / THREADS;
        ds4_sync_block();
        for (int i = threadIdx.x; i < digits; i += THREADS) s.amount[i] = 0;
        ds4_sync_block();
        for (int i = threadIdx.x; i < n; i += THREADS) {
            uint32_t key = order_key(x[i]);
            if (key <= kept.key || (pass && key >> above != prefix >> above)) continue;
            ds4_atomic_add(s.amount + (key >> shift & (uint32_t)(digits - 1)),
                           weights ? weight_of(weights[i]) : (uint64_t)1);
        }
        ds4_sync_block();
        /* from the highest digit down: thread t has digits [digits - per (t + 1), digits - per t) */
        int top = digits - per * (int)threadIdx.x;
        uint64_t own = 0, total, before;
        for (int i = 1; i <= per; i++) own += s.amount[top - i];
        before = reached + scan(own, s, &total);
        if (reached + total < target) return fewer_ties(x, weights, n, kept, target - reached - total, s);
        if (before < target && before + own >= target)
            for (int i = 1; i <= per; i++) {
                uint64_t amount = s.amount[top - i];
                if (before + amount >= target) {
                    s.found[0] = (uint64_t)(top - i);
                    s.found[1] = before;
                    s.found[2] = amount;
                    break;
                }
                before += amount;
            }
        ds4_sync_block();
        prefix |= (uint32_t)s.found[0] << shift;
        reached = s.found[1];
    }
    uint64_t each = 0, count = 0;
    for (int i = threadIdx.x; i < n; i += THREADS)
        if (order_key(x[i]) == prefix) {
            each = weights ? weight_of(weights[i]) : 1;
            count++;
        }
    each = largest(each, s);
    count = sum_of(count, s);
    return {prefix, each ? (target - reached + each - 1) / each : count};
}

/* ---- the draw --------------------------------------------------------------------------------------- */

static __device__ int draw(const float *x, int n, float best, const ds4_sampling &how, float *weights,
                           block_shared &s) {
    float factor = 1.0f / how.temperature;
    for (int i = threadIdx.x; i < n; i += THREADS) weights[i] = ds4_exp((x[i] - best) * factor);
    ds4_sync_block();
    cut kept = {order_key(-DS4_INFINITY), 0};
    if (how.top_k > 0 && how.top_k < n)
        kept = select_best(x, (const float *)0, n, kept, (uint64_t)how.top_k, s);
    /* a thread's ids are neighbours, so that sums over threads go in order of ids */
    int per = (n + THREADS - 1) / THREADS, first = (int)threadIdx.x * per;
    int end = first + per < n ? first + per : n;
    if (how.top_p < 1.0f) {
        uint64_t above = 0, equal = 0, each = 0, total;
        for (int i = threadIdx.x; i < n; i += THREADS) {
            uint32_t key = order_key(x[i]);
            if (key > kept.key) above += weight_of(weights[i]);
            if (key == kept.key) equal++, each = weight_of(weights[i]);
        }
        total = sum_of(above, s);
        equal = sum_of(equal, s);
        each = largest(each, s);
        total += (equal < kept.ties ? equal : kept.ties) * each;
        double share = how.top_p > 0.0f ? (double)how.top_p : 0.0;
        uint64_t target = (uint64_t)ceil(share * (double)total);
        kept = select_best(x, weights, n, kept, target ? target : 1, s);
    }
    float least = how.min_p < 1.0f ? how.min_p : 1.0f;
    uint64_t equal = 0, ignored;
    for (int i = first; i < end; i++) equal += order_key(x[i]) == kept.key;
    uint64_t rank = scan(equal, s, &ignored), own = 0, total, seen = rank;
    for (int i = first; i < end; i++) {
        uint32_t key = order_key(x[i]);
        bool in = key > kept.key || (key == kept.key && seen++ < kept.ties);
        if (in && !(weights[i] < least)) own += weight_of(weights[i]);
    }
    uint64_t before = scan(own, s, &total);
    uint64_t place = ds4_high64(random_of(how.seed, how.index), total);
    ds4_sync_block();
    if (before <= place && place < before + own) { /* one thread */
        seen = rank;
        for (int i = first; i < end; i++) {
            uint32_t key = order_key(x[i]);
            bool in = key > kept.key || (key == kept.key && seen++ < kept.ties);
            if (!in || weights[i] < least) continue;
            before += weight_of(weights[i]);
            if (place < before) {
                s.found[0] = (uint64_t)i;
                break;
            }
        }
    }
    ds4_sync_block();
    return (int)s.found[0];
}

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
        for (int i = threadIdx.x; i < n; i += THREADS) own[i] = logits[i];
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
    for (int i = threadIdx.x; i < n; i += THREADS) total += weight_of(ds4_exp(logits[i] - best));
    total = sum_of(total, s);
    double offset = (double)best + log((double)total / 1099511627776.0);
    wanted = wanted > TOP_LOGPROBS ? TOP_LOGPROBS : wanted;
    wanted = wanted > n ? n : wanted;
    uint64_t last = ~0ull;
    for (int place = 0; place < wanted; place++) { /* the best below the last one */
        uint64_t own = 0;
        for (int i = threadIdx.x; i < n; i += THREADS) {
            uint64_t rank = (uint64_t)order_key(logits[i]) << 32 | (0xffffffffu - (uint32_t)i);
            if (rank < last && rank > own) own = rank;
        }
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
