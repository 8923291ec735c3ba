/* The choice of experts of one token: scores, groups, the best k, their weights. */
#include <math.h>
#include <string.h>

#include "exec.h"

#define LEAST_SUM 0x1p-14f /* smallest normal half: no division by less */

/* p over all experts (contract/ops.py, route_experts). */
static void scores(const ds4_engine *e, int kind, const float *logits, int64_t n, float *p) {
    switch (kind) {
    case DS4_SCORE_SOFTMAX: {
        for (int64_t i = 0; i < n; i++) p[i] = logits[i];
        float sum = e->vector->softmax(p, e->vector->max(p, n), n);
        for (int64_t i = 0; i < n; i++) p[i] = p[i] / sum;
        break;
    }
    case DS4_SCORE_SIGMOID:
        e->vector->exp_scaled(p, logits, 0.0f, -1.0f, n);
        for (int64_t i = 0; i < n; i++) p[i] = 1.0f / (1.0f + p[i]);
        break;
    case DS4_SCORE_SQRT_SOFTPLUS: /* ln(1 + exp(x)) is x to double precision from 40 on */
        for (int64_t i = 0; i < n; i++)
            p[i] = (float)sqrt(logits[i] > 40.0f ? logits[i] : log1p(exp((double)logits[i])));
        break;
    default:
        for (int64_t i = 0; i < n; i++) p[i] = logits[i];
    }
}

/* The best of n candidates, the first of equals, -1 when all are taken (-infinity or NaN). */
static int64_t best(const float *candidates, int64_t n) {
    int64_t at = -1;
    for (int64_t i = 0; i < n; i++)
        if (candidates[i] > (at < 0 ? -INFINITY : candidates[at])) at = i;
    return at;
}

/* Sum of the `top` best of n scores. */
static float group_score(const float *p, int64_t n, uint32_t top) {
    float sum = 0.0f, below = INFINITY;
    int64_t below_at = -1;
    for (uint32_t j = 0; j < top; j++) {
        int64_t at = -1;
        for (int64_t i = 0; i < n; i++) {
            int after = p[i] < below || (p[i] == below && i > below_at);
            if (after && (at < 0 || p[i] > p[at])) at = i;
        }
        if (at < 0) break;
        sum += below = p[at];
        below_at = at;
    }
    return sum;
}

/* Rules out the experts of all groups but the best. */
static void keep_groups(const ds4_image_op *op, float *candidates, int64_t n) {
    float held[DS4_MAX_EXPERTS];
    int64_t size = n / op->groups;
    for (uint32_t g = 0; g < op->groups; g++)
        held[g] = group_score(candidates + g * size, size, op->width);
    char kept[DS4_MAX_EXPERTS] = {0};
    for (uint32_t j = 0; j < op->groups_used; j++) {
        int64_t g = best(held, op->groups);
        if (g < 0) break;
        kept[g] = 1;
        held[g] = -INFINITY;
    }
    for (int64_t i = 0; i < n; i++)
        if (!kept[i / size]) candidates[i] = -INFINITY;
}

static void weigh(const ds4_engine *e, const ds4_image_op *op, float *w, int64_t used) {
    float sum = 0.0f;
    if (op->mode == DS4_SCORE_LOGITS) {
        sum = e->vector->softmax(w, e->vector->max(w, used), used);
        for (int64_t j = 0; j < used; j++) w[j] = w[j] / sum;
    }
    if (op->normalize) {
        sum = 0.0f;
        for (int64_t j = 0; j < used; j++) sum += w[j];
        if (sum < LEAST_SUM) sum = LEAST_SUM;
        for (int64_t j = 0; j < used; j++) w[j] = w[j] / sum;
    }
    for (int64_t j = 0; j < used; j++) w[j] *= op->value;
}

/* The expert that a table names for a token. */
static int64_t listed(const ds4_weight *table, int32_t token, int64_t j) {
    int32_t expert;
    memcpy(&expert, (const char *)table->data + (token * table->cols + j) * 4, 4);
    return expert;
}

void ds4_route(const ds4_engine *e, const ds4_image_op *op, int64_t row) {
    int64_t n = e->image.slots[op->in[0]].width, used = e->image.slots[op->out].width / 2;
    float p[DS4_MAX_EXPERTS], candidates[DS4_MAX_EXPERTS];
    float *chosen = ds4_slot_floats(e, op->out, row), *w = chosen + used;
    scores(e, (int)op->mode, ds4_slot_floats(e, op->in[0], row), n, p);
    const float *bias = op->weight == DS4_NONE ? NULL : e->vectors[op->weight];
    for (int64_t i = 0; i < n; i++) candidates[i] = bias ? p[i] + bias[i] : p[i];
    if (op->groups_used < op->groups) keep_groups(op, candidates, n);
    const ds4_weight *table = op->bias == DS4_NONE ? NULL : e->weights + op->bias;
    for (int64_t j = 0; j < used; j++) {
        int64_t at = table ? listed(table, e->tokens[row], j) : best(candidates, n);
        if (at < 0 || at >= n) { /* scores that are no numbers, or no expert: show it in the result */
            chosen[j] = 0.0f;
            w[j] = NAN;
            continue;
        }
        chosen[j] = (float)at;
        w[j] = p[at];
        candidates[at] = -INFINITY;
    }
    weigh(e, op, w, used);
}
