/* Compares every vector kernel of this build with its scalar reference, bit for bit.
 *
 * For machines that Python does not run on in a test: built for 64-bit ARM and run by an emulator
 * (tests/common/test_neon.py). The same claims as tests/common/test_matmul_kernels.py and
 * test_matmul_edges.py, fewer cases. Prints one line for each kind of kernel of each instruction set
 * that this machine runs, and exits with 1 at the first difference.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kv.h"
#include "matmul.h"
#include "op_vector.h"
#include "repack.h"

enum { MAX_COLS = 1024, MAX_ROWS = 24, FEW_COLUMNS = 11, MAX_COLUMNS = 130, ROUNDS = 3 };

static uint64_t state = 88172645463325252ull;

static uint32_t random_bits(void) { /* xorshift64 */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static float random_float(void) {
    return (float)(int32_t)random_bits() * 0x1p-31f * exp2f((float)(random_bits() % 20) - 10.0f);
}

static void fill_floats(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = random_float();
}

/* Any float at all now and then: infinities, NaN, denormals. */
static void fill_wild(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = random_bits();
        x[i] = random_float();
        if (random_bits() % 50 == 0) memcpy(x + i, &bits, 4);
    }
}

/* Equal bits, or both some NaN. */
static int same(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, 4) && !(isnan(a[i]) && isnan(b[i]))) return 0;
    return 1;
}

static void expect(int holds, const char *what, uint32_t type, int64_t detail) {
    if (holds) return;
    printf("%s differs: type %u, case %lld\n", what, type, (long long)detail);
    exit(1);
}

/* ---- activation columns ---------------------------------------------------------------------- */

static void check_quantize(int isa) {
    static float x[MAX_COLS];
    static uint8_t scalar[8 * MAX_COLS], vector[8 * MAX_COLS];
    for (int format = DS4_ACT_F32; format <= DS4_ACT_Q8_256; format++)
        for (int round = 0; round < 50; round++) {
            int64_t cols = 256 * (1 + random_bits() % 4);
            size_t bytes = ds4_act_bytes(format, cols);
            round % 2 ? fill_wild(x, cols) : fill_floats(x, cols);
            if (round % 5 == 0) memset(x, 0, 128);
            memset(scalar, 0, sizeof scalar), memset(vector, 0, sizeof vector);
            ds4_act_quantize(format, x, cols, scalar, DS4_ISA_SCALAR);
            ds4_act_quantize(format, x, cols, vector, isa);
            /* as floats: the scale of a broken block is some NaN */
            expect(same((float *)scalar, (float *)vector, (int64_t)bytes / 4), "quantize", 0, format);
        }
    printf("activation columns: equal\n");
}

/* ---- matrices -------------------------------------------------------------------------------- */

