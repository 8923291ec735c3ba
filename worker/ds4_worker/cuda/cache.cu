/* All kernels over a KV cache of type DS4_KV: one unit of compilation. The algorithms are in the files
 * included here. */
#include "attend.h"
#include "kv_store.h"
