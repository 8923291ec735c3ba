/* Plain device memory, pinned host memory, copies and fills.
 *
 * Device ranges are checked when a copy is called for, host ranges when it runs: a host buffer
 * that went away too early is a fault then. A lazy stream reads every host buffer late, pinned or
 * not.
 */
#include "stand_in.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

namespace {

std::map<void *, uint64_t> pinned;

void *pointer(CUdeviceptr address) { return reinterpret_cast<void *>(address); }

CUresult copy(CUstream stream, void *to, const void *from, uint64_t n_bytes) {
    return sim::submit(stream, sim::NodeKind::copy, [=] {
        memmove(to, from, n_bytes);
        return CUDA_SUCCESS;
    });
}

CUresult upload(CUstream stream, CUdeviceptr to, const void *from, uint64_t n_bytes) {
    if (!sim::device_range(to, n_bytes, true)) return CUDA_ERROR_INVALID_VALUE;
    return copy(stream, pointer(to), from, n_bytes);
}

CUresult download(CUstream stream, void *to, CUdeviceptr from, uint64_t n_bytes) {
    if (!sim::device_range(from, n_bytes, false)) return CUDA_ERROR_INVALID_VALUE;
    return copy(stream, to, pointer(from), n_bytes);
}

CUresult inside(CUstream stream, CUdeviceptr to, CUdeviceptr from, uint64_t n_bytes) {
    if (!sim::device_range(to, n_bytes, true) || !sim::device_range(from, n_bytes, false))
        return CUDA_ERROR_INVALID_VALUE;
    return copy(stream, pointer(to), pointer(from), n_bytes);
}

template <typename Unit>
CUresult fill(CUstream stream, CUdeviceptr to, Unit value, uint64_t count) {
    if (to % sizeof(Unit) || !sim::device_range(to, count * sizeof(Unit), true))
        return CUDA_ERROR_INVALID_VALUE;
    return sim::submit(stream, sim::NodeKind::fill, [=] {
        Unit *units = static_cast<Unit *>(pointer(to));
        for (uint64_t i = 0; i < count; ++i) units[i] = value;
        return CUDA_SUCCESS;
    });
}

} // namespace

API cuMemAlloc(CUdeviceptr *address, size_t n_bytes) {
    ENTER(context);
    if (CUresult code = sim::refuse_while_capturing()) return code;
    if (!n_bytes) return CUDA_ERROR_INVALID_VALUE;
    return sim::map_plain(address, n_bytes);
}

API cuMemFree(CUdeviceptr address) {
    ENTER(context);
    if (CUresult code = sim::refuse_while_capturing()) return code;
    if (CUresult code = sim::run_everything()) return code;
    return sim::unmap_plain(address);
}

API cuMemHostAlloc(void **address, size_t n_bytes, unsigned int) {
    ENTER(context);
    if (!n_bytes) return CUDA_ERROR_INVALID_VALUE;
    int how = MAP_PRIVATE | MAP_ANONYMOUS;
    void *at = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, how, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    pinned[at] = n_bytes;
    *address = at;
    return CUDA_SUCCESS;
}

API cuMemAllocHost(void **address, size_t n_bytes) { return cuMemHostAlloc(address, n_bytes, 0); }

API cuMemFreeHost(void *address) {
    ENTER(context);
    auto found = pinned.find(address);
    if (found == pinned.end()) return CUDA_ERROR_INVALID_VALUE;
    munmap(address, found->second);
    pinned.erase(found);
    return CUDA_SUCCESS;
}

API cuMemHostGetDevicePointer(CUdeviceptr *address, void *host, unsigned int) {
    ENTER(context);
    auto after = pinned.upper_bound(host);
    if (after == pinned.begin()) return CUDA_ERROR_INVALID_VALUE;
    --after;
    if (static_cast<char *>(host) >= static_cast<char *>(after->first) + after->second)
        return CUDA_ERROR_INVALID_VALUE;
    *address = reinterpret_cast<CUdeviceptr>(host);
    return CUDA_SUCCESS;
}

API cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t n_bytes, CUstream stream) {
    ENTER(context);
    return upload(stream, to, from, n_bytes);
}

API cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t n_bytes, CUstream stream) {
    ENTER(context);
    return download(stream, to, from, n_bytes);
}

API cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t n_bytes, CUstream stream) {
    ENTER(context);
    return inside(stream, to, from, n_bytes);
}

API cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t n_bytes) {
    ENTER(context);
    return upload(nullptr, to, from, n_bytes);
}

API cuMemcpyDtoH(void *to, CUdeviceptr from, size_t n_bytes) {
    ENTER(context);
    return download(nullptr, to, from, n_bytes);
}

API cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t n_bytes) {
    ENTER(context);
    return inside(nullptr, to, from, n_bytes);
}

API cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    ENTER(context);
    return fill<unsigned char>(stream, to, value, count);
}

API cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
    ENTER(context);
    return fill<unsigned int>(stream, to, value, count);
}

API cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
    ENTER(context);
    return fill<unsigned char>(nullptr, to, value, count);
}
