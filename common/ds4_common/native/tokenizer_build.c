/* Builds the tables of a tokenizer blob. Runs once, in the loader child.
 *
 * Owns: the two open-addressing tables, the token pieces, and the mark of tokens that their own
 * merges produce. Refuses what makes a table wrong or slow: duplicate token texts, merges of unknown
 * tokens, byte tokens that name no byte, and names chosen so that their hashes collide.
 */
#include "tokenizer.h"

#include <string.h>

/* What is wrong with the entry whose index a builder returns. build.py holds the sentences. */
enum {
    PROBLEM_DUPLICATE = 1,
    PROBLEM_COLLISIONS = 2,
    PROBLEM_NO_SPACE = 3,     /* a merge is not two texts with a space between */
    PROBLEM_UNKNOWN_LEFT = 4,
    PROBLEM_UNKNOWN_RIGHT = 5,
    PROBLEM_UNKNOWN_RESULT = 6,
    PROBLEM_NOT_A_BYTE = 7,
};

typedef struct {
    int32_t problem;
    uint32_t other; /* PROBLEM_DUPLICATE: the id that has the text already */
} build_problem;

/* ---- Token text -> id ------------------------------------------------------------------------- */

/* Fills `slots` (all zero, mask + 1 of them). Returns -1, or the offending token and its problem. */
DS4_TOKENIZER_EXPORT int64_t ds4_tokenizer_index_vocab(const uint8_t *text, const uint32_t *offsets,
                                                       uint32_t n, ds4_vocab_slot *slots,
                                                       uint32_t mask, uint32_t *probe_limit,
                                                       build_problem *problem) {
    *probe_limit = 0;
    for (uint32_t id = 0; id < n; id++) {
        const uint8_t *name = text + offsets[id];
        const uint32_t length = offsets[id + 1] - offsets[id];
        const uint32_t hash = ds4_tokenizer_hash(name, length);
        uint32_t probe = 0;
        ds4_vocab_slot *slot;
        for (;; probe++) {
            slot = &slots[(hash + probe) & mask];
            if (!slot->id_plus_1)
                break;
            const uint32_t other = slot->id_plus_1 - 1;
            if (slot->hash == hash && offsets[other + 1] - offsets[other] == length &&
                !memcmp(text + offsets[other], name, length)) {
                *problem = (build_problem){PROBLEM_DUPLICATE, other};
                return id;
            }
            if (probe == DS4_TOKENIZER_MAX_PROBES) {
                *problem = (build_problem){PROBLEM_COLLISIONS, 0};
                return id;
            }
        }
        *slot = (ds4_vocab_slot){hash, id + 1};
        if (probe > *probe_limit)
            *probe_limit = probe;
    }
    return -1;
}

/* ---- (left, right) -> (rank, id) -------------------------------------------------------------- */

/* A view of the vocabulary good enough for ds4_tokenizer_find. */
static ds4_tokenizer vocabulary(const ds4_tokenizer_header *header, const uint8_t *text,
                                const uint32_t *offsets, const ds4_vocab_slot *slots,
                                uint32_t mask) {
    ds4_tokenizer t = {.header = header};
    t.text_offsets = offsets;
    t.text = text;
    t.text_bytes = offsets[header->n_vocab];
    t.vocab = slots;
    t.vocab_mask = mask;
    return t;
}

/* Resolves one merge text to ids; 0 or a problem. The space is looked for from the second byte on:
 * the left text may itself be a space. */
