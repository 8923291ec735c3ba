/* Virtual memory management: memfd for memory, PROT_NONE for reserved addresses, mprotect for access.
 *
 * A read-only mapping is read-only to this process's page tables too, so a kernel that writes it
 * faults as it would on a device.
 */
#include "stand_in.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <set>

namespace {

std::map<CUdeviceptr, uint64_t> reservations;
std::map<CUdeviceptr, sim::Span> spans;
std::set<CUdeviceptr> plain; /* the ones of cuMemAlloc */

struct Handle {
    std::shared_ptr<sim::Backing> backing;
    int count;
};
std::map<CUmemGenericAllocationHandle, Handle> handles;
CUmemGenericAllocationHandle next_handle = 0x5150;

void *pointer(CUdeviceptr address) { return reinterpret_cast<void *>(address); }

bool good_properties(const CUmemAllocationProp *p) {
    return p && p->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           p->location.type == CU_MEM_LOCATION_TYPE_DEVICE && p->location.id == 0;
}

CUmemGenericAllocationHandle add_handle(std::shared_ptr<sim::Backing> backing) {
    handles[++next_handle] = {std::move(backing), 1};
    return next_handle;
}

/* The spans of the range, when it consists of whole ones without a gap. */
std::vector<CUdeviceptr> whole_spans(CUdeviceptr address, uint64_t n_bytes) {
    std::vector<CUdeviceptr> found;
    CUdeviceptr at = address;
    while (at < address + n_bytes) {
        auto span = spans.find(at);
        if (span == spans.end()) return {};
        found.push_back(at);
        at += span->second.n_bytes;
    }
    return at == address + n_bytes ? found : std::vector<CUdeviceptr>{};
}

bool inside_reservation(CUdeviceptr address, uint64_t n_bytes) {
    auto after = reservations.upper_bound(address);
    if (after == reservations.begin()) return false;
    auto &[start, size] = *--after;
    return address >= start && address + n_bytes <= start + size;
}

bool touches_span(CUdeviceptr address, uint64_t n_bytes) {
    auto after = spans.lower_bound(address + n_bytes);
    if (after == spans.begin()) return false;
    --after;
    return after->first + after->second.n_bytes > address;
}

bool fits(uint64_t n_bytes) {
    uint64_t total = sim::profile().total_bytes, used = sim::used_bytes();
    return used <= total && n_bytes <= total - used;
}

int protection(const sim::Span &span) {
    return (span.readable ? PROT_READ : PROT_NONE) | (span.writable ? PROT_WRITE : 0);
}

void protect_all(bool hidden) {
    for (auto &[address, span] : spans)
        if (span.readable)
            mprotect(pointer(address), span.n_bytes, hidden ? PROT_NONE : protection(span));
}

CUresult from_errno() {
    return errno == ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult back_to_reserved(CUdeviceptr address, uint64_t n_bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    void *at = mmap(pointer(address), n_bytes, PROT_NONE, flags, -1, 0);
    return at == MAP_FAILED ? from_errno() : CUDA_SUCCESS;
}

} // namespace

sim::Backing::Backing(int fd, uint64_t n_bytes, bool counted)
    : fd(fd), n_bytes(n_bytes), counted(counted) {
    if (counted) own_bytes += n_bytes;
}

sim::Backing::~Backing() {
    close(fd);
    if (counted) own_bytes -= n_bytes;
}

bool sim::is_device_address(CUdeviceptr address) { return touches_span(address, 1); }

bool sim::device_range(CUdeviceptr address, uint64_t n_bytes, bool write) {
    CUdeviceptr at = address, end = address + n_bytes;
    if (end < address) return false;
    while (at < end) {
        auto span = spans.upper_bound(at);
        if (span == spans.begin()) return false;
        --span;
        if (at >= span->first + span->second.n_bytes) return false;
        if (!(write ? span->second.writable : span->second.readable)) return false;
        at = span->first + span->second.n_bytes;
    }
    return true;
}

API cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                  CUmemAllocationGranularity_flags which) {
    ENTER(init);
    if (!good_properties(properties)) return CUDA_ERROR_INVALID_VALUE;
    bool recommended = which == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    *bytes = recommended ? sim::profile().recommended_bytes : sim::granularity;
    return CUDA_SUCCESS;
}

API cuMemCreate(CUmemGenericAllocationHandle *handle, size_t n_bytes,
                const CUmemAllocationProp *properties, unsigned long long flags) {
    ENTER(init);
    if (!sim::profile().has_vmm) return CUDA_ERROR_NOT_SUPPORTED;
    if (!good_properties(properties) || flags || !n_bytes || n_bytes % sim::granularity)
        return CUDA_ERROR_INVALID_VALUE;
    if (!fits(n_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = sim::new_memory(n_bytes);
    if (fd < 0) return from_errno();
    *handle = add_handle(std::make_shared<sim::Backing>(fd, n_bytes, true));
    return CUDA_SUCCESS;
}

API cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(init);
    auto found = handles.find(handle);
    if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
    if (!--found->second.count) handles.erase(found);
    return CUDA_SUCCESS;
}

API cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                 CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(init);
    auto found = handles.find(handle);
    if (found == handles.end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim::profile().has_fd_export) return CUDA_ERROR_NOT_SUPPORTED;
    int fd = fcntl(found->second.backing->fd, F_DUPFD, 0); /* nothing says: closed on exec */
    if (fd < 0) return from_errno();
    *static_cast<int *>(out) = fd;
    return CUDA_SUCCESS;
}

