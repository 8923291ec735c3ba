/* Runs CUDA C++ kernels on a CPU: one fiber per CUDA thread, blocks one after the other.
 *
 * Owns: the twins of every wrapper in worker/ds4_worker/cuda/intrinsics.h, and the module table
 * (cuda_module_table.h) that a kernel file built by g++ exports. Fibers run until they wait, in
 * ascending or descending order of threads (DS4_FIBERS_ORDER below): a kernel that lacks a barrier
 * gives other results in one of the two. Copies in the background happen when they are waited for, not
 * before. A block that can never finish ends the launch with 719 and a message. What this cannot see:
 * the memory model, speed, bank conflicts, and whether inline PTX means what its twin says.
 */
#ifndef DS4_FIBERS_H
#define DS4_FIBERS_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <deque>
#include <mutex>
#include <vector>

#include "cuda_module_table.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define DS4_FIBERS_ASAN 1
#else
#define DS4_FIBERS_ASAN 0
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
/* One block at a time, so one copy does; in a section of its own, so that every block finds it stale. */
#define __shared__ static __attribute__((section("ds4_shared")))
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __restrict__ __restrict

/* ---- vector types ------------------------------------------------------------------------------ */

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

/* ---- fibers ------------------------------------------------------------------------------------ */

namespace ds4_fibers {

constexpr size_t STACK_BYTES = DS4_FIBERS_ASAN ? 512 << 10 : 64 << 10;
constexpr int WARP = 32;
constexpr uint32_t MOST_SHARED = 227 << 10; /* of a block, on any device that kernels are compiled for */

enum State { READY, AT_BLOCK, AT_WARP, DONE };

struct Copy { void *to; const void *from; };

/* What a lane brings to a collective operation of its warp: run by whoever comes last, for all. */
struct Offer { const void *in; void *self; void (*run)(int lane, void *self); };

struct Fiber {
    void *stack_pointer = nullptr;
    char *stack = nullptr;
    void *fake_stack = nullptr;
    uint3 thread{};
    int number = 0;
    State state = DONE;
    std::vector<Copy> open;              /* copies of the group not committed yet */
    std::vector<std::vector<Copy>> groups; /* committed, oldest first */
};

struct Warp { Offer offers[WARP]; uint32_t arrived = 0; };

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<uint8_t> dynamic;
    Fiber *current = nullptr;
    void *scheduler = nullptr;
    void *scheduler_fake = nullptr;
    const void *scheduler_stack = nullptr;
    size_t scheduler_bytes = 0;
    void (*body)(const void *) = nullptr;
    const void *parameter = nullptr;
    int alive = 0, at_block = 0;
};

static Machine machine;
static std::mutex one_launch;
static char message[256];
static const uint8_t *dynamic_base;

extern "C" void ds4_fibers_switch(void **save, void *load) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
asm(R"(
.text
.hidden ds4_fibers_switch
.globl ds4_fibers_switch
.type ds4_fibers_switch,@function
ds4_fibers_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size ds4_fibers_switch,.-ds4_fibers_switch
)");
#else
#error "fibers: the stack switch is written for x86_64 only"
#endif

static inline void to_scheduler(bool last = false) {
    Fiber *self = machine.current;
    (void)last;
#if DS4_FIBERS_ASAN
    __sanitizer_start_switch_fiber(last ? nullptr : &self->fake_stack, machine.scheduler_stack,
                                   machine.scheduler_bytes);
#endif
    ds4_fibers_switch(&self->stack_pointer, machine.scheduler);
#if DS4_FIBERS_ASAN
    __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
#endif
}

[[noreturn]] static void fiber_main() {
#if DS4_FIBERS_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &machine.scheduler_stack, &machine.scheduler_bytes);
#endif
    machine.body(machine.parameter);
    machine.current->state = DONE;
    machine.alive--;
    to_scheduler(true);
    abort(); /* nobody resumes a thread that has returned */
}

static inline void prepare(Fiber &f) {
    if (!f.stack) f.stack = static_cast<char *>(aligned_alloc(64, STACK_BYTES));
    void **top = reinterpret_cast<void **>(f.stack + STACK_BYTES) - 1; /* as after a call */
    *--top = reinterpret_cast<void *>(fiber_main);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f.stack_pointer = top;
    f.state = READY;
    f.open.clear();
    f.groups.clear();
}

