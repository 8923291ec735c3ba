/* Causal attention over the paged cache: windows, sinks, soft caps, grouped heads, latents.
 *
 * Reference: native/attention.c and exec_attend.c; same bits. A query's positions are cut into parts of
 * part_tokens; in a part: scores (an FMA chain in order of dims), maximum, exponentials, their sum in
 * eight lanes, weighted values (an FMA chain in order of positions); parts are folded in ascending
 * order. So a query's result depends on its own sequence only, and both ways of cutting the work agree:
 *
 *   attend_whole               a block takes a tile of rows through all its parts: many tokens
 *   attend_parts, attend_fold  a block per part; then the parts of each (token, head) are folded
 *
 * A tile is up to 16 rows: tile_tokens consecutive tokens of the step x tile_heads heads of one group.
 * Latents (cache.latent) are key and
 * value in one: their scores run in eight chains by dim mod 8, then a fixed tree. Tokens of other banks in a tile, or that do not follow each other, are taken run by run. Parameter
 * ds4_attend. attend_whole and attend_parts: grid (kv_heads * ceil(group / tile_heads), ceil(tokens /
 * tile_tokens), 1 or splits), block (256), dynamic shared memory attend_shared_bytes(...) of
 * kernels.py. attend_fold: grid (heads, tokens), block (128). A token whose bank is below 0 is skipped.
 */
#ifndef DS4_CUDA_ATTEND_H
#define DS4_CUDA_ATTEND_H

#include "kv.h"
#include "parts.h"

struct ds4_attend {
    ds4_cache cache;
    uint64_t q, y, positions, banks, live;
    uint64_t sinks; /* float[heads], or 0 */
    uint64_t parts; /* float[tokens][heads][most_parts][2 + value width], of the split ways */
    uint32_t q_stride, y_stride;
    int32_t tokens, heads, tile_tokens, tile_heads, part_tokens, most_parts, window;
    float scale, soft_cap;
    int32_t reserved;
};

#define DS4_ATTEND_ROWS 16
#define DS4_ATTEND_THREADS 256

/* A run of a tile: rows are token-major, heads inside. */
struct ds4_run {
    int bank, token, tokens, position; /* of its first token */
    int head, heads, rows;             /* first query head, how many */
};

struct ds4_tile {
    float *q, *scores, *state; /* [dim][16 rows], [rows][part_tokens], [rows][width] */
    float *max, *sum, *part_max, *part_sum;
    int width;
};

static __device__ __forceinline__ int ds4_clamp(int x, int low, int high) {
    return x < low ? low : x > high ? high : x;
}
/* Positions of a part that row r may see, and those of them that lie before its window. */
static __device__ __forceinline__ int ds4_visible(const ds4_attend &p, const ds4_run &run, int base,
                                                  int r) {
    return ds4_clamp(run.position + r / run.heads + 1 - base, 0, p.part_tokens);
}
static __device__ __forceinline__ int ds4_hidden(const ds4_attend &p, const ds4_run &run, int base,
                                                 int r) {
    if (!p.window) return 0;
    return ds4_clamp(run.position + r / run.heads + 1 - p.window - base, 0, p.part_tokens);
}
static __device__ __forceinline__ int ds4_first_part(const ds4_attend &p, int position) {
    return p.window && position >= p.window ? (position + 1 - p.window) / p.part_tokens : 0;
}

static __device__ __forceinline__ ds4_tile ds4_carve(const ds4_attend &p, uint8_t *shared) {
    ds4_tile tile;
    tile.width = ds4_kv_width(p.cache.value_dim);
    tile.q = (float *)shared;
    tile.scores = tile.q + DS4_ATTEND_ROWS * p.cache.dim;
    tile.max = tile.scores + DS4_ATTEND_ROWS * p.part_tokens;
    tile.sum = tile.max + DS4_ATTEND_ROWS;
    tile.part_max = tile.sum + DS4_ATTEND_ROWS;
    tile.part_sum = tile.part_max + DS4_ATTEND_ROWS;
    tile.state = tile.part_sum + DS4_ATTEND_ROWS;
    return tile;
}