API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                   CUmemAllocationHandleType type) {
    ENTER(init);
    int borrowed_fd = int(reinterpret_cast<intptr_t>(os_handle));
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !sim::is_device_memory(borrowed_fd))
        return CUDA_ERROR_INVALID_VALUE;
    int fd = fcntl(borrowed_fd, F_DUPFD_CLOEXEC, 0);
    struct stat info;
    if (fd < 0 || fstat(fd, &info)) return from_errno();
    *handle = add_handle(std::make_shared<sim::Backing>(fd, info.st_size, false));
    return CUDA_SUCCESS;
}

API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                           CUmemGenericAllocationHandle handle) {
    ENTER(init);
    if (!handles.count(handle)) return CUDA_ERROR_INVALID_VALUE;
    *properties = {};
    properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    return CUDA_SUCCESS;
}

API cuMemAddressReserve(CUdeviceptr *address, size_t n_bytes, size_t alignment, CUdeviceptr,
                        unsigned long long flags) {
    ENTER(context);
    bool power_of_two = !(alignment & (alignment - 1));
    if (!n_bytes || n_bytes % sim::granularity || !power_of_two || flags)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t step = std::max<uint64_t>(alignment, sim::granularity);
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *wide = mmap(nullptr, n_bytes + step, PROT_NONE, how, -1, 0);
    if (wide == MAP_FAILED) return from_errno();
    CUdeviceptr start = reinterpret_cast<CUdeviceptr>(wide);
    CUdeviceptr aligned = (start + step - 1) / step * step;
    if (aligned > start) munmap(wide, aligned - start);
    if (uint64_t tail = start + step - aligned) munmap(pointer(aligned + n_bytes), tail);
    reservations[aligned] = n_bytes;
    *address = aligned;
    return CUDA_SUCCESS;
}

API cuMemAddressFree(CUdeviceptr address, size_t n_bytes) {
    ENTER(context);
    auto found = reservations.find(address);
    if (found == reservations.end() || found->second != n_bytes || touches_span(address, n_bytes))
        return CUDA_ERROR_INVALID_VALUE;
    munmap(pointer(address), n_bytes);
    reservations.erase(found);
    return CUDA_SUCCESS;
}

API cuMemMap(CUdeviceptr address, size_t n_bytes, size_t offset,
             CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER(context);
    auto found = handles.find(handle);
    if (found == handles.end() || flags || offset || !n_bytes || n_bytes % sim::granularity)
        return CUDA_ERROR_INVALID_VALUE;
    if (!inside_reservation(address, n_bytes) || touches_span(address, n_bytes) ||
        n_bytes > found->second.backing->n_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    int fd = found->second.backing->fd;
    void *at = mmap(pointer(address), n_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (at == MAP_FAILED) return from_errno();
    spans[address] = {n_bytes, false, false, found->second.backing};
    return CUDA_SUCCESS;
}

API cuMemUnmap(CUdeviceptr address, size_t n_bytes) {
    ENTER(context);
    std::vector<CUdeviceptr> whole = whole_spans(address, n_bytes);
    if (whole.empty() || plain.count(address)) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult code = back_to_reserved(address, n_bytes)) return code;
    for (CUdeviceptr start : whole) spans.erase(start);
    return CUDA_SUCCESS;
}

API cuMemSetAccess(CUdeviceptr address, size_t n_bytes, const CUmemAccessDesc *access,
                   size_t count) {
    ENTER(context);
    std::vector<CUdeviceptr> whole = whole_spans(address, n_bytes);
    if (whole.empty() || count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        access->location.id != 0)
        return CUDA_ERROR_INVALID_VALUE;
    bool readable = access->flags & CU_MEM_ACCESS_FLAGS_PROT_READ;
    bool writable = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (CUdeviceptr start : whole) {
        sim::Span &span = spans[start];
        span.readable = readable;
        span.writable = writable;
        int prot = sim::profile().hidden ? PROT_NONE : protection(span);
        if (mprotect(pointer(start), span.n_bytes, prot)) return from_errno();
    }
    return CUDA_SUCCESS;
}

API cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    ENTER(context);
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || !sim::is_device_address(address))
        return CUDA_ERROR_INVALID_VALUE;
    const sim::Span &span = std::prev(spans.upper_bound(address))->second;
    *flags = span.writable   ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
             : span.readable ? CU_MEM_ACCESS_FLAGS_PROT_READ
                             : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

void sim::reveal_memory() {
    if (profile().hidden) protect_all(false);
}

void sim::hide_memory() {
    if (profile().hidden) protect_all(true);
}

CUresult sim::map_plain(CUdeviceptr *address, uint64_t n_bytes) {
    if (!fits(n_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = new_memory(n_bytes);
    if (fd < 0) return from_errno();
    auto backing = std::make_shared<Backing>(fd, n_bytes, true);
    int prot = profile().hidden ? PROT_NONE : PROT_READ | PROT_WRITE;
    void *at = mmap(nullptr, n_bytes, prot, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return from_errno();
    *address = reinterpret_cast<CUdeviceptr>(at);
    spans[*address] = {n_bytes, true, true, std::move(backing)};
    plain.insert(*address);
    return CUDA_SUCCESS;
}

CUresult sim::unmap_plain(CUdeviceptr address) {
    if (!plain.count(address)) return CUDA_ERROR_INVALID_VALUE;
    plain.erase(address);
    munmap(pointer(address), spans[address].n_bytes);
    spans.erase(address);
    return CUDA_SUCCESS;
}
