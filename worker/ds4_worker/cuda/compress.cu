/* Windows of consecutive tokens become one row each, and rows go to their pages.
 *
 * Reference: native/exec_compress.c, exec_rows.c (store_rows), op_vector.c (running_softmax); same bits.
 * compress: parameter ds4_compress, grid (ceil(dim / 128), tokens), block (128): the block of a run's
 * first token - of one bank, positions that follow each other - takes 128 dims of the run from its
 * first token to its last, the running softmax in registers. What a short run adds is kept, with the
 * state before it: the next one of the bank may begin inside it (native/exec_rewind.c), and adds the
 * tokens that stay once more. store_rows: parameter ds4_store_rows, grid
 * (tokens), block (128); tiles = 1: dim by dim, for index_rows. Tokens of banks below 0 are skipped.
 */
#include "rows.h"

struct ds4_compress {
    ds4_plane state; /* f32 [3 copies][dim] in each page: maximum, sum, weighted sum of each copy */
    uint64_t k, gate, bias, y, positions, banks, live; /* k, gate: [copies dim]; bias [ratio][..] */
    uint64_t kept;         /* f32 per bank: a state, then k and gate of each token; 0: nothing is */
    uint64_t kept_stride;  /* bytes from bank to bank */
    uint64_t again, keeps; /* int32[banks]: tokens before the run that are added again; whether the
                              run is kept */
    uint32_t k_stride, gate_stride, y_stride;
    int32_t tokens, copies, window;
};

struct running {
    float max, sum, weighted;
};

static __device__ __forceinline__ running nothing() { return {-DS4_INFINITY, 0.0f, 0.0f}; }

static __device__ __forceinline__ void take(running &to, float k, float gate, float bias) {
    float s = gate + bias, top = s > to.max ? s : to.max;
    float keep = ds4_exp(to.max - top), taken = ds4_exp(s - top);
    to.sum = fmaf(to.sum, keep, taken);
    to.weighted = fmaf(to.weighted, keep, taken * k);
    to.max = top;
}

static __device__ __forceinline__ running load(const float *state, int dim) {
    return {state[0], state[dim], state[2 * dim]};
}
static __device__ __forceinline__ void keep_in(float *state, int dim, const running &r) {
    state[0] = r.max;
    state[dim] = r.sum;
    state[2 * dim] = r.weighted;
}

/* The token at `position`, whose values of column i are at k and gate. */
static __device__ __forceinline__ void add(running &first, running &last, const float *k,
                                           const float *gate, const ds4_compress &p, int position,
                                           int i) {
    int dim = p.state.dim, phase = position % p.window;
    const float *bias = (const float *)p.bias + (int64_t)phase * p.copies * dim + i;
    if (phase == 0) {
        last = first;
        first = nothing();
    }
    take(first, k[0], gate[0], bias[0]);
    if (p.copies == 2) take(last, k[dim], gate[dim], bias[dim]);
}

DS4_KERNEL(compress, ds4_compress, 128, 4) {
    const int *banks = (const int *)p.banks, *positions = (const int *)p.positions;
    int token = blockIdx.y, i = blockIdx.x * 128 + threadIdx.x, dim = p.state.dim;
    int end = ds4_rows(p.live, p.tokens), page_tokens = p.state.page_tokens;
    if (token >= end || banks[token] < 0 || i >= dim) return;
    int bank = banks[token], position = positions[token], wide = p.copies * dim;
    if (token && banks[token - 1] == bank && positions[token - 1] == position - 1) return;
    running first = nothing(), last = nothing(); /* with one copy only the first counts */
    float *kept = (float *)(p.kept + bank * p.kept_stride) + i;
    float *kept_token = kept + 3 * wide;
    int again = p.kept ? ((const int *)p.again)[bank] : 0;
    bool keeps = p.kept && ((const int *)p.keeps)[bank];
    if (again) { /* go on before tokens that were there */
        first = load(kept, dim);
        if (p.copies == 2) last = load(kept + 3 * dim, dim);
        for (int j = again; j > 0; j--, kept_token += 2 * wide)
            add(first, last, kept_token, kept_token + wide, p, position - j, i);
        kept_token = kept + 3 * wide;
    } else if (position) { /* go on after the token before */
        const float *state =
            (const float *)ds4_plane_page(p.state, bank, (position - 1) / page_tokens) + i;
        first = load(state, dim);
        if (p.copies == 2) last = load(state + 3 * dim, dim);
    }
    if (keeps) {
        keep_in(kept, dim, first);
        if (p.copies == 2) keep_in(kept + 3 * dim, dim, last);
    }
    for (bool more = true; more; token++, position++) {
        int phase = position % p.window;
        const float *k = ds4_row<const float>(p.k, p.k_stride, token) + i;
        const float *gate = ds4_row<const float>(p.gate, p.gate_stride, token) + i;
        add(first, last, k, gate, p, position, i);
        for (int part = 0; keeps && part < wide; part += dim) {
            kept_token[part] = k[part];
            kept_token[wide + part] = gate[part];
        }
        kept_token += 2 * wide;
        float sum = p.copies == 2 ? last.sum : first.sum;
        float weighted = p.copies == 2 ? last.weighted : first.weighted;
        ds4_row<float>(p.y, p.y_stride, token)[i] = phase + 1 < p.window ? 0.0f : weighted / sum;
        more = token + 1 < end && banks[token + 1] == bank && positions[token + 1] == position + 1;
        if (more && (position + 1) % page_tokens) continue;
        float *state = (float *)ds4_plane_page(p.state, bank, position / page_tokens) + i;
        keep_in(state, dim, first);
        if (p.copies == 2) keep_in(state + 3 * dim, dim, last);
    }
}

struct ds4_store_rows {
    ds4_plane plane;
    uint64_t x, positions, banks, live;
    uint32_t x_stride;
    int32_t tokens, tiles, reserved;
};

DS4_KERNEL(store_rows, ds4_store_rows, 128, 4) {
    int token = blockIdx.x, ratio = p.plane.ratio, page_tokens = p.plane.page_tokens;
    if (token >= ds4_rows(p.live, p.tokens)) return;
    int bank = ((const int *)p.banks)[token], position = ((const int *)p.positions)[token];
    if (bank < 0 || (position + 1) % ratio) return;
    int records = ds4_plane_records(p.plane), place = position % page_tokens / ratio;
    const float *x = ds4_row<const float>(p.x, p.x_stride, token);
    uint16_t *to = (uint16_t *)ds4_plane_page(p.plane, bank, position / page_tokens);
    int width = (p.plane.dim + 7) / 8 * 8;
    for (int d = threadIdx.x; d < p.plane.dim; d += 128)
        to[p.tiles ? d * records + place : place * width + d] = ds4_float_to_half(x[d]);
}