static inline void resume(Fiber &f) {
    machine.current = &f;
#if DS4_FIBERS_ASAN
    __sanitizer_start_switch_fiber(&machine.scheduler_fake, f.stack, STACK_BYTES);
#endif
    ds4_fibers_switch(&machine.scheduler, f.stack_pointer);
#if DS4_FIBERS_ASAN
    __sanitizer_finish_switch_fiber(machine.scheduler_fake, nullptr, nullptr);
#endif
}

static inline void release(State from) {
    for (Fiber &f : machine.fibers)
        if (f.state == from) f.state = READY;
    machine.at_block = 0;
}

extern "C" {
extern char __start_ds4_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_ds4_shared[] __attribute__((weak, visibility("hidden")));
}

/* Nobody left anything useful in shared memory. (The sanitizer's zones lie between the variables.) */
__attribute__((no_sanitize("address"), noinline)) static void spoil(char *from, char *to) {
    for (volatile char *at = from; at < to; at++) *at = (char)0xa5;
}

/* Runs one block; false when no thread can go on. */
static inline bool run_block(bool descending) {
    int n = static_cast<int>(machine.fibers.size());
    for (Fiber &f : machine.fibers) prepare(f);
    for (Warp &w : machine.warps) w.arrived = 0;
    machine.alive = n;
    machine.at_block = 0;
    if (__start_ds4_shared) spoil(__start_ds4_shared, __stop_ds4_shared);
    while (machine.alive) {
        bool moved = false;
        for (int i = 0; i < n; i++) {
            Fiber &f = machine.fibers[descending ? n - 1 - i : i];
            if (f.state != READY) continue;
            moved = true;
            resume(f);
        }
        if (machine.alive && machine.at_block == machine.alive) release(AT_BLOCK);
        else if (!moved) return false;
    }
    return true;
}

template <typename In, typename Out, typename F> static inline Out collective(const In &in, F f) {
    struct Call { Out out; F *f; } call{Out(), &f};
    Fiber *self = machine.current;
    Warp &warp = machine.warps[self->number / WARP];
    int lane = self->number % WARP;
    int first = self->number - lane, total = static_cast<int>(machine.fibers.size());
    uint32_t whole = total - first >= WARP ? ~0u : (1u << (total - first)) - 1;
    warp.offers[lane] = {&in, &call, [](int at, void *raw) {
        auto *c = static_cast<Call *>(raw);
        Warp &w = machine.warps[machine.current->number / WARP];
        auto bring = [&w](int from) -> const In & {
            return *static_cast<const In *>(w.offers[from].in);
        };
        c->out = (*c->f)(at, bring);
    }};
    warp.arrived |= 1u << lane;
    if (warp.arrived == whole) {
        for (int i = 0; i < WARP && first + i < total; i++)
            warp.offers[i].run(i, warp.offers[i].self);
        warp.arrived = 0;
        for (int i = 0; i < WARP && first + i < total; i++)
            if (machine.fibers[first + i].state == AT_WARP) machine.fibers[first + i].state = READY;
    } else {
        self->state = AT_WARP;
        to_scheduler();
    }
    return call.out;
}

/* DS4_FIBERS_ORDER: 0 ascending, 1 descending; set by tests through ctypes. */
extern "C" { __attribute__((visibility("default"))) int ds4_fibers_order = 0; }
extern "C" __attribute__((visibility("default"))) const char *ds4_fibers_message() { return message; }

static dim3 grid_dim, block_dim;
static uint3 block_index;

