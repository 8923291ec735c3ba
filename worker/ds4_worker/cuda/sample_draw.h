/* A draw from a row of logits by a block: thresholds, their sums, and the token in its place.
 *
 * Owns: what a block computes together for sample.cu. Reference: native/sampler.c. Weights are integers, so
 * sums over threads are exact in any order, and only the order of ids counts in the end. A row is read in
 * steps of all threads, several loads at a time. Atomics to the few digits that most logits share would
 * take longer than all reads, so before a selection a bound is found below which nothing can be kept.
 */
#ifndef DS4_CUDA_SAMPLE_DRAW_H
#define DS4_CUDA_SAMPLE_DRAW_H

#include "op_math.h"

#define THREADS 512
#define WARPS (THREADS / 32)
#define DIGITS 2048

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

/* Tokens kept so far: those whose key is above `key`, and the first `ties` that equal it. */
struct cut {
    uint32_t key;
    uint64_t ties;
};

struct block_shared {
    uint64_t amount[DIGITS];
    uint64_t warps[WARPS];
    uint64_t found[4];
    int count;
};

/* Orders like the floats; -0 and +0 are the same number. */
static __device__ __forceinline__ uint32_t order_key(float x) {
    uint32_t bits = ds4_bits(x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
static __device__ __forceinline__ uint64_t weight_of(float e) {
    return (uint64_t)(e * 1099511627776.0f); /* 2^40 */
}

/* Better tokens have larger ranks: equal logits by lower id. */
static __device__ __forceinline__ uint64_t rank_of(float x, int i) {
    return (uint64_t)order_key(x) << 32 | (0xffffffffu - (uint32_t)i);
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

/* Calls use(i, x[i]) for every i of this thread, in ascending order. */
template <typename Use> static __device__ __forceinline__ void each(const float *x, int n, Use use) {
    int i = threadIdx.x;
    for (; i + 7 * THREADS < n; i += 8 * THREADS) {
        float value[8];
#pragma unroll
        for (int j = 0; j < 8; j++) value[j] = x[i + j * THREADS];
#pragma unroll
        for (int j = 0; j < 8; j++) use(i + j * THREADS, value[j]);
    }
    for (; i < n; i += THREADS) use(i, x[i]);
}

/* The key of the largest value and the first id that has it; *finite as in max_finite. */
static __device__ float best_of(const float *x, int n, block_shared &s, int *at, bool *finite) {
    uint64_t best = 0, bad = 0;
    each(x, n, [&](int i, float value) {
        if (!(value < DS4_INFINITY)) bad = 1;
        uint64_t own = rank_of(value, i);
        if (value == value && own > best) best = own;
    });
    best = largest(best, s);
    *finite = largest(bad, s) == 0;
    *at = (int)(0xffffffffu - (uint32_t)best);
    uint32_t key = (uint32_t)(best >> 32);
    return best ? ds4_float(key >> 31 ? key ^ 0x80000000u : ~key) : -DS4_INFINITY;
}

/* ---- selection without sorting --------------------------------------------------------------------- */

/* A key that at least k tokens reach: the k-th largest of the threads' own largest. 0 where k is large. */
static __device__ uint32_t key_of_best(const float *x, int n, uint64_t k, block_shared &s) {
    if (k > THREADS) return 0;
    uint32_t own = 0;
    each(x, n, [&](int, float value) {
        uint32_t key = order_key(value);
        own = key > own ? key : own;
    });
    ds4_sync_block();
    s.amount[threadIdx.x] = (uint64_t)own << 32 | threadIdx.x; /* all different */
    ds4_sync_block();
    uint64_t place = 0;
    for (int i = 0; i < THREADS; i++) place += s.amount[i] > s.amount[threadIdx.x];
    if (place == k - 1) s.found[3] = own;
    ds4_sync_block();
    return (uint32_t)s.found[3];
}

static __device__ cut fewer_ties(const float *x, const float *weights, int n, cut kept,
                                 uint64_t missing, block_shared &s) {
    uint64_t one = 0;
    if (kept.ties && weights)
        each(x, n, [&](int i, float value) {
            if (order_key(value) == kept.key) one = weight_of(weights[i]);
        });
    one = largest(one, s); /* equal keys have equal weights */
    if (one && (missing + one - 1) / one < kept.ties) kept.ties = (missing + one - 1) / one;
    return kept;
}

/* Among tokens above `kept` (plus its ties) the smallest set, best first, whose amounts reach `target`;
 * the amount of a token is its weight, or 1 without weights. Three passes over digits of the keys. Tokens
 * below `bound` are left out: those from it on reach the target without them. */
static __device__ cut select_best(const float *x, const float *weights, int n, cut kept, uint32_t bound,
                                  uint64_t target, block_shared &s) {
    uint64_t reached = 0;
    uint32_t prefix = 0;
    for (int pass = 0; pass < 3; pass++) {
        int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, above = pass == 1 ? 21 : 10;
        int digits = pass < 2 ? DIGITS : DIGITS / 2, per = digits / THREADS;
        ds4_sync_block();
        for (int i = threadIdx.x; i < digits; i += THREADS) s.amount[i] = 0;
        ds4_sync_block();
        each(x, n, [&](int i, float value) {
            uint32_t key = order_key(value);
            if (key <= kept.key || key < bound || (pass && key >> above != prefix >> above)) return;
            ds4_atomic_add(s.amount + (key >> shift & (uint32_t)(digits - 1)),
                           weights ? weight_of(weights[i]) : (uint64_t)1);
        });
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
    uint64_t one = 0, count = 0;
    each(x, n, [&](int i, float value) {
        if (order_key(value) != prefix) return;
        one = weights ? weight_of(weights[i]) : 1;
        count++;
    });
    one = largest(one, s);
    count = sum_of(count, s);
    return {prefix, one ? (target - reached + one - 1) / one : count};
}

/* ---- the draw --------------------------------------------------------------------------------------- */

#define BOUNDS 6

/* Keeps of `kept` the best tokens whose weights are `share` of all of it. */
static __device__ cut select_share(const float *x, const float *weights, int n, cut kept, float best,
                                   float temperature, float share, block_shared &s) {
    const float below[BOUNDS] = {1.0f, 2.0f, 4.0f, 6.0f, 9.0f, 13.0f}; /* exponents of weights */
    uint32_t bounds[BOUNDS];
    uint64_t above[BOUNDS + 1], equal = 0, one = 0, total = 0; /* above: weights from each bound to the next */
#pragma unroll
    for (int j = 0; j < BOUNDS; j++) bounds[j] = order_key(best - below[j] * temperature);
#pragma unroll
    for (int j = 0; j <= BOUNDS; j++) above[j] = 0;
    each(x, n, [&](int i, float value) {
        uint32_t key = order_key(value);
        uint64_t weight = key >= kept.key ? weight_of(weights[i]) : 0;
        if (key == kept.key) {
            equal++, one = weight;
            return;
        }
#pragma unroll
        for (int j = 0; j <= BOUNDS; j++)
            if ((j == 0 || key < bounds[j - 1]) && (j == BOUNDS || key >= bounds[j])) above[j] += weight;
    });
    equal = sum_of(equal, s);
    one = largest(one, s);
#pragma unroll
    for (int j = 0; j <= BOUNDS; j++) {
        above[j] = sum_of(above[j], s);
        total += above[j];
    }
    total += (equal < kept.ties ? equal : kept.ties) * one;
    uint64_t target = (uint64_t)ceil((share > 0.0f ? (double)share : 0.0) * (double)total), reached = 0;
    if (!target) target = 1;
    uint32_t bound = 0;
#pragma unroll
    for (int j = 0; j < BOUNDS; j++) {
        if (reached < target && reached + above[j] >= target) bound = bounds[j];
        reached += above[j];
    }
    return select_best(x, weights, n, kept, bound, target, s);
}

/* What a token adds to a sum in order of ids. A cell is `per` neighbouring ids; `before` tokens of earlier
 * cells have the kept key, as many as `ties` of all count. Calls take(at, weight) for a tile of 32 ids. */
template <typename Take>
static __device__ __forceinline__ void walk_cell(const float *x, const float *weights, int n, cut kept,
                                                 float least, int cell, int per, uint64_t before, Take take) {
    int first = cell * per, end = first + per < n ? first + per : n, lane = threadIdx.x & 31;
    for (int tile = first; tile < end; tile += 32) {
        int i = tile + lane;
        uint32_t key = i < end ? order_key(x[i]) : 0;
        uint32_t equal = i < end && key == kept.key, sum = equal;
        if (kept.ties) {
            for (int step = 1; step < 32; step <<= 1) {
                uint32_t below = ds4_shuffle_up(sum, step);
                if (lane >= step) sum += below;
            }
        }
        bool in = i < end && (key > kept.key || (equal && before + sum <= kept.ties));
        take(i, in && !(weights[i] < least) ? weight_of(weights[i]) : (uint64_t)0);
        if (kept.ties) before += ds4_shuffle(sum, 31);
    }
}

/* The kept token in that place of the sum of all, in order of ids. A warp walks along a cell, so that it
 * reads neighbours, and thread t answers for cell t. */
static __device__ int token_at(const float *x, const float *weights, int n, cut kept, float least,
                               const ds4_sampling &how, block_shared &s) {
    int per = (n + THREADS - 1) / THREADS, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    uint64_t *ranks = s.amount, *sums = s.amount + THREADS, total;
    if (kept.ties) {
        for (int cell = 32 * warp; cell < 32 * (warp + 1); cell++) {
            uint32_t equal = 0;
            for (int i = cell * per + lane; i < (cell + 1) * per && i < n; i += 32)
                equal += order_key(x[i]) == kept.key;
            for (int step = 16; step; step >>= 1) equal += ds4_shuffle_xor(equal, step);
            if (lane == 0) ranks[cell] = equal;
        }
        ds4_sync_block();
        uint64_t before = scan(ranks[threadIdx.x], s, &total);
        ranks[threadIdx.x] = before;
        ds4_sync_block();
    }
    for (int cell = 32 * warp; cell < 32 * (warp + 1); cell++) {
        uint64_t own = 0;
        walk_cell(x, weights, n, kept, least, cell, per, kept.ties ? ranks[cell] : 0,
                  [&](int, uint64_t weight) { own += weight; });
        for (int step = 16; step; step >>= 1) own += ds4_shuffle_xor(own, step);
        if (lane == 0) sums[cell] = own;
    }
    ds4_sync_block();
    uint64_t own = sums[threadIdx.x], before = scan(own, s, &total);
    uint64_t place = ds4_high64(random_of(how.seed, how.index), total);
    if (before <= place && place < before + own) { /* one thread */
        s.found[0] = threadIdx.x;
        s.found[1] = before;
    }
    ds4_sync_block();
    if (warp == 0) {
        int cell = (int)s.found[0];
        uint64_t reached = s.found[1];
        walk_cell(x, weights, n, kept, least, cell, per, kept.ties ? ranks[cell] : 0,
                  [&](int i, uint64_t weight) {
                      uint64_t sum = weight;
                      for (int step = 1; step < 32; step <<= 1) {
                          uint64_t below = ds4_shuffle_up(sum, step);
                          if (lane >= step) sum += below;
                      }
                      if (reached + sum - weight <= place && place < reached + sum) s.found[2] = (uint64_t)i;
                      reached += ds4_shuffle(sum, 31);
                  });
    }
    ds4_sync_block();
    return (int)s.found[2];
}

static __device__ int draw(const float *x, int n, float best, const ds4_sampling &how, float *weights,
                           block_shared &s) {
    float factor = 1.0f / how.temperature;
    each(x, n, [&](int i, float value) { weights[i] = ds4_exp((value - best) * factor); });
    ds4_sync_block();
    cut kept = {order_key(-DS4_INFINITY), 0};
    if (how.top_k > 0 && how.top_k < n) {
        uint32_t bound = key_of_best(x, n, (uint64_t)how.top_k, s);
        kept = select_best(x, (const float *)0, n, kept, bound, (uint64_t)how.top_k, s);
    }
    if (how.top_p < 1.0f)
        kept = select_share(x, weights, n, kept, best, how.temperature, how.top_p, s);
    return token_at(x, weights, n, kept, how.min_p < 1.0f ? how.min_p : 1.0f, how, s);
}

#endif
