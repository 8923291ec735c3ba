/* Text to ids: cuts out special tokens, then hands the rest to the pre-tokenizer and the merger.
 *
 * Owns: the order in which llama.cpp resolves special tokens (longest first over the whole text, then
 * leftmost), what white space some of them take with them, BOS and EOS, and the SPM space rules.
 */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>

/* ---- Special tokens --------------------------------------------------------------------------- */

/* First special in [low, high) whose byte at `depth` is at or above `byte`. All of the range share
 * their first `depth` bytes and are sorted. */
static uint32_t first_special(const ds4_tokenizer *t, uint32_t low, uint32_t high, uint32_t depth,
                              uint32_t byte) {
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        uint32_t n;
        const uint8_t *name = ds4_tokenizer_text(t, t->specials[middle], &n);
        if (!name || n <= depth || name[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest special token that starts at text[i] and ends at or before `end`: its bytes, 0 when
 * there is none. Each further byte narrows the range of specials that can still match. */
static uint32_t longest_special(const ds4_tokenizer *t, const uint8_t *text, uint64_t i,
                                uint64_t end, int parse_special, int32_t *id) {
    uint32_t low = 0, high = t->n_specials, best = 0;
    for (uint32_t depth = 0; i + depth < end; depth++) {
        low = first_special(t, low, high, depth, text[i + depth]);
        high = first_special(t, low, high, depth, text[i + depth] + 1u);
        if (low == high)
            break;
        uint32_t n; /* the shortest of the range sorts first */
        const uint32_t candidate = t->specials[low];
        if (!ds4_tokenizer_text(t, candidate, &n) || n != depth + 1)
            continue;
        if (parse_special || (t->types[candidate] & ~DS4_TOKEN_STRIPS) == DS4_TOKEN_USER_DEFINED) {
            best = n;
            *id = (int32_t)candidate;
        }
    }
    return best;
}

/* Candidates as heap keys: longer first, then further left. */
static uint64_t candidate_key(uint64_t begin, uint32_t n) {
    return (uint64_t)(UINT32_MAX - n) << 32 | begin; /* begin fits 32 bits */
}

static int ascending(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void sift_down(uint64_t *heap, uint64_t n) {
    const uint64_t key = heap[0];
    uint64_t i = 0;
    for (uint64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= key)
            break;
        heap[i] = heap[child];
    }
    heap[i] = key;
}

/* Collects the longest special at each place as an ascending array, which is also a heap. */
static int find_candidates(const ds4_tokenizer *t, const uint8_t *text, uint64_t n,
                           int parse_special, uint64_t **keys, uint64_t *n_keys) {
    uint8_t starts[256] = {0};
    for (uint32_t k = 0; k < t->n_specials;) {
        uint32_t length;
        const uint8_t *name = ds4_tokenizer_text(t, t->specials[k], &length);
        if (!name || !length)
            return DS4_TOKENIZER_BAD_VALUE;
        starts[name[0]] = 1;
        k = first_special(t, k, t->n_specials, 0, name[0] + 1u); /* skips its namesakes */
    }
    uint64_t capacity = 0;
    for (uint64_t i = 0; i < n; i++) {
        int32_t id;
        const uint32_t length =
            starts[text[i]] ? longest_special(t, text, i, n, parse_special, &id) : 0;
        if (!length)
            continue;
        if (*n_keys == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            uint64_t *grown = realloc(*keys, capacity * sizeof **keys);
            if (!grown)
                return DS4_TOKENIZER_NO_MEMORY;
            *keys = grown;
        }
        (*keys)[(*n_keys)++] = candidate_key(i, length);
    }
    if (*n_keys)
        qsort(*keys, *n_keys, sizeof **keys, ascending);
    return 0;
}

enum { FREE = 0, TOKEN_BEGIN, TOKEN_REST };

/* Marks in `cover` the tokens that longest-first, leftmost-first choice takes. Those taken before
 * are at least as long as the one looked at, so one that overlaps it covers one of its ends. */
static void take_specials(const ds4_tokenizer *t, const uint8_t *text, int parse_special,
                          uint64_t *heap, uint64_t n, uint8_t *cover) {
    while (n) {
        const uint64_t begin = heap[0] & UINT32_MAX;
        const uint32_t length = UINT32_MAX - (uint32_t)(heap[0] >> 32);
        int32_t id;
        uint32_t shorter = 0;
        if (cover[begin] == FREE && cover[begin + length - 1] != FREE)
            shorter = longest_special(t, text, begin, begin + length - 1, parse_special, &id);
        else if (cover[begin] == FREE) {
            memset(cover + begin, TOKEN_REST, length);
            cover[begin] = TOKEN_BEGIN;
        }
        heap[0] = shorter ? candidate_key(begin, shorter) : heap[--n];
        sift_down(heap, n);
    }
}

/* Called with each fragment in order; id = -1: text between specials. Non-zero stops. */
typedef int (*fragment_fn)(void *context, uint64_t begin, uint64_t end, int32_t id);

static int is_white(uint8_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static int walk_cover(const ds4_tokenizer *t, const uint8_t *text, uint64_t n, int parse_special,
                      const uint8_t *cover, fragment_fn fragment, void *context) {
    for (uint64_t begin = 0; begin < n;) {
        const int special = cover[begin] == TOKEN_BEGIN;
        const int inside = special ? TOKEN_REST : FREE;
        uint64_t end = begin + 1;
        while (end < n && cover[end] == inside)
            end++;
        int32_t id = -1;
        if (special)
            longest_special(t, text, begin, end, parse_special, &id);
        const int stopped = fragment(context, begin, end, id);
        if (stopped)
            return stopped;
        if (id >= 0 && (t->types[id] & DS4_TOKEN_STRIPS))
            while (end < n && cover[end] == FREE && is_white(text[end]))
                end++;
        begin = end;
    }
    return 0;
}

static int for_each_fragment(const ds4_tokenizer *t, const uint8_t *text, uint64_t n,
                             uint32_t flags, fragment_fn fragment, void *context) {
    const int parse_special = !!(flags & DS4_TOKENIZER_PARSE_SPECIAL);
    uint64_t *keys = NULL, n_keys = 0;
    uint8_t *cover = NULL;
    int result = 0;
    if (!(flags & DS4_TOKENIZER_RAW))
        result = find_candidates(t, text, n, parse_special, &keys, &n_keys);
    if (result || !n) {
        /* nothing to cut */
    } else if (!n_keys) {
        result = fragment(context, 0, n, -1);
    } else if (!(cover = calloc(n, 1))) {
        result = DS4_TOKENIZER_NO_MEMORY;
    } else {
        take_specials(t, text, parse_special, keys, n_keys, cover);
        result = walk_cover(t, text, n, parse_special, cover, fragment, context);
    }
    free(keys);
    free(cover);
    return result;
}

/* ---- Encode ----------------------------------------------------------------------------------- */

typedef struct {
    const ds4_tokenizer *t;
    const uint8_t *text;
    ds4_merge_scratch *scratch;
    ds4_token_sink sink;
    int after_special; /* SPM puts a space before text at the start and after special tokens */
} encoding;

static int encode_word(void *context, uint64_t begin, uint64_t end) {
    encoding *e = context;
    return ds4_merge_bpe(e->t, e->text + begin, end - begin, e->scratch, &e->sink);
}

static const uint8_t LOW_LINE[3] = {0xe2, 0x96, 0x81}; /* U+2581 stands for a space */

static int is_low_line(const uint8_t *text, uint64_t i, uint64_t n) {
    return n - i >= 3 && !memcmp(text + i, LOW_LINE, 3);
}

/* Merges text whose spaces are U+2581 already. Where no token has U+2581 after another character
 * nothing merges across such a place, so cutting there changes no id and keeps words short. */
static int encode_spm_text(encoding *e, const uint8_t *text, uint64_t n) {
    const int splits = !!(e->t->header->flags & DS4_TOKENIZER_SPACE_SPLITS);
    for (uint64_t begin = 0; begin < n;) {
        uint64_t end = begin;
        if (splits) {
            while (is_low_line(text, end, n))
                end += 3;
            while (end < n && !is_low_line(text, end, n))
                end++;
        } else {
            end = n;
        }
        const int failed = ds4_merge_spm(e->t, text + begin, end - begin, e->scratch, &e->sink);
        if (failed)
            return failed;
        begin = end;
    }
    return 0;
}

static int encode_spm(encoding *e, uint64_t begin, uint64_t end) {
    const int prefix = e->after_special && (e->t->header->flags & DS4_TOKENIZER_ADD_SPACE_PREFIX);
    uint8_t *escaped = malloc(3 * (end - begin) + 3);
    if (!escaped)
        return DS4_TOKENIZER_NO_MEMORY;
    uint64_t n = 0;
    if (prefix) {
        memcpy(escaped, LOW_LINE, 3);
        n = 3;
    }
    for (uint64_t i = begin; i < end; i++) {
        if (e->text[i] == ' ') {
            memcpy(escaped + n, LOW_LINE, 3);
            n += 3;
        } else {
            escaped[n++] = e->text[i];
        }
    }
    const int failed = encode_spm_text(e, escaped, n);
    free(escaped);
    return failed;
}

static int encode_fragment(void *context, uint64_t begin, uint64_t end, int32_t id) {
    encoding *e = context;
    if (id >= 0) {
        ds4_token_push(&e->sink, id);
        e->after_special = 1;
        return 0;
    }
    const int failed =
        e->t->header->kind == DS4_TOKENIZER_SPM
            ? encode_spm(e, begin, end)
            : ds4_pre_split(e->t->header->pre, e->text, begin, end, encode_word, e);
    e->after_special = 0;
    return failed;
}

int64_t ds4_tokenizer_encode(const void *blob, uint64_t n_bytes, const char *text,
                             uint64_t text_bytes, uint32_t flags, int32_t *ids,
                             uint64_t capacity) {
    ds4_tokenizer t;
    const int opened = ds4_tokenizer_open(blob, n_bytes, &t);
    if (opened)
        return opened;
    if (t.header->kind == DS4_TOKENIZER_LIBRARY)
        return DS4_TOKENIZER_NO_ENCODER;
    if (text_bytes > DS4_TOKENIZER_MAX_TEXT)
        return DS4_TOKENIZER_TOO_LONG;
    encoding e = {&t, (const uint8_t *)text, ds4_merge_scratch_new(), {ids, capacity, 0}, 1};
    if (!e.scratch)
        return DS4_TOKENIZER_NO_MEMORY;
    const uint32_t with = flags & DS4_TOKENIZER_WITH_BOS_EOS ? t.header->flags : 0;
    if (with & DS4_TOKENIZER_ADD_BOS)
        ds4_token_push(&e.sink, t.header->bos);
    const int failed = for_each_fragment(&t, e.text, text_bytes, flags, encode_fragment, &e);
    if (with & DS4_TOKENIZER_ADD_EOS)
        ds4_token_push(&e.sink, t.header->eos);
    ds4_merge_scratch_free(e.scratch);
    return failed ? failed : (int64_t)e.sink.n;
}

/* ---- Fragments, for callers that encode the text between specials themselves ------------------ */

typedef struct {
    int64_t *triples;
    uint64_t capacity, n;
} fragment_list;

static int add_fragment(void *context, uint64_t begin, uint64_t end, int32_t id) {
    fragment_list *list = context;
    if (list->n < list->capacity) {
        int64_t *triple = list->triples + 3 * list->n;
        triple[0] = (int64_t)begin;
        triple[1] = (int64_t)end;
        triple[2] = id;
    }
    list->n++;
    return 0;
}

int64_t ds4_tokenizer_fragments(const void *blob, uint64_t n_bytes, const char *text,
                                uint64_t text_bytes, uint32_t flags, int64_t *triples,
                                uint64_t capacity) {
    ds4_tokenizer t;
    const int opened = ds4_tokenizer_open(blob, n_bytes, &t);
    if (opened)
        return opened;
    if (text_bytes > DS4_TOKENIZER_MAX_TEXT)
        return DS4_TOKENIZER_TOO_LONG;
    fragment_list list = {triples, capacity, 0};
    const int failed = for_each_fragment(&t, (const uint8_t *)text, text_bytes,
                                         flags & DS4_TOKENIZER_PARSE_SPECIAL, add_fragment, &list);
    return failed ? failed : (int64_t)list.n;
}
