/* attend_rows: attention over a token's last rows and over compressed ones.
 *
 * Reference: native/exec_attend_rows.c with attention.c and kv.c (score_along, accumulate in f16); same
 * bits. Rows come in the order of positions, then of compressed rows, in parts of 64: scores in eight
 * chains by dim mod 8 and a fixed tree, maximum, exponentials, sum in eight lanes, weighted values;
 * parts folded in order. Both ways of cutting the work agree:
 *
 *   attend_rows                          a block takes 16 heads of a token through all its parts
 *   attend_rows_parts, attend_rows_fold  a block per part; then the parts of each (token, head) are folded
 *
 * Parameter ds4_attend_rows; dim is a multiple of 8. attend_rows and attend_rows_parts: grid
 * (ceil(heads / 16), tokens, 1 or splits), block (256), dynamic shared memory of attention.py.
 * attend_rows_fold: grid (heads, tokens), block (128). A token whose bank is below 0 is skipped.
 */
#include "parts.h"
#include "rows.h"

struct ds4_attend_rows {
    ds4_plane recent, compressed;
    uint64_t q, y, positions, banks, live;
    uint64_t chosen; /* float rows of most_chosen numbers of compressed rows, or 0: all of them */
    uint64_t sinks;  /* float[heads], or 0 */
    uint64_t parts;  /* float[tokens][heads][most_parts][2 + dim], of the split way */
    uint32_t q_stride, y_stride, chosen_stride;
    int32_t tokens, heads, window, most_chosen, most_parts;
    float scale;
    int32_t reserved;
};

#define HEADS 16
#define PART 64
#define THREADS 256

/* The rows that one token sees. */
struct row_list {
    int bank, first, recent, compressed, parts;
    const float *chosen;
};

struct rows_tile {
    float *q, *scores, *part_max, *part_sum, *max, *sum, *state; /* [dim][HEADS], [HEADS][PART], ... */
    int head, heads;
};

static __device__ __forceinline__ uint64_t row_at(const ds4_attend_rows &p, const row_list &l, int i) {
    const ds4_plane &plane = i < l.recent ? p.recent : p.compressed;
    int row = l.first + i;
    if (i >= l.recent) row = l.chosen ? (int)l.chosen[i - l.recent] : i - l.recent;
    int records = ds4_plane_records(plane);
    return (uint64_t)ds4_plane_page(plane, l.bank, row / records) +
           2ull * (uint64_t)(row % records) * (uint64_t)plane.dim;
}

static __device__ __forceinline__ float half_at(uint64_t row, int d) {
    return ds4_half_to_float(((const uint16_t *)row)[d]);
}

/* Of eight halves number i, a constant. */
static __device__ __forceinline__ float half_of(const int4 &eight, int i) {
    uint32_t pair = (uint32_t)(i / 2 == 0 ? eight.x : i / 2 == 1 ? eight.y : i / 2 == 2 ? eight.z : eight.w);
    return ds4_half_to_float((uint16_t)(pair >> 16 * (i % 2)));
}

/* How many of the numbers are rows that the token sees, before the first that is none. */
static __device__ int chosen_rows(const float *chosen, int most, int visible, int *first_bad) {
    if (threadIdx.x == 0) *first_bad = most;
    ds4_sync_block();
    for (int i = threadIdx.x; i < most; i += blockDim.x)
        if (!(chosen[i] >= 0.0f && chosen[i] < (float)visible)) ds4_atomic_min(first_bad, i);
    ds4_sync_block();
    return *first_bad;
}

