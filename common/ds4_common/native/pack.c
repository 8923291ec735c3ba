/* The X8 layout: eight rows of a quant type interleaved, byte for byte the same size.
 *
 * Owns: which types and shapes can be packed, packing and its inverse. The layout is described in
 * docs/layouts.md; a group is eight rows of one block, groups lie in (row / 8, block) order.
 */
#include "quants.h"

/* Where the parts of a raw block lie. In a group they come in this order: halves as f16[8] each,
 * fifth bits (Q5_0, Q5_1) as 32 bytes, then the body, dword by dword, eight rows each. */
typedef struct {
    uint32_t type;
    int16_t halves, half_at[2]; /* scale and minimum */
    int16_t high_at;            /* -1: none */
    int16_t body_at, body_dwords;
} x8_parts;

static const x8_parts PARTS[] = {
    {DS4_Q4_0, 1, {0, 0}, -1, 2, 4},    {DS4_Q4_1, 2, {0, 2}, -1, 4, 4},
    {DS4_Q5_0, 1, {0, 0}, 2, 6, 4},     {DS4_Q5_1, 2, {0, 2}, 4, 8, 4},
    {DS4_Q8_0, 1, {0, 0}, -1, 2, 8},    {DS4_Q2_K, 2, {80, 82}, -1, 0, 20},
    {DS4_Q3_K, 1, {108, 0}, -1, 0, 27}, {DS4_Q4_K, 2, {0, 2}, -1, 4, 35},
    {DS4_Q5_K, 2, {0, 2}, -1, 4, 43},   {DS4_Q6_K, 1, {208, 0}, -1, 0, 52},
};

/* Which dword of the raw body lies at place j. Those of Q6_K follow the order in which a kernel reads
 * them: scales, then for every four weights of the four quarters of a half their two dwords of low
 * bits and the one of high bits. */
static inline __attribute__((always_inline)) int raw_dword(const x8_parts *p, int j) {
    if (p->type != DS4_Q6_K) return j;
    if (j < 4) return 48 + j;
    int step = (j - 4) / 3, part = (j - 4) % 3, half = step / 8;
    return (part < 2 ? 16 * half + 8 * part : 32 + 8 * half) + step % 8;
}

static const x8_parts *parts_of(uint32_t type) {
    for (size_t i = 0; i < sizeof PARTS / sizeof *PARTS; i++)
        if (PARTS[i].type == type) return &PARTS[i];
    return NULL;
}

int ds4_x8_exists(uint32_t type) { return parts_of(type) != NULL; }

/* Bit j of byte 4r+t of the plane is the fifth bit of weight 4j+t. */
static void pack_high(uint32_t high, uint8_t *plane) {
    for (int t = 0; t < 4; t++) {
        uint32_t bits = (high >> t) & 0x11111111; /* every fourth bit, moved together */
        bits = (bits | bits >> 3) & 0x03030303;
        bits = (bits | bits >> 6) & 0x000f000f;
        plane[t] = (uint8_t)(bits | bits >> 12);
    }
}

static uint32_t unpack_high(const uint8_t *plane) {
    uint32_t high = 0;
    for (int t = 0; t < 4; t++)
        for (int j = 0; j < 8; j++) high |= (uint32_t)((plane[t] >> j) & 1) << (4 * j + t);
    return high;
}

static void unpack_row(const x8_parts *p, const uint8_t *group, uint8_t *raw, int r) {
    for (int i = 0; i < p->halves; i++, group += 16) memcpy(raw + p->half_at[i], group + 2 * r, 2);
    if (p->high_at >= 0) {
        uint32_t high = unpack_high(group + 4 * r);
        memcpy(raw + p->high_at, &high, 4);
        group += 32;
    }
    for (int j = 0; j < p->body_dwords; j++)
        memcpy(raw + p->body_at + 4 * raw_dword(p, j), group + 32 * j + 4 * r, 4);
}

void ds4_x8_block(uint32_t type, const uint8_t *group, int r, uint8_t *raw) {
    unpack_row(parts_of(type), group, raw, r);
}

