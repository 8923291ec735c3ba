/* embed: rows of a quantized table as floats, times a factor.
 *
 * Reference: ds4_dequant_row (native/quants.c) and exec_rows.c (embed); same bits. Kernel embed:
 * parameter ds4_embed, grid (ceil(cols / 4096), tokens), block (128): a thread decodes one unit of 32
 * weights. With tokens = 0 addresses it reads row 0 for token 0, row 1 for token 1 and so on: how
 * one-row weights become float vectors at load.
 */
#ifndef DS4_CUDA_EMBED_H
#define DS4_CUDA_EMBED_H

#include "quants.h"
#include "weight_params.h"

DS4_KERNEL(embed, ds4_embed, 128, 4) {
    int row = blockIdx.y, at = blockIdx.x * 128 + threadIdx.x, n = p.cols / DS4_BLOCK_WEIGHTS;
    if (row >= ds4_rows(p.live, p.rows) || at >= n * DS4_UNITS) return;
    int64_t from = p.tokens ? ((const int *)p.tokens)[row] : row;
    int u = at % DS4_UNITS;
    ds4_block block = ds4_block_at((const uint8_t *)p.table, p.table_rows * n, from, n,
                                   at / DS4_UNITS);
    ds4_unit unit;
    ds4_decode(block, u, ds4_grid, unit);
    float d = ds4_block_d(block), *y = ds4_row<float>(p.y, p.y_stride, row) + 32 * at;
#pragma unroll
    for (int k = 0; k < 32; k++) {
        float weight = (float)(int8_t)(unit.w[k / 4] >> (8 * (k % 4)));
        float scale = d;
#if DS4_SUPER
        scale = d * (float)unit.sc[k / 16];
#elif DS4_TWO_SCALES
        scale = ds4_sixteen_d(block, 2 * u + k / 16);
#endif
        float value = scale * weight;
#if DS4_HAS_MIN && DS4_SUPER
        value += ds4_block_m(block) * (float)unit.mn[k / 16];
#elif DS4_HAS_MIN
        value += ds4_block_m(block);
#endif
        y[k] = p.factor != 1.0f ? value * p.factor : value;
    }
}

#endif
