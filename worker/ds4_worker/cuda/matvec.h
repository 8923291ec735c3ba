/* Products of a quantized matrix with a few activation columns: decode.
 *
 * Reference: native/matmul_scalar.c; same bits, for any number of columns. A warp takes `warp_rows` rows
 * (4, or fewer of a small matrix, so that there are blocks for all multiprocessors) and walks along them
 * in chunks of 1024 or 2048 weights. The bytes of the next chunks come into shared memory in the
 * background (stage.h): the blocks, or of an artifact the runs of its sections. Each lane turns one unit
 * of 32 weights per row into an exact integer sum, sums of a block are added over its lanes (integers: any
 * order), and one lane per (row, column) runs the float FMAs over the chunk's blocks in order.
 *
 * Kernels: matvec (dense: grid (ceil(columns / 8), ceil(rows / (4 warp_rows)) in y and z): blocks of the same rows are
 * neighbours, so that the matrix is read once; the blocks of `more` matrices follow) and matvec_experts (grid (ceil(rows / (4 warp_rows)),
 * tokens * used in y and z): each column meets the matrix of its expert, or with routes = 0 the matrix of
 * its number). Parameter ds4_matvec, block (128), dynamic shared memory matvec_shared_bytes(...) of
 * kernels.py.
 */
#ifndef DS4_CUDA_MATVEC_H
#define DS4_CUDA_MATVEC_H

#include "quants.h"
#include "stage.h"
#include "weight_params.h"

#define DS4_MATVEC_ROWS 4
/* Two steps of 1024 weights where a block of eight columns still has room in 99 KiB: small blocks have
 * 32 terms a step, super-blocks 4. */
#define DS4_CHUNK_STEPS (DS4_BLOCK_BYTES * 1024 / DS4_BLOCK_WEIGHTS <= (DS4_SUPER ? 600 : 300) ? 2 : 1)
#define DS4_CHUNK_BLOCKS (DS4_CHUNK_STEPS * 1024 / DS4_BLOCK_WEIGHTS)
#define DS4_CHUNK_TERMS (DS4_SUPER ? 4 * DS4_CHUNK_STEPS : 32 * DS4_CHUNK_STEPS)
#define DS4_TERM_PAIRS (DS4_HAS_MIN || DS4_TWO_SCALES ? 2 : 1)
/* Terms of one (row, column), an odd number of words apart so that lanes meet other banks. */
#define DS4_TERM_STRIDE (DS4_CHUNK_TERMS * DS4_TERM_PAIRS + 1)

/* What a block has in each run of a line, which is a row's part of a chunk, or of two rows in pairs. */
#if DS4_LAYOUT == 0
#define DS4_CODE_BYTES DS4_BLOCK_BYTES
#define DS4_SCALE_BYTES 0
#define DS4_EXTRA_BYTES 0
#elif DS4_LAYOUT == 4 || DS4_LAYOUT == 8
#define DS4_CODE_BYTES 64
#define DS4_SCALE_BYTES 2
#define DS4_EXTRA_BYTES (DS4_LAYOUT == 8 ? 8 : 0)
#elif DS4_LAYOUT == 5
#define DS4_CODE_BYTES 32
#define DS4_SCALE_BYTES 2
#define DS4_EXTRA_BYTES 0
#else
#define DS4_CODE_BYTES 128
#define DS4_SCALE_BYTES 8
#define DS4_EXTRA_BYTES 32
#endif
#define DS4_LINE_ROWS (DS4_LAYOUT == 6 ? 2 : 1)
#define DS4_CODE_PAD (DS4_LAYOUT == 6 ? DS4_CODE_BYTES : 0) /* else blocks would meet in the same banks */
#define DS4_CODE_STRIDE (DS4_CODE_BYTES + (DS4_CODE_PAD ? 16 : 0))
#define DS4_RUN(bytes) ((bytes) ? DS4_RUN_ROOM(DS4_CHUNK_BLOCKS * (bytes)) : 0)
#define DS4_CODE_RUN DS4_RUN(DS4_CODE_STRIDE)
#define DS4_SCALE_RUN DS4_RUN(DS4_SCALE_BYTES)
#define DS4_LINE_BYTES (DS4_CODE_RUN + DS4_SCALE_RUN + DS4_RUN(DS4_EXTRA_BYTES))
#define DS4_RING_BYTES (DS4_MATVEC_ROWS / DS4_LINE_ROWS * DS4_LINE_BYTES)

/* Starts the copy of a line of `blocks` blocks from `first` on. */
static __device__ __forceinline__ void ds4_stage_line(const ds4_block &first, int blocks, uint8_t *to) {
    ds4_stage_run<DS4_CODE_PAD>(first.raw, blocks * DS4_CODE_BYTES, to);
#if DS4_SCALE_BYTES
    ds4_stage_run<0>(first.scale, blocks * DS4_SCALE_BYTES, to + DS4_CODE_RUN);
#endif
#if DS4_EXTRA_BYTES
    ds4_stage_run<0>(first.extra, blocks * DS4_EXTRA_BYTES, to + DS4_CODE_RUN + DS4_SCALE_RUN);
#endif
}

