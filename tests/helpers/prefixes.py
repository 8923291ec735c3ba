"""Engines with a prefix cache over a fake executor."""

from __future__ import annotations

from ds4_worker.engine.api import Event, Finished, Generation, Output, Speculate
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import ExecutorConfig, WindowPages
from helpers import engine_runs
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY, ByteDetokenizer
from helpers.lazy_executor import LazyExecutor

PAGE = 4
CONTEXT = 40


def make_core(
    *,
    banks: int = 3,
    pages: int = 0,
    chunk: int = 512,
    reuse: bool = True,
    recall: int | None = None,
    speculate: Speculate = "off",
    windows: tuple[int, ...] = (),
    window_pages: int = 1000,
    lazy: bool = False,
) -> EngineCore:
    config = ExecutorConfig(
        banks=banks, context_tokens=CONTEXT, pages=pages, batch_tokens=max(chunk, banks + 1)
    )
    executor = (LazyExecutor if lazy else FakeExecutor)(
        config,
        vocabulary=VOCABULARY,
        page_tokens=PAGE,
        recall=recall,
        windows=tuple(window(tokens, config, window_pages) for tokens in windows),
    )
    return EngineCore(
        executor,
        ByteDetokenizer,
        prefill_chunk=chunk,
        live_chunk=chunk,
        reuse_prefixes=reuse,
        speculate=speculate,
    )


def window(tokens: int, config: ExecutorConfig, pages: int) -> WindowPages:
    """`pages`: at most; the fewest with which a full sequence can run are always there."""
    most = min((tokens + config.batch_tokens + PAGE - 3) // PAGE + 1, CONTEXT // PAGE)
    return WindowPages(tokens, max(pages, most), most, page_bytes=8)


def run(core: EngineCore, *items: Generation) -> list[tuple[list[int], Finished]]:
    """Runs generations together to their ends."""
    return [tokens_and_end(events) for events in engine_runs.run(core, *items)]


def tokens_and_end(events: list[Event]) -> tuple[list[int], Finished]:
    end = events[-1]
    assert isinstance(end, Finished)
    outputs = [event for event in events if isinstance(event, Output)]
    assert {event.reused_prompt_tokens for event in outputs} == {end.reused_prompt_tokens}
    return [token for event in outputs for token in event.tokens], end


def item(prompt: list[int], max_tokens: int = 3, **fields: object) -> Generation:
    return Generation(prompt=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
