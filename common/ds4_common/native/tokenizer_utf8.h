/* UTF-8, one character at a time; what is not UTF-8 is one character of one byte. */
#ifndef DS4_TOKENIZER_UTF8_H
#define DS4_TOKENIZER_UTF8_H

#include <stdint.h>

#define DS4_NOT_UTF8 UINT32_MAX

/* Bytes of the character at text[i], i < end; its code point in *rune, DS4_NOT_UTF8 for a byte that
 * begins no well-formed character (surrogates, overlong and truncated forms included). */
static inline uint32_t ds4_utf8_next(const uint8_t *text, uint64_t i, uint64_t end,
                                     uint32_t *rune) {
    const uint8_t a = text[i];
    if (a < 0x80) {
        *rune = a;
        return 1;
    }
    const uint32_t n = a >= 0xf0 ? 4 : a >= 0xe0 ? 3 : 2;
    *rune = DS4_NOT_UTF8;
    if (a < 0xc2 || a > 0xf4 || end - i < n)
        return 1;
    uint32_t r = a & (0x7fu >> n);
    for (uint32_t k = 1; k < n; k++) {
        if ((text[i + k] & 0xc0) != 0x80)
            return 1;
        r = r << 6 | (text[i + k] & 0x3fu);
    }
    if ((n == 3 && (r < 0x800 || (r >= 0xd800 && r < 0xe000))) ||
        (n == 4 && (r < 0x10000 || r > 0x10ffff)))
        return 1;
    *rune = r;
    return n;
}

#endif
