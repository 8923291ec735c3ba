/* The device that the stand-in pretends to be: init, versions, attributes, names of errors. */
#include "stand_in.h"

#include <cstdlib>
#include <cstring>
#include <fstream>

namespace {

std::string setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

uint64_t meminfo_bytes(const char *key) {
    std::ifstream file("/proc/meminfo");
    std::string word;
    uint64_t kib = 0;
    while (file >> word)
        if (word == key) {
            file >> kib;
            break;
        }
    return kib << 10;
}

sim::Profile read_profile() {
    sim::Profile p;
    std::string lacks = setting("DS4_SIM_LACKS", "");
    p.integrated = setting("DS4_SIM_PROFILE", "discrete") == "integrated";
    p.lazy = setting("DS4_SIM_STREAMS", "lazy") != "eager";
    p.hidden = setting("DS4_SIM_HOST", "sees") == "hidden";
    p.has_vmm = lacks != "vmm";
    p.has_fd_export = lacks != "fd" && lacks != "vmm";
    p.driver_version = atoi(setting("DS4_SIM_DRIVER", "13000").c_str());
    uint64_t megabytes = strtoull(setting("DS4_SIM_TOTAL_MB", "0").c_str(), nullptr, 10);
    p.total_bytes = megabytes      ? megabytes << 20
                    : p.integrated ? meminfo_bytes("MemTotal:")
                                   : uint64_t{16} << 30;
    p.recommended_bytes = strtoull(setting("DS4_SIM_GRANULARITY_KB", "2048").c_str(), nullptr, 10) << 10;
    p.name = p.integrated ? "ds4 sim integrated" : "ds4 sim discrete";
    p.pool = setting("DS4_SIM_POOL", "");
    return p;
}

struct Named {
    CUresult code;
    const char *name, *text;
};
const Named names[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access"},
};

} // namespace

const sim::Profile &sim::profile() {
    static const Profile profile = read_profile();
    return profile;
}

API cuInit(unsigned int flags) {
    ENTER(nothing);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    sim::initialised = true;
    sim::catch_faults();
    return CUDA_SUCCESS;
}

API cuDriverGetVersion(int *version) {
    ENTER(nothing);
    *version = sim::profile().driver_version;
    return CUDA_SUCCESS;
}

API cuDeviceGetCount(int *count) {
    ENTER(init);
    *count = 1;
    return CUDA_SUCCESS;
}

API cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(init);
    if (ordinal) return CUDA_ERROR_INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
}

API cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(init);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    strncpy(name, sim::profile().name.c_str(), length);
    return CUDA_SUCCESS;
}

API cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(init);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid->bytes, sim::profile().integrated ? "ds4 sim integr.0" : "ds4 sim discr. 0", 16);
    return CUDA_SUCCESS;
}

API cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    ENTER(init);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = sim::profile().total_bytes;
    return CUDA_SUCCESS;
}

API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER(init);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    const sim::Profile &p = sim::profile();
    switch (int(attribute)) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = p.integrated ? 12 : 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = p.integrated ? 1 : 0; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = p.integrated; break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = p.has_vmm; break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        *value = p.has_fd_export;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 2; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = (p.integrated ? 99 : 227) << 10;
        break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: *value = 1; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

API cuGetErrorName(CUresult code, const char **text) {
    for (const Named &one : names)
        if (one.code == code) return *text = one.name, CUDA_SUCCESS;
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

API cuGetErrorString(CUresult code, const char **text) {
    for (const Named &one : names)
        if (one.code == code) return *text = one.text, CUDA_SUCCESS;
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

API cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTER(context);
    const sim::Profile &p = sim::profile();
    *total_bytes = p.total_bytes;
    uint64_t used = sim::used_bytes();
    uint64_t left = used < p.total_bytes ? p.total_bytes - used : 0;
    /* The system's memory: the driver counts what is free now, without what the cache would give. */
    if (p.integrated) left = std::min(left, meminfo_bytes("MemFree:"));
    *free_bytes = left;
    return CUDA_SUCCESS;
}
