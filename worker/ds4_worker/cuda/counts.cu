/* How often the tokens of each bank were seen: what the penalties of a draw look at (sample.cu).
 *
 * `counts` is int32[banks][vocabulary + 1]: 0 where a token was not seen, else one more than its
 * occurrences in the output; the last entry of a bank says that an id outside the vocabulary came.
 * Reference: the list of native/sampler.h, whose order does not matter because its ids are distinct.
 *
 * count_tokens: parameter ds4_count, grid (banks), block (512), no shared memory. `notes` holds `live`
 * records: what is to be noted of one bank each, its places in bytes from `input`, which the host wrote.
 */
#include "op_math.h"

#define THREADS 512

struct ds4_note {
    int32_t bank, clear;         /* clear: forget what there is first */
    int32_t records, n_records;  /* (int32 id, int32 occurrences): as they stand, each id once */
    int32_t drawn, n_drawn;      /* int32 ids, drawn since, in order */
    int32_t pending, reserved;   /* one more, in this place of the step's tokens; -1 */
};

struct ds4_count {
    uint64_t counts, input, notes, tokens, live;
    int32_t rows, vocabulary;
};

DS4_KERNEL(count_tokens, ds4_count, 512, 1) {
    if (blockIdx.x >= (unsigned)ds4_rows(p.live, p.rows)) return;
    const ds4_note note = ((const ds4_note *)p.notes)[blockIdx.x];
    int n = p.vocabulary, *counts = (int *)p.counts + (int64_t)note.bank * (n + 1);
    if (note.clear)
        for (int i = threadIdx.x; i <= n; i += THREADS) counts[i] = 0;
    ds4_sync_block();
    const int2 *records = (const int2 *)(p.input + (uint64_t)note.records);
    for (int i = threadIdx.x; i < note.n_records; i += THREADS) {
        bool known = (uint32_t)records[i].x < (uint32_t)n;
        counts[known ? records[i].x : n] = known ? records[i].y + 1 : 1;
    }
    ds4_sync_block();
    if (threadIdx.x) return; /* ids may come again: one after the other */
    const int *drawn = (const int *)(p.input + (uint64_t)note.drawn);
    for (int i = 0; i <= note.n_drawn; i++) {
        if (i == note.n_drawn && note.pending < 0) break;
        int id = i < note.n_drawn ? drawn[i] : ((const int *)p.tokens)[note.pending];
        bool known = (uint32_t)id < (uint32_t)n;
        int *count = counts + (known ? id : n);
        *count += *count ? 1 : 2;
    }
}
