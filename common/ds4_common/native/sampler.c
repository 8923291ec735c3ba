#include "sampler.h"

#include <math.h>
#include <string.h>

#include "op_math.h"

#define WEIGHT_ONE 0x1p40f   /* weight of the best token */
#define COLDEST 1e-5f        /* below it a temperature only tells exact ties apart */
#define DIGITS 2048          /* buckets of a radix pass: 11 + 11 + 10 bits */

/* The tokens kept so far: those whose key is above `key`, and the first `ties` that equal it. */
typedef struct {
    uint32_t key;
    uint64_t ties;
} cut;

/* Orders like the floats; -0 and +0 are the same number. */
static uint32_t order_key(float x) {
    uint32_t bits = ds4_bits(x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

static uint64_t weight_of(float e) { return (uint64_t)(e * WEIGHT_ONE); }

uint64_t ds4_random(uint64_t seed, uint64_t index) {
    uint32_t c[4] = {(uint32_t)index, (uint32_t)(index >> 32), 0, 0};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)b;
        c[3] = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (uint64_t)c[1] << 32 | c[0];
}

/* ---- selection without sorting ------------------------------------------------------------------ */

/* Tokens above the cut do not reach the target: how many of its ties are still needed. */
static cut fewer_ties(const float *x, const float *weights, uint32_t n, cut kept, uint64_t missing) {
    uint32_t i = 0;
    while (i < n && order_key(x[i]) != kept.key) i++;
    uint64_t each = kept.ties && i < n && weights ? weight_of(weights[i]) : 0;
    if (each && (missing + each - 1) / each < kept.ties) kept.ties = (missing + each - 1) / each;
    return kept;
}

/* Among tokens above `kept` (plus its ties) finds the smallest set, best first, whose amounts reach
 * `target`; the amount of a token is its weight, or 1 when weights is NULL. Three radix passes, the
 * last two over the ids of one bucket only. `ids` holds n. */
static cut select_best(const float *x, const float *weights, uint32_t n, cut kept, uint64_t target,
                       uint32_t *ids) {
    uint64_t amount[DIGITS], reached = 0;
    static const int shifts[3] = {21, 10, 0};
    uint32_t prefix = 0, count = n;
    for (int pass = 0; pass < 3; pass++) {
        uint32_t digits = pass < 2 ? DIGITS : DIGITS / 2;
        memset(amount, 0, sizeof amount);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t id = pass ? ids[i] : i, key = order_key(x[id]);
            if (key > kept.key)
                amount[key >> shifts[pass] & (digits - 1)] += weights ? weight_of(weights[id]) : 1;
        }
        uint32_t digit = digits;
        while (digit && reached + amount[digit - 1] < target) reached += amount[--digit];
        if (!digit) return fewer_ties(x, weights, n, kept, target - reached);
        prefix |= --digit << shifts[pass];
        uint32_t found = 0;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t id = pass ? ids[i] : i, key = order_key(x[id]);
            if (key > kept.key && key >> shifts[pass] == prefix >> shifts[pass]) ids[found++] = id;
        }
        count = found;
        if (pass == 2) {
            uint64_t each = weights ? weight_of(weights[ids[0]]) : 1;
            uint64_t missing = target - reached;
            return (cut){prefix, each ? (missing + each - 1) / each : count};
        }
    }
    return kept; /* not reached: the last pass returns */
}

static int32_t first_equal(const float *x, uint32_t n, float value) {
    uint32_t i = 0;
    for (; i + 64 <= n; i += 64) {
        int found = 0;
        for (uint32_t j = 0; j < 64; j++) found |= x[i + j] == value;
        if (found) break;
    }
    while (i < n && x[i] != value) i++;
    return (int32_t)i;
}

/* ---- the draw ------------------------------------------------------------------------------------- */

static int32_t draw(const ds4_vector *vector, const float *x, uint32_t n, float best,
                    const ds4_sampling *how, float *weights, uint32_t *ids) {
    vector->exp_scaled(weights, x, best, 1.0f / how->temperature, n);
    cut kept = {order_key(-INFINITY), 0};
    if (how->top_k > 0 && (uint32_t)how->top_k < n)
        kept = select_best(x, NULL, n, kept, (uint64_t)how->top_k, ids);
    if (how->top_p < 1.0f) {
        uint64_t total = 0, ties = kept.ties;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t key = order_key(x[i]);
            if (key > kept.key || (key == kept.key && ties && ties--)) total += weight_of(weights[i]);
        }
        double share = how->top_p > 0.0f ? (double)how->top_p : 0.0;
        uint64_t target = (uint64_t)ceil(share * (double)total);
        kept = select_best(x, weights, n, kept, target ? target : 1, ids);
    }
    float least = how->min_p < 1.0f ? how->min_p : 1.0f; /* the best itself has weight 1 */
    uint64_t total = 0, ties = kept.ties;
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t key = order_key(x[i]);
        if (key < kept.key || (key == kept.key && !(ties && ties--))) continue;
        if (weights[i] < least) continue;
        ids[count++] = i;
        total += weight_of(weights[i]);
    }
    uint64_t random = ds4_random(how->seed, how->index);
    uint64_t place = (uint64_t)((unsigned __int128)random * total >> 64);
    for (uint32_t i = 0; i + 1 < count; i++) {
        uint64_t weight = weight_of(weights[ids[i]]);
        if (place < weight) return (int32_t)ids[i];
        place -= weight;
    }
    return (int32_t)ids[count - 1];
}