/* Block b of a line that has arrived; `row` of those that share it. */
static __device__ __forceinline__ ds4_block ds4_staged_block(const ds4_block &first, const uint8_t *line,
                                                             int row, int b) {
    ds4_block block = {line + ds4_run_shift(first.raw) + b * DS4_CODE_STRIDE, line, line, row};
#if DS4_SCALE_BYTES
    block.scale = line + DS4_CODE_RUN + ds4_run_shift(first.scale) + b * DS4_SCALE_BYTES +
                  row * (DS4_SCALE_BYTES / DS4_LINE_ROWS);
#endif
#if DS4_EXTRA_BYTES
    block.extra = line + DS4_CODE_RUN + DS4_SCALE_RUN + ds4_run_shift(first.extra) + b * DS4_EXTRA_BYTES;
#endif
    return block;
}

/* What a unit adds to an output: pairs (factor, value) of fmaf(factor, value, acc). */
static __device__ __forceinline__ void ds4_unit_terms(const ds4_block &block, float d, float m, int u,
                                                      const ds4_unit &unit, const char *act, int cols,
                                                      int number, bool live, float2 *terms, int term) {
    int4 q0 = {0, 0, 0, 0}, q1 = {0, 0, 0, 0};
    if (live) {
        q0 = *(const int4 *)(act + 32 * number);
        q1 = *(const int4 *)(act + 32 * number + 16);
    }
    int low = ds4_dp4a(unit.w[0], q0.x, ds4_dp4a(unit.w[1], q0.y,
              ds4_dp4a(unit.w[2], q0.z, ds4_dp4a(unit.w[3], q0.w, 0))));
    int high = ds4_dp4a(unit.w[4], q1.x, ds4_dp4a(unit.w[5], q1.y,
               ds4_dp4a(unit.w[6], q1.z, ds4_dp4a(unit.w[7], q1.w, 0))));
#if DS4_SUPER
    ds4_act256 x = ds4_act256_view((void *)act, cols);
    int b = number / 8;
    int sum = unit.sc[0] * low + unit.sc[1] * high;
#if DS4_HAS_MIN
    int minimum = live ? unit.mn[0] * x.sums[16 * b + u] + unit.mn[1] * x.sums[16 * b + 8 + u] : 0;
#endif
#pragma unroll
    for (int step = 4; step; step >>= 1) {
        sum += ds4_shuffle_xor(sum, step);
#if DS4_HAS_MIN
        minimum += ds4_shuffle_xor(minimum, step);
#endif
    }
    if (u == 0 && live) {
        float dx = x.d[b];
        terms[term] = make_float2(d * dx, (float)sum);
#if DS4_HAS_MIN
        terms[term + 1] = make_float2(m * dx, (float)minimum);
#endif
    }
#else
    if (!live) return;
    ds4_act32 x = ds4_act32_view((void *)act, cols);
    float dx = x.d[number];
#if DS4_TWO_SCALES
    terms[term] = make_float2(ds4_sixteen_d(block, 2 * u) * dx, (float)low);
    terms[term + 1] = make_float2(ds4_sixteen_d(block, 2 * u + 1) * dx, (float)high);
#else
    terms[term] = make_float2(d * dx, (float)(low + high));
#if DS4_HAS_MIN
    terms[term + 1] = make_float2(m, x.s[number]);
#endif
#endif
#endif
    (void)block, (void)d, (void)m, (void)u;
}

/* Rows row0 .. of one matrix times `columns` columns; `finish(r, c, value)` takes the outputs. */
template <typename Act, typename Finish>
static __device__ __forceinline__ void ds4_matvec_rows(const ds4_matvec &p, int64_t matrix, int row0,
                                                       int columns, uint8_t *shared, Act act_of,
                                                       Finish finish) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int n = p.cols / DS4_BLOCK_WEIGHTS, chunks = (n + DS4_CHUNK_BLOCKS - 1) / DS4_CHUNK_BLOCKS;
    int first = row0 + p.warp_rows * warp, left = p.rows - first;
    int rows = left < p.warp_rows ? left : p.warp_rows;
    int64_t all = (int64_t)p.rows * p.experts * n, tall = matrix * p.rows + first;
    const uint8_t *weight = (const uint8_t *)p.weight;
    const ds4_grid_entry *grid = ds4_grid;
#if DS4_GRID_ENTRIES
    ds4_grid_entry *book = (ds4_grid_entry *)shared;
    for (int i = threadIdx.x; i < DS4_GRID_ENTRIES; i += 128) book[i] = ds4_grid[i];
    ds4_sync_block();
    grid = book;
