/* Steps over GGUF metadata arrays without decoding them.
 *
 * Owns: the two loops that would be too slow in Python (a vocabulary holds 262k length-prefixed
 * strings). Every length comes from an untrusted file and is checked against the file's end by
 * subtraction, so nothing overflows; no byte outside the window is touched; nothing is allocated.
 */
#include <string.h>

#include "matmul.h" /* DS4_EXPORT */

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF files are read in place: little-endian hosts only"
#endif

#define MAX_DEPTH 4 /* arrays of arrays of arrays of scalars: one more than any file needs */

enum { TYPE_STRING = 8, TYPE_ARRAY = 9, TYPE_COUNT = 13 };
enum { WALK_DONE = 0, WALK_MORE = 1, WALK_BAD_TYPE = -1, WALK_BEYOND_END = -2, WALK_TOO_DEEP = -3 };

/* Mirrored by ds4_common/gguf/parser.py. */
typedef struct {
    uint64_t pos, end;        /* file offsets: next byte to look at, first byte not in the file */
    uint64_t left[MAX_DEPTH]; /* elements still ahead, outermost array first */
    uint32_t type[MAX_DEPTH];
    uint32_t depth;
    uint32_t unused;
} ds4_gguf_walk;

static const uint8_t FIXED_BYTES[TYPE_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

static uint64_t load64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint32_t load32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Are n bytes at w->pos in the window? DONE, or MORE (refill it there), or BEYOND_END. */
static int have(const ds4_gguf_walk *w, uint64_t start, uint64_t n_window, uint64_t n) {
    if (w->pos > w->end || w->end - w->pos < n) return WALK_BEYOND_END;
    if (w->pos < start || w->pos - start > n_window || n_window - (w->pos - start) < n)
        return WALK_MORE;
    return WALK_DONE;
}

/* Advances w over its arrays as far as the window reaches. window holds n_window bytes of the file
 * from offset start. On MORE the caller refills the window at w->pos with at least 12 bytes (or all
 * that the file has); on an error w->pos is the offset of the offending element. */
DS4_EXPORT int ds4_gguf_walk_array(const uint8_t *window, uint64_t start, uint64_t n_window,
                                   ds4_gguf_walk *w) {
    while (w->depth) {
        uint32_t level = w->depth - 1, type = w->type[level];
        if (w->left[level] == 0) {
            w->depth--;
        } else if (type == TYPE_STRING) {
            int status = have(w, start, n_window, 8);
            if (status != WALK_DONE) return status;
            uint64_t length = load64(window + (w->pos - start));
            if (length > w->end - w->pos - 8) return WALK_BEYOND_END;
            w->pos += 8 + length;
            w->left[level]--;
        } else if (type == TYPE_ARRAY) {
            int status = have(w, start, n_window, 12);
            if (status != WALK_DONE) return status;
            if (w->depth == MAX_DEPTH) return WALK_TOO_DEEP;
            w->left[level]--;
            w->type[w->depth] = load32(window + (w->pos - start));
            w->left[w->depth] = load64(window + (w->pos - start) + 4);
            w->depth++;
            w->pos += 12;
        } else {
            if (type >= TYPE_COUNT) return WALK_BAD_TYPE;
            if (w->left[level] > (w->end - w->pos) / FIXED_BYTES[type]) return WALK_BEYOND_END;
            w->pos += w->left[level] * FIXED_BYTES[type];
            w->left[level] = 0;
        }
    }
    return WALK_DONE;
}

/* Ends of `count` length-prefixed strings that fill data[0..n): string i is
 * data[ends[i-1] + 8 .. ends[i]). 0, or -1 when they do not fill it exactly. */
DS4_EXPORT int ds4_gguf_string_ends(const uint8_t *data, uint64_t n, uint64_t count,
                                    uint64_t *ends) {
    uint64_t pos = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (n - pos < 8) return -1;
        uint64_t length = load64(data + pos);
        if (length > n - pos - 8) return -1;
        pos += 8 + length;
        ends[i] = pos;
    }
    return pos == n ? 0 : -1;
}
