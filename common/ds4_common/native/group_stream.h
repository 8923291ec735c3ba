/* Asking for packed groups ahead of their use. Include only from the x86 kernel files. */
#ifndef DS4_GROUP_STREAM_H
#define DS4_GROUP_STREAM_H

#include "avx2.h"

/* Zen 5 and later have as many lines on their way to the first-level cache as memory keeps up with. */
DS4_INLINE int has_many_pending_lines(void) {
    return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512vp2intersect");
}

/* Where groups of eight rows that are read side by side will be read some blocks later. Each group ends
 * before what is ahead of it begins: the next one in memory is its neighbour's. */
typedef struct {
    const uint8_t *at; /* in the first of them */
    int64_t left;      /* blocks to its end */
    int near;          /* into the first-level cache */
} group_stream;

enum { AHEAD_NEAR = 6144 }; /* bytes of each, where `near`; else DS4_AHEAD_FAR */

DS4_INLINE group_stream stream_ahead(const uint8_t *data, int groups, int64_t blocks, int bytes) {
    const int near = has_many_pending_lines();
    int64_t early = near ? AHEAD_NEAR / bytes : DS4_AHEAD_FAR / bytes;
    const uint8_t *from = data + early / blocks * groups * blocks * bytes;
    return (group_stream){from + early % blocks * bytes, blocks - early % blocks, near};
}

/* Asks for one of `parts` parts of a block of each: asked for all at once, the lines of a large block
 * hold up the loads behind them. Into the second-level cache where lines on their way to the first one
 * are few. */
DS4_INLINE void ask_part(const group_stream *s, int groups, int64_t blocks, int bytes, int part,
                         int parts) {
    const int lines = (bytes + 63) / 64, first = lines * part / parts;
    const int end = lines * (part + 1) / parts;
    const char *at = (const char *)s->at;
    if (s->near) {
        for (int line = first; line < end; line++)
            for (int g = 0; g < groups; g++)
                _mm_prefetch(at + g * blocks * bytes + 64 * line, _MM_HINT_T0);
        return;
    }
    for (int line = first; line < end; line++)
        for (int g = 0; g < groups; g++)
            _mm_prefetch(at + g * blocks * bytes + 64 * line, _MM_HINT_T1);
}

DS4_INLINE void step_ahead(group_stream *s, int groups, int64_t blocks, int bytes) {
    s->at += bytes;
    if (--s->left) return;
    s->at += (groups - 1) * blocks * bytes;
    s->left = blocks;
}

#endif
