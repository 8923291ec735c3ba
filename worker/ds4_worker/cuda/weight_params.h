/* Parameters of the kernels over a weight, whatever its type: embed, matvec,
 * matvec_experts and matmul. */
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

#define DS4_MORE_MATRICES 2

struct ds4_matvec {
    uint64_t weight, acts, y;
    uint64_t bias;   /* float[rows], of experts float[experts][rows], or 0 */
    uint64_t routes; /* float rows: `used` numbers of experts first; 0: dense, or one matrix per head */
    uint64_t live;   /* tokens in use */
    uint32_t act_stride, y_stride, route_stride;
    int32_t rows, cols, columns; /* of one matrix; columns: tokens */
    int32_t experts, used;       /* 1, 1 when dense */
    int32_t act_columns;         /* of a token: 1, or `used`, each of ds4_act_bytes(cols) bytes */
    int32_t warp_rows, stages;   /* of matvec: rows of a warp, 1 to 4; chunks in shared memory (stage.h) */
    int32_t reserved;
    /* of matvec: more matrices of the same type and width, which meet the same columns; rows 0: none */
    uint64_t more_weight[DS4_MORE_MATRICES], more_y[DS4_MORE_MATRICES], more_bias[DS4_MORE_MATRICES];
    uint32_t more_y_stride[DS4_MORE_MATRICES];
    int32_t more_rows[DS4_MORE_MATRICES];
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

/* The product that a block of rows belongs to, when there are more matrices; `block` becomes its number
 * there. */
static __device__ __forceinline__ ds4_matvec ds4_matrix_of(const ds4_matvec &p, int &block) {
    ds4_matvec own = p;
#pragma unroll
    for (int i = 0; i < DS4_MORE_MATRICES; i++) {
        int blocks = (own.rows + 4 * own.warp_rows - 1) / (4 * own.warp_rows);
        if (block < blocks || !p.more_rows[i]) break;
        block -= blocks;
        own.weight = p.more_weight[i], own.y = p.more_y[i], own.bias = p.more_bias[i];
        own.y_stride = p.more_y_stride[i], own.rows = p.more_rows[i];
    }
    return own;
}

/* ---- many columns ---------------------------------------------------------------------------- */

#define DS4_MATMUL_COLUMNS 64 /* of a tile, at most */

struct ds4_matmul {
    ds4_matvec product;
    uint64_t sorted;  /* int32: columns by expert, token * used + place; 0 with the next: dense */
    uint64_t tiles;   /* int32[][4]: expert, first, count, 0 */
    uint64_t n_tiles; /* int32 */
};

struct ds4_column_tile {
    int matrix, first, columns;
};

/* Where a tile's columns come from, and where their outputs go. */
struct ds4_matmul_columns {
    const char *act[DS4_MATMUL_COLUMNS];
    float *y[DS4_MATMUL_COLUMNS];
};

/* The block's tile; without columns when there is none. */
static __device__ __forceinline__ ds4_column_tile ds4_tile_of(const ds4_matmul &p) {
    int number = ds4_block_row();
    ds4_column_tile tile = {0, number * DS4_MATMUL_COLUMNS, 0};
    if (p.tiles) {
        if (number >= *(const int *)p.n_tiles) return tile;
        int4 listed = ((const int4 *)p.tiles)[number];
        return {listed.x, listed.y, listed.z};
    }
    int left = ds4_rows(p.product.live, p.product.columns) - tile.first;
    tile.columns = left < DS4_MATMUL_COLUMNS ? left : DS4_MATMUL_COLUMNS;
    return tile;
}

/* By the block: addresses of the tile's columns. They are there after the next barrier. */
static __device__ __forceinline__ void ds4_find_columns(const ds4_matmul &p, const ds4_column_tile &tile,
                                                        int format, ds4_matmul_columns &at) {
    const ds4_matvec &product = p.product;
    int c = threadIdx.x;
    if (c >= tile.columns) return;
    int column = p.sorted ? ((const int *)p.sorted)[tile.first + c] : tile.first + c;
    int token = column / product.used, place = column % product.used;
    int64_t step = product.act_columns > 1 ? ds4_act_bytes(format, product.cols) : 0;
    at.act[c] = ds4_row<const char>(product.acts, product.act_stride, token) + place * step;
    at.y[c] = ds4_row<float>(product.y, product.y_stride, token) + (int64_t)place * product.rows;
}

static __device__ __forceinline__ void ds4_put_product(const ds4_matmul &p, const ds4_column_tile &tile,
                                                       const ds4_matmul_columns &at, int row, int c,
                                                       float value) {
    if (p.product.bias)
        value += ((const float *)p.product.bias)[(int64_t)tile.matrix * p.product.rows + row];
    at.y[c][row] = value;
}

#endif
