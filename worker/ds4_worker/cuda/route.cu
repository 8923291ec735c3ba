/* Experts: the choice of each token, and the sorting of choices by expert for grouped products.
 *
 * Reference: native/exec_route.c and exec_experts.c (sort_columns); same bits, but for the score
 * sqrt_softplus, which goes through exp and log1p in double precision: on a device they may differ in
 * the last bit of the double, so a score may in rare cases by one unit in the last place.
 *
 * route: parameter ds4_route, grid (rows), block (32), dynamic shared memory 8 (experts + groups) + 4 used
 * bytes.
 * sort_experts: parameter ds4_sort_experts, grid (1), block (256), dynamic shared memory 4 (experts + 1)
 * bytes: columns (token * used + place) sorted by expert, in order of columns, and tiles of at most
 * `tile_columns` columns of one expert for matmul_experts.
 */
#include "op_math.h"

enum { SCORE_SOFTMAX = 0, SCORE_SIGMOID = 1, SCORE_SQRT_SOFTPLUS = 2, SCORE_LOGITS = 3 };

struct ds4_route {
    uint64_t logits, bias, routes, live; /* bias: float[experts], or 0; routes: rows of 2 used floats */
    uint64_t tokens, table; /* int32[rows]; int32[][used]: the experts of each token; or 0 */
    uint32_t logits_stride, routes_stride;
    int32_t rows, experts, used, score, groups, groups_used, group_top, normalize;
    float scale;
    int32_t reserved;
};

/* Sum of eight lanes, value i in lane i mod 8, then a fixed tree; the first warp, all lanes. */
static __device__ __forceinline__ float sum_of_lanes(const float *x, int n) {
    int lane = threadIdx.x & 31;
    float sum = 0.0f;
    if (lane < 8)
        for (int i = lane; i < n; i += 8) sum += x[i];
    for (int step = 4; step; step >>= 1) sum += ds4_shuffle_xor(sum, step);
    return ds4_shuffle(sum, 0);
}

static __device__ __forceinline__ float max_of(const float *x, int n) {
    float best = -DS4_INFINITY;
    for (int i = threadIdx.x & 31; i < n; i += 32)
        if (x[i] > best) best = x[i];
    for (int step = 16; step; step >>= 1) {
        float other = ds4_shuffle_xor(best, step);
        if (other > best) best = other;
    }
    return best;
}

/* p over all experts; the first warp. */
static __device__ void scores_of(const ds4_route &p, const float *logits, float *out) {
    int lane = threadIdx.x & 31, n = p.experts;
    if (p.score == SCORE_SOFTMAX) {
        float best = max_of(logits, n);
        for (int i = lane; i < n; i += 32) out[i] = ds4_exp(logits[i] - best);
        ds4_sync_warp();
        float sum = sum_of_lanes(out, n);
        ds4_sync_warp();
        for (int i = lane; i < n; i += 32) out[i] = out[i] / sum;
    } else {
        for (int i = lane; i < n; i += 32) {
            float x = logits[i];
            if (p.score == SCORE_SIGMOID) x = 1.0f / (1.0f + ds4_exp(x * -1.0f));
            if (p.score == SCORE_SQRT_SOFTPLUS)
                x = (float)sqrt(x > 40.0f ? (double)x : log1p(exp((double)x)));
            out[i] = x;
        }
    }
    ds4_sync_warp();
}

/* The best of n candidates, the first of equals; -1 when none is above -infinity. All lanes agree. */
static __device__ __forceinline__ int best_of(const float *candidates, int n) {
    float best = -DS4_INFINITY;
    int at = -1;
    for (int i = threadIdx.x & 31; i < n; i += 32)
        if (candidates[i] > best) {
            best = candidates[i];
            at = i;
        }
    for (int step = 16; step; step >>= 1) {
        float other = ds4_shuffle_xor(best, step);
        int place = ds4_shuffle_xor(at, step);
        if (place >= 0 && (at < 0 || other > best || (other == best && place < at))) {
            best = other;
            at = place;
        }
    }
    return at;
}

/* Sum of the `top` best of n scores, one lane per group. */
static __device__ float group_score(const float *p, int n, int top) {
    float sum = 0.0f, below = DS4_INFINITY;
    int below_at = -1;
    for (int j = 0; j < top; j++) {
        int at = -1;
        for (int i = 0; i < n; i++) {
            bool after = p[i] < below || (p[i] == below && i > below_at);
            if (after && (at < 0 || p[i] > p[at])) at = i;
        }
        if (at < 0) break;
        below = p[at];
        sum += below;
        below_at = at;
    }
    return sum;
}

/* Rules out the experts of all groups but the best; `held` and `kept` have room for the groups. */
static __device__ void keep_groups(const ds4_route &p, float *candidates, float *held, int *kept) {
    int lane = threadIdx.x & 31, size = p.experts / p.groups;
    for (int g = lane; g < p.groups; g += 32) {
        held[g] = group_score(candidates + g * size, size, p.group_top);
        kept[g] = 0;
    }
    ds4_sync_warp();
    for (int j = 0; j < p.groups_used; j++) {
        int g = best_of(held, p.groups);
        if (g < 0) break;
        ds4_sync_warp();
        if (lane == 0) {
            held[g] = -DS4_INFINITY;
            kept[g] = 1;
        }
        ds4_sync_warp();
    }
    for (int i = lane; i < p.experts; i += 32)
        if (!kept[i / size]) candidates[i] = -DS4_INFINITY;
    ds4_sync_warp();
}

