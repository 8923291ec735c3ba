"""From what a request asks for to `Generation`s: defaults, ranges, stops.

Precedence of every sampling field: the request's, else the model's own (the frontend record, which
holds the server's where the model file has none). Everything is checked here, before anything is
queued; each refusal names the client's field.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ds4_common.contract.frontend import SamplingDefaults
from ds4_common.errors import RequestError
from ds4_worker.engine.api import SEED_MASK, Generation, Grammar, ReasoningSpan
from ds4_worker.http.conversation import Decoding
from ds4_worker.http.messages import ContextLengthExceeded
from ds4_worker.http.model import ServedModel

MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 4096
MAX_STOP_SEQUENCES = 16
MAX_STOP_SEQUENCE_TOKENS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


def choices_per_prompt(decoding: Decoding, model: ServedModel) -> int:
    """`n`, at most one per bank."""
    n = 1 if decoding.n is None else decoding.n
    _check(decoding.path("n"), n, 1 <= n <= model.banks, f"1 to {model.banks}")
    return n


def build_generations(
    decoding: Decoding,
    prompts: Sequence[Sequence[int]],
    model: ServedModel,
    *,
    prompt_path: str,
    least_tokens: int = 1,
    grammar: Grammar | None = None,
    reasoning: ReasoningSpan | None = None,
    parsed: bool = False,
    score_prompt: bool = False,
    prediction: Sequence[int] = (),
) -> list[Generation]:
    """`n` generations per prompt, in order. `max_tokens` None: to the context's end.

    `least_tokens`: the lowest limit that the API allows. `parsed`: a parser will read the tokens.
    `score_prompt`: log-probabilities of the prompt's tokens too, where those of the output are
    asked for."""
    defaults = model.frontend.defaults
    temperature = _default(decoding.temperature, defaults.temperature)
    top_p = _default(decoding.top_p, defaults.top_p)
    min_p = _default(decoding.min_p, defaults.min_p)
    top_k = defaults.top_k if decoding.top_k is None else decoding.top_k
    path, logprobs, max_tokens = decoding.path, decoding.logprobs, decoding.max_tokens
    _check(path("temperature"), temperature, 0 <= temperature <= 100, "0 to 100")
    _check(path("top_p"), top_p, 0 <= top_p <= 1, "0 to 1")
    _check(path("min_p"), min_p, 0 <= min_p <= 1, "0 to 1")
    _check(path("top_k"), top_k, -1 <= top_k < 2**31, "-1 (all tokens) or more")
    if logprobs is not None:
        _check(path("logprobs"), logprobs, 0 <= logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
    if max_tokens is not None:
        _check(
            path("max_tokens"), max_tokens, max_tokens >= least_tokens, f"{least_tokens} or more"
        )
    strings = stop_strings(decoding)
    sequences = stop_sequences(decoding, model)
    repetition, frequency, presence = penalties(decoding, defaults)
    bias = logit_bias(decoding, model)
    seed = int.from_bytes(os.urandom(8), "little") if decoding.seed is None else decoding.seed
    n = choices_per_prompt(decoding, model)
    generations = []
    for prompt in prompts:
        room = check_prompt(prompt, model, prompt_path)
        for choice in range(n):
            generations.append(
                Generation(
                    prompt=prompt,
                    max_tokens=room if max_tokens is None else min(room, max_tokens),
                    # top_p 0 keeps only the best token, which is what temperature 0 says.
                    temperature=temperature if top_p > 0 else 0.0,
                    top_k=max(top_k, 0),
                    top_p=top_p if top_p > 0 else 1.0,
                    min_p=min_p,
                    seed=(seed + choice) & SEED_MASK,
                    logprobs=-1 if logprobs is None else logprobs,
                    prompt_logprobs=logprobs if score_prompt and logprobs is not None else -1,
                    reuse_prefix=not score_prompt,
                    stop_strings=strings,
                    stop_token_sequences=sequences,
                    eos_ids=frozenset(model.frontend.eos_ids),
                    ignore_eos=decoding.ignore_eos or model.ignore_eos,
                    repetition_penalty=repetition,
                    frequency_penalty=frequency,
                    presence_penalty=presence,
                    logit_bias=bias,
                    prediction=prediction,
                    grammar=grammar,
                    reasoning=reasoning,
                    pieces=parsed,
                )
            )
    return generations


def check_prompt(prompt: Sequence[int], model: ServedModel, field: str) -> int:
    """Tokens that the context still holds after `prompt` (at least 1)."""
    if not prompt:
        raise RequestError(f"{field}: has no tokens, expected at least 1", param=field)
    if len(prompt) >= model.context_tokens:
        raise ContextLengthExceeded(len(prompt), model.context_tokens, field)
    _check_ids(field, prompt, model)
    return model.context_tokens - len(prompt)


def stop_strings(decoding: Decoding) -> tuple[str, ...]:
    strings, path = decoding.stop, decoding.path("stop")
    _check(path, len(strings), len(strings) <= MAX_STOP_STRINGS, f"{MAX_STOP_STRINGS} or fewer")
    if not all(strings):
        raise RequestError(f"{path}: got an empty string, expected nonempty ones", param=path)
    size = sum(len(string.encode()) for string in strings)
    _check(path, size, size <= MAX_STOP_BYTES, f"{MAX_STOP_BYTES} bytes or fewer in all")
    if strings and (decoding.stop_token_ids or decoding.stop_token_sequences):
        raise RequestError(
            f"{path}: cannot be combined with stop_token_ids or stop_token_sequences", param=path
        )
    return strings


def stop_sequences(decoding: Decoding, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Single stop ids are sequences of one; they do not count towards the limit."""
    sequences = decoding.stop_token_sequences
    # Each once: then there are no more than the vocabulary has, however long the list is.
    single = sorted(set(decoding.stop_token_ids))
    _check_ids(decoding.path("stop_token_ids"), single, model)
    path = decoding.path("stop_token_sequences")
    count, most = len(sequences), MAX_STOP_SEQUENCES
    _check(path, count, count <= most, f"{most} sequences or fewer")
    for ids in sequences:
        fits = 1 <= len(ids) <= MAX_STOP_SEQUENCE_TOKENS
        _check(path, len(ids), fits, f"1 to {MAX_STOP_SEQUENCE_TOKENS} tokens each")
        _check_ids(path, ids, model)
    return (*((token,) for token in single), *sequences)