static __device__ __forceinline__ void ds4_load_queries(const ds4_attend &p, const ds4_run &run,
                                                        const ds4_tile &tile) {
    for (int i = threadIdx.x; i < run.rows * p.cache.dim; i += DS4_ATTEND_THREADS) {
        int r = i / p.cache.dim, d = i % p.cache.dim;
        const float *q = ds4_row<const float>(p.q, p.q_stride, run.token + r / run.heads) +
                         (int64_t)(run.head + r % run.heads) * p.cache.dim;
        tile.q[d * DS4_ATTEND_ROWS + r] = q[d] * p.scale;
    }
}

/* s += q k for R rows; `q` of one dim, aligned to 16. */
template <int R>
static __device__ __forceinline__ void ds4_multiply(const float *q, float k, float (&s)[R]) {
#pragma unroll
    for (int r = 0; r < R; r += 4) {
        float4 four = *(const float4 *)(q + r);
        s[r] = fmaf(four.x, k, s[r]);
        s[r + 1] = fmaf(four.y, k, s[r + 1]);
        s[r + 2] = fmaf(four.z, k, s[r + 2]);
        s[r + 3] = fmaf(four.w, k, s[r + 3]);
    }
}

/* s += q k over the dims of a tile of keys. A thread starts many loads before it uses the first: with
 * few rows there is little else to hide their latency. */
template <int R>
static __device__ __forceinline__ void ds4_score_dims(const char *keys, const float *q, int dims,
                                                      int page_tokens, int place, float (&s)[R]) {
    const int batch = R <= 8 ? 16 : 4;
    int d = 0;
#pragma unroll 1
    for (; d + batch <= dims; d += batch) {
        float k[batch];
#pragma unroll
        for (int j = 0; j < batch; j++) k[j] = ds4_kv_get(keys, (d + j) * page_tokens + place);
#pragma unroll
        for (int j = 0; j < batch; j++) ds4_multiply<R>(q + (d + j) * DS4_ATTEND_ROWS, k[j], s);
    }
#pragma unroll 4
    for (; d < dims; d++)
        ds4_multiply<R>(q + (int64_t)d * DS4_ATTEND_ROWS, ds4_kv_get(keys, d * page_tokens + place), s);
}

/* Scores of the part's positions [start, count): a thread per position, R rows at once. */
template <int R>
static __device__ __forceinline__ void ds4_score(const ds4_attend &p, const ds4_run &run,
                                                 const ds4_tile &tile, int kv_head, int base, int start,
                                                 int count) {
    const ds4_cache &c = p.cache;
    for (int t = start + threadIdx.x; t < count; t += DS4_ATTEND_THREADS) {
        int position = base + t, place = position % c.page_tokens;
        const char *keys = ds4_kv_keys(c, ds4_kv_page(c, run.bank, position / c.page_tokens), kv_head);
        float s[R];
#pragma unroll
        for (int r = 0; r < R; r++) s[r] = 0.0f;
#if DS4_KV_Q8
        for (int b = 0; b < c.dim / DS4_KV_BLOCK; b++) {
            const char *block = ds4_kv_block(keys, b, c.page_tokens);
            const char *codes = block + 2 * c.page_tokens;
            float part[R], scale = ds4_half_to_float(((const uint16_t *)block)[place]);
#pragma unroll
            for (int r = 0; r < R; r++) part[r] = 0.0f;
            ds4_score_dims<R>(codes, tile.q + DS4_KV_BLOCK * b * DS4_ATTEND_ROWS, DS4_KV_BLOCK,
                              c.page_tokens, place, part);
#pragma unroll
            for (int r = 0; r < R; r++) s[r] = fmaf(scale, part[r], s[r]);
        }
#else
        ds4_score_dims<R>(keys, tile.q, c.dim, c.page_tokens, place, s);
#endif
#pragma unroll
        for (int r = 0; r < R; r++)
            if (r < run.rows) tile.scores[r * p.part_tokens + t] = s[r];
    }
}

