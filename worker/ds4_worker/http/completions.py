"""`POST /v1/completions`: its body, and what it means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ds4_common.errors import RequestError
from ds4_worker.http.answer import Facts
from ds4_worker.http.bodies import CommonFields, decode_body
from ds4_worker.http.messages import EventStream, Request, Response
from ds4_worker.http.model import Tokenizer
from ds4_worker.http.service import Service, TextPrompts
from ds4_worker.http.text_renderer import TextOptions, TextRenderer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(CommonFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


async def answer(service: Service, request: Request) -> Response | EventStream:
    body, asked = await service.read(request, read_completion)
    tokenizer = service.model.tokenizer

    def renderer(facts: Facts) -> TextRenderer:
        # Made when the prompts have been checked: ids are spelled only if they are the model's.
        options = TextOptions(
            echoes=[echo_text(item, tokenizer) for item in asked.prompts] if body.echo else None,
            logprobs=body.logprobs,
            keep=body.n or 1,
            include_usage=body.include_usage,
        )
        return TextRenderer(facts, tokenizer, options)

    return await service.complete(asked, renderer)


def read_completion(data: bytes) -> tuple[CompletionBody, TextPrompts]:
    """A body and what it asks for. Raises RequestError."""
    body = decode_body(data, CompletionBody)
    return body, text_prompts(body, prompt_inputs(body.prompt))


def text_prompts(body: CompletionBody, prompts: Sequence[str | list[int]]) -> TextPrompts:
    """Raises RequestError for contradictions and for what is not implemented."""
    if body.suffix:
        raise RequestError(
            "suffix: filling in a middle is not part of this server; leave it out",
            param="suffix",
            code="unsupported_parameter",
        )
    tries = tries_of(body)
    paths = {} if body.best_of is None else {"n": "best_of"}
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    logprobs = body.logprobs
    if logprobs is None and (tries or 1) != (body.n or 1):
        logprobs = 0  # to choose by
    return TextPrompts(
        prompts=prompts,
        model=body.model,
        decoding=body.decoding(max_tokens=limit, logprobs=logprobs, n=tries, paths=paths),
        observation=body.observation,
        stream=bool(body.stream),
        least_tokens=0,
        score_prompt=bool(body.echo) and body.logprobs is not None,
    )


def tries_of(body: CompletionBody) -> int | None:
    """How many choices to generate per prompt, of which the best `n` are shown."""
    if body.best_of is None:
        return body.n
    n = 1 if body.n is None else body.n
    if n < 1:
        raise RequestError(f"n: got {n}, expected 1 or more", param="n")
    if body.best_of < n:
        raise RequestError(
            f"best_of: got {body.best_of}, expected n ({n}) or more", param="best_of"
        )
    if body.stream and body.best_of > n:
        raise RequestError(
            f"best_of: a stream cannot wait for the best; got {body.best_of}, expected n ({n})",
            param="best_of",
        )
    return body.best_of


def echo_text(item: str | list[int], tokenizer: Tokenizer) -> str:
    return item if isinstance(item, str) else tokenizer.decode(item).decode(errors="replace")


def prompt_inputs(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a text completion: one text, several texts, one list of ids, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if set(map(type, prompt)) == {int}:  # a body may hold millions, and the event loop waits
        return [cast(list[int], prompt)]
    texts: list[str | list[int]] = [item for item in prompt if not isinstance(item, int)]
    if not prompt or len(texts) != len(prompt):
        raise RequestError(
            "prompt: expected a string, strings, token ids, or lists of token ids",
            param="prompt",
        )
    return texts
