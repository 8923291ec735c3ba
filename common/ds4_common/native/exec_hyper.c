/* Residual streams that exchange, and the two ops that make values coarse: all of them row by row. */
#include <math.h>
#include <string.h>

#include "exec.h"
#include "op_math.h"

static float sigmoid(float x) { return 1.0f / (1.0f + ds4_exp(-x)); }

/* Divides each of the n columns (step 1) or rows (step n) by its sum + eps. */
static void normalize(float *c, uint32_t n, uint32_t step, float eps) {
    uint32_t along = step == 1 ? n : 1; /* from one value of the sum to the next */
    for (uint32_t i = 0; i < n; i++) {
        float *first = c + i * step, sum = 0.0f;
        for (uint32_t j = 0; j < n; j++) sum += first[j * along];
        sum = 1.0f / (sum + eps);
        for (uint32_t j = 0; j < n; j++) first[j * along] *= sum;
    }
}

static void softmax_rows(float *c, uint32_t n, float eps) {
    for (uint32_t i = 0; i < n; i++, c += n) {
        float top = c[0], sum = 0.0f;
        for (uint32_t j = 1; j < n; j++) top = c[j] > top ? c[j] : top;
        for (uint32_t j = 0; j < n; j++) sum += c[j] = ds4_exp(c[j] - top);
        for (uint32_t j = 0; j < n; j++) c[j] = c[j] / sum + eps;
    }
}

void ds4_hyper_weights(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    uint32_t n = op->groups, width = e->image.slots[op->out].width;
    const float *m = ds4_slot_floats(e, op->in[0], row), *base = e->vectors[op->bias];
    const float *scale = e->vectors[op->weight];
    float *w = ds4_slot_floats(e, op->out, row);
    for (uint32_t i = 0; i < width; i++) {
        uint32_t part = i < n ? 0 : i < 2 * n ? 1 : 2;
        float x = m[i] * scale[part] + base[i];
        w[i] = part == 0 ? sigmoid(x) + op->value : part == 1 ? 2.0f * sigmoid(x) : x;
    }
    if (width == n) return;
    float *cross = w + 2 * n;
    softmax_rows(cross, n, op->value);
    normalize(cross, n, 1, op->value);
    for (uint32_t i = 1; i < op->window; i++) {
        normalize(cross, n, n, op->value);
        normalize(cross, n, 1, op->value);
    }
}

void ds4_hyper_read(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    uint32_t width = e->image.slots[op->out].width;
    const float *s = ds4_slot_floats(e, op->in[0], row), *w = ds4_slot_floats(e, op->in[1], row);
    float *x = ds4_slot_floats(e, op->out, row);
    memset(x, 0, width * sizeof *x);
    for (uint32_t i = 0; i < op->groups; i++) e->vector->add_scaled(x, s + i * width, w[i], width);
}

void ds4_hyper_write(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    uint32_t n = op->groups, width = e->image.slots[op->in[0]].width;
    const float *y = ds4_slot_floats(e, op->in[0], row), *s = ds4_slot_floats(e, op->in[1], row);
    const float *w = ds4_slot_floats(e, op->in[2], row) + n, *cross = w + n;
    float *to = ds4_slot_floats(e, op->out, row);
    memset(to, 0, n * width * sizeof *to);
    for (uint32_t d = 0; d < n; d++, to += width) {
        e->vector->add_scaled(to, y, w[d], width);
        for (uint32_t i = 0; i < n; i++)
            e->vector->add_scaled(to, s + i * width, cross[i * n + d], width);
    }
}

/* Sums and differences of halves, quarters and so on: the transform without a matrix. */
void ds4_hadamard(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    uint32_t width = e->image.slots[op->out].width, dim = width / op->heads;
    const float *x = ds4_slot_floats(e, op->in[0], row);
    float *y = ds4_slot_floats(e, op->out, row), scale = (float)(1.0 / sqrt(dim));
    for (uint32_t i = 0; i < width; i++) y[i] = x[i] * scale;
    for (uint32_t half = 1; half < dim; half *= 2)
        for (uint32_t at = 0; at < width; at += 2 * half)
            for (uint32_t i = at; i < at + half; i++) {
                float a = y[i], b = y[i + half];
                y[i] = a + b;
                y[i + half] = a - b;
            }
}

/* ---- floats of few bits --------------------------------------------------------------------------- */

typedef struct {
    float most, least_amax;
    int mantissa, least_exponent;
} small_float;

static const small_float SMALL[DS4_SMALL_KINDS] = {
    {448.0f, 1e-4f, 3, -6},
    {6.0f, 6.0f * 0x1p-126f, 1, 0},
};

static float power_of_two(int exponent) { return ds4_float((uint32_t)(exponent + 127) << 23); }

static int exponent_of(float x) { return (int)(ds4_bits(x) >> 23 & 255) - 127; }

/* The nearest value of the format, ties to even; x is within its range, or no number. */
static float nearest(const small_float *f, float x) {
    int exponent = exponent_of(x);
    if (exponent < f->least_exponent) exponent = f->least_exponent;
    float step = power_of_two(exponent - f->mantissa), steps = fabsf(x) / step;
    steps = (steps + 0x1p23f) - 0x1p23f; /* the float adder rounds to whole numbers */
    return copysignf(steps * step, x);
}

static void round_block(const small_float *f, const float *x, float *y, int64_t n) {
    float amax = f->least_amax;
    for (int64_t i = 0; i < n; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    if (!(amax < 0x1p120f)) { /* nothing that a model computes: let it be seen */
        for (int64_t i = 0; i < n; i++) y[i] = NAN;
        return;
    }
    float ratio = amax / f->most;
    int exponent = exponent_of(ratio) + ((ds4_bits(ratio) & 0x7fffff) != 0);
    float scale = power_of_two(exponent), inverse = power_of_two(-exponent);
    for (int64_t i = 0; i < n; i++) {
        float v = x[i] * inverse;
        v = v > f->most ? f->most : v < -f->most ? -f->most : v;
        y[i] = nearest(f, v) * scale;
    }
}

void ds4_round_floats(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    uint32_t width = e->image.slots[op->out].width / op->heads;
    const float *x = ds4_slot_floats(e, op->in[0], row);
    float *y = ds4_slot_floats(e, op->out, row);
    for (uint32_t head = 0; head < op->heads; head++, x += width, y += width) {
        for (uint32_t d = 0; d < op->dim; d += op->width)
            round_block(SMALL + op->mode, x + d, y + d, op->width);
        memmove(y + op->dim, x + op->dim, (width - op->dim) * sizeof *y);
    }
}
