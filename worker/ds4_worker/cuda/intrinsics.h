/* What a kernel uses of the machine: the launch macros, and every instruction that CUDA C++ has no
 * portable spelling for.
 *
 * Owns: all inline PTX of the kernels. Each wrapper has a twin in tests/native/cuda_fibers/fibers.h,
 * under which the same kernels run on a CPU; a kernel file contains no asm and no other intrinsic.
 *
 * Launch ABI of every kernel: exactly one parameter, a struct passed by value whose fields
 * cuda/kernels.py repeats. Addresses are 64-bit device addresses. `live` is the address of an int32
 * that tells how many of the rows of the grid are in use in this step, or 0 when all are: so a
 * captured graph serves every step of its size or below.
 *
 * Arithmetic is compiled without contraction (--fmad=false) and without flushing denormals, so that a
 * float result here has the bits of the scalar definition in ds4_common/native.
 */
#ifndef DS4_CUDA_INTRINSICS_H
#define DS4_CUDA_INTRINSICS_H

#ifdef DS4_FIBERS
#include "fibers.h"
#else

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

/* `threads` of a block; at least `blocks` of them fit a multiprocessor (0: whatever comes out). */
#define DS4_KERNEL(name, Params, threads, blocks)                                                  \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                  \
        name(const __grid_constant__ Params p)
#define DS4_SHARED_BYTES(name) extern __shared__ __align__(16) uint8_t name[]

#define DS4_FULL 0xffffffffu

static __device__ __forceinline__ void ds4_sync_block() { __syncthreads(); }
static __device__ __forceinline__ void ds4_sync_warp() { __syncwarp(); }

template <typename T> static __device__ __forceinline__ T ds4_shuffle(T value, int lane) {
    return __shfl_sync(DS4_FULL, value, lane);
}
template <typename T> static __device__ __forceinline__ T ds4_shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(DS4_FULL, value, mask);
}
template <typename T> static __device__ __forceinline__ T ds4_shuffle_up(T value, int by) {
    return __shfl_up_sync(DS4_FULL, value, by);
}

template <typename T> static __device__ __forceinline__ T ds4_atomic_add(T *at, T value) {
    return atomicAdd(at, value);
}

static __device__ __forceinline__ void ds4_atomic_min(int *at, int value) { atomicMin(at, value); }

/* acc + the dot product of four signed bytes. */
static __device__ __forceinline__ int ds4_dp4a(int a, int b, int acc) { return __dp4a(a, b, acc); }

static __device__ __forceinline__ float ds4_half_to_float(uint16_t h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
/* Nearest, ties to even. */
static __device__ __forceinline__ uint16_t ds4_float_to_half(float x) {
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
static __device__ __forceinline__ uint32_t ds4_bits(float x) { return __float_as_uint(x); }
static __device__ __forceinline__ float ds4_float(uint32_t bits) { return __uint_as_float(bits); }
/* The low word of high:low shifted right by `shift` below 32 bits. */
static __device__ __forceinline__ uint32_t ds4_funnel(uint32_t low, uint32_t high, uint32_t shift) {
    return __funnelshift_r(low, high, shift);
}
/* Byte i of the result is byte `pick >> 4 i & 7` of high:low; bit 3 of each nibble must be clear. */
static __device__ __forceinline__ uint32_t ds4_pick_bytes(uint32_t low, uint32_t high,
                                                          uint32_t pick) {
    return __byte_perm(low, high, pick);
}
static __device__ __forceinline__ int ds4_count_bits(uint32_t x) { return __popc(x); }
static __device__ __forceinline__ uint64_t ds4_high64(uint64_t a, uint64_t b) {
    return __umul64hi(a, b);
}

/* Sixteen bytes from global to shared memory, both aligned to 16, in the background. A thread's
 * copies since its last commit are a group; waiting leaves the newest `LEFT` groups in flight. Other
 * threads see the bytes after a barrier that follows the wait. */
static __device__ __forceinline__ void ds4_copy16_async(void *shared, const void *global) {
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
static __device__ __forceinline__ void ds4_copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT> static __device__ __forceinline__ void ds4_copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* d += a b over int8: a is 16 x k by rows, b is k x 8 by columns, d 16 x 8. Fragments as in the PTX
 * manual: with group = lane / 4 and pair = lane % 4, a[0] holds row group, bytes 4 pair ..; a[1] row
 * group + 8; for k = 32 a[2] and a[3] the same rows, bytes 16 + 4 pair ..; b[0] (and b[1]: + 16)
 * column group, bytes 4 pair ..; d[0], d[1] row group, columns 2 pair, 2 pair + 1; d[2], d[3] row
 * group + 8. */
static __device__ __forceinline__ void ds4_mma_k32(int (&d)[4], const int (&a)[4],
                                                   const int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ __forceinline__ void ds4_mma_k16(int (&d)[4], int a0, int a1, int b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

#endif
#endif
