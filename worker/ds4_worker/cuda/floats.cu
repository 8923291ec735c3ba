/* All kernels over a matrix of floats: DS4_TYPE 0 (F32), 1 (F16) or 30 (BF16). Same names, parameters
 * and grids as those of quantized matrices (embed.h, matvec.h).
 *
 * Reference: native/matmul_scalar.c (dot_float); same bits. An output is summed in eight chains,
 * number k mod 8, in order of k, then by a fixed tree. A warp takes `warp_rows` rows, eight lanes per row,
 * a lane per chain; the rows come through shared memory (stage.h), KiB by KiB. Activations are plain
 * floats. matvec goes over eight columns at a time; matmul over 64, grid (ceil(rows / 32), ...) as in
 * matmul.h, block (256), no dynamic shared memory.
 */
#include "stage.h"
#include "weight_params.h"

static __device__ __forceinline__ float weight_at(const uint8_t *row, int64_t k) {
#if DS4_TYPE == 0
    return ((const float *)row)[k];
#elif DS4_TYPE == 1
    return ds4_half_to_float(((const uint16_t *)row)[k]);
#else
    return ds4_float((uint32_t)((const uint16_t *)row)[k] << 16);
#endif
}
#define WEIGHT_BYTES (DS4_TYPE == 0 ? 4 : 2)

DS4_KERNEL(embed, ds4_embed, 128, 4) {
    int row = blockIdx.y;
    if (row >= ds4_rows(p.live, p.rows)) return;
    int64_t from = p.tokens ? ((const int *)p.tokens)[row] : row;
    const uint8_t *weights = (const uint8_t *)p.table + from * p.cols * WEIGHT_BYTES;
    float *y = ds4_row<float>(p.y, p.y_stride, row);
    for (int k = blockIdx.x * 4096 + threadIdx.x; k < p.cols && k < (int)(blockIdx.x + 1) * 4096;
         k += 128) {
        float value = weight_at(weights, k);
        y[k] = p.factor != 1.0f ? value * p.factor : value;
    }
}

#define CHUNK_BYTES 1024
#define CHUNK (CHUNK_BYTES / WEIGHT_BYTES)
#define LINE_BYTES (DS4_RUN_ROOM(CHUNK_BYTES) + 32) /* rows meet other banks */