/* `bytes` of memory that end where nothing is mapped: one read or written beyond ends the program. */
static uint8_t *edge(int area, size_t bytes) {
    enum { AREA = 1 << 21, PAGE = 1 << 16 };
    static uint8_t *areas[3];
    if (!areas[area]) {
        areas[area] = mmap(NULL, AREA + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        expect(areas[area] != MAP_FAILED && !mprotect(areas[area] + AREA, PAGE, PROT_NONE), "mmap", 0, 0);
    }
    expect(bytes <= AREA, "size of an area", 0, (int64_t)bytes);
    return areas[area] + AREA - bytes;
}

/* Every number of columns around those at which a kernel changes its way, up to `most`. */
static int64_t next_columns(int64_t n, int64_t most) {
    static const int64_t apart[] = {16, 17, 31, 63, 64, 65, 66, 67, 71, 130};
    for (size_t i = 0; n >= FEW_COLUMNS && i < sizeof apart / sizeof *apart; i++)
        if (apart[i] > n) return apart[i] <= most ? apart[i] : most + 1;
    return n + 1;
}

static void check_rectangles(const ds4_weight *w, int isa, const uint8_t *acts, size_t stride,
                             int64_t most) {
    static float scalar[MAX_COLUMNS * MAX_ROWS];
    int64_t granule = ds4_row_granule(w->type, w->layout);
    ds4_matmul_fn kernel = ds4_matmul_kernel(w->type, w->layout, isa);
    ds4_matmul_fn reference = ds4_matmul_kernel(w->type, w->layout, DS4_ISA_SCALAR);
    expect(kernel && kernel != reference, "has no kernel of its own, or", w->type, w->layout);
    memset(scalar, 0, sizeof scalar);
    reference(w, 0, w->rows, acts, stride, most, scalar, w->rows);
    for (int64_t n = 1; n <= most; n = next_columns(n, most)) {
        size_t bytes = (size_t)(n * w->rows) * sizeof(float);
        float *vector = (float *)(void *)edge(0, bytes);
        uint8_t *columns = edge(1, (size_t)n * stride);
        memcpy(columns, acts, (size_t)n * stride);
        for (int64_t row0 = 0; row0 < w->rows; row0 += granule * 5) {
            memset(vector, 0, bytes);
            kernel(w, row0, w->rows, columns, stride, n, vector, w->rows);
            for (int64_t c = 0; c < n; c++) {
                const float *y = vector + c * w->rows;
                expect(same(scalar + c * w->rows + row0, y + row0, w->rows - row0), "matmul", w->type, n);
                for (int64_t r = 0; r < row0; r++) expect(y[r] == 0.0f, "other rows", w->type, n);
            }
        }
    }
}

static void quantize_columns(int format, int64_t cols, int64_t n, uint8_t *acts) {
    static float x[MAX_COLS];
    for (int64_t c = 0; c < n; c++) {
        fill_floats(x, cols);
        if (c % 5 == 3) x[random_bits() % cols] = INFINITY;
        ds4_act_quantize(format, x, cols, acts + (size_t)c * ds4_act_bytes(format, cols), DS4_ISA_SCALAR);
    }
}

/* Raw rows of random bytes, and the same packed; in the last round few blocks, many columns. */
static int check_type(uint32_t type, int isa) {
    static uint8_t raw[MAX_ROWS * MAX_COLS * 4];
    static _Alignas(64) uint8_t acts[MAX_COLUMNS * 8 * MAX_COLS];
    int format = ds4_act_format(type);
    if (format < 0) return 0;
    for (int round = 0; round <= ROUNDS; round++) {
        int64_t step = ds4_block_weights(type) < 16 ? 1 : ds4_block_weights(type);
        int64_t most = round < ROUNDS ? FEW_COLUMNS : MAX_COLUMNS;
        int64_t range = round < ROUNDS ? MAX_COLS : 512;
        int64_t cols = step == 1 ? 1 + random_bits() % 200 : step * (1 + random_bits() % (range / step));
        int64_t rows = round ? 8 * (1 + random_bits() % 3) : 13;
        size_t stride = ds4_act_bytes(format, cols);
        quantize_columns(format, cols, most, acts);
        for (size_t i = 0; i < sizeof raw; i++) raw[i] = (uint8_t)random_bits();
        size_t bytes = (size_t)ds4_layout_bytes(type, DS4_LAYOUT_RAW, rows, cols);
        uint8_t *data = edge(2, bytes);
        memcpy(data, raw, bytes);
        ds4_weight w = {data, type, DS4_LAYOUT_RAW, rows, cols, 0, 0};
        check_rectangles(&w, isa, acts, stride, most);
        if (!ds4_pack_possible(type, rows, cols)) continue;
        ds4_pack_rows(type, raw, data, 0, rows, cols);
        w.layout = DS4_LAYOUT_X8;
        check_rectangles(&w, isa, acts, stride, most);
    }
    return 1;
}

static void check_matrices(int isa) {
    int types = 0;
    for (uint32_t type = 0; type < 64; type++) types += check_type(type, isa);
    printf("matrices: %d types equal\n", types);
}

/* A few rows in the middle of a tensor of many, as one expert's are. */
static void check_aligned(uint32_t type, int kind, int isa) {
    enum { TENSOR_ROWS = 3 * MAX_ROWS };
    static uint8_t raw[TENSOR_ROWS * MAX_COLS];
    static _Alignas(64) uint8_t acts[FEW_COLUMNS * 8 * MAX_COLS];
    for (int round = 0; round < ROUNDS; round++) {
        int64_t cols = 256 * (1 + round), pair = kind == DS4_Q2_K_ALIGNED ? 2 : 1;
        size_t stride = ds4_act_bytes(DS4_ACT_Q8_256, cols);
        ds4_repack_shape shape = {cols, MAX_ROWS, 3, TENSOR_ROWS / pair, pair,
                                  ds4_layout_bytes(type, (uint32_t)kind, TENSOR_ROWS, cols)};
        uint8_t *artifact = edge(2, (size_t)shape.dst_bytes);
        for (size_t i = 0; i < sizeof raw; i++) raw[i] = (uint8_t)random_bits();
        quantize_columns(DS4_ACT_Q8_256, cols, FEW_COLUMNS, acts);
        expect(!ds4_repack(kind, &shape, raw, 0, shape.units, artifact), "repack", type, round);
        ds4_weight whole = {artifact, type, (uint32_t)kind, TENSOR_ROWS, cols, 0, 0};
        ds4_weight part = ds4_weight_rows(&whole, MAX_ROWS - 2, 20);
        check_rectangles(&part, isa, acts, stride, FEW_COLUMNS);
        ds4_weight plain = {raw, type, DS4_LAYOUT_RAW, TENSOR_ROWS, cols, 0, 0};
        plain = ds4_weight_rows(&plain, MAX_ROWS - 2, 20);
        static float as_raw[MAX_ROWS], as_artifact[MAX_ROWS];
        ds4_matmul_kernel(type, DS4_LAYOUT_RAW, isa)(&plain, 0, 20, acts, stride, 1, as_raw, 20);
        ds4_matmul_kernel(type, (uint32_t)kind, isa)(&part, 0, 20, acts, stride, 1, as_artifact, 20);
        expect(same(as_raw, as_artifact, 20), "aligned rows", type, round);
    }
}

static void check_planes(uint32_t type, int isa) {
    static uint8_t raw[MAX_ROWS * MAX_COLS], back[MAX_ROWS * MAX_COLS];
    static _Alignas(64) uint8_t acts[FEW_COLUMNS * 8 * MAX_COLS];
    static float as_raw[MAX_ROWS], as_planes[MAX_ROWS];
    for (int round = 0; round < ROUNDS; round++) {
        int64_t cols = 256 * (1 + round), rows = 13;
        size_t stride = ds4_act_bytes(DS4_ACT_Q8_256, cols);
        for (size_t i = 0; i < sizeof raw; i++) raw[i] = (uint8_t)random_bits();
        quantize_columns(DS4_ACT_Q8_256, cols, FEW_COLUMNS, acts);
        uint8_t *planes = edge(2, (size_t)ds4_layout_bytes(type, DS4_LAYOUT_IQ2_PLANES, rows, cols));
        expect(!ds4_planes_pack(type, raw, planes, rows, cols), "planes", type, round);
        expect(!ds4_planes_unpack(type, planes, back, rows, cols), "raw blocks", type, round);
        size_t bytes = (size_t)ds4_layout_bytes(type, DS4_LAYOUT_RAW, rows, cols);
        expect(!memcmp(raw, back, bytes), "raw blocks", type, round);
        ds4_weight w = {planes, type, DS4_LAYOUT_IQ2_PLANES, rows, cols, 0, 0};
        check_rectangles(&w, isa, acts, stride, FEW_COLUMNS);
        ds4_weight plain = {raw, type, DS4_LAYOUT_RAW, rows, cols, 0, 0};
        ds4_matmul_kernel(type, w.layout, isa)(&w, 0, rows, acts, stride, 1, as_planes, rows);
        ds4_matmul_kernel(type, plain.layout, isa)(&plain, 0, rows, acts, stride, 1, as_raw, rows);
        expect(same(as_raw, as_planes, rows), "rows of planes", type, round);
    }
}

static void check_all_aligned(int isa) {
    check_aligned(16, DS4_IQ2_XXS_ALIGNED, isa);
    check_aligned(17, DS4_IQ2_XS_ALIGNED, isa);
    check_aligned(10, DS4_Q2_K_ALIGNED, isa);
    printf("aligned layouts: 3 types equal\n");
    check_planes(16, isa);
    check_planes(17, isa);
    printf("planes: 2 types equal\n");
}

/* ---- vector operations ----------------------------------------------------------------------- */

/* Three scores into a softmax that begins empty. */
static void check_running(const ds4_vector *s, const ds4_vector *v, const float *a, const float *b,
                          const float *c, int64_t n) {
    static float rs[3][MAX_COLS], rv[3][MAX_COLS];
    memset(rs, 0, sizeof rs);
    for (int64_t i = 0; i < n; i++) rs[0][i] = -INFINITY;
    memcpy(rv, rs, sizeof rs);
    const float *given[] = {a, b, c};
    for (int i = 0; i < 3; i++) {
        const float *k = given[i], *gate = given[(i + 1) % 3], *bias = given[(i + 2) % 3];
        s->running_softmax(rs[0], rs[1], rs[2], k, gate, bias, n);
        v->running_softmax(rv[0], rv[1], rv[2], k, gate, bias, n);
    }
    for (int i = 0; i < 3; i++) expect(same(rs[i], rv[i], n), "running_softmax", (uint32_t)i, n);
}

static void check_elementwise(const ds4_vector *s, const ds4_vector *v, int64_t n, int wild) {
    static float a[MAX_COLS], b[MAX_COLS], c[MAX_COLS], ys[MAX_COLS], yv[MAX_COLS];
    wild ? fill_wild(a, n) : fill_floats(a, n);
    fill_floats(b, n), fill_floats(c, n);
    float ss = s->sum_squares(a, n), sv = v->sum_squares(a, n);
    expect(same(&ss, &sv, 1), "sum_squares", 0, n);
    s->scale_by(ys, a, b, 0.37f, n), v->scale_by(yv, a, b, 0.37f, n);
    expect(same(ys, yv, n), "scale_by", 0, n);
    s->add(ys, a, b, n), v->add(yv, a, b, n);
    expect(same(ys, yv, n), "add", 0, n);
    s->silu_mul(ys, a, b, n), v->silu_mul(yv, a, b, n);
    expect(same(ys, yv, n), "silu_mul", 0, n);
    for (int mode = 0; mode < 3; mode++)
        for (int limited = 0; limited < 2; limited++) {
            float limit = limited ? 7.0f : 0.0f;
            s->gated_mul(ys, a, b, mode, limit, 1.702f, n);
            v->gated_mul(yv, a, b, mode, limit, 1.702f, n);
            expect(same(ys, yv, n), "gated_mul", (uint32_t)mode, n);
        }
    s->soft_cap(ys, a, 30.0f, n), v->soft_cap(yv, a, 30.0f, n);
    expect(same(ys, yv, n), "soft_cap", 0, n);
    memcpy(ys, c, sizeof c), memcpy(yv, c, sizeof c);
    s->add_scaled(ys, a, 0.7f, n), v->add_scaled(yv, a, 0.7f, n);
    expect(same(ys, yv, n), "add_scaled", 0, n);
    int fs = 1, fv = 1;
    float ms = s->max_finite(a, n, &fs), mv = v->max_finite(a, n, &fv);
    expect(same(&ms, &mv, 1) && fs == fv, "max_finite", 0, n);
    ms = s->max(a, n), mv = v->max(a, n);
    expect(same(&ms, &mv, 1), "max", 0, n);
    s->exp_scaled(ys, a, 1.5f, 0.8f, n), v->exp_scaled(yv, a, 1.5f, 0.8f, n);
    expect(same(ys, yv, n), "exp_scaled", 0, n);
    check_running(s, v, a, b, c, n);
    memcpy(ys, a, sizeof a), memcpy(yv, a, sizeof a);
    s->join(ys, b, 0.3f, 0.6f, n), v->join(yv, b, 0.3f, 0.6f, n);
    expect(same(ys, yv, n), "join", 0, n);
    memcpy(ys, a, sizeof a), memcpy(yv, a, sizeof a);
    ms = s->softmax(ys, 2.0f, n), mv = v->softmax(yv, 2.0f, n);
    expect(same(ys, yv, n) && same(&ms, &mv, 1), "softmax", 0, n);
}

static void check_vectors(int isa) {
    const ds4_vector *scalar = ds4_vector_table(DS4_ISA_SCALAR), *vector = ds4_vector_table(isa);
    for (size_t i = 0; i < sizeof *vector / sizeof(void (*)(void)); i++) {
        void (*entry)(void);
        memcpy(&entry, (const char *)vector + i * sizeof entry, sizeof entry);
        expect(entry != NULL, "table has no entry, which", 0, (int64_t)i);
    }
    for (int64_t n = 1; n < 140; n++)
        for (int wild = 0; wild < 2; wild++) check_elementwise(scalar, vector, n, wild);
    printf("vector operations: equal\n");
}

/* ---- the KV cache ------------------------------------------------------------------------------- */

static void check_cache(const ds4_kv *s, const ds4_kv *v, int64_t dim) {
    enum { DIM = 96, PAGE = 32, ROWS = DS4_SCORE_ROWS };
    static float q[ROWS * DIM], x[DIM], ys[ROWS * PAGE], yv[ROWS * PAGE];
    static float os[DS4_VALUE_ROWS * DIM], ov[DS4_VALUE_ROWS * DIM];
    static char across[2][4 * DIM * PAGE], along[2][4 * DIM * PAGE];
    int64_t width = ds4_kv_width(dim);
    memset(across, 0, sizeof across), memset(along, 0, sizeof along);
    fill_floats(q, ROWS * DIM);
    for (int64_t place = 0; place < PAGE; place++) {
        fill_floats(x, DIM);
        for (int i = 0; i < 2; i++) {
            ds4_kv_store_across(i ? v : s, x, dim, PAGE, place, across[i]);
            ds4_kv_store_along(i ? v : s, x, dim, PAGE, place, along[i]);
        }
    }
    expect(!memcmp(across[0], across[1], sizeof across[0]) &&
               !memcmp(along[0], along[1], sizeof along[0]),
           "stored tile", (uint32_t)s->type, dim);
    for (int rows = 1; rows <= ROWS; rows++)
        for (int64_t tokens = 1; tokens <= PAGE; tokens++) {
            int64_t tokens8 = (tokens + 7) / 8 * 8;
            s->score(q, rows, dim, across[0], across[0], PAGE, tokens8, ys, PAGE);
            v->score(q, rows, dim, across[0], across[0], PAGE, tokens8, yv, PAGE);
            expect(same(ys, yv, ROWS * PAGE), "score", (uint32_t)s->type, tokens);
            s->score_along(q, rows, dim, along[0], along[0], PAGE, width, tokens, ys, PAGE);
            v->score_along(q, rows, dim, along[0], along[0], PAGE, width, tokens, yv, PAGE);
            expect(same(ys, yv, ROWS * PAGE), "score_along", (uint32_t)s->type, tokens);
        }
    for (int rows = 1; rows <= DS4_VALUE_ROWS; rows++)
        for (int64_t tokens = 1; tokens <= PAGE; tokens++)
            for (int64_t from = 0; from + tokens <= PAGE; from += 3) {
                fill_floats(os, DS4_VALUE_ROWS * DIM);
                memcpy(ov, os, sizeof os);
                s->accumulate(q, PAGE, rows, from, tokens, along[0], along[0], PAGE, width, width, os);
                v->accumulate(q, PAGE, rows, from, tokens, along[0], along[0], PAGE, width, width, ov);
                expect(same(os, ov, DS4_VALUE_ROWS * DIM), "accumulate", (uint32_t)s->type, tokens);
            }
}

static void check_caches(int isa) {
    for (int type = 0; type < DS4_KV_TYPES; type++) {
        const ds4_kv *s = ds4_kv_table(type, DS4_ISA_SCALAR), *v = ds4_kv_table(type, isa);
        check_cache(s, v, 64);
        check_cache(s, v, 96);
        if (type != DS4_KV_Q8_0) check_cache(s, v, 37), check_cache(s, v, 5);
    }
    printf("caches: %d types equal\n", DS4_KV_TYPES);
}

int main(void) {
    int checked = 0;
    for (int isa = DS4_ISA_SCALAR + 1; isa < DS4_ISAS; isa++) {
        if (!ds4_isa_runs(isa)) continue;
        printf("instruction set %d\n", isa);
        check_quantize(isa);
        check_matrices(isa);
        check_all_aligned(isa);
        check_vectors(isa);
        check_caches(isa);
        checked++;
    }
    return checked ? 0 : 2;
}
