/* The tokenizer blob and the functions that read it.
 *
 * Owns: the in-memory view of a blob (docs/layouts.md, "Tokenizer blob") shared by the encoder, the
 * pre-tokenizer scanners and the table builder. A blob is mapped read-only by many processes, so
 * everything in it is an offset, nothing is allocated at open, and a call needs only its address.
 *
 * Trust: `ds4_tokenizer_open` checks every section's place and size. Values inside the tables are
 * checked where they are used - one compare each - because checking all of them at open would touch
 * megabytes in a worker that wants to answer within a millisecond. Probing is bounded by the limits
 * in the header, and every merge shortens its word, so hostile tables give wrong ids or an error,
 * never a crash or a hang.
 */
#ifndef DS4_TOKENIZER_H
#define DS4_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#define DS4_TOKENIZER_EXPORT __attribute__((visibility("default")))
#define DS4_TOKENIZER_MAGIC "DS4TOKEN"
#define DS4_TOKENIZER_VERSION 1u
#define DS4_TOKENIZER_MAX_PROBES 1024u /* a fair hash stays far below */
#define DS4_TOKENIZER_MAX_TEXT ((uint64_t)1 << 26) /* bytes of one text: symbols are 32-bit */

/* Results below zero. encoder.py holds the matching sentences. */
enum {
    DS4_TOKENIZER_SHORT = -1,      /* fewer bytes than a header, or than the header says */
    DS4_TOKENIZER_BAD_MAGIC = -2,
    DS4_TOKENIZER_BAD_VERSION = -3,
    DS4_TOKENIZER_BAD_SECTION = -4, /* a section outside the blob or of an impossible size */
    DS4_TOKENIZER_BAD_VALUE = -5,   /* a table holds an id or an offset out of range */
    DS4_TOKENIZER_NO_MEMORY = -6,
    DS4_TOKENIZER_TOO_LONG = -7,   /* text above DS4_TOKENIZER_MAX_TEXT */
    DS4_TOKENIZER_NO_ENCODER = -8, /* kind LIBRARY: the pre-tokenizer has no scanner here */
    DS4_TOKENIZER_MISALIGNED = -9,
};

enum { DS4_TOKENIZER_BPE = 1, DS4_TOKENIZER_SPM = 2, DS4_TOKENIZER_LIBRARY = 3 };

/* Header flags. */
enum {
    DS4_TOKENIZER_ADD_BOS = 1,
    DS4_TOKENIZER_ADD_EOS = 2,
    DS4_TOKENIZER_ADD_SPACE_PREFIX = 4,
    DS4_TOKENIZER_IGNORE_MERGES = 8, /* a word that is a token is that token */
    DS4_TOKENIZER_NFC = 16,          /* encoder.py normalises before it calls */
    DS4_TOKENIZER_SPACE_SPLITS = 32, /* SPM: no token has U+2581 after another character */
};

/* Flags of one encode call. */
enum { DS4_TOKENIZER_WITH_BOS_EOS = 1, DS4_TOKENIZER_PARSE_SPECIAL = 2, DS4_TOKENIZER_RAW = 4 };

/* Token types as in GGUF. Flags: WHOLE marks normal tokens that their own merges produce, STRIPS special
 * ones that take the white space after them along. */
enum {
    DS4_TOKEN_NORMAL = 1,
    DS4_TOKEN_UNKNOWN = 2,
    DS4_TOKEN_CONTROL = 3,
    DS4_TOKEN_USER_DEFINED = 4,
    DS4_TOKEN_UNUSED = 5,
    DS4_TOKEN_BYTE = 6,
    DS4_TOKEN_STRIPS = 0x40,
    DS4_TOKEN_WHOLE = 0x80,
};

typedef struct {
    uint64_t offset, n_bytes;
} ds4_tokenizer_section;

enum {
    DS4_TOKENIZER_TEXT_OFFSETS, /* u32[n_vocab + 1] into TEXT */
    DS4_TOKENIZER_TEXT,
    DS4_TOKENIZER_PIECE_OFFSETS, /* u32[n_vocab + 1] into PIECES */
    DS4_TOKENIZER_PIECES,
    DS4_TOKENIZER_TYPES,       /* u8[n_vocab] */
    DS4_TOKENIZER_SCORES,      /* f32[n_vocab], SPM only */
    DS4_TOKENIZER_VOCAB_TABLE, /* ds4_vocab_slot[2^k] */
    DS4_TOKENIZER_MERGE_TABLE, /* ds4_merge_slot[2^k], BPE only */
    DS4_TOKENIZER_BYTE_IDS,    /* i32[256], -1 where the vocabulary lacks the byte */
    DS4_TOKENIZER_SPECIALS,    /* u32[]: ids cut out of text, ordered by their text's bytes */
    DS4_TOKENIZER_EOG,         /* u32[]: ids that end a generation, ascending */
    DS4_TOKENIZER_JSON,        /* kind LIBRARY only */
    DS4_TOKENIZER_SECTIONS,
};

typedef struct {
    char magic[8];
    uint32_t version, kind;
    uint64_t n_bytes;
    uint32_t pre, flags, n_vocab, max_text_bytes;
    int32_t bos, eos, unk, pad;
    uint32_t vocab_probe_limit, merge_probe_limit;
    ds4_tokenizer_section sections[DS4_TOKENIZER_SECTIONS];
} ds4_tokenizer_header;

typedef struct {
    uint32_t hash, id_plus_1; /* id_plus_1 = 0: empty */
} ds4_vocab_slot;

