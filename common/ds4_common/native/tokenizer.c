/* Opens a tokenizer blob and looks things up in it. See tokenizer.h for what is checked when. */
#include "tokenizer.h"

#include <string.h>

/* ---- Hashes (part of the blob format) --------------------------------------------------------- */

uint32_t ds4_tokenizer_hash(const uint8_t *bytes, uint64_t n) {
    uint64_t h = 0xcbf29ce484222325u;
    for (uint64_t i = 0; i < n; i++)
        h = (h ^ bytes[i]) * 0x100000001b3u;
    return (uint32_t)(h ^ h >> 32);
}

uint32_t ds4_tokenizer_pair_hash(uint32_t left, uint32_t right) {
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> 32);
}

/* ---- Open ------------------------------------------------------------------------------------- */

/* The section's bytes when it lies inside the blob and is made of whole entries; else NULL. */
static const void *section(const ds4_tokenizer_header *h, int which, uint64_t entry_bytes) {
    const ds4_tokenizer_section s = h->sections[which];
    if (s.offset % 8 || s.offset < sizeof *h || s.offset > h->n_bytes)
        return NULL;
    if (s.n_bytes > h->n_bytes - s.offset || s.n_bytes % entry_bytes)
        return NULL;
    return (const uint8_t *)h + s.offset;
}

static int power_of_two(uint64_t n) { return n && n <= (uint64_t)1 << 31 && !(n & (n - 1)); }

static int id_or_none(int32_t id, uint64_t n) { return id >= -1 && (id < 0 || (uint32_t)id < n); }

int ds4_tokenizer_open(const void *blob, uint64_t n_bytes, ds4_tokenizer *t) {
    const ds4_tokenizer_header *h = blob;
    if (!blob || n_bytes < sizeof *h)
        return DS4_TOKENIZER_SHORT;
    if ((uintptr_t)blob % 8)
        return DS4_TOKENIZER_MISALIGNED;
    if (memcmp(h->magic, DS4_TOKENIZER_MAGIC, 8))
        return DS4_TOKENIZER_BAD_MAGIC;
    if (h->version != DS4_TOKENIZER_VERSION)
        return DS4_TOKENIZER_BAD_VERSION;
    if (h->n_bytes > n_bytes)
        return DS4_TOKENIZER_SHORT;
    const uint64_t n = h->n_vocab;
    if (h->kind < DS4_TOKENIZER_BPE || h->kind > DS4_TOKENIZER_LIBRARY || !n || n > INT32_MAX ||
        (h->kind == DS4_TOKENIZER_BPE && h->pre >= ds4_pre_count()))
        return DS4_TOKENIZER_BAD_VALUE;
    if (!id_or_none(h->bos, n) || !id_or_none(h->eos, n) || !id_or_none(h->unk, n) ||
        !id_or_none(h->pad, n) || ((h->flags & DS4_TOKENIZER_ADD_BOS) && h->bos < 0) ||
        ((h->flags & DS4_TOKENIZER_ADD_EOS) && h->eos < 0) ||
        h->vocab_probe_limit > DS4_TOKENIZER_MAX_PROBES ||
        h->merge_probe_limit > DS4_TOKENIZER_MAX_PROBES)
        return DS4_TOKENIZER_BAD_VALUE;

    t->header = h;
    t->text_offsets = section(h, DS4_TOKENIZER_TEXT_OFFSETS, 4);
    t->text = section(h, DS4_TOKENIZER_TEXT, 1);
    t->piece_offsets = section(h, DS4_TOKENIZER_PIECE_OFFSETS, 4);
    t->pieces = section(h, DS4_TOKENIZER_PIECES, 1);
    t->types = section(h, DS4_TOKENIZER_TYPES, 1);
    t->scores = section(h, DS4_TOKENIZER_SCORES, 4);
    t->vocab = section(h, DS4_TOKENIZER_VOCAB_TABLE, sizeof *t->vocab);
    t->merges = section(h, DS4_TOKENIZER_MERGE_TABLE, sizeof *t->merges);
    t->byte_ids = section(h, DS4_TOKENIZER_BYTE_IDS, 4);
    t->specials = section(h, DS4_TOKENIZER_SPECIALS, 4);
    if (!t->text_offsets || !t->text || !t->piece_offsets || !t->pieces || !t->types ||
        !t->scores || !t->vocab || !t->merges || !t->byte_ids || !t->specials ||
        !section(h, DS4_TOKENIZER_EOG, 4) || !section(h, DS4_TOKENIZER_JSON, 1))
        return DS4_TOKENIZER_BAD_SECTION;

    const ds4_tokenizer_section *s = h->sections;
    const uint64_t vocab_slots = s[DS4_TOKENIZER_VOCAB_TABLE].n_bytes / sizeof *t->vocab;
    const uint64_t merge_slots = s[DS4_TOKENIZER_MERGE_TABLE].n_bytes / sizeof *t->merges;
    if (s[DS4_TOKENIZER_TEXT_OFFSETS].n_bytes != 4 * (n + 1) ||
        s[DS4_TOKENIZER_PIECE_OFFSETS].n_bytes != 4 * (n + 1) ||
        s[DS4_TOKENIZER_TYPES].n_bytes != n || s[DS4_TOKENIZER_BYTE_IDS].n_bytes != 4 * 256 ||
        !power_of_two(vocab_slots) || !power_of_two(merge_slots) ||
        s[DS4_TOKENIZER_SPECIALS].n_bytes > 4 * n || s[DS4_TOKENIZER_EOG].n_bytes > 4 * n ||
        (h->kind == DS4_TOKENIZER_SPM && s[DS4_TOKENIZER_SCORES].n_bytes != 4 * n))
        return DS4_TOKENIZER_BAD_SECTION;
    t->text_bytes = s[DS4_TOKENIZER_TEXT].n_bytes;
    t->piece_bytes = s[DS4_TOKENIZER_PIECES].n_bytes;
    t->vocab_mask = (uint32_t)(vocab_slots - 1);
    t->merge_mask = (uint32_t)(merge_slots - 1);
    t->n_specials = (uint32_t)(s[DS4_TOKENIZER_SPECIALS].n_bytes / 4);
    return 0;
}

