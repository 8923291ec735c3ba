/* All kernels over a quantized matrix of type DS4_TYPE in layout DS4_LAYOUT: one unit of compilation,
 * so that a worker compiles what its model has. The algorithms are in the files included here. */
#include "embed.h"
#include "matmul.h"
#include "matvec.h"
