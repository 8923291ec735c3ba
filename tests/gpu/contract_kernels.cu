// The kernels of the driver-contract suite: for a device by NVRTC, for the stand-in driver by g++,
// where a loop stands for the grid and the table at the end names the entries.
#ifdef __CUDACC_RTC__
#define KERNEL extern "C" __global__ void
#define EACH(i, n)                                                                \
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < (n);             \
         i += blockDim.x * gridDim.x)
#else
#include "../native/cuda_module_table.h"
#define KERNEL static void
#define EACH(i, n) for (unsigned i = 0; i < (n); ++i)
#endif

KERNEL add(float *data, unsigned n, float value) {
    EACH(i, n) data[i] += value;
}

KERNEL sum(const float *data, unsigned n, float *result) {
    float total = 0.0f;
    for (unsigned i = 0; i < n; ++i) total += data[i];
    EACH(i, 1) *result = total;
}

#ifndef __CUDACC_RTC__
namespace {

template <typename T> T value(void *const *parameters, int index) {
    return *static_cast<T *>(parameters[index]);
}
int32_t run_add(const ds4_cuda_launch *, void *const *p) {
    add(value<float *>(p, 0), value<unsigned>(p, 1), value<float>(p, 2));
    return 0;
}
int32_t run_sum(const ds4_cuda_launch *, void *const *p) {
    sum(value<float *>(p, 0), value<unsigned>(p, 1), value<float *>(p, 2));
    return 0;
}

const uint32_t add_bytes[] = {8, 4, 4}, sum_bytes[] = {8, 4, 8};
const ds4_cuda_kernel kernels[] = {{"add", run_add, add_bytes, 3, 1024, 0},
                                   {"sum", run_sum, sum_bytes, 3, 1024, 0}};

} // namespace

extern "C" const ds4_cuda_module ds4_cuda_module_table = {DS4_CUDA_MODULE_ABI, 2, kernels};
#endif
