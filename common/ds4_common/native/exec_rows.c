/* Ops that look only at their own row: a token, or an output. */
#include <math.h>
#include <string.h>

#include "exec.h"
#include "op_math.h"

/* ---- rope --------------------------------------------------------------------------------------- */

/* Angles in double precision: a float product of position and frequency is off by whole turns' worth
 * of rounding at large positions. Once per step and configuration, not per layer. */
static void angles(const ds4_engine *e, int64_t token) {
    for (uint32_t i = 0; i < e->image.header->n_ropes; i++) {
        const ds4_rope_table *table = e->ropes + i;
        int64_t half = e->image.ropes[i].rope_dim / 2;
        float *cosine = table->cosine + token * half, *sine = table->sine + token * half;
        for (int64_t j = 0; j < half; j++) {
            double position = (double)e->positions[token] + e->image.ropes[i].shift;
            double angle = position * table->frequency[j];
            cosine[j] = (float)(cos(angle) * table->magnitude);
            sine[j] = (float)(sin(angle) * table->magnitude);
        }
    }
}

static void rope(const ds4_engine *e, const ds4_image_op *op, int64_t token) {
    const ds4_image_rope *how = e->image.ropes + op->rope;
    int64_t half = how->rope_dim / 2, dim = op->dim, first = op->first;
    const float *cosine = e->ropes[op->rope].cosine + token * half;
    const float *sine = e->ropes[op->rope].sine + token * half;
    const float *x = ds4_slot_floats(e, op->in[0], token);
    float *y = ds4_slot_floats(e, op->out, token);
    int64_t step = how->style ? 1 : 2, mate = how->style ? half : 1;
    float sign = op->mode ? -1.0f : 1.0f;
    for (uint32_t head = 0; head < op->heads; head++, x += dim, y += dim) {
        for (int64_t d = 0; d < first; d++) y[d] = x[d];
        for (int64_t j = 0; j < half; j++) {
            int64_t d = first + j * step;
            float a = x[d], b = x[d + mate], turn = sign * sine[j];
            y[d] = a * cosine[j] - b * turn;
            y[d + mate] = a * turn + b * cosine[j];
        }
        for (int64_t d = first + 2 * half; d < dim; d++) y[d] = x[d];
    }
}

/* ---- cache store ---------------------------------------------------------------------------------- */

static void kv_store(const ds4_engine *e, const ds4_image_op *op, int64_t token) {
    const ds4_image_plane *plane = e->image.planes + op->plane;
    const ds4_kv *kv = e->kv_kernels;
    int64_t page_tokens = e->image.header->page_tokens, position = e->positions[token];
    int64_t dim = plane->dim, value_dim = plane->value_dim, place = position % page_tokens;
    int64_t key_tile = ds4_kv_tile_bytes(kv->type, dim, page_tokens);
    int64_t value_tile = ds4_kv_tile_bytes(kv->type, ds4_kv_width(value_dim), page_tokens);
    const float *k = ds4_slot_floats(e, op->in[0], token);
    char *keys = ds4_plane_page(e, op->plane, e->banks[token], position / page_tokens);
    if (plane->kind == DS4_PLANE_LATENT) {
        ds4_kv_store_along(kv, k, dim, page_tokens, place, keys);
        return;
    }
    const float *v = ds4_slot_floats(e, op->in[1], token);
    char *values = keys + plane->kv_heads * key_tile;
    for (uint32_t head = 0; head < plane->kv_heads; head++, k += dim, v += value_dim) {
        ds4_kv_store_across(kv, k, dim, page_tokens, place, keys + head * key_tile);
        ds4_kv_store_along(kv, v, value_dim, page_tokens, place, values + head * value_tile);
    }
}

/* The row of a window that ends with this token. */
static void store_rows(const ds4_engine *e, const ds4_image_op *op, int64_t token) {
    const ds4_image_plane *plane = e->image.planes + op->plane;
    int64_t position = e->positions[token], page_tokens = e->image.header->page_tokens;
    if ((position + 1) % plane->ratio) return;
    int64_t records = page_tokens / plane->ratio, place = position % page_tokens / plane->ratio;
    char *page = ds4_plane_page(e, op->plane, e->banks[token], position / page_tokens);
    const float *x = ds4_slot_floats(e, op->in[0], token);
    if (plane->kind == DS4_PLANE_ROWS)
        ds4_kv_store_along(e->row_kernels, x, plane->dim, records, place, page);
    else
        ds4_kv_store_across(e->row_kernels, x, plane->dim, records, place, page);
}

