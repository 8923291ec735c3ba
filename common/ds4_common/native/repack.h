/* Building the published derived artifacts from raw GGUF tensors (docs/layouts.md).
 *
 * Owns: the seam between the driver (ds4_owner/artifacts.py, which reads chunks and owns threads)
 * and the byte moves. A job turns `count` source units, beginning with unit `first` of the whole
 * tensor, into their final bytes of the destination. Jobs write disjoint bytes, so the result
 * depends neither on the chunk size nor on the number of threads.
 */
#ifndef DS4_REPACK_H
#define DS4_REPACK_H

#include "matmul.h" /* DS4_EXPORT */

/* Kinds as in manifests. The unit of every kind but two is a row of the source. */
enum {
    DS4_ROW_GROUP_NORMS = 1,
    DS4_Q8_F16 = 2,
    DS4_Q8_F32 = 3,
    DS4_IQ2_XXS_ALIGNED = 4,
    DS4_Q8_0_ALIGNED = 5,
    DS4_Q2_K_ALIGNED = 6, /* unit: a pair of rows */
    DS4_MLA_KV_B = 7,     /* unit: a head, that is nope + 128 rows */
    DS4_IQ2_XS_ALIGNED = 8
};

typedef struct {
    int64_t in_dim, out_dim, groups; /* as in the manifest record */
    int64_t units;                   /* in the whole tensor */
    int64_t unit_rows;               /* source rows per unit */
    int64_t dst_bytes;               /* of the whole artifact */
} ds4_repack_shape;

/* src holds units [first, first + count); dst is the artifact's first byte. 0, or -1 when kind,
 * shape and range do not fit together (nothing is written then). */
DS4_EXPORT int ds4_repack(int kind, const ds4_repack_shape *shape, const uint8_t *src,
                          int64_t first, int64_t count, uint8_t *dst);

/* Q8_0 arithmetic: kinds 1 to 3. */
void ds4_q8_row_group_norms(const ds4_repack_shape *s, const uint8_t *src, int64_t first,
                            int64_t count, uint8_t *dst);
void ds4_q8_to_f16(const ds4_repack_shape *s, const uint8_t *src, int64_t first, int64_t count,
                   uint8_t *dst);
void ds4_q8_to_f32(const ds4_repack_shape *s, const uint8_t *src, int64_t first, int64_t count,
                   uint8_t *dst);

#endif
