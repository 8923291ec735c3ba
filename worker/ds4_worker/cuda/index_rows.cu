/* index_rows: which compressed rows a token attends to, in two kernels.
 *
 * Reference: native/exec_index.c; same rows. index_scores: a thread per row, heads in order. index_pick:
 * the k-th greatest score by digits of its bits, then the rows at or above it in ascending order. Where
 * a token sees no more than k rows there is nothing to score. Parameter ds4_index; index_scores: grid
 * (ceil(most_rows / 128), tokens), block (128), dynamic shared memory 4 dim (heads rounded up to 8)
 * bytes; index_pick: grid (tokens), block (256).
 */
#include "rows.h"

struct ds4_index {
    ds4_plane plane; /* tiles: [dim][rows of a page] */
    uint64_t q, w, positions, banks, live;
    uint64_t scores; /* float[tokens][most_rows] */
    uint64_t rows;   /* float rows of k numbers, -1 in the places left */
    uint32_t q_stride, w_stride, rows_stride;
    int32_t tokens, heads, k, most_rows;
    float scale;
};

DS4_KERNEL(index_scores, ds4_index, 128, 4) {
    DS4_SHARED_BYTES(shared);
    float *q = (float *)shared; /* [dim][heads8] */
    int token = blockIdx.y, dim = p.plane.dim, heads8 = (p.heads + 7) / 8 * 8;
    if (token >= ds4_rows(p.live, p.tokens)) return;
    int bank = ((const int *)p.banks)[token];
    int visible = (((const int *)p.positions)[token] + 1) / p.plane.ratio;
    if (bank < 0 || visible <= p.k || (int)blockIdx.x * 128 >= visible) return;
    const float *from = ds4_row<const float>(p.q, p.q_stride, token);
    for (int i = threadIdx.x; i < dim * heads8; i += 128) {
        int d = i / heads8, h = i % heads8;
        q[i] = h < p.heads ? from[h * dim + d] : 0.0f;
    }
    ds4_sync_block();
    int row = blockIdx.x * 128 + threadIdx.x, records = ds4_plane_records(p.plane);
    if (row >= visible) return;
    const uint16_t *tile =
        (const uint16_t *)ds4_plane_page(p.plane, bank, row / records) + row % records;
    const float *w = ds4_row<const float>(p.w, p.w_stride, token);
    float score = 0.0f;
    for (int h = 0; h < p.heads; h += 8) {
        float dot[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 2
        for (int d = 0; d < dim; d++) {
            float k = ds4_half_to_float(tile[d * records]);
            const float4 *own = (const float4 *)(q + d * heads8 + h);
            float4 low = own[0], high = own[1];
            dot[0] = fmaf(low.x, k, dot[0]);
            dot[1] = fmaf(low.y, k, dot[1]);
            dot[2] = fmaf(low.z, k, dot[2]);
            dot[3] = fmaf(low.w, k, dot[3]);
            dot[4] = fmaf(high.x, k, dot[4]);
            dot[5] = fmaf(high.y, k, dot[5]);
            dot[6] = fmaf(high.z, k, dot[6]);
            dot[7] = fmaf(high.w, k, dot[7]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (h + i < p.heads) score += (dot[i] > 0.0f ? dot[i] : 0.0f) * (w[h + i] * p.scale);
    }
    ((float *)p.scores)[(int64_t)token * p.most_rows + row] = score;
}

/* Bits whose order as numbers is that of the floats; what is no number comes last. */
static __device__ __forceinline__ uint32_t key_of(float x) {
    uint32_t bits = ds4_bits(x);
    if (!(x == x)) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Sum over the threads before this one; *total over all 256. */
static __device__ int scan(int value, int *warps, int *total) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, sum = value, before = 0, all = 0;
    for (int step = 1; step < 32; step <<= 1) {
        int below = ds4_shuffle_up(sum, step);
        if (lane >= step) sum += below;
    }
    ds4_sync_block();
    if (lane == 31) warps[warp] = sum;
    ds4_sync_block();
    for (int i = 0; i < 8; i++) {
        if (i < warp) before += warps[i];
        all += warps[i];
    }
    *total = all;
    return before + sum - value;
}

DS4_KERNEL(index_pick, ds4_index, 256, 2) {
    __shared__ int count[256], warps[8], found[2];
    int token = blockIdx.x, total;
    if (token >= ds4_rows(p.live, p.tokens)) return;
    float *chosen = ds4_row<float>(p.rows, p.rows_stride, token);
    int n = (((const int *)p.positions)[token] + 1) / p.plane.ratio, k = p.k;
    if (((const int *)p.banks)[token] < 0) n = 0;
    if (n <= k) {
        for (int i = threadIdx.x; i < k; i += 256) chosen[i] = i < n ? (float)i : -1.0f;
        return;
    }
    const float *scores = (const float *)p.scores + (int64_t)token * p.most_rows;
    uint32_t least = 0, mask = 0;
    int equals = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        ds4_sync_block();
        count[threadIdx.x] = 0;
        ds4_sync_block();
        for (int i = threadIdx.x; i < n; i += 256) {
            uint32_t key = key_of(scores[i]);
            if ((key & mask) == least) ds4_atomic_add(count + (key >> shift & 255), 1);
        }
        ds4_sync_block();
        /* from the highest digit down: thread t looks at digit 255 - t */
        int own = count[255 - threadIdx.x], before = scan(own, warps, &total);
        if (before < equals && (before + own >= equals || threadIdx.x == 255)) {
            found[0] = 255 - (int)threadIdx.x;
            found[1] = equals - before;
        }
        ds4_sync_block();
        least |= (uint32_t)found[0] << shift;
        mask |= 255u << shift;
        equals = found[1];
    }
    int taken = 0, passed = 0; /* rows chosen, and equal ones met, before this stretch */
    for (int start = 0; start < n && taken < k; start += 256) {
        int i = start + threadIdx.x, same, all;
        uint32_t key = i < n ? key_of(scores[i]) : 0;
        bool equal = i < n && key == least;
        int rank = passed + scan(equal, warps, &same);
        bool in = i < n && (key > least || (equal && rank < equals));
        int place = taken + scan(in, warps, &all);
        if (in && place < k) chosen[place] = (float)i;
        taken += all;
        passed += same;
    }
    for (int i = taken + threadIdx.x; i < k; i += 256) chosen[i] = -1.0f;
}
