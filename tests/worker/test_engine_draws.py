"""Penalties, biases, grammars and forced tokens, and that none of them depends on the batch."""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.contract.lower import lower_cpu
from ds4_common.gguf import GgmlType
from ds4_worker.engine.api import (
    Event,
    Failed,
    Finished,
    Generation,
    Output,
    ReasoningSpan,
    Speculate,
)
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.draws import Draws, ReasoningState, SeenTokens, biases
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cpu import CpuExecutor
from helpers.engine_runs import run
from helpers.executors import packed
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import ByteDetokenizer
from helpers.prepared import Prepared, prepare_file
from helpers.stride import Stride
from helpers.tiny_gguf import TinyLlama, write_llama

VOCABULARY = 260


def item(prompt: list[int], max_tokens: int = 8, **fields: object) -> Generation:
    return Generation(prompt=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def fake_core(banks: int = 3, speculate: Speculate = "off") -> EngineCore:
    config = ExecutorConfig(banks=banks, context_tokens=128)
    executor = FakeExecutor(config, vocabulary=VOCABULARY)
    return EngineCore(executor, ByteDetokenizer, speculate=speculate)


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Output) for token in event.tokens]


# --- the lists that the sampler gets ----------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(0, 9), max_size=40))
def test_seen_tokens_count_the_output_and_know_the_prompt(
    prompt: list[int], out: list[int]
) -> None:
    for repetition in (1.0, 1.5):
        seen = SeenTokens(item(prompt or [0], repetition_penalty=repetition, presence_penalty=1.0))
        for token in out:
            seen.add(token)
        address, count = seen.records()
        records = dict(struct.iter_unpack("<ii", ctypes.string_at(address, 8 * count)))
        known = {*out, *(prompt or [0])} if repetition != 1.0 else set(out)
        assert len(records) == count
        assert records == {token: out.count(token) for token in known}


def test_a_bias_of_minus_hundred_and_a_ban_are_minus_infinity() -> None:
    table = biases([(1, 2.5), (2, -100.0), (3, 7.0)], [3, 4])
    assert dict(struct.iter_unpack("<if", table.tobytes())) == {
        1: 2.5, 2: -math.inf, 3: -math.inf, 4: -math.inf,
    }  # fmt: skip


def test_a_plain_sequence_tells_the_sampler_nothing_more() -> None:
    draws = Draws(item([1], seed=9))
    first = draws.next()
    assert (first.adjust, first.mask, first.forced, first.index) == (None, 0, -1, 0)
    assert not draws.accept(5)
    assert draws.next().index == 1


# --- end of sequence ---------------------------------------------------------------------------


def test_ignored_end_of_sequence_is_never_drawn() -> None:
    eos = frozenset(range(250))  # nearly everything ends a sequence
    (events,) = run(fake_core(), item([1], 60, eos_ids=eos, ignore_eos=True))
    assert set(tokens_of(events)) <= set(range(250, 260))
    assert len(tokens_of(events)) == 60
    (events,) = run(fake_core(), item([1], 60, eos_ids=eos))
    assert len(tokens_of(events)) < 60


def test_end_of_sequence_may_be_ignored_inside_reasoning_only() -> None:
    eos = frozenset(range(258))
    span = ReasoningSpan(close=(259,), open=(258,), opened=True, ignore_eos=True)
    for seed in range(5):
        (events,) = run(fake_core(), item([seed], 100, eos_ids=eos, reasoning=span))
        tokens = tokens_of(events)
        closed = tokens.index(259)
        assert set(tokens[:closed]) <= {258}
        assert tokens[-1] in eos
        # Not from the reasoning, but always ignored: that wins.
        both = item([seed], 20, eos_ids=eos, reasoning=span, ignore_eos=True)
        assert not eos & set(tokens_of(run(fake_core(), both)[0]))


# --- reasoning ---------------------------------------------------------------------------------


def test_a_budget_forces_the_close_token_by_token() -> None:
    for budget in (0, 1, 5):
        span = ReasoningSpan(close=(7, 8, 9), opened=True, budget=budget)
        (events,) = run(fake_core(), item([3], 12, reasoning=span, seed=2))
        tokens = tokens_of(events)
        assert tokens[budget : budget + 3] == [7, 8, 9]
        assert len(tokens) == 12


