/* Parameters of the kernels over a weight, whatever its type: embed, matvec, matvec_experts. */
#ifndef DS4_CUDA_WEIGHT_PARAMS_H
#define DS4_CUDA_WEIGHT_PARAMS_H

#include "act.h"

struct ds4_embed {
    uint64_t table, tokens, y, live; /* tokens: int32[n] or 0 */
    int64_t table_rows;              /* all rows of the tensor: layouts 4 and up need it */
    uint32_t y_stride;
    int32_t rows, cols; /* rows: of y */
    float factor;
};

struct ds4_matvec {
    uint64_t weight, acts, y;
    uint64_t bias;   /* float[rows], of experts float[experts][rows], or 0 */
    uint64_t routes; /* float rows: `used` numbers of experts first; 0: dense, or one matrix per head */
    uint64_t live;   /* tokens in use */
    uint32_t act_stride, y_stride, route_stride;
    int32_t rows, cols, columns; /* of one matrix; columns: tokens */
    int32_t experts, used;       /* 1, 1 when dense */
    int32_t act_columns;         /* of a token: 1, or `used`, each of ds4_act_bytes(cols) bytes */
    int32_t reserved;
};

/* The number of a block in y, of more than the 65535 that a grid has there: limits.py folded. */
static __device__ __forceinline__ int ds4_block_row() {
    return (int)(blockIdx.z * gridDim.y + blockIdx.y);
}

/* The matrix that place `place` of a token meets. A number that is none counts as 0. */
static __device__ __forceinline__ int ds4_expert_of(const ds4_matvec &p, int token, int place) {
    if (!p.routes) return place;
    float number = ds4_row<const float>(p.routes, p.route_stride, token)[place];
    return number >= 0.0f && number < (float)p.experts ? (int)number : 0;
}

#endif
