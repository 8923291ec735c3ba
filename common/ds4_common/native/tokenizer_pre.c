/* Pre-tokenizers: cut text into the words that BPE merges inside.
 *
 * Owns: hand-written scanners equal to the regular expressions that models were trained with. Each
 * scanner returns the end of the piece that starts at `i`; a pre-tokenizer is a chain of up to four
 * scanners, each cutting the pieces of the one before. Look-ahead ends at the piece, as a regular
 * expression run on that piece alone would have it.
 *
 * Classes (\p{L}, \p{N}, \s ...) are those of the `tokenizers` library's engine, generated into
 * unicode_classes.h. A byte that is not UTF-8 is one character without a class.
 */
#include "tokenizer.h"
#include "tokenizer_utf8.h"
#include "unicode_classes.h"

#define LETTER DS4_UNICODE_LETTER
#define MARK DS4_UNICODE_MARK
#define NUMBER DS4_UNICODE_NUMBER
#define SPACE DS4_UNICODE_SPACE
#define PUNCTUATION DS4_UNICODE_PUNCTUATION
#define SYMBOL DS4_UNICODE_SYMBOL

/* ---- Characters ------------------------------------------------------------------------------- */

typedef struct {
    uint32_t rune;
    uint8_t n, class; /* n: bytes */
} character;

/* Out of line, to keep the path of ASCII text small. */
static __attribute__((noinline)) character wide_character_at(const uint8_t *t, uint64_t i,
                                                             uint64_t end) {
    uint32_t rune;
    const uint32_t n = ds4_utf8_next(t, i, end, &rune);
    return (character){rune, (uint8_t)n, rune == DS4_NOT_UTF8 ? 0 : ds4_unicode_class(rune)};
}

/* The character at t[i], i < end. */
static inline character character_at(const uint8_t *t, uint64_t i, uint64_t end) {
    if (t[i] < 0x80)
        return (character){t[i], 1, DS4_UNICODE_CLASS[t[i]]}; /* block 0 is the first */
    return wide_character_at(t, i, end);
}

/* End of the longest run from i of characters of any of these classes. */
static uint64_t run_of(uint8_t classes, const uint8_t *t, uint64_t i, uint64_t end) {
    while (i < end) {
        const character c = character_at(t, i, end);
        if (!(c.class & classes))
            break;
        i += c.n;
    }
    return i;
}

/* End of the longest run from i of characters of none of these classes. */
static uint64_t run_without(uint8_t classes, const uint8_t *t, uint64_t i, uint64_t end) {
    while (i < end) {
        const character c = character_at(t, i, end);
        if (c.class & classes)
            break;
        i += c.n;
    }
    return i;
}

static uint64_t run_of_newlines(const uint8_t *t, uint64_t i, uint64_t end) {
    while (i < end && (t[i] == '\r' || t[i] == '\n'))
        i++;
    return i;
}

/* ---- Parts shared by the expressions ---------------------------------------------------------- */

/* 's|'t|'re|'ve|'m|'ll|'d from i: its end, or i when there is none. With any_case the engine folds
 * case by Unicode, where U+017F is an s. */
static uint64_t contraction(const uint8_t *t, uint64_t i, uint64_t end, int any_case) {
    if (t[i] != '\'' || i + 1 >= end)
        return i;
    const uint8_t fold = any_case ? 0x20 : 0;
    if (any_case && i + 2 < end && t[i + 1] == 0xc5 && t[i + 2] == 0xbf)
        return i + 3;
    const uint8_t a = t[i + 1] | fold;
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return i + 2;
    const uint8_t b = i + 2 < end ? t[i + 2] | fold : 0;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? i + 3 : i;
}

/* \s*[\r\n]+ (when `newlines`), else \s+(?!\S), else \s+ from a whitespace character at i. */
static uint64_t whitespace(const uint8_t *t, uint64_t i, uint64_t end, int newlines) {
    uint64_t k = i, last = i, after_newline = 0;
    while (k < end) {
        const character c = character_at(t, k, end);
        if (!(c.class & SPACE))
            break;
        last = k;
        k += c.n;
        if (c.rune == '\r' || c.rune == '\n')
            after_newline = k;
    }
    if (newlines && after_newline)
        return after_newline;
    return k < end && last > i ? last : k;
}

/* ---- Scanners --------------------------------------------------------------------------------- */

/* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static uint64_t scan_gpt2(const uint8_t *t, uint64_t i, uint64_t end) {
    const uint64_t after = contraction(t, i, end, 0);
    if (after > i)
        return after;
    uint64_t j = i;
    character c = character_at(t, i, end);
    if (c.rune == ' ' && i + 1 < end) {
        const character next = character_at(t, i + 1, end);
        if (!(next.class & SPACE)) {
            c = next;
            j = i + 1;
        }
    }
    if (c.class & LETTER)
        return run_of(LETTER, t, j, end);
    if (c.class & NUMBER)
        return run_of(NUMBER, t, j, end);
    if (!(c.class & SPACE))
        return run_without(SPACE | LETTER | NUMBER, t, j, end);
    return whitespace(t, i, end, 0);
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?<word>+|\p{N}{1,digits}|
 *  ?[^\s<word>\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+  where <word> is \p{L} or [\p{L}\p{M}] */
static uint64_t scan_words(const uint8_t *t, uint64_t i, uint64_t end, uint8_t word, int digits) {
    const uint64_t after = contraction(t, i, end, 1);
    if (after > i)
        return after;
    const character c = character_at(t, i, end);
    if (c.class & word)
        return run_of(word, t, i, end);
    const int has_next = i + c.n < end;
    const character next = has_next ? character_at(t, i + c.n, end) : c;
    if (has_next && (next.class & word) && !(c.class & NUMBER) && c.rune != '\r' && c.rune != '\n')
        return run_of(word, t, i + c.n, end);
    if (c.class & NUMBER) {
        uint64_t k = i + c.n;
        for (int n = 1; n < digits && k < end; n++) {
            const character d = character_at(t, k, end);
            if (!(d.class & NUMBER))
                break;
            k += d.n;
        }
        return k;
    }
    const uint8_t not_other = SPACE | NUMBER | word;
    if (!(c.class & not_other))
        return run_of_newlines(t, run_without(not_other, t, i, end), end);
    if (c.rune == ' ' && has_next && !(next.class & not_other))
        return run_of_newlines(t, run_without(not_other, t, i + 1, end), end);
    return whitespace(t, i, end, 1);
}

static uint64_t scan_qwen2(const uint8_t *t, uint64_t i, uint64_t end) {
    return scan_words(t, i, end, LETTER, 1);
}

static uint64_t scan_qwen35(const uint8_t *t, uint64_t i, uint64_t end) {
    return scan_words(t, i, end, LETTER | MARK, 1);
}

static uint64_t scan_llama3(const uint8_t *t, uint64_t i, uint64_t end) {
    return scan_words(t, i, end, LETTER, 3);
}

/* One match of the expression below at i: its end, or i when nothing matches there. */
static uint64_t match_deepseek3(const uint8_t *t, uint64_t i, uint64_t end) {
    const character c = character_at(t, i, end);
    const int has_next = i + c.n < end;
    const character next = has_next ? character_at(t, i + c.n, end) : c;
    const int ascii_mark = c.rune < 0x80 && (c.class & (PUNCTUATION | SYMBOL));
    if (ascii_mark && has_next && next.rune < 0x80 && (next.class & LETTER)) {
        uint64_t k = i + 1;
        while (k < end && t[k] < 0x80 && (ds4_unicode_class(t[k]) & LETTER))
            k++;
        return k;
    }
    if (c.class & (LETTER | MARK))
        return run_of(LETTER | MARK, t, i, end);
    if (has_next && (next.class & (LETTER | MARK)) && c.rune != '\r' && c.rune != '\n' &&
        !(c.class & (PUNCTUATION | SYMBOL)))
        return run_of(LETTER | MARK, t, i + c.n, end);
    if (c.class & (PUNCTUATION | SYMBOL))
        return run_of_newlines(t, run_of(PUNCTUATION | SYMBOL, t, i, end), end);
    if (c.rune == ' ' && has_next && (next.class & (PUNCTUATION | SYMBOL)))
        return run_of_newlines(t, run_of(PUNCTUATION | SYMBOL, t, i + 1, end), end);
    return c.class & SPACE ? whitespace(t, i, end, 1) : i;
}

/* [!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|
 * \s*[\r\n]+|\s+(?!\S)|\s+  - text that matches nothing is a piece too, up to the next match. */
static uint64_t scan_deepseek3(const uint8_t *t, uint64_t i, uint64_t end) {
    uint64_t k = i;
    while (k < end) {
        const uint64_t after = match_deepseek3(t, k, end);
        if (after > k)
            return k > i ? k : after;
        k += character_at(t, k, end).n;
    }
    return end;
}