/* The same over latents, four rows from r0: eight chains by dim mod 8, then a fixed tree. */
static __device__ __forceinline__ void ds4_score_along(const ds4_attend &p, const ds4_run &run,
                                                       const ds4_tile &tile, int base, int start,
                                                       int count, int r0) {
    const ds4_cache &c = p.cache;
    for (int t = start + threadIdx.x; t < count; t += DS4_ATTEND_THREADS) {
        int position = base + t, place = position % c.page_tokens;
        const char *keys = ds4_kv_keys(c, ds4_kv_page(c, run.bank, position / c.page_tokens), 0);
        float lane[8][4];
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int r = 0; r < 4; r++) lane[i][r] = 0.0f;
#if DS4_KV_Q8
        for (int b = 0; b < c.dim / DS4_KV_BLOCK; b++) {
            const char *block = ds4_kv_block(keys, b, c.page_tokens);
            const char *codes = block + 2 * c.page_tokens;
            float part[8][4], scale = ds4_half_to_float(((const uint16_t *)block)[place]);
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int r = 0; r < 4; r++) part[i][r] = 0.0f;
#pragma unroll 1
            for (int d = 0; d < DS4_KV_BLOCK; d += 8)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    ds4_multiply<4>(tile.q + (DS4_KV_BLOCK * b + d + i) * DS4_ATTEND_ROWS + r0,
                                    ds4_kv_get(codes, place * DS4_KV_BLOCK + d + i), part[i]);
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int r = 0; r < 4; r++) lane[i][r] = fmaf(scale, part[i][r], lane[i][r]);
        }
#else
        const int ahead = DS4_KV == 1 ? 1 : 2; /* loads that are started together; registers are full */
        int64_t first = (int64_t)place * ds4_kv_width(c.dim);
#pragma unroll 1
        for (int d = 0; d < c.dim; d += 8 * ahead) {
            ds4_kv_eight k[ahead];
#pragma unroll
            for (int j = 0; j < ahead; j++)
                if (d + 8 * j < c.dim) k[j] = ds4_kv_get_eight(keys, first + d + 8 * j);
#pragma unroll
            for (int j = 0; j < ahead; j++)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (d + 8 * j + i < c.dim)
                        ds4_multiply<4>(tile.q + (d + 8 * j + i) * DS4_ATTEND_ROWS + r0,
                                        ds4_kv_of_eight(k[j], i), lane[i]);
        }
#endif
#pragma unroll
        for (int half = 4; half; half >>= 1)
#pragma unroll
            for (int i = 0; i < half; i++)
#pragma unroll
                for (int r = 0; r < 4; r++) lane[i][r] += lane[i + half][r];
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r0 + r < run.rows) tile.scores[(r0 + r) * p.part_tokens + t] = lane[0][r];
    }
}

/* Caps, maximum, exponentials and sums of the rows, a warp per row. */
static __device__ __forceinline__ void ds4_softmax_rows(const ds4_attend &p, const ds4_run &run,
                                                        const ds4_tile &tile, int base) {
    int lane = threadIdx.x & 31;
    for (int r = threadIdx.x / 32; r < run.rows; r += DS4_ATTEND_THREADS / 32) {
        int from = ds4_hidden(p, run, base, r), n = ds4_visible(p, run, base, r) - from;
        float *s = tile.scores + r * p.part_tokens + from;
        if (p.soft_cap != 0.0f)
            for (int i = lane; i < n; i += 32) s[i] = ds4_soft_cap(s[i], p.soft_cap);
        ds4_part_softmax(s, n, tile.part_max + r, tile.part_sum + r);
    }
}