static int32_t resolve_merge(const ds4_tokenizer *t, const uint8_t *merge, uint32_t n,
                             ds4_merge_slot *resolved) {
    const uint8_t *space = n > 1 ? memchr(merge + 1, ' ', n - 1) : NULL;
    uint8_t joined[1024];
    if (!space || n - 1 > sizeof joined)
        return PROBLEM_NO_SPACE;
    const uint32_t left_n = (uint32_t)(space - merge), right_n = n - left_n - 1;
    memcpy(joined, merge, left_n);
    memcpy(joined + left_n, space + 1, right_n);
    const int32_t left = ds4_tokenizer_find(t, merge, left_n);
    const int32_t right = ds4_tokenizer_find(t, space + 1, right_n);
    const int32_t id = ds4_tokenizer_find(t, joined, left_n + right_n);
    if (left < 0)
        return PROBLEM_UNKNOWN_LEFT;
    if (right < 0)
        return PROBLEM_UNKNOWN_RIGHT;
    if (id < 0)
        return PROBLEM_UNKNOWN_RESULT;
    resolved->left = (uint32_t)left;
    resolved->right = (uint32_t)right;
    resolved->id = (uint32_t)id;
    return 0;
}

/* Fills `slots` (every byte 0xff, mask + 1 of them); a merge named twice keeps its first rank.
 * `header` needs n_vocab, max_text_bytes and vocab_probe_limit. Returns -1, or the offending merge. */
DS4_TOKENIZER_EXPORT int64_t ds4_tokenizer_index_merges(
    const ds4_tokenizer_header *header, const uint8_t *text, const uint32_t *offsets,
    const ds4_vocab_slot *vocab_slots, uint32_t vocab_mask, const uint8_t *merges,
    const uint32_t *merge_offsets, uint32_t n_merges, ds4_merge_slot *slots, uint32_t mask,
    uint32_t *probe_limit, build_problem *problem) {
    const ds4_tokenizer t = vocabulary(header, text, offsets, vocab_slots, vocab_mask);
    *probe_limit = 0;
    for (uint32_t rank = 0; rank < n_merges; rank++) {
        ds4_merge_slot merge = {.rank = rank};
        const uint32_t begin = merge_offsets[rank];
        problem->problem =
            resolve_merge(&t, merges + begin, merge_offsets[rank + 1] - begin, &merge);
        if (problem->problem)
            return rank;
        const uint32_t hash = ds4_tokenizer_pair_hash(merge.left, merge.right);
        uint32_t probe = 0;
        ds4_merge_slot *slot = &slots[hash & mask];
        while (slot->left != UINT32_MAX &&
               !(slot->left == merge.left && slot->right == merge.right)) {
            if (++probe > DS4_TOKENIZER_MAX_PROBES) {
                problem->problem = PROBLEM_COLLISIONS;
                return rank;
            }
            slot = &slots[(hash + probe) & mask];
        }
        if (slot->left != UINT32_MAX)
            continue;
        *slot = merge;
        if (probe > *probe_limit)
            *probe_limit = probe;
    }
    return -1;
}

/* ---- Pieces: the bytes a token stands for ----------------------------------------------------- */

/* The byte that a GPT-2 character of 1 or 2 UTF-8 bytes stands for, -1 when it stands for none. */
static int32_t gpt2_byte(const uint8_t *text, uint32_t n, uint32_t *used) {
    uint32_t rune = text[0];
    *used = 1;
    if (rune >= 0xc2 && rune < 0xe0 && n >= 2 && (text[1] & 0xc0) == 0x80) {
        rune = (rune & 31u) << 6 | (text[1] & 63u);
        *used = 2;
    } else if (rune >= 0x80) {
        return -1;
    }
    if ((rune > 0x20 && rune < 0x7f) || (rune > 0xa0 && rune < 0x100 && rune != 0xad))
        return (int32_t)rune;
    if (rune >= 0x100 && rune <= 0x120)
        return (int32_t)(rune - 0x100);
    if (rune >= 0x121 && rune <= 0x142)
        return (int32_t)(rune - 0x121 + 0x7f);
    return rune == 0x143 ? 0xad : -1;
}

/* Text in GPT-2 characters to bytes. Text with any other character was added by hand: as it is. */
static uint32_t gpt2_piece(const uint8_t *text, uint32_t n, uint8_t *out) {
    uint32_t written = 0;
    for (uint32_t i = 0, used; i < n; i += used) {
        const int32_t byte = gpt2_byte(text + i, n - i, &used);
        if (byte < 0) {
            memcpy(out, text, n);
            return n;
        }
        out[written++] = (uint8_t)byte;
    }
    return written;
}