/* Isolates runs: pieces are runs of at most `most` characters that are `in`, and what is between. */
static uint64_t scan_isolated(const uint8_t *t, uint64_t i, uint64_t end, int (*in)(character),
                              uint64_t most) {
    character c = character_at(t, i, end);
    const int inside = in(c);
    for (uint64_t n = 1;; n++) {
        i += c.n;
        if (i >= end || (inside && n == most))
            return i;
        c = character_at(t, i, end);
        if (in(c) != inside)
            return i;
    }
}

static int is_number(character c) { return !!(c.class & NUMBER); }

static int is_falcon_mark(character c) {
    return (c.class & PUNCTUATION) || c.rune == '$' || c.rune == '+' ||
           (c.rune >= '<' && c.rune <= '>') || c.rune == '^' || c.rune == '~' || c.rune == '|' ||
           c.rune == '`';
}

static int is_default_mark(character c) { return c.rune != '`' && is_falcon_mark(c); }

/* U+4E00-9FA5 (Han), U+3040-30FF (kana) */
static int is_cjk(character c) {
    return (c.rune >= 0x4e00 && c.rune <= 0x9fa5) || (c.rune >= 0x3040 && c.rune <= 0x30ff);
}

static uint64_t scan_digit(const uint8_t *t, uint64_t i, uint64_t end) {
    return scan_isolated(t, i, end, is_number, 1);
}

static uint64_t scan_three_digits(const uint8_t *t, uint64_t i, uint64_t end) {
    return scan_isolated(t, i, end, is_number, 3);
}

static uint64_t scan_number(const uint8_t *t, uint64_t i, uint64_t end) {
    return scan_isolated(t, i, end, is_number, UINT64_MAX);
}

static uint64_t scan_falcon_marks(const uint8_t *t, uint64_t i, uint64_t end) {
    return scan_isolated(t, i, end, is_falcon_mark, UINT64_MAX);
}

static uint64_t scan_default_marks(const uint8_t *t, uint64_t i, uint64_t end) {
    return scan_isolated(t, i, end, is_default_mark, UINT64_MAX);
}

static uint64_t scan_cjk(const uint8_t *t, uint64_t i, uint64_t end) {
    return scan_isolated(t, i, end, is_cjk, UINT64_MAX);
}

static int is_ascii_digit(uint8_t c) { return c >= '0' && c <= '9'; }

static int three_ascii_digits(const uint8_t *t, uint64_t i, uint64_t end) {
    return end - i >= 3 && is_ascii_digit(t[i]) && is_ascii_digit(t[i + 1]) &&
           is_ascii_digit(t[i + 2]);
}

/* [0-9][0-9][0-9], isolated */
static uint64_t scan_ascii_triples(const uint8_t *t, uint64_t i, uint64_t end) {
    if (three_ascii_digits(t, i, end))
        return i + 3;
    while (i < end && !three_ascii_digits(t, i, end))
        i++;
    return i;
}

/* ---- Chains ----------------------------------------------------------------------------------- */

typedef uint64_t (*scanner)(const uint8_t *t, uint64_t i, uint64_t end);

#define CHAIN 4

/* Indexed by the header's `pre`; ds4_common/tokenizer/pre_tokenizers.py holds the same order. */
static const scanner CHAINS[][CHAIN] = {
    {scan_gpt2},
    {scan_digit, scan_gpt2},
    {scan_qwen2},
    {scan_llama3},
    {scan_default_marks, scan_gpt2, scan_number, scan_ascii_triples},
    {scan_falcon_marks, scan_gpt2, scan_ascii_triples},
    {scan_qwen35},
    {scan_three_digits, scan_cjk, scan_deepseek3},
};

uint32_t ds4_pre_count(void) { return sizeof CHAINS / sizeof CHAINS[0]; }

static int split(const scanner *chain, int depth, const uint8_t *t, uint64_t begin, uint64_t end,
                 ds4_pre_word word, void *context) {
    if (depth == CHAIN || !chain[depth])
        return word(context, begin, end);
    while (begin < end) {
        const uint64_t next = chain[depth](t, begin, end);
        const int stopped = split(chain, depth + 1, t, begin, next, word, context);
        if (stopped)
            return stopped;
        begin = next;
    }
    return 0;
}

int ds4_pre_split(uint32_t pre, const uint8_t *text, uint64_t begin, uint64_t end,
                  ds4_pre_word word, void *context) {
    return split(CHAINS[pre], 0, text, begin, end, word, context);
}