def penalties(decoding: Decoding, defaults: SamplingDefaults) -> tuple[float, float, float]:
    """Repetition, frequency, presence."""
    path = decoding.path
    repetition = _default(decoding.repetition_penalty, defaults.repeat_penalty)
    frequency = _default(decoding.frequency_penalty, 0.0)
    presence = _default(decoding.presence_penalty, 0.0)
    _check(path("repetition_penalty"), repetition, 0.01 <= repetition <= 100, "0.01 to 100")
    _check(path("frequency_penalty"), frequency, -2 <= frequency <= 2, "-2 to 2")
    _check(path("presence_penalty"), presence, -2 <= presence <= 2, "-2 to 2")
    return repetition, frequency, presence


def logit_bias(decoding: Decoding, model: ServedModel) -> tuple[tuple[int, float], ...]:
    """-100 bans; 100 leaves the others no chance at the usual temperatures."""
    path, bias, vocabulary = (
        decoding.path("logit_bias"),
        decoding.logit_bias,
        model.frontend.vocabulary,
    )
    _check(path, len(bias), len(bias) <= MAX_LOGIT_BIAS, f"{MAX_LOGIT_BIAS} tokens or fewer")
    for token, value in bias.items():
        expected = f"token ids below {vocabulary}"
        _check(path, token, 0 <= token < vocabulary, expected)
        _check(f"{path}.{token}", value, -100 <= value <= 100, "-100 to 100")
    return tuple(bias.items())


def unsupported(field: str) -> RequestError:
    return RequestError(
        f"{field}: not supported by this server; leave it out",
        param=field,
        code="unsupported_parameter",
    )


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _check_ids(field: str, ids: Sequence[int], model: ServedModel) -> None:
    vocabulary = model.frontend.vocabulary
    for token in (min(ids), max(ids)) if ids else ():
        _check(field, token, 0 <= token < vocabulary, f"token ids below {vocabulary}")


def _check(field: str, got: float, fits: bool, expected: str) -> None:
    if not fits:
        raise RequestError(f"{field}: got {got}, expected {expected}", param=field)
