/* Taking back the end of a sequence whose state runs along: drafts that did not come true.
 *
 * Owns: when that is possible. Each bank keeps what its last slice added to running state, and the state
 * before it, as long as the pages hold what that slice left; exec_compress.c adds the part again that
 * the next slice keeps. So the state is the one that plain decoding has, to the bit.
 */
#include "exec.h"

/* The physical page of a position of the bank, in the history that keeps all. */
static int32_t page_at(const ds4_engine *e, int32_t bank, int64_t position) {
    return ds4_bank_pages(e, e->histories, bank)[position / e->image.header->page_tokens];
}

int ds4_can_rewind(const ds4_engine *e, const ds4_slice *s) {
    if (!e->rewinds) return 0;
    const ds4_rewind *r = e->rewinds + s->bank;
    int64_t last = r->start + r->count - 1;
    return r->count && s->start > r->start && s->start <= last &&
           page_at(e, s->bank, r->start) == r->pages[0] &&
           page_at(e, s->bank, s->start) ==
               r->pages[s->start / e->image.header->page_tokens !=
                        r->start / e->image.header->page_tokens];
}

uint32_t ds4_most_rewind(const ds4_engine *e) {
    uint32_t page_tokens = e->image.header->page_tokens;
    if (!e->image.header->forward_only) return UINT32_MAX;
    return !e->rewinds ? 0 : page_tokens < DS4_REWIND ? page_tokens : DS4_REWIND;
}

/* Somebody writes the page: what other banks left in it is gone. */
void ds4_forget_rewinds(ds4_engine *e, int32_t bank, int32_t page) {
    for (uint32_t i = 0; e->rewinds && i < e->config.banks; i++) {
        ds4_rewind *r = e->rewinds + i;
        if ((int32_t)i != bank && (r->pages[0] == page || r->pages[1] == page)) r->count = 0;
    }
}

void ds4_note_slices(ds4_engine *e) {
    if (!e->rewinds) return;
    int64_t page_tokens = e->image.header->page_tokens;
    for (uint32_t i = 0; i < e->n_slices; i++) {
        const ds4_slice *s = e->slices + i;
        ds4_rewind *r = e->rewinds + s->bank;
        r->again = ds4_can_rewind(e, s) ? s->start - r->start : 0;
        r->again_start = r->start;
        int64_t end = s->start + s->count - 1;
        for (int64_t j = s->start / page_tokens; j <= end / page_tokens; j++)
            ds4_forget_rewinds(e, s->bank, page_at(e, s->bank, j * page_tokens));
        r->start = s->start;
        r->count = (uint32_t)s->count <= ds4_most_rewind(e) ? s->count : 0;
        r->pages[0] = page_at(e, s->bank, s->start);
        r->pages[1] = page_at(e, s->bank, end);
    }
}