int ds4_tokenizer_check(const void *blob, uint64_t n_bytes) {
    ds4_tokenizer t;
    const int opened = ds4_tokenizer_open(blob, n_bytes, &t);
    if (opened)
        return opened;
    const ds4_tokenizer_section eog = t.header->sections[DS4_TOKENIZER_EOG];
    const uint32_t *ids = (const uint32_t *)((const uint8_t *)blob + eog.offset);
    for (uint64_t i = 0; i < eog.n_bytes / 4; i++)
        if (ids[i] >= t.header->n_vocab)
            return DS4_TOKENIZER_BAD_VALUE;
    return 0;
}

/* ---- Look-ups --------------------------------------------------------------------------------- */

const uint8_t *ds4_tokenizer_text(const ds4_tokenizer *t, uint32_t id, uint32_t *n) {
    if (id >= t->header->n_vocab)
        return NULL;
    const uint32_t begin = t->text_offsets[id], end = t->text_offsets[id + 1];
    if (begin > end || end > t->text_bytes)
        return NULL;
    *n = end - begin;
    return t->text + begin;
}

int32_t ds4_tokenizer_find(const ds4_tokenizer *t, const uint8_t *text, uint64_t n) {
    if (!n || n > t->header->max_text_bytes)
        return -1;
    const uint32_t hash = ds4_tokenizer_hash(text, n);
    for (uint32_t probe = 0; probe <= t->header->vocab_probe_limit; probe++) {
        const ds4_vocab_slot *slot = &t->vocab[(hash + probe) & t->vocab_mask];
        if (!slot->id_plus_1)
            return -1;
        if (slot->hash != hash)
            continue;
        uint32_t length;
        const uint8_t *candidate = ds4_tokenizer_text(t, slot->id_plus_1 - 1, &length);
        if (candidate && length == n && !memcmp(candidate, text, n))
            return (int32_t)(slot->id_plus_1 - 1);
    }
    return -1;
}

const ds4_merge_slot *ds4_tokenizer_find_merge(const ds4_tokenizer *t, uint32_t left,
                                               uint32_t right) {
    const uint32_t hash = ds4_tokenizer_pair_hash(left, right);
    for (uint32_t probe = 0; probe <= t->header->merge_probe_limit; probe++) {
        const ds4_merge_slot *slot = &t->merges[(hash + probe) & t->merge_mask];
        if (slot->left == left && slot->right == right)
            return slot;
        if (slot->left == UINT32_MAX)
            return NULL;
    }
    return NULL;
}

int32_t ds4_tokenizer_id_of(const void *blob, uint64_t n_bytes, const char *text,
                            uint64_t text_bytes) {
    ds4_tokenizer t;
    const int opened = ds4_tokenizer_open(blob, n_bytes, &t);
    if (opened)
        return opened - 1; /* -1 means "no such token" here */
    return ds4_tokenizer_find(&t, (const uint8_t *)text, text_bytes);
}
