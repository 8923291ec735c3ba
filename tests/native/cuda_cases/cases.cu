/* Small kernels with known faults and known results, for the tests of the fibers themselves. */
#include "intrinsics.h"

struct ds4_case {
    uint64_t in, out;
    int32_t n, flag; /* flag 1: without the fault */
};

/* Every thread reads its neighbour's word; without the barrier it may not be there yet. */
DS4_KERNEL(neighbour, ds4_case, 64, 1) {
    __shared__ int words[64];
    int i = threadIdx.x;
    words[i] = ((const int *)p.in)[i];
    if (p.flag) ds4_sync_block();
    ((int *)p.out)[i] = words[(i + 63) % 64];
}

/* Bytes that come in the background and are read without waiting for them. */
DS4_KERNEL(background, ds4_case, 32, 1) {
    __shared__ int4 words[32];
    int i = threadIdx.x;
    words[i] = make_int4(-1, -1, -1, -1);
    ds4_sync_warp();
    ds4_copy16_async(words + i, (const int4 *)p.in + i);
    ds4_copy_commit();
    if (p.flag) ds4_copy_wait<0>();
    ds4_sync_warp();
    ((int4 *)p.out)[i] = words[31 - i];
}

/* Half a warp waits for the block, the other half for the warp. */
DS4_KERNEL(divergent, ds4_case, 64, 1) {
    if (p.flag || threadIdx.x % 2) ds4_sync_block();
    else ds4_sync_warp();
    ((int *)p.out)[threadIdx.x] = 1;
}

/* Threads that have returned do not hold up the rest. */
DS4_KERNEL(early, ds4_case, 64, 1) {
    if (threadIdx.x >= 32) return;
    ds4_sync_block();
    ((int *)p.out)[threadIdx.x] = ds4_shuffle_xor((int)threadIdx.x, 5) + 100 * blockIdx.x;
}

/* A word from an address that is none. */
DS4_KERNEL(misaligned, ds4_case, 32, 1) {
    const char *from = (const char *)p.in + (p.flag ? 0 : 2);
    ((int *)p.out)[threadIdx.x] = ((const int *)from)[threadIdx.x];
}

/* One float beyond the block's dynamic shared memory (of 128 bytes). */
DS4_KERNEL(beyond, ds4_case, 32, 1) {
    DS4_SHARED_BYTES(shared);
    ((float *)shared)[threadIdx.x + (p.flag ? 0 : 8)] = 1.0f;
    ((int *)p.out)[threadIdx.x] = 1;
}

/* out[16][8] = in[16][k] * (in + 16 k)[8][k]: rows by columns, k = 16 n. */
DS4_KERNEL(multiply, ds4_case, 32, 1) {
    const int8_t *a = (const int8_t *)p.in, *b = a + 16 * 16 * p.n;
    int k = 16 * p.n, group = threadIdx.x / 4, pair = threadIdx.x % 4;
    int left[4], right[2], d[4] = {0, 0, 0, 0};
    for (int i = 0; i < 2 * p.n; i++)
        left[i] = *(const int *)(a + (group + 8 * (i % 2)) * k + 16 * (i / 2) + 4 * pair);
    for (int i = 0; i < p.n; i++) right[i] = *(const int *)(b + group * k + 16 * i + 4 * pair);
    if (p.n == 2) ds4_mma_k32(d, left, right);
    else ds4_mma_k16(d, left[0], left[1], right[0]);
    for (int i = 0; i < 4; i++)
        ((int *)p.out)[(group + 8 * (i / 2)) * 8 + 2 * pair + i % 2] = d[i];
}

/* out[i] = half to float, float to half and the byte operations of word i. */
DS4_KERNEL(convert, ds4_case, 32, 1) {
    for (int i = threadIdx.x; i < p.n; i += 32) {
        uint32_t word = ((const uint32_t *)p.in)[i];
        uint32_t *out = (uint32_t *)p.out + 2 * i;
        out[0] = ds4_bits(ds4_half_to_float((uint16_t)word));
        out[1] = ds4_float_to_half(ds4_float(word));
    }
}
