/* Where the end of a sequence has occurred before in it: what followed there is the draft.
 *
 * Owns: an index over the tokens of one sequence, in memory of the caller. Every position is entered once,
 * under its last FAR and its last NEAR tokens; entries of one hash are chained, the latest first. A
 * look-up walks at most DS4_HISTORY_WALK entries per index, so it is bounded however repetitive the
 * text. Memory of zeros is an empty index once ds4_history_init has written its capacity.
 */
#ifndef DS4_HISTORY_H
#define DS4_HISTORY_H

#include <stdint.h>

#define DS4_HISTORY_NEAR 2   /* least tokens that must have occurred before */
#define DS4_HISTORY_FAR 5    /* looked for first: few places share so many */
#define DS4_HISTORY_WALK 32
#define DS4_HISTORY_MATCH 64 /* a longer match is as good as this one */

#define DS4_HISTORY_EXPORT __attribute__((visibility("default")))

/* Bytes for a sequence of at most `capacity` tokens; 0 for more than 2^30. */
DS4_HISTORY_EXPORT uint64_t ds4_history_bytes(uint32_t capacity);
/* `memory`: 8-byte aligned, zeros. */
DS4_HISTORY_EXPORT void ds4_history_init(void *memory, uint32_t capacity);
/* Appends `count` tokens, of which those beyond the capacity are dropped; then writes at most `wanted`
 * tokens to `draft`: what followed the latest of the longest earlier occurrences of the end. Where that
 * runs into the end itself, the draft goes on with its own beginning. Returns how many, and in *matched the
 * length of the match (at most DS4_HISTORY_MATCH). */
DS4_HISTORY_EXPORT uint32_t ds4_history_propose(void *memory, const int32_t *tokens, uint32_t count,
                                                int32_t *draft, uint32_t wanted, uint32_t *matched);

#endif
