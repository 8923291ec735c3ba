/* The ABI number of the whole library: raised when any exported function changes meaning. */
#include "matmul.h"

DS4_EXPORT int ds4_native_abi(void) { return 1; }