/* ---- the rest ------------------------------------------------------------------------------------- */

static void embed(const ds4_engine *e, const ds4_image_op *op, int64_t token) {
    const ds4_weight *table = e->weights + op->weight;
    float *y = ds4_slot_floats(e, op->out, token);
    ds4_dequant_row(table, e->tokens[token], y);
    if (op->value != 1.0f)
        for (int64_t i = 0; i < table->cols; i++) y[i] *= op->value;
}

static void rms_norm(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    int64_t width = e->image.slots[op->out].width / op->heads;
    const float *x = ds4_slot_floats(e, op->in[0], row);
    float *y = ds4_slot_floats(e, op->out, row);
    for (uint32_t head = 0; head < op->heads; head++, x += width, y += width) {
        float mean = e->vector->sum_squares(x, width) / (float)width;
        float scale = 1.0f / sqrtf(mean + op->value);
        if (op->weight != DS4_NONE)
            e->vector->scale_by(y, x, e->vectors[op->weight], scale, width);
        else
            for (int64_t i = 0; i < width; i++) y[i] = x[i] * scale;
    }
}

static void glu(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    int64_t width = e->image.slots[op->out].width;
    const float *gate = ds4_slot_floats(e, op->in[0], row), *up = ds4_slot_floats(e, op->in[1], row);
    float *y = ds4_slot_floats(e, op->out, row);
    if (op->mode == DS4_GLU_SILU && op->limit == 0.0f)
        e->vector->silu_mul(y, gate, up, width);
    else
        e->vector->gated_mul(y, gate, up, (int)op->mode, op->limit, op->alpha, width);
}

static void gate_row(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    const float *x = ds4_slot_floats(e, op->in[0], row);
    float *y = ds4_slot_floats(e, op->out, row);
    float scale = 1.0f / (1.0f + ds4_exp(-*ds4_slot_floats(e, op->in[1], row)));
    for (int64_t i = 0; i < e->image.slots[op->out].width; i++) y[i] = x[i] * scale;
}

/* Each expert's part by the expert's scale, or the whole row by one. */
static void scale_parts(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    const float *x = ds4_slot_floats(e, op->in[0], row), *scales = e->vectors[op->weight];
    const float *bias = op->bias == DS4_NONE ? NULL : e->vectors[op->bias];
    const float *chosen = op->in[1] == DS4_NONE ? NULL : ds4_slot_floats(e, op->in[1], row);
    uint32_t used = chosen ? e->image.slots[op->in[1]].width / 2 : 1;
    uint32_t width = e->image.slots[op->out].width / used;
    float count = (float)e->weights[op->weight].cols, *y = ds4_slot_floats(e, op->out, row);
    for (uint32_t j = 0; j < used; j++, x += width, y += width) {
        float number = chosen ? chosen[j] : 0.0f;
        float scale = scales[number >= 0.0f && number < count ? (uint32_t)number : 0];
        for (uint32_t i = 0; i < width; i++) y[i] = bias ? x[i] * scale + bias[i] : x[i] * scale;
    }
}

static void slice_heads(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    const float *x = ds4_slot_floats(e, op->in[0], row) + op->first;
    float *y = ds4_slot_floats(e, op->out, row);
    for (uint32_t head = 0; head < op->heads; head++, x += op->dim, y += op->width)
        memmove(y, x, op->width * sizeof *y); /* a damaged image may overlap */
}

static void join_heads(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    uint32_t width = e->image.slots[op->out].width / op->heads;
    uint32_t left = e->image.slots[op->in[0]].width / op->heads, right = width - left;
    uint32_t step = e->image.slots[op->in[1]].width == right ? 0 : right; /* one head for all */
    const float *a = ds4_slot_floats(e, op->in[0], row), *b = ds4_slot_floats(e, op->in[1], row);
    float *y = ds4_slot_floats(e, op->out, row);
    for (uint32_t head = 0; head < op->heads; head++, a += left, b += step, y += width) {
        memmove(y, a, left * sizeof *y);
        memmove(y + left, b, right * sizeof *y);
    }
}

