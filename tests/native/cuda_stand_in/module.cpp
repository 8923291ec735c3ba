/* Modules built for the host, and the launches of their kernels.
 *
 * The image is a shared library that exports the table of ../cuda_module_table.h. Parameters are
 * copied when a launch is called for, so it may be queued or captured.
 */
#include "../cuda_module_table.h"
#include "stand_in.h"

#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>

struct CUfunc_st {
    CUmodule module;
    const ds4_cuda_kernel *kernel;
    int max_dynamic_shared_bytes = 48 << 10;
    bool loaded = false; /* code comes to a device late: when it is asked for, or launched */
};

struct CUmod_st {
    void *library;
    const ds4_cuda_module *table;
    std::map<std::string, CUfunc_st> functions;
};

namespace {

#if defined(__x86_64__)
constexpr int host_machine = EM_X86_64;
#else
constexpr int host_machine = EM_AARCH64;
#endif

/* A file of its own for every load: the loader takes one file, or one name, for one library. */
void *open_image(const void *image, uint64_t n_bytes) {
    const char *folder = getenv("TMPDIR");
    std::string path = std::string(folder ? folder : "/tmp") + "/ds4-sim-module-XXXXXX";
    int fd = mkstemp(path.data());
    if (fd < 0) return nullptr;
    bool whole = write(fd, image, n_bytes) == ssize_t(n_bytes);
    close(fd);
    void *library = whole ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (whole && !library) fprintf(stderr, "stand-in driver: %s\n", dlerror());
    unlink(path.c_str());
    return library;
}

struct Arguments { /* copies of a launch's parameter values, and pointers to them */
    std::vector<std::vector<unsigned char>> values;
    std::vector<void *> pointers;
};

std::shared_ptr<Arguments> copy_parameters(const ds4_cuda_kernel *kernel, void **parameters) {
    auto arguments = std::make_shared<Arguments>();
    for (uint32_t i = 0; i < kernel->parameter_count; ++i) {
        const auto *value = static_cast<const unsigned char *>(parameters[i]);
        arguments->values.emplace_back(value, value + kernel->parameter_bytes[i]);
    }
    for (auto &value : arguments->values) arguments->pointers.push_back(value.data());
    return arguments;
}

bool possible(CUfunction function, const ds4_cuda_launch &launch) {
    uint64_t threads = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
    uint64_t blocks = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    return threads && blocks && threads <= function->kernel->max_threads_per_block &&
           launch.grid[0] <= 0x7fffffff && launch.grid[1] <= 65535 && launch.grid[2] <= 65535 &&
           launch.block[0] <= 1024 && launch.block[1] <= 1024 && launch.block[2] <= 64 &&
           launch.dynamic_shared_bytes + function->kernel->static_shared_bytes <=
               uint32_t(function->max_dynamic_shared_bytes);
}

CUresult launch_kernel(CUfunction function, const ds4_cuda_launch &launch, CUstream stream,
                       void **parameters) {
    if (!possible(function, launch) || (function->kernel->parameter_count && !parameters))
        return CUDA_ERROR_INVALID_VALUE;
    if (!function->loaded)
        if (CUresult code = sim::refuse_while_capturing()) return code;
    function->loaded = true;
    auto arguments = copy_parameters(function->kernel, parameters);
    ds4_cuda_entry entry = function->kernel->entry;
    return sim::submit(stream, sim::NodeKind::kernel, [=] {
        return CUresult(entry(&launch, arguments->pointers.data()));
    });
}

} // namespace

API cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER(context);
    if (CUresult code = sim::refuse_while_capturing()) return code;
    const auto *header = static_cast<const Elf64_Ehdr *>(image);
    if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
    if (header->e_machine != host_machine) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    uint64_t n_bytes = header->e_shoff + uint64_t{header->e_shentsize} * header->e_shnum;
    void *library = open_image(image, n_bytes);
    if (!library) return CUDA_ERROR_INVALID_IMAGE;
    auto *table = static_cast<const ds4_cuda_module *>(dlsym(library, DS4_CUDA_MODULE_SYMBOL));
    if (!table || table->abi != DS4_CUDA_MODULE_ABI) {
        dlclose(library);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *module = new CUmod_st{library, table, {}};
    for (uint32_t i = 0; i < table->kernel_count; ++i)
        (*module)->functions[table->kernels[i].name] = {*module, &table->kernels[i]};
    return CUDA_SUCCESS;
}

API cuModuleUnload(CUmodule module) {
    ENTER(context);
    if (CUresult code = sim::run_everything()) return code;
    dlclose(module->library);
    delete module;
    return CUDA_SUCCESS;
}

API cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER(context);
    auto found = module->functions.find(name);
    if (found == module->functions.end()) return CUDA_ERROR_NOT_FOUND;
    *function = &found->second;
    return CUDA_SUCCESS;
}

API cuFuncLoad(CUfunction function) {
    ENTER(context);
    if (CUresult code = sim::refuse_while_capturing()) return code;
    function->loaded = true;
    return CUDA_SUCCESS;
}

API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    ENTER(init);
    switch (int(attribute)) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = int(function->kernel->max_threads_per_block);
        break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = int(function->kernel->static_shared_bytes);
        break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = function->max_dynamic_shared_bytes;
        break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break; /* a host library has none to tell */
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = sim::profile().integrated ? 121 : 90; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

API cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    ENTER(init);
    int most = (sim::profile().integrated ? 99 : 227) << 10;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
        value + int(function->kernel->static_shared_bytes) > most)
        return CUDA_ERROR_INVALID_VALUE;
    function->max_dynamic_shared_bytes = value;
    return CUDA_SUCCESS;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction, int threads, size_t) {
    ENTER(context);
    if (threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    *blocks = 2048 / threads;
    return CUDA_SUCCESS;
}

API cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                   unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                   void **parameters, void **extra) {
    ENTER(context);
    if (extra) return CUDA_ERROR_NOT_SUPPORTED;
    ds4_cuda_launch launch = {
        {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    return launch_kernel(function, launch, stream, parameters);
}

/* Attributes such as programmatic serialisation change when a kernel starts, not what it does. */
API cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                     void **extra) {
    ENTER(context);
    if (extra) return CUDA_ERROR_NOT_SUPPORTED;
    ds4_cuda_launch launch = {{config->gridDimX, config->gridDimY, config->gridDimZ},
                              {config->blockDimX, config->blockDimY, config->blockDimZ},
                              config->sharedMemBytes};
    return launch_kernel(function, launch, config->hStream, parameters);
}