/* ---- log-probabilities ------------------------------------------------------------------------------ */

static void log_probabilities(const ds4_vector *vector, const float *logits, uint32_t n, float best,
                              int wanted, float *weights, ds4_sampled *out) {
    vector->exp_scaled(weights, logits, best, 1.0f, n);
    uint64_t total = 0;
    for (uint32_t i = 0; i < n; i++) total += weight_of(weights[i]);
    double offset = (double)best + log((double)total / (double)WEIGHT_ONE);
    out->logprob = (float)((double)logits[out->token] - offset);
    if (wanted > DS4_TOP_LOGPROBS) wanted = DS4_TOP_LOGPROBS;
    if ((uint32_t)wanted > n) wanted = (int)n;
    float top[DS4_TOP_LOGPROBS];
    int held = 0;
    for (uint32_t i = 0; wanted && i < n; i++) {
        if (held == wanted && !(logits[i] > top[held - 1])) continue;
        int place = held < wanted ? held++ : held - 1;
        for (; place && logits[i] > top[place - 1]; place--) {
            top[place] = top[place - 1];
            out->top_ids[place] = out->top_ids[place - 1];
        }
        top[place] = logits[i];
        out->top_ids[place] = (int32_t)i;
    }
    for (int i = 0; i < held; i++) out->top_logprobs[i] = (float)((double)top[i] - offset);
    out->n_top = held;
}

/* ---- biases, penalties, mask ------------------------------------------------------------------------ */

/* Lists of a few ids, so plain scalar code; each operation is one rounding, in the order of the rules. */
static int adjust(float *x, uint32_t n, const ds4_sampling *how) {
    for (uint32_t i = 0; i < how->n_biases; i++) {
        if ((uint32_t)how->biases[i].id >= n) return -1;
        x[how->biases[i].id] += how->biases[i].bias;
    }
    for (uint32_t i = 0; i < how->n_seen; i++) {
        const ds4_seen *seen = how->seen + i;
        if ((uint32_t)seen->id >= n) return -1;
        float logit = x[seen->id];
        logit = logit > 0.0f ? logit / how->repetition : logit * how->repetition;
        logit -= (float)seen->count * how->frequency;
        if (seen->count) logit -= how->presence;
        x[seen->id] = logit;
    }
    return 0;
}

/* Most words of a grammar's mask are all ones or all zeros. */
static void apply_mask(float *x, uint32_t n, const uint32_t *mask) {
    for (uint32_t i = 0; i < n; i += 32) {
        uint32_t word = mask[i / 32], count = n - i < 32 ? n - i : 32;
        if (word == 0xffffffffu) continue;
        for (uint32_t j = 0; j < count; j++) x[i + j] = word >> j & 1 ? x[i + j] : -INFINITY;
    }
}

/* The logits that are drawn from, in `own` where they are not the model's; NULL with out->status set. */
static const float *allowed_logits(const ds4_vector *vector, const float *logits, uint32_t n,
                                   const ds4_sampling *how, float *own, float *best,
                                   ds4_sampled *out) {
    if (!how->mask && !how->n_biases && !how->n_seen) return logits;
    memcpy(own, logits, (size_t)n * sizeof *own);
    out->status = DS4_SAMPLE_BAD_ID;
    if (adjust(own, n, how)) return NULL;
    if (how->mask) apply_mask(own, n, how->mask);
    int finite = 1;
    *best = vector->max_finite(own, n, &finite);
    out->status = finite ? DS4_SAMPLE_NOTHING_ALLOWED : DS4_SAMPLE_NOT_FINITE;
    return finite && *best > -INFINITY ? own : NULL;
}

static int32_t choose(const ds4_vector *vector, const float *logits, uint32_t n, float best,
                      const ds4_sampling *how, void *scratch, ds4_sampled *out) {
    float *weights = scratch, *own = weights + n;
    uint32_t *ids = (uint32_t *)(void *)(own + n);
    if (how->forced >= 0) {
        out->status = (uint32_t)how->forced < n ? DS4_SAMPLE_OK : DS4_SAMPLE_BAD_ID;
        return out->status == DS4_SAMPLE_OK ? how->forced : -1;
    }
    const float *x = allowed_logits(vector, logits, n, how, own, &best, out);
    if (!x) return -1;
    out->status = DS4_SAMPLE_OK;
    if (how->temperature >= COLDEST && how->top_k != 1)
        return draw(vector, x, n, best, how, weights, ids);
    return first_equal(x, n, best);
}

void ds4_sample(const ds4_vector *vector, const float *logits, uint32_t n, const ds4_sampling *how,
                void *scratch, ds4_sampled *out) {
    out->token = -1;
    out->n_top = 0;
    out->logprob = 0.0f;
    int finite = 1;
    float best = vector->max_finite(logits, n, &finite);
    out->status = DS4_SAMPLE_NOT_FINITE;
    if (!finite || best == -INFINITY) return;
    out->token = choose(vector, logits, n, best, how, scratch, out);
    if (out->token >= 0 && how->logprobs >= 0)
        log_probabilities(vector, logits, n, best, how->logprobs, scratch, out);
}
