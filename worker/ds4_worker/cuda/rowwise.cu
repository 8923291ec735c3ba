/* Ops that look only at their own row: add, scale, glu, soft_cap, gate_row, scale_parts, slice_heads,
 * join_heads, combine, gather_rows; and pending_tokens, which is no op.
 *
 * Reference: native/exec_rows.c with op_vector.c; same bits. Every kernel: parameter ds4_rowwise, grid
 * (blocks over the width of y, rows), block (256), no shared memory. Rows of x, b and y are x_stride,
 * b_stride and y_stride bytes apart; in-place use is fine where an element reads only its own place
 * (add, scale, glu, soft_cap, gate_row, scale_parts).
 */
#include "op_math.h"

struct ds4_rowwise {
    uint64_t x, b, y; /* b: second operand; routes of combine; row numbers (int32) of gather_rows
                         and pending_tokens */
    uint64_t live;
    uint64_t scales, bias; /* scale_parts: floats, of `dim` experts or one; of a row, 0: none */
    uint32_t x_stride, b_stride, y_stride;
    int32_t rows, width;               /* width: floats of a row of y */
    int32_t heads, dim, first, part;   /* slice_heads: dim of a head in x, first and part kept;
                                          join_heads: part = floats of b in a head, dim = 0 when one
                                          head of b serves all; combine: heads = experts per token */
    int32_t mode;                      /* glu */
    float value, limit, alpha;         /* factor of scale, cap of soft_cap; glu */
    int32_t reserved;
};

#define ROWS_OF(p)                                                                                 \
    int row = blockIdx.y;                                                                          \
    if (row >= ds4_rows(p.live, p.rows)) return;                                                   \
    const float *x = ds4_row<const float>(p.x, p.x_stride, row);                                   \
    float *y = ds4_row<float>(p.y, p.y_stride, row);                                               \
    (void)x
#define EACH(i, p)                                                                                 \
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.width; i += gridDim.x * blockDim.x)

DS4_KERNEL(add, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    const float *b = ds4_row<const float>(p.b, p.b_stride, row);
    EACH(i, p) y[i] = x[i] + b[i];
}

DS4_KERNEL(scale, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    EACH(i, p) y[i] = x[i] * p.value;
}

/* x = gate, b = up */
DS4_KERNEL(glu, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    const float *up = ds4_row<const float>(p.b, p.b_stride, row);
    EACH(i, p) y[i] = ds4_gated(p.mode, p.limit, p.alpha, x[i], up[i]);
}

DS4_KERNEL(soft_cap, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    EACH(i, p) y[i] = ds4_soft_cap(x[i], p.value);
}

/* b = one float per row */
DS4_KERNEL(gate_row, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    float factor = 1.0f / (1.0f + ds4_exp(-*ds4_row<const float>(p.b, p.b_stride, row)));
    EACH(i, p) y[i] = x[i] * factor;
}

/* b = routes where heads, the experts per token, is not 0 */
DS4_KERNEL(scale_parts, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    const float *scales = (const float *)p.scales, *bias = (const float *)p.bias;
    const float *chosen = p.heads ? ds4_row<const float>(p.b, p.b_stride, row) : (const float *)0;
    EACH(i, p) {
        float number = chosen ? chosen[i / (p.width / p.heads)] : 0.0f;
        float scale = scales[number >= 0.0f && number < (float)p.dim ? (uint32_t)number : 0u];
        y[i] = bias ? x[i] * scale + bias[i] : x[i] * scale;
    }
}

DS4_KERNEL(slice_heads, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    EACH(i, p) y[i] = x[i / p.part * p.dim + p.first + i % p.part];
}

DS4_KERNEL(join_heads, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    const float *b = ds4_row<const float>(p.b, p.b_stride, row);
    int whole = p.width / p.heads, left = whole - p.part;
    EACH(i, p) {
        int head = i / whole, at = i % whole;
        y[i] = at < left ? x[head * left + at] : b[head * p.dim + at - left];
    }
}

/* x [k width], b = routes [2 k]: the sum in the order of the choice */
DS4_KERNEL(combine, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    const float *weight = ds4_row<const float>(p.b, p.b_stride, row) + p.heads;
    EACH(i, p) {
        float sum = 0.0f;
        for (int j = 0; j < p.heads; j++) sum = fmaf(weight[j], x[(int64_t)j * p.width + i], sum);
        y[i] = sum;
    }
}

/* y row r = x row rows[r]; `live` counts rows of y */
DS4_KERNEL(gather_rows, ds4_rowwise, 256, 2) {
    ROWS_OF(p);
    const float *from = ds4_row<const float>(p.x, p.x_stride, ((const int *)p.b)[row]);
    EACH(i, p) y[i] = from[i];
}

/* int32 y[r] = x[b[r]] wherever b[r] >= 0: a token that the step before drew, x, takes its place in
 * this step. A draw that failed gives token 0: nobody reads what comes of it. Width 1. */
DS4_KERNEL(pending_tokens, ds4_rowwise, 256, 2) {
    int row = blockIdx.y;
    if (row >= ds4_rows(p.live, p.rows) || threadIdx.x) return;
    int from = ((const int *)p.b)[row];
    if (from < 0) return;
    int token = ((const int *)p.x)[from];
    ((int *)p.y)[row] = token < 0 ? 0 : token;
}
