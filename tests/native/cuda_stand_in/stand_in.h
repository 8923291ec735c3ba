/* The stand-in CUDA driver: what its parts share.
 *
 * A libcuda.so.1 for tests: device memory is memfd, a stream is a queue that this process runs
 * itself, a module is a host library. It models what can go wrong on the host side of the driver
 * API - order, lifetime, sharing, errors - and nothing of a GPU's speed or memory model. Where the
 * documentation leaves something open it takes the stricter reading. The driver-contract suite
 * (tests/gpu) makes the same claims about it and about a real driver.
 *
 * Settings are environment variables, read once:
 *   DS4_SIM_PROFILE   discrete (default; compute 9.0) or integrated (12.1, memory of the system)
 *   DS4_SIM_STREAMS   lazy (default: queued work runs only when somebody waits for it) or eager
 *   DS4_SIM_HOST      sees (default) or hidden: device memory faults outside of copies and kernels
 *   DS4_SIM_TOTAL_MB  device memory there is
 *   DS4_SIM_GRANULARITY_KB  the recommended one; 2048 is the least, and the default
 *   DS4_SIM_POOL      name of a pool: processes of one pool share that memory, as on one device
 *   DS4_SIM_DRIVER    version to report (13000)
 *   DS4_SIM_LACKS     vmm or fd: an attribute the device does not have
 *   DS4_SIM_FAULT     comma-separated [PROGRAM/]FUNCTION:N[+]:ACTION; see faults.cpp
 *   DS4_SIM_LOG       file that gets a line "PID FUNCTION" for every call
 */
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) CUresult

namespace sim {

/* ---- profile.cpp */
struct Profile {
    bool integrated, lazy, hidden, has_vmm, has_fd_export;
    int driver_version;
    uint64_t total_bytes, recommended_bytes; /* the latter: granularity */
    std::string name, pool;
};
const Profile &profile();
constexpr uint64_t granularity = 2u << 20; /* the least */

/* ---- faults.cpp: entering a call */
enum class Needs { nothing, init, context };
extern bool initialised;
extern std::recursive_mutex big_lock; /* around every call: threads see one another's work whole */

/* Counts the call, plays its injected fault, checks what it needs; `refused` is then its result. */
struct Call {
    Call(const char *function, Needs needs);
    std::unique_lock<std::recursive_mutex> lock;
    CUresult refused = CUDA_SUCCESS;
};
#define ENTER(needs)                                 \
    sim::Call call_(__func__, sim::Needs::needs);    \
    if (call_.refused != CUDA_SUCCESS) return call_.refused

/* A failure of the context: this and every later call that needs the context end with it. */
CUresult poison(CUresult code);
CUresult poisoned();

/* ---- context.cpp */
bool context_is_current();

/* ---- pool.cpp */
uint64_t used_bytes();
int new_memory(uint64_t n_bytes); /* a memfd of the pool, or -1 with errno */
bool is_device_memory(int fd);

/* ---- vmm.cpp */
struct Span { /* device addresses that have memory */
    uint64_t n_bytes;
    bool readable, writable;
    std::shared_ptr<struct Backing> backing;
};
struct Backing { /* memory itself; lives while a handle or a mapping does */
    Backing(int fd, uint64_t n_bytes, bool counted);
    ~Backing();
    Backing(const Backing &) = delete;
    Backing &operator=(const Backing &) = delete;
    int fd;
    uint64_t n_bytes;
    bool counted;
};
/* Whether the whole range is device memory that may be read, or written. */
bool device_range(CUdeviceptr address, uint64_t n_bytes, bool write);
bool is_device_address(CUdeviceptr address);
/* Around work, when device memory is hidden from the host. */
void reveal_memory();
void hide_memory();
CUresult map_plain(CUdeviceptr *address, uint64_t n_bytes);
CUresult unmap_plain(CUdeviceptr address);
extern uint64_t own_bytes; /* of allocations made by this process and alive */

/* ---- run.cpp: work with faults caught */
CUresult protect(const std::function<CUresult()> &work);
void catch_faults();

/* ---- stream.cpp */
using Work = std::function<CUresult()>;
enum class NodeKind { kernel, copy, fill, host };
/* Runs, queues or captures; `stream` may be null, the legacy stream. */
CUresult submit(CUstream stream, NodeKind kind, Work work);
CUresult run_everything();
/* 900 while the calling thread captures (which breaks the capture), else success. */
CUresult refuse_while_capturing();

} // namespace sim