static int32_t launch(const char *name, const ds4_cuda_launch *how, void (*body)(const void *),
                      const void *parameter, uint32_t most_threads) {
    std::lock_guard<std::mutex> guard(one_launch);
    uint64_t threads = uint64_t{how->block[0]} * how->block[1] * how->block[2];
    bool possible = how->grid[0] <= 0x7fffffff && how->grid[1] <= 65535 && how->grid[2] <= 65535 &&
                    how->block[2] <= 64 && how->grid[0] && how->grid[1] && how->grid[2] &&
                    how->dynamic_shared_bytes <= MOST_SHARED;
    if (!possible || !threads || threads > most_threads) {
        snprintf(message, sizeof message,
                 "%s: no device launches a grid of (%u, %u, %u), blocks of (%u, %u, %u) and %u bytes", name,
                 how->grid[0], how->grid[1], how->grid[2], how->block[0], how->block[1], how->block[2],
                 how->dynamic_shared_bytes);
        return 1; /* CUDA_ERROR_INVALID_VALUE */
    }
    machine.fibers.resize(threads);
    machine.warps.resize((threads + WARP - 1) / WARP);
    machine.body = body;
    machine.parameter = parameter;
    grid_dim = {how->grid[0], how->grid[1], how->grid[2]};
    block_dim = {how->block[0], how->block[1], how->block[2]};
    std::vector<uint8_t> dynamic(how->dynamic_shared_bytes + 16);
    uint8_t *base = dynamic.data() + (16 - reinterpret_cast<uintptr_t>(dynamic.data()) % 16) % 16;
    dynamic_base = base;
    for (uint32_t i = 0; i < uint32_t(threads); i++) {
        machine.fibers[i].number = static_cast<int>(i);
        machine.fibers[i].thread = {i % block_dim.x, i / block_dim.x % block_dim.y,
                                    i / block_dim.x / block_dim.y};
    }
    for (unsigned z = 0; z < grid_dim.z; z++)
        for (unsigned y = 0; y < grid_dim.y; y++)
            for (unsigned x = 0; x < grid_dim.x; x++) {
                block_index = {x, y, z};
                memset(base, 0xa5, how->dynamic_shared_bytes);
                if (run_block(ds4_fibers_order != 0)) continue;
                int waiting = 0;
                for (const Fiber &f : machine.fibers) waiting += f.state == AT_WARP;
                snprintf(message, sizeof message,
                         "%s: block (%u, %u, %u) can never finish: %d threads returned, %d wait for "
                         "the block and %d for their warp",
                         name, x, y, z, static_cast<int>(threads) - machine.alive, machine.at_block,
                         waiting);
                return 719; /* CUDA_ERROR_LAUNCH_FAILED */
            }
    return 0;
}

/* ---- the module table -------------------------------------------------------------------------- */

/* Any number of kernels; the table follows where they move to. */
static std::vector<ds4_cuda_kernel> kernels;
static std::deque<uint32_t> sizes;
extern "C" {
__attribute__((visibility("default"))) ds4_cuda_module ds4_cuda_module_table = {
    DS4_CUDA_MODULE_ABI, 0, nullptr};
}

struct Registrar {
    Registrar(const char *name, ds4_cuda_entry entry, size_t bytes, uint32_t threads) {
        sizes.push_back(static_cast<uint32_t>(bytes));
        kernels.push_back({name, entry, &sizes.back(), 1, threads, 0});
        ds4_cuda_module_table.kernels = kernels.data();
        ds4_cuda_module_table.kernel_count = static_cast<uint32_t>(kernels.size());
    }
};

} // namespace ds4_fibers

#define threadIdx (ds4_fibers::machine.current->thread)
#define blockIdx (ds4_fibers::block_index)
#define blockDim (ds4_fibers::block_dim)
#define gridDim (ds4_fibers::grid_dim)

#define DS4_KERNEL(name, Params, threads, blocks)                                                  \
    static void name(const Params &p);                                                             \
    static ds4_fibers::Registrar ds4_register_##name(                                              \
        #name,                                                                                     \
        [](const ds4_cuda_launch *how, void *const *parameters) -> int32_t {                       \
            Params own; /* the values may change after the call */                                 \
            memcpy(&own, parameters[0], sizeof own);                                               \
            return ds4_fibers::launch(                                                             \
                #name, how, [](const void *at) { name(*static_cast<const Params *>(at)); }, &own,  \
                threads);                                                                          \
        },                                                                                         \
        sizeof(Params), threads);                                                                  \
    static void name(const Params &p)
#define DS4_SHARED_BYTES(name) uint8_t *const name = const_cast<uint8_t *>(ds4_fibers::dynamic_base)
#define DS4_FULL 0xffffffffu

/* ---- twins of intrinsics.h --------------------------------------------------------------------- */

static inline void ds4_sync_block() {
    ds4_fibers::machine.current->state = ds4_fibers::AT_BLOCK;
    ds4_fibers::machine.at_block++;
    ds4_fibers::to_scheduler();
}
static inline void ds4_sync_warp() {
    ds4_fibers::collective<int, int>(0, [](int, auto) { return 0; });
}
template <typename T> static inline T ds4_shuffle(T value, int lane) {
    return ds4_fibers::collective<T, T>(value, [lane](int, auto bring) { return bring(lane & 31); });
}
template <typename T> static inline T ds4_shuffle_xor(T value, int mask) {
    return ds4_fibers::collective<T, T>(value, [mask](int at, auto bring) { return bring(at ^ mask); });
}
template <typename T> static inline T ds4_shuffle_up(T value, int by) {
    return ds4_fibers::collective<T, T>(
        value, [by](int at, auto bring) { return bring(at < by ? at : at - by); });
}
template <typename T> static inline T ds4_atomic_add(T *at, T value) {
    T old = *at;
    *at = old + value;
    return old;
}

