/* Contexts: the primary one, and what is current in a thread. */
#include "stand_in.h"

struct CUctx_st {
    bool primary;
    int retained;
};

namespace {
CUctx_st primary{true, 0};
thread_local std::vector<CUcontext> current; /* a stack; the last one is current */
} // namespace

bool sim::context_is_current() {
    if (current.empty() || !current.back()) return false;
    return !current.back()->primary || current.back()->retained > 0;
}

API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(init);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    if (sim::poisoned() != CUDA_SUCCESS) return sim::poisoned();
    ++primary.retained;
    *context = &primary;
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER(init);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    if (!primary.retained) return CUDA_ERROR_INVALID_CONTEXT;
    --primary.retained;
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    ENTER(init);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = primary.retained > 0;
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int) {
    ENTER(init);
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

API cuCtxSetCurrent(CUcontext context) {
    ENTER(init);
    if (current.empty()) current.push_back(nullptr);
    current.back() = context;
    return CUDA_SUCCESS;
}

API cuCtxGetCurrent(CUcontext *context) {
    ENTER(init);
    *context = current.empty() ? nullptr : current.back();
    return CUDA_SUCCESS;
}

API cuCtxPushCurrent(CUcontext context) {
    ENTER(init);
    current.push_back(context);
    return CUDA_SUCCESS;
}

API cuCtxPopCurrent(CUcontext *context) {
    ENTER(init);
    if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context) *context = current.back();
    current.pop_back();
    return CUDA_SUCCESS;
}

API cuCtxGetDevice(CUdevice *device) {
    ENTER(context);
    *device = 0;
    return CUDA_SUCCESS;
}

API cuCtxSynchronize(void) {
    ENTER(context);
    if (CUresult code = sim::refuse_while_capturing()) return code;
    return sim::run_everything();
}
