import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.errors import ExecutorFailure
from ds4_worker.engine.api import Event, Failed, Finished, Generation, Output
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.scheduler import Limits, Scheduler
from ds4_worker.engine.sequence import Sequence
from ds4_worker.engine.step import check_results
from ds4_worker.executor.api import ExecutorConfig, Sampled
from helpers.fake_executor import FakeExecutor, failing_after
from helpers.fake_model import VOCABULARY, ByteDetokenizer

CONTEXT = 64


def make_core(
    *,
    banks: int = 2,
    pages: int = 0,
    prefill: int = 512,
    live: int = 128,
    steps: int = -1,
    rewinds: bool = True,
) -> EngineCore:
    config = ExecutorConfig(
        banks=banks, context_tokens=CONTEXT, pages=pages, batch_tokens=max(prefill, live + banks)
    )
    before = failing_after(steps) if steps >= 0 else None
    executor = FakeExecutor(
        config, vocabulary=VOCABULARY, before_step=before, rewinds=rewinds, divisible=rewinds
    )
    return EngineCore(executor, ByteDetokenizer, prefill_chunk=prefill, live_chunk=live)


def generation(prompt: list[int], max_tokens: int, seed: int = 7) -> Generation:
    return Generation(prompt=prompt, max_tokens=max_tokens, seed=seed)


def finish(core: EngineCore) -> dict[Sequence, list[Event]]:
    """Runs until idle; the events of each sequence."""
    events: dict[Sequence, list[Event]] = {}
    while (batch := core.step()) is not None:
        for sequence, event in batch:
            events.setdefault(sequence, []).append(event)
    return events


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Output) for token in event.tokens]


def run_alone(item: Generation) -> list[int]:
    core = make_core(banks=1)
    sequence = core.sequence(item)
    core.submit(sequence)
    return tokens_of(finish(core)[sequence])


prompts = st.lists(st.integers(0, 99), min_size=1, max_size=40)
requests = st.lists(
    st.tuples(prompts, st.integers(1, 20), st.integers(0, 3), st.integers(0, 6)),
    min_size=1,
    max_size=7,
)


@settings(deadline=None)
@given(
    requests,
    st.integers(1, 3),
    st.integers(15, 48),
    st.integers(1, 30),
    st.integers(1, 9),
    st.sets(st.integers(0, 6), max_size=2),
    st.booleans(),
)
def test_tokens_do_not_depend_on_batch_chunks_pages_or_neighbours(
    items: list[tuple[list[int], int, int, int]],
    banks: int,
    pages: int,
    prefill: int,
    live: int,
    cancelled: set[int],
    rewinds: bool,
) -> None:
    """Requests arrive at different steps, some are cancelled; the others give what each gives
    alone. The executor itself refuses shared pages, gaps and steps beyond its capacity."""
    core = make_core(banks=banks, pages=pages, prefill=prefill, live=live, rewinds=rewinds)
    wanted = [generation(p, min(n, CONTEXT - len(p)), seed) for p, n, seed, _ in items]
    sequences = [core.sequence(item) for item in wanted]
    events: dict[Sequence, list[Event]] = {sequence: [] for sequence in sequences}
    turn, pending = 0, True
    while pending or turn <= 7:
        for sequence, (*_, arrival) in zip(sequences, items, strict=True):
            if arrival == turn:
                core.submit(sequence)
        if turn == 4:
            for index in cancelled & set(range(len(sequences))):
                core.cancel(sequences[index])
        batch = core.step()
        pending = batch is not None
        for sequence, event in batch or []:
            events[sequence].append(event)
        turn += 1
    for index, (sequence, item) in enumerate(zip(sequences, wanted, strict=True)):
        alone = run_alone(item)
        got = tokens_of(events[sequence])
        if index in cancelled and items[index][3] <= 4:
            assert alone[: len(got)] == got
        else:
            assert got == alone
            assert isinstance(events[sequence][-1], Finished)
    assert core.scheduler.memory.cache.available == core.scheduler.memory.pool.total
    assert not core.scheduler.running
    assert not core.scheduler.waiting


def test_a_long_prompt_never_stops_a_running_stream() -> None:
    core = make_core(prefill=8, live=3)
    talking = core.sequence(generation([1], 20))
    core.submit(talking)
    core.step()
    core.submit(core.sequence(generation(list(range(30)), 5)))
    for _ in range(10):
        batch = core.step()
        assert batch is not None
        assert any(sequence is talking for sequence, _ in batch)
        executor = core._executor
        assert isinstance(executor, FakeExecutor)
        assert sum(len(piece.tokens) for piece in executor.steps[-1]) <= 1 + 3