def test_reasoning_that_closes_by_itself_is_not_forced() -> None:
    state = ReasoningState(ReasoningSpan(close=(7, 8), open=(1,), budget=3))
    for token in (5, 5, 5, 5, 1):
        assert state.forced == -1
        state.push(token)
    assert state.inside
    for token in (5, 7, 8):
        assert state.forced == -1
        state.push(token)
    for token in (1, 5, 5, 5, 5):  # the first close ends it for good
        assert (state.inside, state.forced) == (False, -1)
        state.push(token)


def test_a_close_that_was_interrupted_is_forced_from_its_begin() -> None:
    state = ReasoningState(ReasoningSpan(close=(7, 8), opened=True, budget=1))
    for token, forced in ((5, -1), (6, 7), (7, 7), (6, 8), (7, 7), (8, 8), (1, -1)):
        assert state.forced == forced
        state.push(token)
    assert not state.inside


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 5), st.booleans())
def test_reasoning_never_exceeds_its_budget(out: list[int], budget: int, opened: bool) -> None:
    """Draws follow what is forced; between the delimiters there are at most `budget` tokens, and
    those of the close itself."""
    span = ReasoningSpan(close=(2, 3), open=(0, 1), opened=opened, budget=budget)
    state, inside = ReasoningState(span), 0
    for token in out:
        inside = inside + 1 if state.inside else 0
        assert inside <= budget + len(span.close)
        state.push(token if state.forced < 0 else state.forced)


# --- grammars ----------------------------------------------------------------------------------


def test_a_complete_grammar_ends_the_sequence_and_releases_what_was_held() -> None:
    (events,) = run(fake_core(), item([1], 50, grammar=Stride(5), stop_token_sequences=((1, 1),)))
    tokens = tokens_of(events)
    assert len(tokens) == 5
    assert all(1 <= (b - a) % 256 <= 20 for a, b in zip([0, *tokens], tokens, strict=False))
    assert events[-1] == Finished("stop", 5)
    (events,) = run(fake_core(), item([1], 4, grammar=Stride(5)))
    assert events[-1] == Finished("length", 4)
    (events,) = run(fake_core(), item([1], 5, grammar=Stride(5)))
    assert events[-1] == Finished("stop", 5)


def test_a_grammar_that_breaks_down_fails_its_sequence_alone() -> None:
    broken = item([1], 50, grammar=Stride(broken=frozenset(range(1, 256))))
    fine = item([2], 10)
    core = fake_core()
    failed, others = run(core, broken, fine)
    assert failed[-1] == Failed(500, "broken on purpose", "grammar_failure")
    assert len(tokens_of(failed)) == 1
    assert tokens_of(others) == tokens_of(run(fake_core(), fine)[0])
    assert core.stats.finished["failed"] == 1
    at_once = item([1], 50, grammar=Stride(broken=frozenset({0})))
    assert isinstance(run(core, at_once)[0][-1], Failed)
    assert core.scheduler.memory.held == 0


@pytest.mark.parametrize("speculate", ["off", 4])
def test_a_delimiter_that_is_due_waits_until_the_grammar_has_it(speculate: Speculate) -> None:
    """In the middle of a character no grammar allows a delimiter; the budget must not break it."""
    grammar = Stride(modulus=64, reach=9)
    for seed in range(8):
        span = ReasoningSpan(close=(40,), opened=True, budget=2)
        wanted = item([1], 40, grammar=grammar, reasoning=span, seed=seed)
        (events,) = run(fake_core(speculate=speculate), wanted)
        assert isinstance(events[-1], Finished)
        assert (events[-1].reason, events[-1].completion_tokens) == ("length", 40)
        tokens = [0, *tokens_of(events)]
        assert all(grammar.follows(a, b) for a, b in itertools.pairwise(tokens))
        due = next(i for i, t in enumerate(tokens) if i >= 2 and grammar.follows(t, 40))
        assert tokens[due + 1] == 40


def test_steps_with_and_without_a_grammar_are_counted() -> None:
    core = fake_core()
    run(core, item([1], 5), item([2], 5))
    assert core.stats.constrained_max_inflight == 0
    run(core, item([1], 5, grammar=Stride()), item([2], 3))
    assert core.stats.constrained_max_inflight == 1
    assert core.stats.mixed_grammar_decode_steps == 2
    run(core, item([1], 5, grammar=Stride()), item([2], 3, grammar=Stride()))
    assert core.stats.mixed_grammar_decode_steps == 2


