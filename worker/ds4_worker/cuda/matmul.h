/* Products of a quantized matrix with many activation columns: prefill, on tensor cores.
 *
 * Reference: native/matmul_scalar.c; same bits as matvec. A block of four warps takes 64 rows x 64
 * columns. In stages of 128 weights its threads decode the rows' units into shared memory as signed
 * bytes and copy the columns' bytes beside them; each warp multiplies 16 rows with the 64 columns by
 * integer mma: the products of a unit (or of its two sixteens, where their scales differ) are exact
 * sums, scaled and added up to the block's exact sum as integers; then one float FMA per block (two
 * with a minimum), in the order of blocks. Rows and columns beyond the edge are zeros.
 *
 * Kernel matmul, parameter ds4_matmul, block (128), no dynamic shared memory. Dense (tiles = 0): grid
 * (ceil(rows / 64), ceil(columns / 64)). Of experts: grid (ceil(rows / 64), most tiles in y and z), tiles of
 * at most 64 columns of one expert made by sort_experts. One kernel for both, so that it is compiled once.
 */
#ifndef DS4_CUDA_MATMUL_H
#define DS4_CUDA_MATMUL_H

#include "quants.h"
#include "weight_params.h"

#define DS4_TILE DS4_MATMUL_COLUMNS
#define DS4_STAGE_UNITS 4
#define DS4_STAGE_BYTES (32 * DS4_STAGE_UNITS + 16) /* of a row or column: other banks for neighbours */

struct ds4_matmul_shared {
    ds4_matmul_columns at;
    uint8_t a[DS4_TILE * DS4_STAGE_BYTES], b[DS4_TILE * DS4_STAGE_BYTES]; /* rows, columns */
#if DS4_SUPER
    int16_t sc[DS4_TILE][2 * DS4_STAGE_UNITS], sums[DS4_TILE][2 * DS4_STAGE_UNITS];
    int16_t mn[DS4_HAS_MIN ? DS4_TILE : 1][2 * DS4_STAGE_UNITS];
    float d[DS4_TILE], m[DS4_TILE], dx[DS4_TILE];
#else
    float d[DS4_TILE][2 * DS4_STAGE_UNITS]; /* per sixteen of NVFP4, else per unit */
    float m[DS4_TILE][DS4_STAGE_UNITS], dx[DS4_TILE][DS4_STAGE_UNITS], sx[DS4_TILE][DS4_STAGE_UNITS];
#endif
};

/* Units [first, first + 4) of the tile's rows, by all threads. */
static __device__ __forceinline__ void ds4_stage_rows(const ds4_matvec &p, int64_t matrix, int row0,
                                                      int first, ds4_matmul_shared &shared) {
    int n = p.cols / DS4_BLOCK_WEIGHTS;
    for (int i = threadIdx.x; i < DS4_TILE * DS4_STAGE_UNITS; i += 128) {
        int r = i / DS4_STAGE_UNITS, at = i % DS4_STAGE_UNITS, number = first + at;
        int b = number / DS4_UNITS, u = number % DS4_UNITS;
        ds4_unit unit = {};
        ds4_block block = {};
        bool live = row0 + r < p.rows && b < n;
        float d = 0.0f, m = 0.0f;
        (void)d, (void)m; /* unused where sixteens have scales */
        if (live) {
            block = ds4_block_at((const uint8_t *)p.weight, (int64_t)p.rows * p.experts * n,
                                 matrix * p.rows + row0 + r, n, b);
            ds4_decode(block, u, ds4_grid, unit);
            d = ds4_block_d(block);
#if DS4_HAS_MIN
            m = ds4_block_m(block);
#endif
        }
        int4 *to = (int4 *)(shared.a + r * DS4_STAGE_BYTES + 32 * at);
        to[0] = make_int4(unit.w[0], unit.w[1], unit.w[2], unit.w[3]);
        to[1] = make_int4(unit.w[4], unit.w[5], unit.w[6], unit.w[7]);
#if DS4_SUPER
        shared.sc[r][2 * at] = (int16_t)unit.sc[0];
        shared.sc[r][2 * at + 1] = (int16_t)unit.sc[1];
#if DS4_HAS_MIN
        shared.mn[r][2 * at] = (int16_t)unit.mn[0];
        shared.mn[r][2 * at + 1] = (int16_t)unit.mn[1];
#endif
        if (at == 0) {
            shared.d[r] = d;
            shared.m[r] = m;
        }
#elif DS4_TWO_SCALES
        shared.d[r][2 * at] = live ? ds4_sixteen_d(block, 2 * u) : 0.0f;
        shared.d[r][2 * at + 1] = live ? ds4_sixteen_d(block, 2 * u + 1) : 0.0f;
#else
        shared.d[r][at] = d;
        shared.m[r][at] = m;
#endif
    }
}

