/* Rows of a matrix on their way into shared memory, in the background: for decode, which must keep more
 * bytes in flight than registers hold.
 *
 * Owns: the ring of a warp. Its rows are walked along in chunks; while one is computed the next ones, up
 * to `stages` - 1 of them, are copied. Copies are whole aligned pieces of 16 bytes, so byte 0 of a run
 * comes to lie as far behind a multiple of 16 as it was in global memory; pieces may reach over both ends
 * of a run up to the next multiple of 16.
 */
#ifndef DS4_CUDA_STAGE_H
#define DS4_CUDA_STAGE_H

#include "op_math.h"

#define DS4_MOST_STAGES 4

/* Room for a run of n bytes, wherever it begins. */
#define DS4_RUN_ROOM(n) (((n) + 15) / 16 * 16 + 16)

static __device__ __forceinline__ int ds4_run_shift(const void *start) { return (int)((uint64_t)start & 15); }

/* By a warp: starts the copy of n bytes. With PAD, 16 bytes stay free behind every PAD. */
template <int PAD>
static __device__ __forceinline__ void ds4_stage_run(const uint8_t *start, int n, uint8_t *to) {
    const uint8_t *base = start - ds4_run_shift(start);
    int pieces = (n + ds4_run_shift(start) + 15) / 16;
    for (int i = threadIdx.x & 31; i < pieces; i += 32)
        ds4_copy16_async(to + 16 * (PAD ? i + i / (PAD / 16) : i), base + 16 * i);
}

/* The chunk that was started `stages` - 1 commits before the last one has arrived, for the whole warp. */
static __device__ __forceinline__ void ds4_stage_wait(int stages) {
    if (stages == 2) ds4_copy_wait<1>();
    else if (stages == 3) ds4_copy_wait<2>();
    else ds4_copy_wait<3>();
    ds4_sync_warp();
}

/* Walks `chunks` chunks: `copy(chunk, to)` starts one of at most `bytes` bytes, `compute(chunk, at)` reads
 * it. Both are of a warp; `ring` holds `stages` times `bytes`. */
template <typename Copy, typename Compute>
static __device__ __forceinline__ void ds4_walk(int chunks, int stages, int bytes, uint8_t *ring, Copy copy,
                                                Compute compute) {
    for (int i = 0; i < stages - 1; i++) {
        if (i < chunks) copy(i, ring + i * bytes);
        ds4_copy_commit();
    }
    int slot = 0, free = stages - 1;
    for (int chunk = 0; chunk < chunks; chunk++) {
        if (chunk + stages - 1 < chunks) copy(chunk + stages - 1, ring + free * bytes);
        ds4_copy_commit();
        ds4_stage_wait(stages);
        compute(chunk, (const uint8_t *)ring + slot * bytes);
        ds4_sync_warp();
        free = slot;
        slot = slot + 1 < stages ? slot + 1 : 0;
    }
}

#endif
