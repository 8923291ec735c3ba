/* Rotary positions: the angles of a step, then the rotation of heads.
 *
 * Reference: native/exec_rows.c (angles, rope). rope has the same bits. rope_angles computes in double
 * precision and rounds once; the device's cos and sin may differ from the C library's in the last bit
 * of the double, so its floats may in rare cases by one unit in the last place (tolerance of tests on
 * a device: 1 ulp; under fibers equal).
 *
 * rope_angles: parameter ds4_rope_angles, grid (ceil(half / 64), tokens), block (64).
 * rope: parameter ds4_rope, grid (heads + more_heads, tokens), block (64): queries, and keys behind them.
 */
#include "op_math.h"

struct ds4_rope_angles {
    uint64_t frequency;              /* double[half]: theta of a position is position * frequency */
    uint64_t positions;              /* int32[tokens]; `shift` is added to each */
    uint64_t cosine, sine, live;     /* float[tokens][half] */
    double magnitude;
    int32_t tokens, half, shift, reserved;
};

DS4_KERNEL(rope_angles, ds4_rope_angles, 64, 2) {
    int token = blockIdx.y, i = blockIdx.x * 64 + threadIdx.x;
    if (token >= ds4_rows(p.live, p.tokens) || i >= p.half) return;
    double angle = (double)(((const int *)p.positions)[token] + p.shift) * ((const double *)p.frequency)[i];
    ((float *)p.cosine)[(int64_t)token * p.half + i] = (float)(cos(angle) * p.magnitude);
    ((float *)p.sine)[(int64_t)token * p.half + i] = (float)(sin(angle) * p.magnitude);
}

struct ds4_rope {
    uint64_t x, y, cosine, sine, live; /* y may be x */
    uint32_t x_stride, y_stride;
    int32_t tokens, heads, dim, first, half; /* dims [first, first + 2 half) of each head turn */
    int32_t style;                           /* 0: pairs (2i, 2i + 1), 1: (i, i + half) */
    int32_t inverse, more_heads;             /* inverse 1: turn back; more_heads: of more_x, or 0 */
    uint64_t more_x, more_y;                 /* other rows that turn alike */
    uint32_t more_x_stride, more_y_stride;
};

DS4_KERNEL(rope, ds4_rope, 64, 2) {
    int token = blockIdx.y, head = blockIdx.x;
    if (token >= ds4_rows(p.live, p.tokens)) return;
    bool more = head >= p.heads;
    if (more) head -= p.heads;
    const float *x = ds4_row<const float>(more ? p.more_x : p.x, more ? p.more_x_stride : p.x_stride, token) +
                     head * p.dim;
    float *y = ds4_row<float>(more ? p.more_y : p.y, more ? p.more_y_stride : p.y_stride, token) + head * p.dim;
    const float *cosine = (const float *)p.cosine + (int64_t)token * p.half;
    const float *sine = (const float *)p.sine + (int64_t)token * p.half;
    int step = p.style ? 1 : 2, mate = p.style ? p.half : 1;
    for (int i = threadIdx.x; i < p.half; i += 64) {
        int d = p.first + i * step;
        float a = x[d], b = x[d + mate], c = cosine[i], s = p.inverse ? -sine[i] : sine[i];
        y[d] = a * c - b * s;
        y[d + mate] = a * s + b * c;
    }
    if (x == y) return;
    for (int d = threadIdx.x; d < p.dim; d += 64)
        if (d < p.first || d >= p.first + 2 * p.half) y[d] = x[d];
}