/* The same of the tile's columns. */
static __device__ __forceinline__ void ds4_stage_columns(const ds4_matvec &p, int columns, int first,
                                                         ds4_matmul_shared &shared) {
    for (int i = threadIdx.x; i < DS4_TILE * DS4_STAGE_UNITS; i += 128) {
        int c = i / DS4_STAGE_UNITS, at = i % DS4_STAGE_UNITS, number = first + at;
        bool live = c < columns && 32 * number < p.cols;
        char *act = live ? (char *)shared.at.act[c] : (char *)0;
        int4 zero = {0, 0, 0, 0}, *to = (int4 *)(shared.b + c * DS4_STAGE_BYTES + 32 * at);
        to[0] = live ? *(const int4 *)(act + 32 * number) : zero;
        to[1] = live ? *(const int4 *)(act + 32 * number + 16) : zero;
#if DS4_SUPER
        ds4_act256 x = ds4_act256_view(act, p.cols);
        int b = number / 8, u = number % 8;
        shared.sums[c][2 * at] = live ? x.sums[16 * b + u] : (int16_t)0;
        shared.sums[c][2 * at + 1] = live ? x.sums[16 * b + 8 + u] : (int16_t)0;
        if (at == 0) shared.dx[c] = live ? x.d[b] : 0.0f;
#else
        ds4_act32 x = ds4_act32_view(act, p.cols);
        shared.dx[c][at] = live ? x.d[number] : 0.0f;
        shared.sx[c][at] = live ? x.s[number] : 0.0f;
#endif
    }
}

DS4_KERNEL(matmul, ds4_matmul, 128, 2) {
    const ds4_matvec &product = p.product;
    ds4_column_tile tile = ds4_tile_of(p);
    if (tile.columns <= 0) return;
    __shared__ ds4_matmul_shared shared;
    ds4_find_columns(p, tile, DS4_SUPER ? DS4_ACT_Q8_256 : DS4_ACT_Q8_32, shared.at);
    int lane = threadIdx.x & 31, group = lane / 4, pair = lane % 4, top = threadIdx.x / 32 * 16;
    int rows[2] = {top + group, top + group + 8};
    float acc[8][4];
#if DS4_SUPER
    int sum[8][4], low[8][4];
#endif
#pragma unroll
    for (int eight = 0; eight < 8; eight++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[eight][i] = 0.0f;
    int units = product.cols / 32, row0 = blockIdx.x * DS4_TILE;
    for (int first = 0; first < units; first += DS4_STAGE_UNITS) {
        ds4_sync_block();
        ds4_stage_rows(product, tile.matrix, row0, first, shared);
        ds4_stage_columns(product, tile.columns, first, shared);
        ds4_sync_block();
#if DS4_SUPER
        if (first % 8 == 0) {
#pragma unroll
            for (int eight = 0; eight < 8; eight++)
#pragma unroll
                for (int i = 0; i < 4; i++) sum[eight][i] = low[eight][i] = 0;
        }
#endif
#pragma unroll 1
        for (int at = 0; at < DS4_STAGE_UNITS && first + at < units; at++) {
            const uint8_t *left = shared.a + 32 * at + 4 * pair;
            int a[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = *(const int *)(left + rows[i % 2] * DS4_STAGE_BYTES + 16 * (i / 2));
#pragma unroll
            for (int eight = 0; eight < 8; eight++) {
                const uint8_t *right = shared.b + (8 * eight + group) * DS4_STAGE_BYTES + 32 * at + 4 * pair;
                int b[2] = {*(const int *)right, *(const int *)(right + 16)};
#if DS4_SIXTEENS || DS4_TWO_SCALES
                int first16[4] = {0, 0, 0, 0}, second16[4] = {0, 0, 0, 0};
                ds4_mma_k16(first16, a[0], a[1], b[0]);
                ds4_mma_k16(second16, a[2], a[3], b[1]);
#else
                int whole[4] = {0, 0, 0, 0};
                ds4_mma_k32(whole, a, b);
#endif
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int r = rows[i / 2], c = 8 * eight + 2 * pair + i % 2;
                    (void)r, (void)c;
#if DS4_SUPER
#if DS4_SIXTEENS
                    sum[eight][i] += shared.sc[r][2 * at] * first16[i] +
                                    shared.sc[r][2 * at + 1] * second16[i];
#else
                    sum[eight][i] += shared.sc[r][2 * at] * whole[i];
#endif
#if DS4_HAS_MIN
                    low[eight][i] += shared.mn[r][2 * at] * shared.sums[c][2 * at] +
                                    shared.mn[r][2 * at + 1] * shared.sums[c][2 * at + 1];
#endif
#elif DS4_TWO_SCALES
                    float dx = shared.dx[c][at];
                    acc[eight][i] = fmaf(shared.d[r][2 * at] * dx, (float)first16[i], acc[eight][i]);
                    acc[eight][i] = fmaf(shared.d[r][2 * at + 1] * dx, (float)second16[i], acc[eight][i]);
#else
                    acc[eight][i] =
                        fmaf(shared.d[r][at] * shared.dx[c][at], (float)whole[i], acc[eight][i]);
#if DS4_HAS_MIN
                    acc[eight][i] = fmaf(shared.m[r][at], shared.sx[c][at], acc[eight][i]);
#endif
#endif
                }
            }
        }
#if DS4_SUPER
        if (first % 8 == 0) continue; /* half of the block */
#pragma unroll
        for (int eight = 0; eight < 8; eight++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int r = rows[i / 2], c = 8 * eight + 2 * pair + i % 2;
                float dx = shared.dx[c];
                acc[eight][i] = fmaf(shared.d[r] * dx, (float)sum[eight][i], acc[eight][i]);
#if DS4_HAS_MIN
                acc[eight][i] = fmaf(shared.m[r] * dx, (float)low[eight][i], acc[eight][i]);
#endif
            }
#endif
    }
#pragma unroll
    for (int eight = 0; eight < 8; eight++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = row0 + rows[i / 2], c = 8 * eight + 2 * pair + i % 2;
            if (r < product.rows && c < tile.columns)
                ds4_put_product(p, tile, shared.at, r, c, acc[eight][i]);
        }
}

#endif
