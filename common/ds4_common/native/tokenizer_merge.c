/* Turns one word into ids by merging neighbours, best pair first.
 *
 * Owns: the merge order of llama.cpp's BPE (lowest rank, then leftmost) and SPM (highest score, then
 * leftmost) sessions. A binary heap of candidate pairs makes a word of n symbols cost n log n, so a
 * megabyte without a space is slow in proportion, not in its square.
 */
#include "tokenizer.h"
#include "tokenizer_utf8.h"

#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

typedef struct {
    uint32_t prev, next; /* NONE at the ends */
    uint32_t begin, n;   /* bytes of the word; n = 0: merged into its left neighbour */
    int32_t id;          /* BPE: -1 where the vocabulary has no token for the byte */
} symbol;

/* A symbol and its right neighbour that could merge. Stale when either changed since, which their
 * joint size shows: symbols only grow, so it equals n only while both are as they were. */
typedef struct {
    uint64_t key; /* rank or inverted score, then the left symbol: the smallest goes first */
    uint32_t n, id;
} pair;

struct ds4_merge_scratch {
    symbol *symbols;
    pair *heap;
    uint8_t *name; /* a word in GPT-2 characters, for whole-word look-ups */
    uint64_t n_symbols, n_heap, heap_capacity, symbol_capacity, name_capacity;
};

ds4_merge_scratch *ds4_merge_scratch_new(void) { return calloc(1, sizeof(ds4_merge_scratch)); }

void ds4_merge_scratch_free(ds4_merge_scratch *s) {
    if (!s)
        return;
    free(s->symbols);
    free(s->heap);
    free(s->name);
    free(s);
}

/* Makes room for n entries, keeping what is there. */
static int grow(void **array, uint64_t *capacity, uint64_t n, uint64_t entry_bytes) {
    if (n <= *capacity)
        return 0;
    const uint64_t wanted = n > 2 * *capacity ? n + 64 : 2 * *capacity;
    void *grown = realloc(*array, wanted * entry_bytes);
    if (!grown)
        return DS4_TOKENIZER_NO_MEMORY;
    *array = grown;
    *capacity = wanted;
    return 0;
}

/* ---- Heap ------------------------------------------------------------------------------------- */

static int heap_push(ds4_merge_scratch *s, pair p) {
    if (grow((void **)&s->heap, &s->heap_capacity, s->n_heap + 1, sizeof p))
        return DS4_TOKENIZER_NO_MEMORY;
    uint64_t i = s->n_heap++;
    while (i) {
        const uint64_t parent = (i - 1) / 2;
        if (s->heap[parent].key <= p.key)
            break;
        s->heap[i] = s->heap[parent];
        i = parent;
    }
    s->heap[i] = p;
    return 0;
}

static pair heap_pop(ds4_merge_scratch *s) {
    const pair top = s->heap[0], last = s->heap[--s->n_heap];
    uint64_t i = 0;
    for (;;) {
        uint64_t child = 2 * i + 1;
        if (child >= s->n_heap)
            break;
        if (child + 1 < s->n_heap && s->heap[child + 1].key < s->heap[child].key)
            child++;
        if (s->heap[child].key >= last.key)
            break;
        s->heap[i] = s->heap[child];
        i = child;
    }
    s->heap[i] = last;
    return top;
}

/* ---- Candidate pairs -------------------------------------------------------------------------- */