static uint32_t spm_piece(const uint8_t *text, uint32_t n, uint8_t *out) {
    uint32_t written = 0;
    for (uint32_t i = 0; i < n;) {
        if (n - i >= 3 && !memcmp(text + i, "\xe2\x96\x81", 3)) {
            out[written++] = ' ';
            i += 3;
        } else {
            out[written++] = text[i++];
        }
    }
    return written;
}

static int hex_digit(uint8_t c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* <0xAB> */
static int32_t byte_token(const uint8_t *text, uint32_t n) {
    if (n != 6 || memcmp(text, "<0x", 3) || text[5] != '>' || hex_digit(text[3]) < 0 ||
        hex_digit(text[4]) < 0)
        return -1;
    return hex_digit(text[3]) << 4 | hex_digit(text[4]);
}

/* Writes every token's bytes to `pieces` (room for all of text) and where they begin. Returns -1,
 * or the token that is of type BYTE and names none. Unused tokens stand for nothing. */
DS4_TOKENIZER_EXPORT int64_t ds4_tokenizer_make_pieces(uint32_t kind, const uint8_t *text,
                                                       const uint32_t *offsets,
                                                       const uint8_t *types, uint32_t n,
                                                       uint8_t *pieces, uint32_t *piece_offsets,
                                                       build_problem *problem) {
    uint32_t at = 0;
    for (uint32_t id = 0; id < n; id++) {
        const uint8_t *name = text + offsets[id];
        const uint32_t length = offsets[id + 1] - offsets[id];
        piece_offsets[id] = at;
        switch (types[id]) {
        case DS4_TOKEN_NORMAL:
            at += kind == DS4_TOKENIZER_SPM ? spm_piece(name, length, pieces + at)
                                            : gpt2_piece(name, length, pieces + at);
            break;
        case DS4_TOKEN_BYTE: {
            const int32_t byte = byte_token(name, length);
            if (byte < 0) {
                problem->problem = PROBLEM_NOT_A_BYTE;
                return id;
            }
            pieces[at++] = (uint8_t)byte;
            break;
        }
        case DS4_TOKEN_UNUSED:
            break;
        default:
            memcpy(pieces + at, name, length);
            at += length;
        }
    }
    piece_offsets[n] = at;
    return -1;
}

/* ---- Whole words ------------------------------------------------------------------------------ */

/* Marks, in a finished blob, the normal tokens that merging their own bytes gives: a word that is
 * such a token needs one look-up instead of its merges. Returns 0 or a result below zero. */
DS4_TOKENIZER_EXPORT int ds4_tokenizer_mark_whole(void *blob, uint64_t n_bytes) {
    ds4_tokenizer t;
    const int opened = ds4_tokenizer_open(blob, n_bytes, &t);
    if (opened)
        return opened;
    uint8_t *types = (uint8_t *)blob + t.header->sections[DS4_TOKENIZER_TYPES].offset;
    ds4_merge_scratch *scratch = ds4_merge_scratch_new();
    if (!scratch)
        return DS4_TOKENIZER_NO_MEMORY;
    int failed = 0;
    for (uint32_t id = 0; !failed && id < t.header->n_vocab; id++) {
        if (types[id] != DS4_TOKEN_NORMAL)
            continue;
        int32_t ids[2];
        ds4_token_sink sink = {ids, 2, 0};
        if (t.header->kind == DS4_TOKENIZER_SPM) {
            uint32_t n;
            const uint8_t *text = ds4_tokenizer_text(&t, id, &n);
            failed = ds4_merge_spm(&t, text, n, scratch, &sink);
        } else {
            const uint32_t begin = t.piece_offsets[id], end = t.piece_offsets[id + 1];
            failed = ds4_merge_bpe(&t, t.pieces + begin, end - begin, scratch, &sink);
        }
        if (sink.n == 1 && ids[0] == (int32_t)id)
            types[id] |= DS4_TOKEN_WHOLE;
    }
    ds4_merge_scratch_free(scratch);
    return failed;
}
