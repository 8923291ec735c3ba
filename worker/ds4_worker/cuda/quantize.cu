/* Activation columns for the integer kernels: quantize, and a gated unit quantized as it is made.
 *
 * Reference: native/act.c (ds4_act_quantize), op_vector.c (gated_mul); same bytes, padding excepted.
 * Parameter ds4_quantize; grid (ceil(blocks / 8), rows), block (256): a warp makes one block of the
 * format (32 values; 256 for Q8_256). A row of x holds `columns` columns of `width` floats, one after
 * the other; a column of the result has ds4_act_bytes(format, width) bytes.
 */
#include "act.h"

struct ds4_quantize {
    uint64_t x, up;  /* up: second operand of glu_quantize */
    uint64_t y;      /* glu_quantize: the floats as well, or 0 */
    uint64_t act, live;
    uint32_t x_stride, up_stride, y_stride, act_stride;
    int32_t rows, width, columns, format;
    int32_t mode;
    float limit, alpha;
    int32_t reserved;
};

/* `load(i)` reads what value i is made of, `make(i, that)` makes it: a lane reads all of its eight first. */
template <typename Load, typename Make>
static __device__ __forceinline__ void quantize_block(const ds4_quantize &p, int row, Load load, Make make) {
    int lane = threadIdx.x & 31, size = p.format == DS4_ACT_Q8_256 ? 256 : 32;
    int per_column = (p.width + size - 1) / size;
    int number = blockIdx.x * 8 + threadIdx.x / 32;
    if (number >= per_column * p.columns) return; /* whole warps */
    int column = number / per_column, block = number % per_column, first = column * p.width;
    char *act = ds4_row<char>(p.act, p.act_stride, row) +
                (p.columns > 1 ? column * ds4_act_bytes(p.format, p.width) : 0);
    if (p.format == DS4_ACT_Q8_256) {
        float2 read[8];
        float own[8];
        int at = first + 256 * block + 8 * lane;
#pragma unroll
        for (int i = 0; i < 8; i++) read[i] = load(at + i);
#pragma unroll
        for (int i = 0; i < 8; i++) own[i] = make(at + i, read[i]);
        ds4_quantize256(ds4_act256_view(act, p.width), block, own);
    } else if (p.format == DS4_ACT_Q8_32) {
        int at = first + 32 * block + lane;
        ds4_quantize32(ds4_act32_view(act, p.width), block, make(at, load(at)));
    } else {
        int i = 32 * block + lane;
        if (i < p.width) ((float *)act)[i] = make(first + i, load(first + i));
        else if (4 * i < ds4_round64(4 * (int64_t)p.width)) ((float *)act)[i] = 0.0f;
    }
}

DS4_KERNEL(quantize, ds4_quantize, 256, 2) {
    int row = blockIdx.y;
    if (row >= ds4_rows(p.live, p.rows)) return;
    const float *x = ds4_row<const float>(p.x, p.x_stride, row);
    quantize_block(
        p, row, [&](int i) { return make_float2(x[i], 0.0f); }, [](int, float2 read) { return read.x; });
}

DS4_KERNEL(glu_quantize, ds4_quantize, 256, 2) {
    int row = blockIdx.y;
    if (row >= ds4_rows(p.live, p.rows)) return;
    const float *gate = ds4_row<const float>(p.x, p.x_stride, row);
    const float *up = ds4_row<const float>(p.up, p.up_stride, row);
    float *y = p.y ? ds4_row<float>(p.y, p.y_stride, row) : (float *)0;
    quantize_block(
        p, row, [&](int i) { return make_float2(gate[i], up[i]); },
        [&](int i, float2 read) {
            float made = ds4_gated(p.mode, p.limit, p.alpha, read.x, read.y);
            if (y) y[i] = made;
            return made;
        });
}