/* Maps floats to unsigned integers that fall as the float rises: the best score is the smallest. */
static uint32_t falling(float score) {
    uint32_t bits;
    memcpy(&bits, &score, 4);
    if ((bits << 1) == 0)
        bits = 0; /* -0.0 and 0.0 are one score */
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

static int offer_bpe(const ds4_tokenizer *t, ds4_merge_scratch *s, uint32_t left, uint32_t right) {
    const symbol *l = &s->symbols[left], *r = &s->symbols[right];
    if (l->id < 0 || r->id < 0)
        return 0;
    const ds4_merge_slot *merge = ds4_tokenizer_find_merge(t, (uint32_t)l->id, (uint32_t)r->id);
    if (!merge)
        return 0;
    if (merge->id >= t->header->n_vocab)
        return DS4_TOKENIZER_BAD_VALUE;
    return heap_push(s, (pair){(uint64_t)merge->rank << 32 | left, l->n + r->n, merge->id});
}

static int offer_spm(const ds4_tokenizer *t, ds4_merge_scratch *s, const uint8_t *text,
                     uint32_t left, uint32_t right) {
    const symbol *l = &s->symbols[left], *r = &s->symbols[right];
    const int32_t id = ds4_tokenizer_find(t, text + l->begin, (uint64_t)l->n + r->n);
    if (id < 0)
        return 0;
    const uint64_t key = (uint64_t)falling(t->scores[id]) << 32 | left;
    return heap_push(s, (pair){key, l->n + r->n, (uint32_t)id});
}

static int offer(const ds4_tokenizer *t, ds4_merge_scratch *s, const uint8_t *text, uint32_t left,
                 uint32_t right) {
    if (left == NONE || right == NONE)
        return 0;
    return t->header->kind == DS4_TOKENIZER_SPM ? offer_spm(t, s, text, left, right)
                                                : offer_bpe(t, s, left, right);
}

/* ---- The merge loop --------------------------------------------------------------------------- */

/* Merges s->symbols, a chain in text order, until no pair is left. */
static int merge_all(const ds4_tokenizer *t, ds4_merge_scratch *s, const uint8_t *text) {
    int failed;
    s->n_heap = 0;
    for (uint32_t i = 1; i < s->n_symbols; i++)
        if ((failed = offer(t, s, text, i - 1, i)))
            return failed;
    while (s->n_heap) {
        const pair p = heap_pop(s);
        const uint32_t left = (uint32_t)p.key;
        symbol *l = &s->symbols[left];
        if (!l->n || l->next == NONE || l->n + s->symbols[l->next].n != p.n)
            continue;
        symbol *r = &s->symbols[l->next];
        l->n = p.n;
        l->id = (int32_t)p.id;
        l->next = r->next;
        r->n = 0;
        if (l->next != NONE)
            s->symbols[l->next].prev = left;
        if ((failed = offer(t, s, text, l->prev, left)) ||
            (failed = offer(t, s, text, left, l->next)))
            return failed;
    }
    return 0;
}

/* Appends a symbol of n bytes to the chain. The caller has made room. */
static void add_symbol(ds4_merge_scratch *s, uint32_t begin, uint32_t n, int32_t id) {
    const uint32_t i = (uint32_t)s->n_symbols++;
    s->symbols[i] = (symbol){i - 1, NONE, begin, n, id}; /* 0 - 1 is NONE */
    if (i)
        s->symbols[i - 1].next = i;
}

/* ---- BPE -------------------------------------------------------------------------------------- */

/* Id of the token whose text is this word in GPT-2 characters, -1 when there is none. */
static int32_t find_word(const ds4_tokenizer *t, const uint8_t *text, uint64_t n,
                         ds4_merge_scratch *s) {
    if (n > t->header->max_text_bytes ||
        grow((void **)&s->name, &s->name_capacity, 2 * n, 1))
        return -1;
    uint64_t length = 0;
    for (uint64_t i = 0; i < n; i++)
        length += ds4_gpt2_char(text[i], s->name + length);
    return ds4_tokenizer_find(t, s->name, length);
}

int ds4_merge_bpe(const ds4_tokenizer *t, const uint8_t *text, uint64_t n, ds4_merge_scratch *s,
                  ds4_token_sink *sink) {
    if (n > 1) {
        const int32_t whole = find_word(t, text, n, s);
        if (whole >= 0 && ((t->header->flags & DS4_TOKENIZER_IGNORE_MERGES) ||
                           (t->types[whole] & DS4_TOKEN_WHOLE))) {
            ds4_token_push(sink, whole);
            return 0;
        }
    }
    if (grow((void **)&s->symbols, &s->symbol_capacity, n, sizeof(symbol)))
        return DS4_TOKENIZER_NO_MEMORY;
    s->n_symbols = 0;
    for (uint64_t i = 0; i < n; i++) {
        const int32_t id = t->byte_ids[text[i]];
        if (id >= (int32_t)t->header->n_vocab)
            return DS4_TOKENIZER_BAD_VALUE;
        add_symbol(s, (uint32_t)i, 1, id);
    }
    const int failed = merge_all(t, s, text);
    if (failed)
        return failed;
    for (uint32_t i = n ? 0 : NONE; i != NONE; i = s->symbols[i].next)
        if (s->symbols[i].id >= 0) /* a byte that the vocabulary lacks is dropped, as elsewhere */
            ds4_token_push(sink, s->symbols[i].id);
    return 0;
}

/* ---- SPM -------------------------------------------------------------------------------------- */

int ds4_merge_spm(const ds4_tokenizer *t, const uint8_t *text, uint64_t n, ds4_merge_scratch *s,
                  ds4_token_sink *sink) {
    const int32_t whole = ds4_tokenizer_find(t, text, n);
    if (whole >= 0 && (t->types[whole] & DS4_TOKEN_WHOLE)) {
        ds4_token_push(sink, whole);
        return 0;
    }
    if (grow((void **)&s->symbols, &s->symbol_capacity, n, sizeof(symbol)))
        return DS4_TOKENIZER_NO_MEMORY;
    s->n_symbols = 0;
    for (uint64_t i = 0; i < n;) {
        uint32_t rune;
        const uint32_t length = ds4_utf8_next(text, i, n, &rune);
        add_symbol(s, (uint32_t)i, length, -1);
        i += length;
    }
    const int failed = merge_all(t, s, text);
    if (failed)
        return failed;
    for (uint32_t i = n ? 0 : NONE; i != NONE; i = s->symbols[i].next) {
        const symbol *y = &s->symbols[i];
        const int32_t id = y->id >= 0 ? y->id : ds4_tokenizer_find(t, text + y->begin, y->n);
        if (id >= 0) {
            ds4_token_push(sink, id);
            continue;
        }
        for (uint32_t k = 0; k < y->n; k++) { /* byte fallback */
            const int32_t byte = t->byte_ids[text[y->begin + k]];
            if (byte < 0 || byte >= (int32_t)t->header->n_vocab)
                return DS4_TOKENIZER_BAD_VALUE;
            ds4_token_push(sink, byte);
        }
    }
    return 0;
}