static inline void ds4_atomic_min(int *at, int value) { *at = value < *at ? value : *at; }

static inline int ds4_dp4a(int a, int b, int acc) {
    for (int i = 0; i < 4; i++) acc += (int8_t)(a >> (8 * i)) * (int8_t)(b >> (8 * i));
    return acc;
}

static inline uint32_t ds4_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float ds4_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline float ds4_half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) return ds4_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return ds4_float(sign | (exponent + 112) << 23 | mantissa << 13);
    return ds4_float(sign | ds4_bits((float)mantissa * 0x1p-24f));
}
static inline uint16_t ds4_float_to_half(float x) {
    uint32_t bits = ds4_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff; /* the one NaN that the instruction makes */
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000)
        return (uint16_t)(sign | (ds4_bits(ds4_float(magnitude) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}
static inline uint32_t ds4_funnel(uint32_t low, uint32_t high, uint32_t shift) {
    return (uint32_t)(((uint64_t)high << 32 | low) >> (shift & 31));
}
static inline uint32_t ds4_pick_bytes(uint32_t low, uint32_t high, uint32_t pick) {
    uint64_t both = (uint64_t)high << 32 | low;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        if (pick >> (4 * i) & 8) abort(); /* the instruction would repeat the sign */
        out |= (uint32_t)(both >> (8 * (pick >> (4 * i) & 7)) & 255) << (8 * i);
    }
    return out;
}
static inline int ds4_count_bits(uint32_t x) { return __builtin_popcount(x); }
static inline uint64_t ds4_high64(uint64_t a, uint64_t b) {
    return (uint64_t)((unsigned __int128)a * b >> 64);
}

static inline void ds4_copy16_async(void *shared, const void *global) {
    ds4_fibers::machine.current->open.push_back({shared, global});
}
static inline void ds4_copy_commit() {
    ds4_fibers::Fiber *f = ds4_fibers::machine.current;
    f->groups.push_back(std::move(f->open));
    f->open.clear();
}
template <int LEFT> static inline void ds4_copy_wait() {
    auto &groups = ds4_fibers::machine.current->groups;
    while (groups.size() > LEFT) {
        for (const ds4_fibers::Copy &copy : groups.front())
            *static_cast<uint4 *>(copy.to) = *static_cast<const uint4 *>(copy.from);
        groups.erase(groups.begin());
    }
}

struct ds4_fragments { int a[4], b[2]; };
struct ds4_mma_sums { int d[4]; };

static inline int8_t ds4_byte(int word, int i) { return (int8_t)(word >> (8 * i)); }

/* Sums of one lane: rows group and group + 8, columns 2 pair and 2 pair + 1. */
template <typename Bring> static inline ds4_mma_sums ds4_mma_lane(int lane, Bring bring, int halves) {
    ds4_mma_sums out;
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2, sum = 0;
        for (int k = 0; k < 16 * halves; k++) {
            const ds4_fragments &left = bring(row % 8 * 4 + k % 16 / 4);
            const ds4_fragments &right = bring(column * 4 + k % 16 / 4);
            sum += ds4_byte(left.a[row / 8 + 2 * (k / 16)], k % 4) *
                   ds4_byte(right.b[k / 16], k % 4);
        }
        out.d[i] = sum;
    }
    return out;
}
static inline void ds4_mma_k32(int (&d)[4], const int (&a)[4], const int (&b)[2]) {
    ds4_fragments own = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    ds4_mma_sums sums = ds4_fibers::collective<ds4_fragments, ds4_mma_sums>(
        own, [](int lane, auto bring) { return ds4_mma_lane(lane, bring, 2); });
    for (int i = 0; i < 4; i++) d[i] += sums.d[i];
}
static inline void ds4_mma_k16(int (&d)[4], int a0, int a1, int b0) {
    ds4_fragments own = {{a0, a1, 0, 0}, {b0, 0}};
    ds4_mma_sums sums = ds4_fibers::collective<ds4_fragments, ds4_mma_sums>(
        own, [](int lane, auto bring) { return ds4_mma_lane(lane, bring, 1); });
    for (int i = 0; i < 4; i++) d[i] += sums.d[i];
}

#endif