/* Weighted values of R rows from r0 for dim d. */
template <int R>
static __device__ __forceinline__ void ds4_weigh(const ds4_attend &p, const ds4_run &run,
                                                 const ds4_tile &tile, int kv_head, int base, int start,
                                                 int count, int r0, int d, float (&out)[R]) {
    const ds4_cache &c = p.cache;
    int from[R], to[R], width = ds4_kv_value_width(c);
    (void)width;
#pragma unroll
    for (int r = 0; r < R; r++) {
        bool mine = r0 + r < run.rows;
        from[r] = mine ? ds4_hidden(p, run, base, r0 + r) : 0;
        to[r] = mine ? ds4_visible(p, run, base, r0 + r) : 0;
        out[r] = 0.0f;
    }
    for (int first = start / c.page_tokens * c.page_tokens; first < count; first += c.page_tokens) {
        const char *values =
            ds4_kv_values(c, ds4_kv_page(c, run.bank, (base + first) / c.page_tokens), kv_head);
        int t0 = first < start ? start : first;
        int t1 = first + c.page_tokens < count ? first + c.page_tokens : count;
#if DS4_KV_Q8
        const char *block = ds4_kv_block(values, d / DS4_KV_BLOCK, c.page_tokens);
        const char *codes = block + 2 * c.page_tokens;
#endif
        const int batch = DS4_KV_Q8 ? 8 : 16; /* loads that are started together */
#pragma unroll 1
        for (int t = t0; t < t1; t += batch) {
            float value[batch];
#if DS4_KV_Q8
            float scale[batch];
#endif
#pragma unroll
            for (int j = 0; j < batch; j++) {
                int place = (t + j < t1 ? t + j : t1 - 1) - first;
#if DS4_KV_Q8
                scale[j] = ds4_half_to_float(((const uint16_t *)block)[place]);
                value[j] = ds4_kv_get(codes, place * DS4_KV_BLOCK + d % DS4_KV_BLOCK);
#else
                value[j] = ds4_kv_get(values, place * width + d);
#endif
            }
#pragma unroll
            for (int j = 0; j < batch; j++) {
                if (t + j >= t1) break;
#pragma unroll
                for (int r = 0; r < R; r++) {
                    if (t + j < from[r] || t + j >= to[r]) continue;
                    float weight = tile.scores[(r0 + r) * p.part_tokens + t + j];
#if DS4_KV_Q8
                    weight *= scale[j];
#endif
                    out[r] = fmaf(weight, value[j], out[r]);
                }
            }
        }
    }
}

/* One part of a run; `take(row, d, value)` gets the weighted values once, before the next barrier. */
template <typename Take>
static __device__ __forceinline__ void ds4_attend_part(const ds4_attend &p, const ds4_run &run,
                                                       const ds4_tile &tile, int kv_head, int part,
                                                       Take take) {
    int base = part * p.part_tokens;
    int start = ds4_hidden(p, run, base, 0), count = ds4_visible(p, run, base, run.rows - 1);
    if (p.cache.latent)
        for (int r0 = 0; r0 < run.rows; r0 += 4) ds4_score_along(p, run, tile, base, start, count, r0);
    else if (run.rows <= 4) ds4_score<4>(p, run, tile, kv_head, base, start, count);
    else if (run.rows <= 8) ds4_score<8>(p, run, tile, kv_head, base, start, count);
    else ds4_score<DS4_ATTEND_ROWS>(p, run, tile, kv_head, base, start, count);
    ds4_sync_block();
    ds4_softmax_rows(p, run, tile, base);
    ds4_sync_block();
    /* four rows and one dim per item */
    int quads = (run.rows + 3) / 4;
    for (int item = threadIdx.x; item < quads * tile.width; item += DS4_ATTEND_THREADS) {
        int r0 = item / tile.width * 4, d = item % tile.width;
        float out[4];
        ds4_weigh<4>(p, run, tile, kv_head, base, start, count, r0, d, out);
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r0 + r < run.rows) take(r0 + r, d, out[r]);
    }
}

/* Calls body(run, kv_head) for each run of the block's tile. */
template <typename Body>
static __device__ __forceinline__ void ds4_each_run(const ds4_attend &p, Body body) {
    const int *banks = (const int *)p.banks, *positions = (const int *)p.positions;
    int group = p.heads / p.cache.kv_heads, chunks = (group + p.tile_heads - 1) / p.tile_heads;
    int kv_head = blockIdx.x / chunks, first_head = blockIdx.x % chunks * p.tile_heads;
    int left = group - first_head, end = ds4_rows(p.live, p.tokens);
    int token = blockIdx.y * p.tile_tokens;
    if (token + p.tile_tokens < end) end = token + p.tile_tokens;
    while (token < end) {
        ds4_run run;
        run.bank = banks[token];
        run.token = token;
        run.position = positions[token];
        run.head = kv_head * group + first_head;
        run.heads = left < p.tile_heads ? left : p.tile_heads;
        run.tokens = 1;
        while (token + run.tokens < end && banks[token + run.tokens] == run.bank &&
               positions[token + run.tokens] == run.position + run.tokens)
            run.tokens++;
        run.rows = run.tokens * run.heads;
        token += run.tokens;
        if (run.bank >= 0) body(run, kv_head);
    }
}

