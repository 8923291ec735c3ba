/* Runs kernels of this machine between marks, so that their instructions can be counted
 * (count_plugin.c): a line for each on stdout, in the order of the counts. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "matmul.h"

enum { ROWS = 64, COLS = 2048, MOST = 256 };

static void fill(uint8_t *bytes, size_t n) {
    static uint64_t state = 88172645463325252ull;
    for (size_t i = 0; i < n; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        bytes[i] = (uint8_t)(state >> 16);
    }
}

static void count(uint32_t type, uint32_t layout, int isa, int64_t n, const uint8_t *data) {
    static _Alignas(64) uint8_t acts[MOST * 4 * (COLS + COLS / 4)];
    static float y[MOST * ROWS];
    ds4_matmul_fn kernel = ds4_matmul_kernel(type, layout, isa);
    ds4_weight w = {data, type, layout, ROWS, COLS, 0, 0};
    size_t stride = ds4_act_bytes(ds4_act_format(type), COLS);
    kernel(&w, 0, ROWS, acts, stride, n, y, ROWS); /* what the program does once is done */
    getppid();
    kernel(&w, 0, ROWS, acts, stride, n, y, ROWS);
    getppid();
    printf("%u %u %d %lld %lld\n", type, layout, isa, (long long)n, (long long)n * ROWS * COLS);
}

int main(int argc, char **argv) {
    static uint8_t raw[ROWS * COLS * 4], packed[ROWS * COLS * 4];
    for (uint32_t type = 0; type < 64; type++) {
        if (ds4_act_format(type) < 0) continue;
        fill(raw, sizeof raw);
        int x8 = ds4_pack_possible(type, ROWS, COLS) && !ds4_pack_rows(type, raw, packed, 0, ROWS, COLS);
        for (int isa = DS4_ISA_SCALAR + 1; isa < DS4_ISAS; isa++)
            for (int i = 1; ds4_isa_runs(isa) && i < argc; i++) {
                int64_t n = atoll(argv[i]);
                if (n > MOST) return 2;
                count(type, DS4_LAYOUT_RAW, isa, n, raw);
                if (x8) count(type, DS4_LAYOUT_X8, isa, n, packed);
            }
    }
    return 0;
}