static void combine(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    uint32_t used = e->image.slots[op->in[1]].width / 2, width = e->image.slots[op->out].width;
    const float *x = ds4_slot_floats(e, op->in[0], row);
    const float *weights = ds4_slot_floats(e, op->in[1], row) + used;
    float *y = ds4_slot_floats(e, op->out, row);
    memset(y, 0, width * sizeof *y);
    for (uint32_t j = 0; j < used; j++, x += width) e->vector->add_scaled(y, x, weights[j], width);
}

static void quantize(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    const ds4_image_slot *act = e->image.slots + op->out;
    const float *x = ds4_slot_floats(e, op->in[0], row);
    char *out = ds4_slot_row(e, op->out, row);
    size_t step = act->columns > 1 ? ds4_act_bytes(act->format, act->width) : 0;
    for (uint32_t column = 0; column < act->columns; column++, x += act->width, out += step)
        ds4_act_quantize(act->format, x, act->width, out, e->config.isa);
}

static void run_op(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    switch (op->kind) {
    case DS4_OP_EMBED: embed(e, op, row); break;
    case DS4_OP_RMS_NORM: rms_norm(e, op, row); break;
    case DS4_OP_ROPE: rope(e, op, row); break;
    case DS4_OP_KV_STORE: kv_store(e, op, row); break;
    case DS4_OP_ADD:
        e->vector->add(ds4_slot_floats(e, op->out, row), ds4_slot_floats(e, op->in[0], row),
                       ds4_slot_floats(e, op->in[1], row), e->image.slots[op->out].width);
        break;
    case DS4_OP_GLU: glu(e, op, row); break;
    case DS4_OP_SOFT_CAP:
        e->vector->soft_cap(ds4_slot_floats(e, op->out, row), ds4_slot_floats(e, op->in[0], row),
                            op->value, e->image.slots[op->out].width);
        break;
    case DS4_OP_GATE_ROW: gate_row(e, op, row); break;
    case DS4_OP_SCALE_PARTS: scale_parts(e, op, row); break;
    case DS4_OP_SLICE_HEADS: slice_heads(e, op, row); break;
    case DS4_OP_JOIN_HEADS: join_heads(e, op, row); break;
    case DS4_OP_ROUTE: ds4_route(e, op, row); break;
    case DS4_OP_COMBINE: combine(e, op, row); break;
    case DS4_OP_GATHER:
        memmove(ds4_slot_row(e, op->out, row), ds4_slot_row(e, op->in[0], e->output_rows[row]),
                (size_t)e->image.slots[op->out].width * 4);
        break;
    case DS4_OP_QUANTIZE: quantize(e, op, row); break;
    case DS4_OP_STORE_ROWS: store_rows(e, op, row); break;
    case DS4_OP_HYPER_WEIGHTS: ds4_hyper_weights(e, op, row); break;
    case DS4_OP_HYPER_READ: ds4_hyper_read(e, op, row); break;
    case DS4_OP_HYPER_WRITE: ds4_hyper_write(e, op, row); break;
    case DS4_OP_HADAMARD: ds4_hadamard(e, op, row); break;
    case DS4_OP_ROUND_FLOATS: ds4_round_floats(e, op, row); break;
    }
}

static int64_t last_row(const ds4_engine *e, int64_t first) {
    int64_t end = first + e->rows_per_unit;
    return end < e->section_rows ? end : e->section_rows;
}

void ds4_run_rows(ds4_engine *e, uint64_t unit, int thread) {
    (void)thread;
    int64_t first = (int64_t)unit * e->rows_per_unit, end = last_row(e, first);
    const ds4_image_op *ops = e->image.ops + e->section->first_op;
    for (int64_t row = first; row < end; row++)
        for (uint32_t i = 0; i < e->section->n_ops; i++) run_op(e, ops + i, row);
}

void ds4_run_angles(ds4_engine *e, uint64_t unit, int thread) {
    (void)thread;
    int64_t first = (int64_t)unit * e->rows_per_unit, end = last_row(e, first);
    for (int64_t token = first; token < end; token++) angles(e, token);
}
