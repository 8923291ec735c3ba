/* INDEX sections: which compressed rows a token attends to.
 *
 * Many tokens: a task is a token, scored and picked. Few tokens: a task is a part of a token's rows, and
 * a second round picks. A score depends on its token and row only, and the pick on the scores, so
 * both ways give the same rows.
 */
#include "exec.h"
#include "op_math.h"

#define PART_ROWS 1024

static const ds4_image_op *index_op(const ds4_engine *e) {
    return e->image.ops + e->section->first_op;
}

static int64_t visible(const ds4_engine *e, int64_t token) {
    return (e->positions[token] + 1) / e->image.planes[index_op(e)->plane].ratio;
}

uint64_t ds4_prepare_index(ds4_engine *e) {
    if (e->split == DS4_SPLIT_PARTS) {
        e->split = DS4_SPLIT_FOLD;
        return e->n_tokens;
    }
    int64_t most = 0;
    for (uint32_t i = 0; i < e->n_tokens; i++)
        if (visible(e, i) > most) most = visible(e, i);
    e->max_parts = (uint32_t)((most + PART_ROWS - 1) / PART_ROWS);
    e->split = DS4_SPLIT_WHOLE;
    if (most <= e->image.slots[index_op(e)->out].width || e->max_parts < 2 ||
        e->n_tokens > e->index_tokens)
        return e->n_tokens;
    e->split = DS4_SPLIT_PARTS;
    return (uint64_t)e->n_tokens * e->max_parts;
}

/* Scores of rows [first, end): `first` begins a page. dots holds a page's rows of every head. */
static void score_rows(const ds4_engine *e, int64_t token, int64_t first, int64_t end, float *dots,
                       float *scores) {
    const ds4_image_op *op = index_op(e);
    const ds4_image_plane *plane = e->image.planes + op->plane;
    int64_t dim = plane->dim, records = e->image.header->page_tokens / plane->ratio;
    int32_t bank = e->banks[token];
    const float *q = ds4_slot_floats(e, op->in[0], token);
    const float *w = ds4_slot_floats(e, op->in[1], token);
    for (int64_t row = first; row < end; row += records) {
        int64_t n = end - row < records ? end - row : records, n8 = ds4_pad8(n);
        const char *tile = ds4_plane_page(e, op->plane, bank, row / records), *next = tile;
        if (row + records < end) next = ds4_plane_page(e, op->plane, bank, row / records + 1);
        for (uint32_t h = 0; h < op->heads; h += DS4_SCORE_ROWS) {
            uint32_t rows = op->heads - h < DS4_SCORE_ROWS ? op->heads - h : DS4_SCORE_ROWS;
            e->row_kernels->score(q + h * dim, (int)rows, dim, tile, next, records, n8,
                                  dots + h * records, records);
        }
        for (int64_t t = 0; t < n; t++) scores[row + t] = 0.0f;
        for (uint32_t h = 0; h < op->heads; h++) {
            float weight = w[h] * op->value;
            for (int64_t t = 0; t < n; t++) {
                float dot = dots[h * records + t];
                scores[row + t] += (dot > 0.0f ? dot : 0.0f) * weight;
            }
        }
    }
}

/* Bits whose order as numbers is that of the floats; what is no number comes last. */
static uint32_t key_of(float x) {
    uint32_t bits = ds4_bits(x);
    if (!(x == x)) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The k-th greatest key, and how many of the keys equal to it are among the k. */
static uint32_t threshold(const float *scores, int64_t n, int64_t k, int64_t *equals) {
    uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t count[256] = {0};
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = key_of(scores[i]);
            if ((key & mask) == found) count[key >> shift & 255]++;
        }
        int digit = 255;
        while (digit > 0 && count[digit] < k) k -= count[digit--];
        found |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    *equals = k;
    return found;
}

static void pick(const ds4_engine *e, int64_t token, const float *scores) {
    const ds4_image_op *op = index_op(e);
    int64_t n = visible(e, token), k = e->image.slots[op->out].width, taken = 0, equals = n;
    float *chosen = ds4_slot_floats(e, op->out, token);
    uint32_t least = n > k ? threshold(scores, n, k, &equals) : 0;
    for (int64_t i = 0; i < n && taken < k; i++) {
        uint32_t key = n > k ? key_of(scores[i]) : 1;
        if (key > least || (key == least && equals-- > 0)) chosen[taken++] = (float)i;
    }
    while (taken < k) chosen[taken++] = -1.0f;
}

void ds4_run_index(ds4_engine *e, uint64_t unit, int thread) {
    float *dots = e->index_dots + (uint64_t)thread * e->index_dots_floats;
    if (e->split == DS4_SPLIT_WHOLE) {
        int64_t token = (int64_t)unit, n = visible(e, token);
        float *scores = e->index_scores + (uint64_t)thread * e->index_rows;
        if (n > e->image.slots[index_op(e)->out].width) score_rows(e, token, 0, n, dots, scores);
        pick(e, token, scores);
        return;
    }
    int64_t token = (int64_t)(e->split == DS4_SPLIT_FOLD ? unit : unit / e->max_parts);
    float *scores = e->index_scores + (uint64_t)token * e->index_rows;
    if (e->split == DS4_SPLIT_FOLD) {
        pick(e, token, scores);
        return;
    }
    int64_t first = (int64_t)(unit % e->max_parts) * PART_ROWS, end = first + PART_ROWS;
    if (end > visible(e, token)) end = visible(e, token);
    score_rows(e, token, first, end, dots, scores);
}
