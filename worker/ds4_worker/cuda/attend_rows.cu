/* attend_rows: attention over a token's last rows and over compressed ones.
 *
 * Reference: native/exec_attend_rows.c with attention.c and kv.c (score_along, accumulate in f16); same
 * bits. Rows come in the order of positions, then of compressed rows, in parts of 64: scores in eight
 * chains by dim mod 8 and a fixed tree, maximum, exponentials, sum in eight lanes, weighted values;
 * parts folded in order. Parameter ds4_attend_rows; grid (ceil(heads / tile_heads), tokens), tile_heads
 * at most 16, block (256), dynamic shared memory 4 * 16 (2 dim + 64 + 4) bytes; dim is a multiple of 8.
 */
#include "rows.h"

struct ds4_attend_rows {
    ds4_plane recent, compressed;
    uint64_t q, y, positions, banks, live;
    uint64_t chosen; /* float rows of most_chosen numbers of compressed rows, or 0: all of them */
    uint64_t sinks;  /* float[heads], or 0 */
    uint32_t q_stride, y_stride, chosen_stride;
    int32_t tokens, heads, window, most_chosen, tile_heads;
    float scale;
    int32_t reserved;
};

#define HEADS 16
#define PART 64
#define THREADS 256

/* The rows that one token sees. */
struct row_list {
    int bank, first, recent, compressed;
    const float *chosen;
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

/* How many of the numbers are rows that the token sees, before the first that is none. */
static __device__ int chosen_rows(const float *chosen, int most, int visible, int *first_bad) {
    if (threadIdx.x == 0) *first_bad = most;
    ds4_sync_block();
    for (int i = threadIdx.x; i < most; i += THREADS)
        if (!(chosen[i] >= 0.0f && chosen[i] < (float)visible)) ds4_atomic_min(first_bad, i);
    ds4_sync_block();
    return *first_bad;
}

DS4_KERNEL(attend_rows, ds4_attend_rows, 256, 1) {
    DS4_SHARED_BYTES(shared);
    __shared__ uint64_t rows[PART];
    __shared__ int first_bad;
    int token = blockIdx.y, dim = p.recent.dim, head0 = blockIdx.x * p.tile_heads;
    int heads = p.heads - head0 < p.tile_heads ? p.heads - head0 : p.tile_heads;
    int quads = (heads + 3) / 4, lane = threadIdx.x & 31;
    if (token >= ds4_rows(p.live, p.tokens)) return;
    float *q = (float *)shared, *state = q + HEADS * dim, *scores = state + HEADS * dim;
    float *max = scores + HEADS * PART, *sum = max + HEADS, *part_max = sum + HEADS;
    float *part_sum = part_max + HEADS;
    int position = ((const int *)p.positions)[token];
    row_list list = {((const int *)p.banks)[token], 0, 0, 0, (const float *)0};
    if (list.bank < 0) return;
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
    const float *x = ds4_row<const float>(p.q, p.q_stride, token) + (int64_t)head0 * dim;
    for (int i = threadIdx.x; i < HEADS * dim; i += THREADS) {
        int h = i / dim, d = i % dim;
        q[d * HEADS + h] = h < heads ? x[h * dim + d] * p.scale : 0.0f;
        state[i] = 0.0f;
    }
    if (threadIdx.x < HEADS) {
        max[threadIdx.x] = -DS4_INFINITY;
        sum[threadIdx.x] = 0.0f;
    }
    int total = list.recent + list.compressed;
    for (int first = 0; first < total; first += PART) {
        int n = total - first < PART ? total - first : PART;
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
            for (int d = 0; d < dim; d += 8)
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    float k = half_at(rows[i], d + c);
                    float4 own = *(const float4 *)(q + (d + c) * HEADS + h);
                    chain[c][0] = fmaf(own.x, k, chain[c][0]);
                    chain[c][1] = fmaf(own.y, k, chain[c][1]);
                    chain[c][2] = fmaf(own.z, k, chain[c][2]);
                    chain[c][3] = fmaf(own.w, k, chain[c][3]);
                }
#pragma unroll
            for (int half = 4; half; half >>= 1)
#pragma unroll
                for (int c = 0; c < half; c++)
#pragma unroll
                    for (int r = 0; r < 4; r++) chain[c][r] += chain[c + half][r];
#pragma unroll
            for (int r = 0; r < 4; r++) scores[(h + r) * PART + i] = chain[0][r];
        }
        ds4_sync_block();
        for (int h = threadIdx.x / 32; h < heads; h += THREADS / 32) {
            float *s = scores + h * PART, best = -DS4_INFINITY, own = 0.0f;
            for (int i = lane; i < n; i += 32)
                if (s[i] > best) best = s[i];
            for (int step = 16; step; step >>= 1) {
                float other = ds4_shuffle_xor(best, step);
                if (other > best) best = other;
            }
            for (int i = lane; i < n; i += 32) s[i] = ds4_exp(s[i] - best);
            ds4_sync_warp();
            if (lane < 8)
                for (int i = lane; i < n; i += 8) own += s[i];
            for (int step = 4; step; step >>= 1) own += ds4_shuffle_xor(own, step);
            if (lane == 0) {
                part_max[h] = best;
                part_sum[h] = own;
            }
        }
        ds4_sync_block();
        for (int item = threadIdx.x; item < quads * dim; item += THREADS) {
            int d = item % dim, h0 = item / dim * 4;
            float out[4] = {0, 0, 0, 0};
#pragma unroll 4
            for (int i = 0; i < n; i++) {
                float value = half_at(rows[i], d);
#pragma unroll
                for (int r = 0; r < 4; r++)
                    out[r] = fmaf(scores[(h0 + r) * PART + i], value, out[r]);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                int h = h0 + r;
                if (h >= heads || part_sum[h] == 0.0f) continue;
                float top = part_max[h] > max[h] ? part_max[h] : max[h];
                float keep = ds4_exp(max[h] - top), take = ds4_exp(part_max[h] - top);
                state[h * dim + d] = state[h * dim + d] * keep + out[r] * take;
            }
        }
        ds4_sync_block();
        if ((int)threadIdx.x < heads && part_sum[threadIdx.x] != 0.0f) {
            int h = threadIdx.x;
            float top = part_max[h] > max[h] ? part_max[h] : max[h];
            float keep = ds4_exp(max[h] - top), take = ds4_exp(part_max[h] - top);
            max[h] = top;
            sum[h] = sum[h] * keep + part_sum[h] * take;
        }
    }
    ds4_sync_block();
    float *y = ds4_row<float>(p.y, p.y_stride, token) + (int64_t)head0 * dim;
    for (int i = threadIdx.x; i < heads * dim; i += THREADS) {
        int h = i / dim;
        float whole = sum[h], value = state[i];
        if (p.sinks) {
            float sink = ((const float *)p.sinks)[head0 + h], top = sink > max[h] ? sink : max[h];
            float keep = ds4_exp(max[h] - top);
            whole = whole * keep + ds4_exp(sink - top);
            value *= keep;
        }
        y[i] = value * (1.0f / whole);
    }
}
