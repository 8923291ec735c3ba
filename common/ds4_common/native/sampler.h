/* Draws one token from a row of logits.
 *
 * Owns: the sampling rules. They are, in this order: biases, penalties, mask, temperature, top_k, top_p
 * (of what top_k left), min_p (relative to the best), draw. So top_p and min_p see probabilities after
 * temperature, as the OpenAI API and vLLM have it (llama.cpp applies temperature last by default).
 * Biases come before penalties, as in vLLM and llama.cpp. Equal logits rank by lower id. The draw depends
 * on logits, parameters, seed and index only: probabilities are integers in units of 2^-40 of the best,
 * summed exactly, and the random number is Philox4x32-10 of (seed, index). Log-probabilities are of the
 * model's own softmax: temperature 1, no bias, no penalty, no mask.
 */
#ifndef DS4_SAMPLER_H
#define DS4_SAMPLER_H

#include "op_vector.h"

#define DS4_TOP_LOGPROBS 20

/* A token of the prompt or the output so far, each id once. */
typedef struct {
    int32_t id;
    int32_t count; /* occurrences in the output */
} ds4_seen;

typedef struct {
    int32_t id;
    float bias; /* added to the logit; -infinity bans */
} ds4_bias;

typedef struct {
    float temperature; /* below 1e-5: argmax */
    float top_p, min_p;
    int32_t top_k; /* 0: all */
    uint64_t seed, index;
    const uint32_t *mask; /* 1 = allowed, or NULL */
    int32_t logprobs;     /* -1: none */
    int32_t forced;       /* this token, whatever the rest says; -1: none */
    const ds4_bias *biases;
    const ds4_seen *seen;
    uint32_t n_biases, n_seen;
    float repetition; /* divides positive logits of seen tokens, multiplies the others; 1: none */
    float frequency;  /* taken from the logit once per occurrence in the output */
    float presence;   /* taken once when there is any */
    int32_t reserved;
} ds4_sampling;

enum {
    DS4_SAMPLE_OK = 0,
    DS4_SAMPLE_NOT_FINITE = 1,
    DS4_SAMPLE_NOTHING_ALLOWED = 2,
    DS4_SAMPLE_BAD_ID = 3, /* a bias, a seen or the forced token is outside the vocabulary */
};

typedef struct {
    int32_t token, status;
    float logprob;
    int32_t n_top;
    int32_t top_ids[DS4_TOP_LOGPROBS];
    float top_logprobs[DS4_TOP_LOGPROBS];
} ds4_sampled;

_Static_assert(sizeof(ds4_sampling) == 88, "executor/cpu.py SAMPLING_RECORD");
_Static_assert(sizeof(ds4_sampled) == 176, "executor/cpu.py SAMPLED_RECORD");

/* Bytes of scratch for one draw. */
#define DS4_SAMPLE_SCRATCH(vocabulary) ((size_t)(vocabulary) * 12)

/* logits: n finite values (-infinity allowed). Always returns; out->status tells. */
__attribute__((visibility("default"))) void ds4_sample(
    const ds4_vector *vector, const float *logits, uint32_t n, const ds4_sampling *how, void *scratch,
    ds4_sampled *out);

/* 64 random bits of (seed, index); exported for its known-answer test. */
__attribute__((visibility("default"))) uint64_t ds4_random(uint64_t seed, uint64_t index);

#endif
