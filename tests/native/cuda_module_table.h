/* What a kernel module built for the host exports, so that the stand-in driver can launch it.
 *
 * The fiber shim (cuda_fibers/) fills the table in; the stand-in driver (cuda_stand_in/) gets the
 * shared library's bytes from cuModuleLoadData, opens it and looks `ds4_cuda_module_table` up.
 * Tests call the same entries through ctypes, without any driver. Plain C, fixed-size fields.
 */
#ifndef DS4_CUDA_MODULE_TABLE_H
#define DS4_CUDA_MODULE_TABLE_H

#include <stddef.h>
#include <stdint.h>

#define DS4_CUDA_MODULE_ABI 2u
#define DS4_CUDA_MODULE_SYMBOL "ds4_cuda_module_table"

struct ds4_cuda_launch {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t dynamic_shared_bytes;
};

/* Runs the whole grid and returns 0, or the CUresult that the launch shall end with (719 for a
 * block that can never finish). `parameters` points to one pointer per parameter, as cuLaunchKernel
 * takes them; the values may change after the call. Works on the calling thread, whose bad addresses
 * the stand-in driver catches (it leaves the entry by longjmp then). */
typedef int32_t (*ds4_cuda_entry)(const struct ds4_cuda_launch *launch, void *const *parameters);

struct ds4_cuda_kernel {
    const char *name; /* the extern "C" name of the __global__ function */
    ds4_cuda_entry entry;
    const uint32_t *parameter_bytes; /* the size of each parameter */
    uint32_t parameter_count;
    uint32_t max_threads_per_block; /* __launch_bounds__, or 1024 */
    uint32_t static_shared_bytes;
};

struct ds4_cuda_module {
    uint32_t abi; /* DS4_CUDA_MODULE_ABI */
    uint32_t kernel_count;
    const struct ds4_cuda_kernel *kernels;
};

#endif