/* By the whole block. Without parts: a token that is not in use, or of no bank. */
static __device__ __forceinline__ row_list rows_of(const ds4_attend_rows &p, int token) {
    __shared__ int first_bad;
    row_list list = {-1, 0, 0, 0, 0, (const float *)0};
    if (token >= ds4_rows(p.live, p.tokens)) return list;
    list.bank = ((const int *)p.banks)[token];
    if (list.bank < 0) return list;
    int position = ((const int *)p.positions)[token];
    list.first = position + 1 > p.window ? position + 1 - p.window : 0;
    list.recent = position + 1 - list.first;
    if (p.compressed.pages) {
        int visible = (position + 1) / p.compressed.ratio;
        list.compressed = visible;
        if (p.chosen) {
            list.chosen = ds4_row<const float>(p.chosen, p.chosen_stride, token);
            list.compressed = chosen_rows(list.chosen, p.most_chosen, visible, &first_bad);
        }
    }
    list.parts = (list.recent + list.compressed + PART - 1) / PART;
    return list;
}

/* The tile of the block's heads, its queries loaded. */
static __device__ __forceinline__ rows_tile load_tile(const ds4_attend_rows &p, int token,
                                                      uint8_t *shared) {
    rows_tile tile;
    int dim = p.recent.dim;
    tile.q = (float *)shared;
    tile.scores = tile.q + HEADS * dim;
    tile.part_max = tile.scores + HEADS * PART;
    tile.part_sum = tile.part_max + HEADS;
    tile.max = tile.part_sum + HEADS;
    tile.sum = tile.max + HEADS;
    tile.state = tile.sum + HEADS;
    tile.head = blockIdx.x * HEADS;
    tile.heads = p.heads - tile.head < HEADS ? p.heads - tile.head : HEADS;
    const float *x = ds4_row<const float>(p.q, p.q_stride, token) + (int64_t)tile.head * dim;
    for (int i = threadIdx.x; i < HEADS * dim; i += THREADS) {
        int h = i / dim, d = i % dim;
        tile.q[d * HEADS + h] = h < tile.heads ? x[h * dim + d] * p.scale : 0.0f;
    }
    return tile;
}

/* One part; `take(head of the tile, d, value)` gets the weighted values once, before the next barrier. */
template <typename Take>
static __device__ __forceinline__ void attend_part(const ds4_attend_rows &p, const row_list &list,
                                                   const rows_tile &tile, int part, Take take) {
    __shared__ uint64_t rows[PART];
    int dim = p.recent.dim, quads = (tile.heads + 3) / 4, first = part * PART;
    int total = list.recent + list.compressed, n = total - first < PART ? total - first : PART;
    ds4_sync_block();
    if ((int)threadIdx.x < n) rows[threadIdx.x] = row_at(p, list, first + threadIdx.x);
    ds4_sync_block();
    for (int item = threadIdx.x; item < quads * PART; item += THREADS) {
        int i = item % PART, h = item / PART * 4;
        if (i >= n) continue;
        float chain[8][4];
#pragma unroll
        for (int c = 0; c < 8; c++)
#pragma unroll
            for (int r = 0; r < 4; r++) chain[c][r] = 0.0f;
#pragma unroll 1
        for (int first_dim = 0; first_dim < dim; first_dim += 32) {
            int4 eights[4]; /* loads that are started together */
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (first_dim + 8 * j < dim) eights[j] = ((const int4 *)rows[i])[first_dim / 8 + j];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int d = first_dim + 8 * j;
                if (d >= dim) break;
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    float k = half_of(eights[j], c);
                    float4 own = *(const float4 *)(tile.q + (d + c) * HEADS + h);
                    chain[c][0] = fmaf(own.x, k, chain[c][0]);
                    chain[c][1] = fmaf(own.y, k, chain[c][1]);
                    chain[c][2] = fmaf(own.z, k, chain[c][2]);
                    chain[c][3] = fmaf(own.w, k, chain[c][3]);
                }
            }
        }
#pragma unroll
        for (int half = 4; half; half >>= 1)
#pragma unroll
            for (int c = 0; c < half; c++)
#pragma unroll
                for (int r = 0; r < 4; r++) chain[c][r] += chain[c + half][r];
