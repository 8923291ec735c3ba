/* Int8 tiles: configuration and what both tile kernels share. Include only from *_amx.c.
 *
 * A product is C[token][row] += A[token][k] B[k / 4][row][k % 4]: A is read straight from activation
 * columns, B is unpacked weights with one dword per row - the X8 order - and C has one lane per row.
 */
#ifndef DS4_AMX_H
#define DS4_AMX_H

#include "avx512.h"

#define TILE 16       /* rows of weights, and most columns, of a tile */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Orders what the compiler wrote to memory before what tile instructions read there, and back. */
DS4_INLINE void tiles_see_memory(void) { __asm__ volatile("" ::: "memory"); }

/* Tiles 0 to 3 hold sums, 4 and 5 `columns` columns of `depth` activations, 6 and 7 weights. */
DS4_INLINE void configure_tiles(int columns, int depth) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? depth : 64);
        config.rows[i] = (uint8_t)(i < 6 ? columns : depth / 4);
    }
    /* not the compiler's intrinsic: GCC 12 takes it to read eight bytes, and drops the rest */
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/* First column of tile t: the last one ends with the last column, and overlaps the one before. */
DS4_INLINE int64_t tile_start(int64_t t, int64_t n) {
    return TILE * (t + 1) <= n ? TILE * t : n < TILE ? 0 : n - TILE;
}

#endif
