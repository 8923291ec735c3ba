"""An engine core over an executor of frames, for tests of two steps under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds4_worker.engine.api import (
    Event,
    Finished,
    Generation,
    Output,
    Speculate,
)
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import ExecutorConfig
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY, ByteDetokenizer
from helpers.lazy_executor import LazyExecutor

CONTEXT = 64
PAGE = 4


def make_core(
    lazy: bool = True,
    *,
    banks: int = 3,
    pages: int = 0,
    chunk: int = 64,
    speculate: Speculate = "off",
    recall: int | None = None,
    divisible: bool = True,
    choose: Callable[[list[int]], int] | None = None,
    before_step: Callable[[], None] | None = None,
    frames: int = 2,
) -> EngineCore:
    config = ExecutorConfig(
        banks=banks, context_tokens=CONTEXT, pages=pages, batch_tokens=chunk + banks
    )
    executor = (LazyExecutor if lazy else FakeExecutor)(
        config,
        vocabulary=VOCABULARY,
        page_tokens=PAGE,
        recall=recall,
        divisible=divisible,
        choose=choose,
        before_step=before_step,
    )
    return EngineCore(
        executor,
        ByteDetokenizer,
        prefill_chunk=chunk,
        live_chunk=max(1, chunk // 2),
        speculate=speculate,
        frames=frames,
    )


def lazy_of(core: EngineCore) -> LazyExecutor:
    assert isinstance(core._executor, LazyExecutor)
    return core._executor


def item(prompt: list[int], max_tokens: int = 8, **fields: Any) -> Generation:
    return Generation(prompt=prompt, max_tokens=max_tokens, **fields)


def seen(events: list[Event]) -> list[object]:
    """All that a reader may see, but times and what the cache saved."""
    return [
        (event.tokens, event.text, event.logprobs, event.pieces, event.prompt_logprobs)
        if isinstance(event, Output)
        else (event.reason, event.stop, event.completion_tokens)
        if isinstance(event, Finished)
        else event
        for event in events
    ]


def run_to_the_end(core: EngineCore) -> None:
    while core.step() is not None:
        pass


def counting(history: list[int]) -> int:
    """The next token is the last one and one."""
    return (history[-1] + 1) % 250
