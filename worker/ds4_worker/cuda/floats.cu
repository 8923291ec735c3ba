/* All kernels over a matrix of floats: DS4_TYPE 0 (F32), 1 (F16) or 30 (BF16). Same names, parameters
 * and grids as those of quantized matrices (embed.h, matvec.h).
 *
 * Reference: native/matmul_scalar.c (dot_float); same bits. An output is summed in eight chains,
 * number k mod 8, in order of k, then by a fixed tree. A warp takes four rows, eight lanes per row,
 * a lane per chain. Activations are plain floats. Dense grids go over eight columns at a time, for any
 * number of columns; no dynamic shared memory.
 */
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

/* Rows row0 .. of one matrix times up to eight columns. */
template <typename Act, typename Finish>
static __device__ __forceinline__ void float_rows(const ds4_matvec &p, int64_t matrix, int row0,
                                                  int columns, Act act_of, Finish finish) {
    int lane = threadIdx.x & 31, chain = lane & 7;
    int row = row0 + 4 * (threadIdx.x / 32) + lane / 8;
    if (row0 + 4 * (int)(threadIdx.x / 32) >= p.rows) return; /* whole warps */
    int64_t number = matrix * p.rows + (row < p.rows ? row : p.rows - 1);
    const uint8_t *weights = (const uint8_t *)p.weight + number * p.cols * WEIGHT_BYTES;
    const float *acts[8];
    float sum[8];
#pragma unroll
    for (int c = 0; c < 8; c++) {
        acts[c] = act_of(c < columns ? c : 0);
        sum[c] = 0.0f;
    }
    if (columns == 1) {
#pragma unroll 8
        for (int k = chain; k < p.cols; k += 8) sum[0] = fmaf(weight_at(weights, k), acts[0][k], sum[0]);
    } else {
        for (int k = chain; k < p.cols; k += 8) {
            float weight = weight_at(weights, k);
#pragma unroll
            for (int c = 0; c < 8; c++)
                if (c < columns) sum[c] = fmaf(weight, acts[c][k], sum[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < 8; c++) {
        if (c >= columns) break;
        float value = sum[c];
        for (int step = 4; step; step >>= 1) value += ds4_shuffle_xor(value, step);
        if (chain == 0 && row < p.rows) finish(row, c, value);
    }
}

DS4_KERNEL(matvec, ds4_matvec, 128, 4) {
    int first = blockIdx.y * 8, columns = ds4_rows(p.live, p.columns) - first;
    if (columns <= 0) return;
    float_rows(
        p, 0, blockIdx.x * 16, columns < 8 ? columns : 8,
        [&](int c) { return ds4_row<const float>(p.acts, p.act_stride, first + c); },
        [&](int row, int c, float value) {
            if (p.bias) value += ((const float *)p.bias)[row];
            ds4_row<float>(p.y, p.y_stride, first + c)[row] = value;
        });
}

DS4_KERNEL(matvec_experts, ds4_matvec, 128, 4) {
    int number = ds4_block_row(), token = number / p.used, place = number % p.used;
    if (token >= ds4_rows(p.live, p.columns)) return;
    int expert = ds4_expert_of(p, token, place);
    const float *act = ds4_row<const float>(p.acts, p.act_stride, token);
    if (p.act_columns > 1) act += place * ds4_act_bytes(DS4_ACT_F32, p.cols) / 4;
    float_rows(
        p, expert, blockIdx.x * 16, 1, [&](int) { return act; },
        [&](int row, int, float value) {
            if (p.bias) value += ((const float *)p.bias)[(int64_t)expert * p.rows + row];
            ds4_row<float>(p.y, p.y_stride, token)[(int64_t)place * p.rows + row] = value;
        });
}