#endif
    if (rows <= 0) return; /* whole warps; nothing below waits for the block */
    const int book_bytes = DS4_GRID_ENTRIES * (int)sizeof(ds4_grid_entry);
    const int ring_bytes = p.stages * DS4_RING_BYTES;
    const int term_bytes = (DS4_MATVEC_ROWS * columns * DS4_TERM_STRIDE * 8 + 15) / 16 * 16;
    uint8_t *ring = shared + book_bytes + warp * (ring_bytes + term_bytes);
    float2 *terms = (float2 *)(ring + ring_bytes);
    float acc = 0.0f; /* of row lane / 8, column lane % 8 */
    auto copy = [&](int chunk, uint8_t *to) {
        int from = chunk * DS4_CHUNK_BLOCKS, blocks = n - from < DS4_CHUNK_BLOCKS ? n - from : DS4_CHUNK_BLOCKS;
        for (int r = 0; r < rows; r += DS4_LINE_ROWS, to += DS4_LINE_BYTES)
            ds4_stage_line(ds4_block_at(weight, all, tall + r, n, from), blocks, to);
    };
    auto compute = [&](int chunk, const uint8_t *lines) {
        for (int step = 0; step < DS4_CHUNK_STEPS; step++) {
            int at = 32 * step + lane, b = at / DS4_UNITS, u = at % DS4_UNITS;
            int block_number = chunk * DS4_CHUNK_BLOCKS + b;
            bool live = block_number < n;
            ds4_unit unit[DS4_MATVEC_ROWS];
            ds4_block block[DS4_MATVEC_ROWS];
            float d[DS4_MATVEC_ROWS], m[DS4_MATVEC_ROWS];
#pragma unroll
            for (int r = 0; r < DS4_MATVEC_ROWS; r++) {
                unit[r] = {};
                block[r] = {};
                d[r] = m[r] = 0.0f;
                if (r >= rows || !live) continue;
                const int line = r / DS4_LINE_ROWS, of_line = r % DS4_LINE_ROWS;
                block[r] = ds4_staged_block(
                    ds4_block_at(weight, all, tall + line * DS4_LINE_ROWS, n, chunk * DS4_CHUNK_BLOCKS),
                    lines + line * DS4_LINE_BYTES, of_line, b);
                ds4_decode(block[r], u, grid, unit[r]);
                d[r] = ds4_block_d(block[r]);
#if DS4_HAS_MIN
                m[r] = ds4_block_m(block[r]);
#endif
            }
            int term = (DS4_SUPER ? 4 * step + lane / 8 : at) * DS4_TERM_PAIRS;
            for (int c = 0; c < columns; c++) {
                const char *act = act_of(c);
#pragma unroll
                for (int r = 0; r < DS4_MATVEC_ROWS; r++)
                    if (r < rows) /* of the warp: every lane alike */
                        ds4_unit_terms(block[r], d[r], m[r], u, unit[r], act, p.cols,
                                       block_number * DS4_UNITS + u, live,
                                       terms + (r * columns + c) * DS4_TERM_STRIDE, term);
            }
        }
        ds4_sync_warp();
        if (lane % 8 < columns && lane / 8 < rows) {
            const float2 *own = terms + (lane / 8 * columns + lane % 8) * DS4_TERM_STRIDE;
            int parts = (n - chunk * DS4_CHUNK_BLOCKS) * (DS4_SUPER ? 1 : DS4_UNITS);
            if (parts > DS4_CHUNK_TERMS) parts = DS4_CHUNK_TERMS;
#pragma unroll 4
            for (int i = 0; i < parts * DS4_TERM_PAIRS; i++) acc = fmaf(own[i].x, own[i].y, acc);
        }
    };
    ds4_walk(chunks, p.stages, DS4_RING_BYTES, ring, copy, compute);
    if (lane % 8 < columns && lane / 8 < rows) finish(first + lane / 8, lane % 8, acc);
}

DS4_KERNEL(matvec, ds4_matvec, 128, 4) {
    DS4_SHARED_BYTES(shared);
    int first = blockIdx.x * 8, columns = ds4_rows(p.live, p.columns) - first;
    if (columns <= 0) return;
    int block = ds4_block_row();
    const ds4_matvec own = ds4_matrix_of(p, block);
    columns = columns < 8 ? columns : 8;
    ds4_matvec_rows(
        own, 0, block * 4 * own.warp_rows, columns, shared,
        [&](int c) { return ds4_row<const char>(p.acts, p.act_stride, first + c); },
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
    const char *act = ds4_row<const char>(p.acts, p.act_stride, token);
    if (p.act_columns > 1)
        act += place * ds4_act_bytes(DS4_SUPER ? DS4_ACT_Q8_256 : DS4_ACT_Q8_32, p.cols);
    ds4_matvec_rows(
        p, expert, blockIdx.x * 4 * p.warp_rows, 1, shared, [&](int) { return act; },
        [&](int row, int, float value) {
            if (p.bias) value += ((const float *)p.bias)[(int64_t)expert * p.rows + row];
            ds4_row<float>(p.y, p.y_stride, token)[(int64_t)place * p.rows + row] = value;
        });
}

#endif