#pragma unroll
        for (int r = 0; r < 4; r++) tile.scores[(h + r) * PART + i] = chain[0][r];
    }
    ds4_sync_block();
    for (int h = threadIdx.x / 32; h < tile.heads; h += THREADS / 32)
        ds4_part_softmax(tile.scores + h * PART, n, tile.part_max + h, tile.part_sum + h);
    ds4_sync_block();
    for (int item = threadIdx.x; item < quads * dim; item += THREADS) {
        int d = item % dim, h0 = item / dim * 4;
        float out[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int i = 0; i < n; i += 16) {
            float value[16];
#pragma unroll
            for (int j = 0; j < 16; j++) value[j] = half_at(rows[i + j < n ? i + j : n - 1], d);
#pragma unroll
            for (int j = 0; j < 16; j++) {
                if (i + j >= n) break;
#pragma unroll
                for (int r = 0; r < 4; r++)
                    out[r] = fmaf(tile.scores[(h0 + r) * PART + i + j], value[j], out[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (h0 + r < tile.heads) take(h0 + r, d, out[r]);
    }
}

DS4_KERNEL(attend_rows, ds4_attend_rows, 256, 1) {
    DS4_SHARED_BYTES(shared);
    int token = blockIdx.y, dim = p.recent.dim;
    row_list list = rows_of(p, token);
    if (!list.parts) return;
    rows_tile tile = load_tile(p, token, shared);
    for (int i = threadIdx.x; i < HEADS * dim; i += THREADS) tile.state[i] = 0.0f;
    if (threadIdx.x < HEADS) {
        tile.max[threadIdx.x] = -DS4_INFINITY;
        tile.sum[threadIdx.x] = 0.0f;
    }
    for (int part = 0; part < list.parts; part++) {
        attend_part(p, list, tile, part, [&](int h, int d, float value) {
            if (tile.part_sum[h] == 0.0f) return;
            ds4_join join = ds4_join_part(tile.max[h], tile.part_max[h]);
            float *into = tile.state + h * dim + d;
            *into = *into * join.keep + value * join.take;
        });
        ds4_sync_block();
        if ((int)threadIdx.x < tile.heads && tile.part_sum[threadIdx.x] != 0.0f) {
            int h = threadIdx.x;
            ds4_join join = ds4_join_part(tile.max[h], tile.part_max[h]);
            tile.max[h] = join.max;
            tile.sum[h] = tile.sum[h] * join.keep + tile.part_sum[h] * join.take;
        }
    }
    ds4_sync_block();
    float *y = ds4_row<float>(p.y, p.y_stride, token) + (int64_t)tile.head * dim;
    for (int i = threadIdx.x; i < tile.heads * dim; i += THREADS) {
        int h = i / dim;
        y[i] = ds4_finish_row((const float *)p.sinks, tile.head + h, tile.max[h], tile.sum[h],
                              tile.state[i]);
    }
}

DS4_KERNEL(attend_rows_parts, ds4_attend_rows, 256, 1) {
    DS4_SHARED_BYTES(shared);
    int token = blockIdx.y, part = blockIdx.z;
    row_list list = rows_of(p, token);
    if (part >= list.parts) return; /* the whole block */
    rows_tile tile = load_tile(p, token, shared);
    for (; part < list.parts; part += gridDim.z)
        attend_part(p, list, tile, part, [&](int h, int d, float value) {
            float *state = ds4_part_state(p.parts, p.heads, p.most_parts, p.recent.dim, token,
                                          tile.head + h, part);
            if (d == 0) {
                state[0] = tile.part_max[h];
                state[1] = tile.part_sum[h];
            }
            state[2 + d] = value;
        });
}

DS4_KERNEL(attend_rows_fold, ds4_attend_rows, 128, 4) {
    int head = blockIdx.x, token = blockIdx.y, dim = p.recent.dim;
    row_list list = rows_of(p, token);
    if (!list.parts) return;
    ds4_fold_parts(ds4_part_state(p.parts, p.heads, p.most_parts, dim, token, head, 0), dim, 0,
                   list.parts, (const float *)p.sinks, head, dim,
                   ds4_row<float>(p.y, p.y_stride, token) + (int64_t)head * dim);
}