# --- bits --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    spec = TinyLlama(context=256, weights=(GgmlType.Q8_0, GgmlType.Q4_1))
    return packed(prepare_file(write_llama(path, spec)))


@pytest.fixture(scope="module")
def image(tiny: Prepared) -> bytes:
    return lower_cpu(tiny.bundle)


def cpu_core(tiny: Prepared, image: bytes, **options: Any) -> EngineCore:
    config = ExecutorConfig(
        threads=options.get("threads", 1),
        banks=options.get("banks", 1),
        context_tokens=256,
        batch_tokens=options.get("chunk", 256),
    )
    executor = CpuExecutor(image, tiny.allocations, config)
    chunk = options.get("chunk", 256)
    return EngineCore(
        executor,
        ByteDetokenizer,
        prefill_chunk=chunk,
        live_chunk=chunk,
        reuse_prefixes=bool(options.get("reuse", 1)),
        speculate=options.get("speculate", "off"),
    )


def bits(events: list[Event]) -> list[object]:
    """Everything that must not depend on anything else."""
    return [
        (event.tokens, event.text, event.logprobs)
        if isinstance(event, Output)
        else (event.reason, event.stop)
        if isinstance(event, Finished)
        else event
        for event in events
    ]


SHARED = [(7 * i) % 250 for i in range(150)]
VARIED = [
    item(SHARED[:100], 20, seed=1, logprobs=3),
    item(SHARED[:130], 20, seed=2, repetition_penalty=1.3, logprobs=2),
    item(SHARED, 20, seed=3, frequency_penalty=0.7, presence_penalty=-0.4, logprobs=1),
    item([*SHARED[:90], 1, 2, 3], 20, seed=4, logit_bias=((5, 8.0), (9, -100.0)), logprobs=0),
    item(SHARED[:70], 20, seed=5, grammar=Stride(), logprobs=4, temperature=0.7),
    item(SHARED[:70], 20, seed=6, grammar=Stride(11), repetition_penalty=1.1, temperature=1.3),
    item([9], 20, seed=7, reasoning=ReasoningSpan(close=(4, 5), opened=True, budget=3), top_p=0.9),
]


@pytest.fixture(scope="module")
def alone(tiny: Prepared, image: bytes) -> Iterator[list[list[object]]]:
    """Each by itself, from a cold start."""
    core = cpu_core(tiny, image, reuse=0)
    yield [bits(run(core, wanted)[0]) for wanted in VARIED]
    core.close()


@settings(deadline=None, max_examples=25)
@given(
    order=st.permutations(range(len(VARIED))),
    banks=st.integers(1, 4),
    chunk=st.integers(40, 256),
    threads=st.integers(1, 2),
    rounds=st.integers(1, 2),
    speculate=st.sampled_from(["off", "auto", 1, 4, 15]),
)
def test_every_bit_is_that_of_a_cold_and_lonely_run(
    tiny: Prepared,
    image: bytes,
    alone: list[list[object]],
    order: list[int],
    banks: int,
    chunk: int,
    threads: int,
    rounds: int,
    speculate: Speculate,
) -> None:
    """With penalties, biases, grammars and forced tokens, in any batch and chunking, with whatever
    the prefix cache holds by then, and whatever is drafted."""
    core = cpu_core(tiny, image, banks=banks, chunk=chunk, threads=threads, speculate=speculate)
    try:
        for _ in range(rounds):
            together = run(core, *(VARIED[i] for i in order))
            assert [bits(events) for events in together] == [alone[i] for i in order]
        assert core.stats.prompt_tokens_reused > 0
    finally:
        core.close()


def test_logprobs_are_those_of_the_model_whatever_is_drawn(tiny: Prepared, image: bytes) -> None:
    core = cpu_core(tiny, image)
    free = item(SHARED, 1, temperature=0.0, logprobs=5)
    changed = item(
        SHARED,
        1,
        temperature=0.0,
        logprobs=5,
        repetition_penalty=1.5,
        logit_bias=((11, 90.0),),
        grammar=Stride(),
    )
    first, second = run(core, free, changed)
    core.close()
    for events in (first, second):
        assert isinstance(events[0], Output)
    tops = [
        e.logprobs[0].top for e in (first[0], second[0]) if isinstance(e, Output) and e.logprobs
    ]
    assert tops[0] == tops[1]
    assert isinstance(second[0], Output)
    assert second[0].tokens == [11]
