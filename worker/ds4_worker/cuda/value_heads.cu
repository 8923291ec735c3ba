/* The value rows of each head out of the published artifact 7 (Q8_0, transposed: docs/layouts.md).
 *
 * Reference: native/matmul_scalar.c over the raw rows; same bits: exact integer sums per block of 32, then
 * one FMA per block in block order. Kernel matvec_experts of layout 7, without routes: matrix h, of 128
 * rows, meets column h of each token. Parameter ds4_matvec (rows 128, experts = used = heads), grid (1,
 * tokens * used in y and z), block (128): a thread per value dim, so that a warp reads 32 neighbouring bytes.
 */
#include "weight_params.h"

#define VALUE_DIM 128

DS4_KERNEL(matvec_experts, ds4_matvec, 128, 4) {
    int number = ds4_block_row(), token = number / p.used, head = number % p.used, d = threadIdx.x;
    if (token >= ds4_rows(p.live, p.columns)) return;
    int blocks = p.cols / 32;
    char *act = ds4_row<char>(p.acts, p.act_stride, token);
    if (p.act_columns > 1) act += head * ds4_act_bytes(DS4_ACT_Q8_32, p.cols);
    ds4_act32 x = ds4_act32_view(act, p.cols);
    int64_t first = (int64_t)head * blocks;
    const uint16_t *scales = (const uint16_t *)p.weight + first * VALUE_DIM + d;
    const int8_t *codes = (const int8_t *)p.weight + 2ll * p.experts * blocks * VALUE_DIM +
                          32 * first * VALUE_DIM + d;
    float sum = 0.0f;
    for (int b = 0; b < blocks; b++, scales += VALUE_DIM, codes += 32 * VALUE_DIM) {
        int dot = 0;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            int q = *(const int *)(x.q + 32 * b + i);
#pragma unroll
            for (int t = 0; t < 4; t++)
                dot += codes[(i + t) * VALUE_DIM] * (int)(int8_t)(q >> (8 * t));
        }
        sum = fmaf(ds4_half_to_float(*scales) * x.d[b], (float)dot, sum);
    }
    ds4_row<float>(p.y, p.y_stride, token)[(int64_t)head * VALUE_DIM + d] = sum;
}