int ds4_pack_possible(uint32_t type, int64_t rows, int64_t cols) {
    return ds4_x8_exists(type) && rows > 0 && cols > 0 && rows % DS4_X8_ROWS == 0 &&
           cols % ds4_block_weights(type) == 0;
}

typedef struct {
    const x8_parts *parts; /* NULL: the range does not fit the layout */
    int64_t block_bytes, blocks;
} x8_range;

static x8_range range_of(uint32_t type, int64_t row0, int64_t row1, int64_t cols) {
    if (row0 < 0 || row0 % DS4_X8_ROWS || !ds4_pack_possible(type, row1 - row0, cols))
        return (x8_range){NULL, 0, 0};
    return (x8_range){parts_of(type), ds4_block_bytes(type), cols / ds4_block_weights(type)};
}

/* Byte offset of the group that holds block b of a row. */
static int64_t group_at(const x8_range *range, int64_t row, int64_t b) {
    return (row / DS4_X8_ROWS * range->blocks + b) * DS4_X8_ROWS * range->block_bytes;
}

/* Packs whole groups. Inlined per type, so that offsets and counts are constants and the loops plain
 * moves: two to four times as fast, and a load packs every weight of the model. */
static inline __attribute__((always_inline)) void pack_groups(const x8_parts *p,
                                                              const x8_range *range,
                                                              const uint8_t *raw, int64_t groups,
                                                              uint8_t *group) {
    int64_t row_bytes = range->blocks * range->block_bytes;
    for (int64_t g = 0; g < groups; g++, raw += DS4_X8_ROWS * row_bytes)
        for (int64_t b = 0; b < range->blocks; b++) {
            const uint8_t *block = raw + b * range->block_bytes;
            for (int i = 0; i < p->halves; i++, group += 2 * DS4_X8_ROWS)
                for (int r = 0; r < DS4_X8_ROWS; r++)
                    memcpy(group + 2 * r, block + r * row_bytes + p->half_at[i], 2);
            if (p->high_at >= 0) {
                for (int r = 0; r < DS4_X8_ROWS; r++)
                    pack_high(ds4_load_u32(block + r * row_bytes + p->high_at), group + 4 * r);
                group += 4 * DS4_X8_ROWS;
            }
#pragma GCC unroll 64
            for (int j = 0; j < p->body_dwords; j++, group += 4 * DS4_X8_ROWS)
                for (int r = 0; r < DS4_X8_ROWS; r++)
                    memcpy(group + 4 * r,
                           block + r * row_bytes + p->body_at + 4 * raw_dword(p, j), 4);
        }
}

int ds4_pack_rows(uint32_t type, const void *src, void *dst, int64_t row0, int64_t row1,
                  int64_t cols) {
    x8_range range = range_of(type, row0, row1, cols);
    if (!range.parts) return -1;
    uint8_t *first = (uint8_t *)dst + group_at(&range, row0, 0);
    int64_t groups = (row1 - row0) / DS4_X8_ROWS;
    switch (range.parts - PARTS) {
    case 0: pack_groups(&PARTS[0], &range, src, groups, first); break;
    case 1: pack_groups(&PARTS[1], &range, src, groups, first); break;
    case 2: pack_groups(&PARTS[2], &range, src, groups, first); break;
    case 3: pack_groups(&PARTS[3], &range, src, groups, first); break;
    case 4: pack_groups(&PARTS[4], &range, src, groups, first); break;
    case 9: pack_groups(&PARTS[9], &range, src, groups, first); break;
    default: pack_groups(range.parts, &range, src, groups, first);
    }
    return 0;
}

int ds4_unpack_rows(uint32_t type, const void *src, void *dst, int64_t row0, int64_t row1,
                    int64_t cols) {
    x8_range range = range_of(type, row0, row1, cols);
    if (!range.parts) return -1;
    uint8_t *raw = dst;
    for (int64_t row = row0; row < row1; row++)
        for (int64_t b = 0; b < range.blocks; b++, raw += range.block_bytes)
            unpack_row(range.parts, (const uint8_t *)src + group_at(&range, row, b), raw,
                       (int)(row % DS4_X8_ROWS));
    return 0;
}
