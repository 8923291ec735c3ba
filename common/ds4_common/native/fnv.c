/* FNV-1a, 64 bits: the hash of the published fingerprint and of `--repack-hash`. */
#include "matmul.h" /* DS4_EXPORT */

/* Continues from `hash`, so callers choose the basis and may feed pieces. */
DS4_EXPORT uint64_t ds4_fnv1a64(uint64_t hash, const uint8_t *data, size_t n) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ data[i]) * 1099511628211u;
    return hash;
}
