#include "history.h"

#include <string.h>

typedef struct {
    uint32_t capacity, length, mask, reserved;
} header;

/* tokens, then for each index the previous entry of each position and the latest one of each hash; all
 * are positions plus 1, and 0 is none. */
typedef struct {
    header *h;
    int32_t *tokens;
    uint32_t *previous[2], *latest[2];
} history;

static const uint32_t orders[2] = {DS4_HISTORY_FAR, DS4_HISTORY_NEAR};

static uint32_t slots_of(uint32_t capacity) {
    uint32_t slots = 16;
    while (slots < capacity) slots *= 2;
    return slots;
}

uint64_t ds4_history_bytes(uint32_t capacity) {
    if (capacity > 1u << 30) return 0;
    return sizeof(header) + 4 * (3 * (uint64_t)capacity + 2 * (uint64_t)slots_of(capacity));
}

void ds4_history_init(void *memory, uint32_t capacity) {
    header *h = memory;
    h->capacity = capacity;
    h->mask = slots_of(capacity) - 1;
}

static history view(void *memory) {
    history v = {.h = memory};
    v.tokens = (int32_t *)(void *)(v.h + 1);
    v.previous[0] = (uint32_t *)(void *)(v.tokens + v.h->capacity);
    v.previous[1] = v.previous[0] + v.h->capacity;
    v.latest[0] = v.previous[1] + v.h->capacity;
    v.latest[1] = v.latest[0] + v.h->mask + 1;
    return v;
}

/* Of the `order` tokens that end at position `end`. */
static uint32_t slot_of(const history *v, uint32_t end, uint32_t order) {
    uint64_t hash = 0;
    for (uint32_t i = 0; i < order; i++)
        hash = (hash ^ (uint32_t)v->tokens[end - i]) * 0x9E3779B97F4A7C15ull;
    return (uint32_t)(hash >> 32) & v->h->mask;
}

static void append(const history *v, int32_t token) {
    uint32_t end = v->h->length++;
    v->tokens[end] = token;
    for (int index = 0; index < 2; index++) {
        if (v->h->length < orders[index]) continue;
        uint32_t *latest = v->latest[index] + slot_of(v, end, orders[index]);
        v->previous[index][end] = *latest;
        *latest = end + 1;
    }
}

/* How many tokens before and at `place` are those before and at the end. */
static uint32_t match_length(const history *v, uint32_t place) {
    uint32_t end = v->h->length - 1, length = 0;
    while (length < DS4_HISTORY_MATCH && length <= place &&
           v->tokens[place - length] == v->tokens[end - length])
        length++;
    return length;
}

/* The earlier position at which the longest match ends, and its length; 0 for none. */
static uint32_t find(const history *v, uint32_t *place) {
    uint32_t end = v->h->length - 1, best = 0;
    for (int index = 0; index < 2 && !best; index++) {
        if (v->h->length <= orders[index]) continue;
        uint32_t entry = v->previous[index][end];
        for (int walked = 0; entry && walked < DS4_HISTORY_WALK && best < DS4_HISTORY_MATCH; walked++) {
            uint32_t length = match_length(v, entry - 1);
            if (length >= orders[index] && length > best) {
                best = length;
                *place = entry - 1;
            }
            entry = v->previous[index][entry - 1];
        }
    }
    return best;
}

uint32_t ds4_history_propose(void *memory, const int32_t *tokens, uint32_t count, int32_t *draft,
                             uint32_t wanted, uint32_t *matched) {
    history v = view(memory);
    for (uint32_t i = 0; i < count && v.h->length < v.h->capacity; i++) append(&v, tokens[i]);
    uint32_t place = 0;
    *matched = v.h->length && wanted ? find(&v, &place) : 0;
    if (!*matched) return 0;
    uint32_t known = v.h->length - 1 - place;
    for (uint32_t i = 0; i < wanted; i++)
        draft[i] = i < known ? v.tokens[place + 1 + i] : draft[i - known];
    return wanted;
}
