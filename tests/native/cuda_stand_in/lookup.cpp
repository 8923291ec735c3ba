/* cuGetProcAddress: which function a base name stands for. What is missing is told as not found. */
#include "stand_in.h"

#include <dlfcn.h>

#include <cstring>

namespace {

void *find(const std::string &name) {
    static void *self = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void *>(&find), &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    for (const char *version : {"_v4", "_v3", "_v2", ""})
        if (void *found = dlsym(self, (name + version).c_str())) {
            Dl_info info; /* dlsym also searches what this library links to */
            if (dladdr(found, &info) && info.dli_sname && !strncmp(info.dli_sname, "cu", 2))
                return found;
        }
    return nullptr;
}

} // namespace

API cuGetProcAddress(const char *symbol, void **function, int, cuuint64_t,
                     CUdriverProcAddressQueryResult *status) {
    *function = find(!strcmp(symbol, "cuGraphInstantiate") ? "cuGraphInstantiateWithFlags" : symbol);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* NVRTC asks every driver that it finds for private functions, and believes that it got them when
 * there is nobody to say no. */
API cuGetExportTable(const void **table, const CUuuid *) {
    *table = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}