static __device__ void weigh(const ds4_route &p, float *w) {
    if (p.score == SCORE_LOGITS) {
        float best = -DS4_INFINITY, lane[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int j = 0; j < p.used; j++)
            if (w[j] > best) best = w[j];
        for (int first = 0; first < p.used; first += 8)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (first + i < p.used) {
                    w[first + i] = ds4_exp(w[first + i] - best);
                    lane[i] += w[first + i];
                }
#pragma unroll
        for (int half = 4; half; half >>= 1)
#pragma unroll
            for (int i = 0; i < half; i++) lane[i] += lane[i + half];
        for (int j = 0; j < p.used; j++) w[j] = w[j] / lane[0];
    }
    if (p.normalize) {
        float sum = 0.0f;
        for (int j = 0; j < p.used; j++) sum += w[j];
        if (sum < 0.00006103515625f) sum = 0.00006103515625f; /* 2^-14 */
        for (int j = 0; j < p.used; j++) w[j] = w[j] / sum;
    }
    for (int j = 0; j < p.used; j++) w[j] *= p.scale;
}

DS4_KERNEL(route, ds4_route, 32, 8) {
    int row = blockIdx.x, lane = threadIdx.x & 31, n = p.experts;
    if (row >= ds4_rows(p.live, p.rows)) return;
    DS4_SHARED_BYTES(shared);
    float *scores = (float *)shared, *candidates = scores + n, *held = candidates + n;
    const float *logits = ds4_row<const float>(p.logits, p.logits_stride, row);
    const float *bias = (const float *)p.bias;
    float *chosen = ds4_row<float>(p.routes, p.routes_stride, row);
    float *w = held + 2 * p.groups; /* here until it is done: one lane goes over it again and again */
    scores_of(p, logits, scores);
    for (int i = lane; i < n; i += 32) candidates[i] = bias ? scores[i] + bias[i] : scores[i];
    ds4_sync_warp();
    if (p.groups_used < p.groups) keep_groups(p, candidates, held, (int *)(held + p.groups));
    const int *listed = (const int *)p.table;
    if (listed) listed += (int64_t)((const int *)p.tokens)[row] * p.used;
    for (int j = 0; j < p.used; j++) {
        int at = listed ? listed[j] : best_of(candidates, n);
        if (at >= n) at = -1;
        ds4_sync_warp();
        if (lane == 0) { /* scores that are no numbers show in the result */
            chosen[j] = at < 0 ? 0.0f : (float)at;
            w[j] = at < 0 ? DS4_NAN : scores[at];
            if (at >= 0) candidates[at] = -DS4_INFINITY;
        }
        ds4_sync_warp();
    }
    if (lane == 0) weigh(p, w);
    ds4_sync_warp();
    for (int j = lane; j < p.used; j += 32) chosen[p.used + j] = w[j];
}

struct ds4_sort_experts {
    uint64_t routes, live;
    uint64_t columns; /* int32[tokens * used] */
    uint64_t tiles;   /* int32[most_tiles][4]: expert, first column, count, 0 */
    uint64_t n_tiles; /* int32 */
    uint32_t routes_stride;
    int32_t tokens, used, experts, tile_columns, reserved;
};

static __device__ __forceinline__ int expert_of(const ds4_sort_experts &p, int column) {
    float number = ds4_row<const float>(p.routes, p.routes_stride, column / p.used)[column % p.used];
    return number >= 0.0f && number < (float)p.experts ? (int)number : 0;
}

DS4_KERNEL(sort_experts, ds4_sort_experts, 256, 1) {
    DS4_SHARED_BYTES(shared);
    int *start = (int *)shared, n = ds4_rows(p.live, p.tokens) * p.used;
    for (int i = threadIdx.x; i <= p.experts; i += 256) start[i] = 0;
    ds4_sync_block();
    for (int c = threadIdx.x; c < n; c += 256) ds4_atomic_add(start + expert_of(p, c) + 1, 1);
    ds4_sync_block();
    if (threadIdx.x == 0) {
        int4 *tiles = (int4 *)p.tiles;
        int made = 0;
        for (int e = 0; e < p.experts; e++) {
            int count = start[e + 1];
            for (int i = 0; i < count; i += p.tile_columns)
                tiles[made++] = make_int4(e, start[e] + i,
                                          count - i < p.tile_columns ? count - i : p.tile_columns, 0);
            start[e + 1] += start[e];
        }
        *(int *)p.n_tiles = made;
    }
    ds4_sync_block();
    /* an expert's columns in their order: one thread walks all columns for the experts it has */
    for (int e = threadIdx.x; e < p.experts; e += 256) {
        if (start[e] == start[e + 1]) continue;
        int at = start[e];
        for (int c = 0; c < n; c++)
            if (expert_of(p, c) == e) ((int *)p.columns)[at++] = c;
    }
}