typedef struct {
    uint32_t left, right, rank, id; /* left = UINT32_MAX: empty */
} ds4_merge_slot;

typedef struct {
    const ds4_tokenizer_header *header;
    const uint32_t *text_offsets, *piece_offsets, *specials;
    const uint8_t *text, *pieces, *types;
    const float *scores;
    const ds4_vocab_slot *vocab;
    const ds4_merge_slot *merges;
    const int32_t *byte_ids;
    uint64_t text_bytes, piece_bytes;
    uint32_t vocab_mask, merge_mask, n_specials;
} ds4_tokenizer;

/* ---- tokenizer.c: open and look up ------------------------------------------------------------ */

/* Fills *t from a blob. 0, or one of the results below zero. */
int ds4_tokenizer_open(const void *blob, uint64_t n_bytes, ds4_tokenizer *t);

/* FNV-1a over bytes, folded to 32 bits. */
uint32_t ds4_tokenizer_hash(const uint8_t *bytes, uint64_t n);
uint32_t ds4_tokenizer_pair_hash(uint32_t left, uint32_t right);

/* Text of a token; NULL when the id or the blob's offsets are out of range. */
const uint8_t *ds4_tokenizer_text(const ds4_tokenizer *t, uint32_t id, uint32_t *n);

/* Id of a token text, -1 when there is none. */
int32_t ds4_tokenizer_find(const ds4_tokenizer *t, const uint8_t *text, uint64_t n);

/* The merge of a pair; NULL when there is none. */
const ds4_merge_slot *ds4_tokenizer_find_merge(const ds4_tokenizer *t, uint32_t left,
                                               uint32_t right);

/* ---- tokenizer_pre.c: pre-tokenizers ---------------------------------------------------------- */

/* Number of pre-tokenizers that have scanners here: valid `pre` values are below it. */
uint32_t ds4_pre_count(void);

/* Calls word(context, begin, end) for each piece of text[begin, end) in order; stops at the first
 * non-zero result and returns it. */
typedef int (*ds4_pre_word)(void *context, uint64_t begin, uint64_t end);
int ds4_pre_split(uint32_t pre, const uint8_t *text, uint64_t begin, uint64_t end,
                  ds4_pre_word word, void *context);

/* ---- tokenizer_merge.c: one word to ids ------------------------------------------------------- */

typedef struct {
    int32_t *ids;
    uint64_t capacity, n; /* n counts on past capacity; nothing is written there */
} ds4_token_sink;

static inline void ds4_token_push(ds4_token_sink *sink, int32_t id) {
    if (sink->n < sink->capacity)
        sink->ids[sink->n] = id;
    sink->n++;
}

typedef struct ds4_merge_scratch ds4_merge_scratch;
ds4_merge_scratch *ds4_merge_scratch_new(void);
void ds4_merge_scratch_free(ds4_merge_scratch *scratch);

/* Appends the ids of text[0, n), taken as one word. For SPM, spaces are U+2581 already. */
int ds4_merge_bpe(const ds4_tokenizer *t, const uint8_t *text, uint64_t n,
                  ds4_merge_scratch *scratch, ds4_token_sink *sink);
int ds4_merge_spm(const ds4_tokenizer *t, const uint8_t *text, uint64_t n,
                  ds4_merge_scratch *scratch, ds4_token_sink *sink);

/* GPT-2's printable stand-in for a byte: writes 1 or 2 bytes of UTF-8, returns how many. */
static inline uint32_t ds4_gpt2_char(uint8_t byte, uint8_t *out) {
    uint32_t rune = byte;
    if (byte <= 0x20)
        rune = 0x100u + byte;
    else if (byte >= 0x7f && byte <= 0xa0)
        rune = 0x121u + (byte - 0x7fu);
    else if (byte == 0xad)
        rune = 0x143u;
    if (rune < 0x80) {
        out[0] = (uint8_t)rune;
        return 1;
    }
    out[0] = (uint8_t)(0xc0u | rune >> 6);
    out[1] = (uint8_t)(0x80u | (rune & 63u));
    return 2;
}

/* ---- Exported to Python ----------------------------------------------------------------------- */

/* Checks a blob. 0 or a result below zero. */
DS4_TOKENIZER_EXPORT int ds4_tokenizer_check(const void *blob, uint64_t n_bytes);

/* Encodes UTF-8 text. Returns how many ids the text has - when that is above capacity only the
 * first `capacity` were written - or a result below zero. Bytes that are not UTF-8 count as single
 * characters of no class and keep their value: BPE encodes them as themselves. */
DS4_TOKENIZER_EXPORT int64_t ds4_tokenizer_encode(const void *blob, uint64_t n_bytes,
                                                  const char *text, uint64_t text_bytes,
                                                  uint32_t flags, int32_t *ids, uint64_t capacity);

/* Cuts text at special tokens. Fragment k is triples[3k..3k+2] = (begin, end, id), id -1 for text
 * between specials. Returns the number of fragments (counted on past capacity) or a result < 0. */
DS4_TOKENIZER_EXPORT int64_t ds4_tokenizer_fragments(const void *blob, uint64_t n_bytes,
                                                     const char *text, uint64_t text_bytes,
                                                     uint32_t flags, int64_t *triples,
                                                     uint64_t capacity);

/* Id of a token text, -1 when there is none, or a result below -1 (BAD_MAGIC and so on). */
DS4_TOKENIZER_EXPORT int32_t ds4_tokenizer_id_of(const void *blob, uint64_t n_bytes,
                                                 const char *text, uint64_t text_bytes);

#endif