/* Rows row0 .. of one matrix times up to eight columns. */
template <typename Act, typename Finish>
static __device__ __forceinline__ void float_rows(const ds4_matvec &p, int64_t matrix, int row0, int columns,
                                                  uint8_t *shared, Act act_of, Finish finish) {
    int lane = threadIdx.x & 31, chain = lane & 7, own = lane / 8;
    int first = row0 + p.warp_rows * (int)(threadIdx.x / 32), left = p.rows - first;
    int rows = left < p.warp_rows ? left : p.warp_rows;
    if (rows <= 0) return; /* whole warps */
    int64_t row_bytes = (int64_t)p.cols * WEIGHT_BYTES;
    const uint8_t *weights = (const uint8_t *)p.weight + (matrix * p.rows + first) * row_bytes;
    const uint8_t *mine = weights + (own < rows ? own : 0) * row_bytes;
    const float *acts[8];
    float sum[8];
#pragma unroll
    for (int c = 0; c < 8; c++) {
        acts[c] = act_of(c < columns ? c : 0);
        sum[c] = 0.0f;
    }
    auto copy = [&](int chunk, uint8_t *to) {
        int64_t from = (int64_t)chunk * CHUNK_BYTES;
        int bytes = (int)(row_bytes - from < CHUNK_BYTES ? row_bytes - from : CHUNK_BYTES);
        for (int r = 0; r < rows; r++)
            ds4_stage_run<0>(weights + r * row_bytes + from, bytes, to + r * LINE_BYTES);
    };
    auto compute = [&](int chunk, const uint8_t *lines) {
        int from = chunk * CHUNK, count = p.cols - from < CHUNK ? p.cols - from : CHUNK;
        const uint8_t *line = lines + (own < rows ? own : 0) * LINE_BYTES +
                              ds4_run_shift(mine + (int64_t)chunk * CHUNK_BYTES);
        if (columns == 1) {
            const float *act = acts[0] + from;
#pragma unroll 8
            for (int k = chain; k < count; k += 8) sum[0] = fmaf(weight_at(line, k), act[k], sum[0]);
        } else {
            for (int k = chain; k < count; k += 8) {
                float weight = weight_at(line, k);
#pragma unroll
                for (int c = 0; c < 8; c++)
                    if (c < columns) sum[c] = fmaf(weight, acts[c][from + k], sum[c]);
            }
        }
    };
    uint8_t *ring = shared + threadIdx.x / 32 * p.stages * 4 * LINE_BYTES;
    ds4_walk((int)((row_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES), p.stages, 4 * LINE_BYTES, ring, copy, compute);
#pragma unroll
    for (int c = 0; c < 8; c++) {
        if (c >= columns) break;
        float value = sum[c];
        for (int step = 4; step; step >>= 1) value += ds4_shuffle_xor(value, step);
        if (chain == 0 && own < rows) finish(first + own, c, value);
    }
}

DS4_KERNEL(matvec, ds4_matvec, 128, 4) {
    DS4_SHARED_BYTES(shared);
    int first = blockIdx.x * 8, columns = ds4_rows(p.live, p.columns) - first;
    if (columns <= 0) return;
    int block = ds4_block_row();
    const ds4_matvec own = ds4_matrix_of(p, block);
    float_rows(
        own, 0, block * 4 * own.warp_rows, columns < 8 ? columns : 8, shared,
        [&](int c) { return ds4_row<const float>(p.acts, p.act_stride, first + c); },
        [&](int row, int c, float value) {
            if (own.bias) value += ((const float *)own.bias)[row];
            ds4_row<float>(own.y, own.y_stride, first + c)[row] = value;
        });
}

DS4_KERNEL(matvec_experts, ds4_matvec, 128, 4) {
    DS4_SHARED_BYTES(shared);
    int number = ds4_block_row(), token = number / p.used, place = number % p.used;
    if (token >= ds4_rows(p.live, p.columns)) return;
    int expert = ds4_expert_of(p, token, place);
    const float *act = ds4_row<const float>(p.acts, p.act_stride, token);
    if (p.act_columns > 1) act += place * ds4_act_bytes(DS4_ACT_F32, p.cols) / 4;
    float_rows(
        p, expert, blockIdx.x * 4 * p.warp_rows, 1, shared, [&](int) { return act; },
        [&](int row, int, float value) {
            if (p.bias) value += ((const float *)p.bias)[(int64_t)expert * p.rows + row];
            ds4_row<float>(p.y, p.y_stride, token)[(int64_t)place * p.rows + row] = value;
        });
}

/* Many columns: 32 rows x 64 columns per block. A thread owns one of the eight chains of 8 x 8 outputs, so
 * the order of sums is that of float_rows; weights and columns come through shared memory, 32 at a time. */
#define TILE_ROWS 32
#define TILE_COLUMNS 64
#define TILE_DEPTH 32

DS4_KERNEL(matmul, ds4_matmul, 256, 2) {
    __shared__ float4 w[TILE_DEPTH][TILE_ROWS / 4 + 1]; /* other banks for neighbours */
    __shared__ float4 x[TILE_DEPTH][TILE_COLUMNS / 4 + 1];
    __shared__ ds4_matmul_columns at;
    const ds4_matvec &product = p.product;
    ds4_column_tile tile = ds4_tile_of(p);
    if (tile.columns <= 0) return;
    ds4_find_columns(p, tile, DS4_ACT_F32, at);
    int row0 = blockIdx.x * TILE_ROWS, lane = threadIdx.x & 31, warp = threadIdx.x / 32, chain = lane & 7;
    int r0 = 8 * (warp / 2), c0 = 8 * (warp % 2 * 4 + lane / 8);
    float sum[8][8];
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int c = 0; c < 8; c++) sum[r][c] = 0.0f;
    for (int first = 0; first < product.cols; first += TILE_DEPTH) {
        ds4_sync_block();
        for (int i = threadIdx.x; i < TILE_ROWS * TILE_DEPTH; i += 256) {
            int r = i / TILE_DEPTH, k = first + i % TILE_DEPTH;
            bool live = row0 + r < product.rows && k < product.cols;
            int64_t number = (int64_t)tile.matrix * product.rows + row0 + r;
            const uint8_t *weights = (const uint8_t *)product.weight + number * product.cols * WEIGHT_BYTES;
            ((float *)w[i % TILE_DEPTH])[r] = live ? weight_at(weights, k) : 0.0f;
        }
        for (int i = threadIdx.x; i < TILE_COLUMNS * TILE_DEPTH; i += 256) {
            int c = i / TILE_DEPTH, k = first + i % TILE_DEPTH;
            bool live = c < tile.columns && k < product.cols;
            ((float *)x[i % TILE_DEPTH])[c] = live ? ((const float *)at.act[c])[k] : 0.0f;
        }
        ds4_sync_block();
#pragma unroll 1
        for (int k = chain; k < TILE_DEPTH && first + k < product.cols; k += 8) {
            float4 left[2] = {w[k][r0 / 4], w[k][r0 / 4 + 1]}, right[2] = {x[k][c0 / 4], x[k][c0 / 4 + 1]};
            float a[8] = {left[0].x, left[0].y, left[0].z, left[0].w,
                          left[1].x, left[1].y, left[1].z, left[1].w};
            float b[8] = {right[0].x, right[0].y, right[0].z, right[0].w,
                          right[1].x, right[1].y, right[1].z, right[1].w};
#pragma unroll
            for (int r = 0; r < 8; r++)
#pragma unroll
                for (int c = 0; c < 8; c++) sum[r][c] = fmaf(a[r], b[c], sum[r][c]);
        }
    }
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int c = 0; c < 8; c++) {
            float value = sum[r][c];
            for (int step = 4; step; step >>= 1) value += ds4_shuffle_xor(value, step);
            int row = row0 + r0 + r;
            if (chain == 0 && row < product.rows && c0 + c < tile.columns)
                ds4_put_product(p, tile, at, row, c0 + c, value);
        }
}