def test_prompts_use_whole_chunks_while_nobody_decodes() -> None:
    core = make_core(prefill=8, live=3)
    core.submit(core.sequence(generation(list(range(20)), 1)))
    finish(core)
    executor = core._executor
    assert isinstance(executor, FakeExecutor)
    assert [len(step[0].tokens) for step in executor.steps] == [8, 8, 4]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    core = make_core(banks=3, pages=8)  # 8 pages of 4 tokens
    first = core.sequence(generation(list(range(20)), 1))  # 5 pages
    large = core.sequence(generation(list(range(20)), 1))  # 5 pages: has to wait
    small = core.sequence(generation([1], 1))  # 1 page: would fit
    for sequence in (first, large, small):
        core.submit(sequence)
    core.step()
    assert list(core.scheduler.waiting) == [large, small]
    assert set(finish(core)) == {large, small}


def test_a_sequence_that_could_never_run_is_refused_at_once() -> None:
    core = make_core(pages=2)
    with pytest.raises(ValueError, match="the pool has 2"):
        core.submit(core.sequence(generation(list(range(20)), 1)))


def test_cancelling_twice_or_after_the_end_changes_nothing() -> None:
    core = make_core()
    sequence = core.sequence(generation([1], 1))
    core.submit(sequence)
    finish(core)
    core.cancel(sequence)
    assert core.stats.finished["cancelled"] == 0
    waiting = core.sequence(generation([1], 1))
    core.submit(waiting)
    core.cancel(waiting)
    core.cancel(waiting)
    assert core.stats.finished["cancelled"] == 1


def test_a_failed_step_raises_and_fail_all_ends_every_sequence() -> None:
    core = make_core(banks=1, steps=1)
    sequences = [core.sequence(generation([1, 2], 5)) for _ in range(3)]
    for sequence in sequences:
        core.submit(sequence)
    core.step()
    with pytest.raises(ExecutorFailure, match="broken on purpose"):
        core.step()


@pytest.mark.parametrize(
    "results",
    [[], [None], [Sampled(-1)], [Sampled(VOCABULARY)], [Sampled(1), Sampled(1)]],
)
def test_results_that_do_not_answer_the_step_are_a_failure(results: list[Sampled | None]) -> None:
    scheduler = Scheduler(Limits(banks=1, pages=4, page_tokens=4))
    scheduler.submit(Sequence(generation([1], 1), ByteDetokenizer()))
    step = scheduler.plan()
    assert step is not None
    with pytest.raises(ExecutorFailure):
        check_results(step, results, VOCABULARY)


def test_counters_follow_what_happened() -> None:
    core = make_core()
    for length in (3, 5):
        core.submit(core.sequence(generation([1] * length, 4)))
    finish(core)
    stats = core.stats
    assert (stats.submitted, stats.prompt_tokens, stats.generated_tokens) == (2, 8, 8)
    assert stats.finished == {"stop": 0, "length": 2, "cancelled": 0, "failed": 0}
    assert sum(stats.first_token_seconds.counts) == 2
    assert sum(stats.between_tokens_seconds.counts) == 6
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def test_a_sequence_that_cannot_be_sampled_fails_alone() -> None:
    core = make_core()
    broken, fine = (core.sequence(generation([token], 3)) for token in (1, 2))
    for sequence in (broken, fine):
        core.submit(sequence)
    executor = core._executor
    assert isinstance(executor, FakeExecutor)
    executor.errors[0] = "logits are not finite"
    events = finish(core)
    assert events[broken] == [Failed(500, "logits are not finite", "sampling_failure")]
    assert tokens_of(events[fine]) == run_alone(fine.generation)
    assert core.scheduler.memory.cache.available == core.scheduler.memory.pool.total


@pytest.mark.parametrize("rewinds", [True, False])
def test_a_conversation_goes_on_from_its_last_page_even_where_pages_cannot_be_cut(
    rewinds: bool,
) -> None:
    core = make_core(rewinds=rewinds)
    first = generation([1, 2, 3, 4, 5, 6], 4)
    sequence = core.sequence(first)
    core.submit(sequence)
    answer = tokens_of(finish(core)[sequence])
    said = [*first.prompt, *answer[:-1]]  # the last token drawn is never computed
    reused = []
    for prompt in ([*said, answer[-1], 7, 8], [*said[:6], 9, 9]):
        sequence = core.sequence(generation(prompt, 2))
        core.submit(sequence)
        assert tokens_of(finish(core)[sequence]) == run_alone(generation(prompt, 2))
        reused.append(sequence.reused)
    assert reused == [len(said), 6 if rewinds else 4]  # a page holds four tokens
