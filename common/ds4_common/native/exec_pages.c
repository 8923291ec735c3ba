/* Pages of the KV cache between steps. */
#include <stdio.h>
#include <string.h>

#include "exec.h"

int ds4_engine_copy_page(ds4_engine *e, uint32_t history, int32_t source, int32_t target,
                         int32_t tokens) {
    ds4_history *h = e->histories + (history < e->n_histories ? history : 0);
    int32_t pages = history < e->n_histories ? (int32_t)h->pages : 0;
    int whole = (int)e->image.header->forward_only; /* what runs along is that of the last token */
    if (source < 0 || source >= pages || target < 0 || target >= pages || source == target ||
        tokens < 1 || (uint32_t)tokens > h->page_fill[source] ||
        (whole && (uint32_t)tokens < h->page_fill[source])) {
        snprintf(e->error, sizeof e->error,
                 "copy of page %d to %d: expected two pages below %d and %s the tokens that the first "
                 "holds, got %d",
                 source, target, pages, whole ? "exactly" : "no more than", tokens);
        return DS4_STEP_REFUSED;
    }
    memcpy(h->kv + (uint64_t)target * h->page_stride, h->kv + (uint64_t)source * h->page_stride,
           h->page_stride);
    h->page_fill[target] = (uint32_t)tokens;
    if (!history) ds4_forget_rewinds(e, -1, target);
    return DS4_STEP_OK;
}

void ds4_engine_history(const ds4_engine *e, uint32_t history, ds4_history_facts *info) {
    const ds4_history *h = e->histories + history;
    *info = (ds4_history_facts){
        .window = h->window, .pages = h->pages, .most = h->most, .page_bytes = h->page_stride};
}