DS4_KERNEL(attend_whole, ds4_attend, 256, DS4_KV_Q8 ? 1 : 2) {
    DS4_SHARED_BYTES(shared);
    ds4_tile tile = ds4_carve(p, shared);
    ds4_each_run(p, [&](const ds4_run &run, int kv_head) {
        ds4_sync_block(); /* the run before is done with the tile */
        ds4_load_queries(p, run, tile);
        for (int i = threadIdx.x; i < run.rows * tile.width; i += DS4_ATTEND_THREADS)
            tile.state[i] = 0.0f;
        if (threadIdx.x < DS4_ATTEND_ROWS) {
            tile.max[threadIdx.x] = -DS4_INFINITY;
            tile.sum[threadIdx.x] = 0.0f;
        }
        ds4_sync_block();
        int parts = (run.position + run.tokens - 1) / p.part_tokens + 1;
        for (int part = ds4_first_part(p, run.position); part < parts; part++) {
            ds4_attend_part(p, run, tile, kv_head, part, [&](int r, int d, float value) {
                if (tile.part_sum[r] == 0.0f) return; /* does not reach this row */
                ds4_join join = ds4_join_part(tile.max[r], tile.part_max[r]);
                float *into = tile.state + r * tile.width + d;
                *into = *into * join.keep + value * join.take;
            });
            ds4_sync_block();
            if ((int)threadIdx.x < run.rows && tile.part_sum[threadIdx.x] != 0.0f) {
                int r = threadIdx.x;
                ds4_join join = ds4_join_part(tile.max[r], tile.part_max[r]);
                tile.max[r] = join.max;
                tile.sum[r] = tile.sum[r] * join.keep + tile.part_sum[r] * join.take;
            }
            ds4_sync_block();
        }
        for (int i = threadIdx.x; i < run.rows * p.cache.value_dim; i += DS4_ATTEND_THREADS) {
            int r = i / p.cache.value_dim, d = i % p.cache.value_dim;
            int token = run.token + r / run.heads, head = run.head + r % run.heads;
            ds4_row<float>(p.y, p.y_stride, token)[(int64_t)head * p.cache.value_dim + d] =
                ds4_finish_row((const float *)p.sinks, head, tile.max[r], tile.sum[r],
                               tile.state[r * tile.width + d]);
        }
    });
}

DS4_KERNEL(attend_parts, ds4_attend, 256, 2) {
    DS4_SHARED_BYTES(shared);
    ds4_tile tile = ds4_carve(p, shared);
    ds4_each_run(p, [&](const ds4_run &run, int kv_head) {
        int parts = (run.position + run.tokens - 1) / p.part_tokens + 1;
        int part = ds4_first_part(p, run.position) + blockIdx.z;
        if (part >= parts) return; /* the whole block */
        ds4_sync_block();
        ds4_load_queries(p, run, tile);
        ds4_sync_block();
        for (; part < parts; part += gridDim.z) {
            ds4_attend_part(p, run, tile, kv_head, part, [&](int r, int d, float value) {
                int token = run.token + r / run.heads, head = run.head + r % run.heads;
                float *state =
                    ds4_part_state(p.parts, p.heads, p.most_parts, tile.width, token, head, part);
                if (d == 0) {
                    state[0] = tile.part_max[r];
                    state[1] = tile.part_sum[r];
                }
                state[2 + d] = value;
            });
            ds4_sync_block();
        }
    });
}

DS4_KERNEL(attend_fold, ds4_attend, 128, 4) {
    int head = blockIdx.x, token = blockIdx.y;
    if (token >= ds4_rows(p.live, p.tokens) || ((const int *)p.banks)[token] < 0) return;
    int position = ((const int *)p.positions)[token], width = ds4_kv_width(p.cache.value_dim);
    /* parts that the tile's first token began with, but this token does not see, hold a sum of 0 */
    int first = ds4_first_part(p, position), parts = position / p.part_tokens + 1;
    ds4_fold_parts(ds4_part_state(p.parts, p.heads, p.most_parts, width, token, head, 0), width, first,
                   parts, (const float *)p.sinks, head, p.cache.value_dim,
                   ds4_row<float>(p.y, p.y_stride, token) + (int64_t)head * p.cache.value_dim);
}

#endif
