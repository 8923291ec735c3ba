"""The prefix cache: what is reused, that this changes nothing, and that a page has one owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from ds4_worker.engine.api import Event, Failed, Finished, Generation, Output, Speculate
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.pages import PagePool
from ds4_worker.engine.prefix import Node, PrefixCache, common_length
from ds4_worker.engine.sequence import Sequence
from ds4_worker.executor.api import ExecutorConfig, WindowPages
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


def fake(core: EngineCore) -> FakeExecutor:
    assert isinstance(core._executor, FakeExecutor)
    return core._executor


def run(core: EngineCore, *items: Generation) -> list[tuple[list[int], Finished]]:
    """Runs generations together to their ends."""
    sequences = [core.sequence(item) for item in items]
    for sequence in sequences:
        core.submit(sequence)
    events: dict[Sequence, list[Event]] = {sequence: [] for sequence in sequences}
    while (batch := core.step()) is not None:
        for sequence, event in batch:
            events[sequence].append(event)
    return [tokens_and_end(events[sequence]) for sequence in sequences]


def tokens_and_end(events: list[Event]) -> tuple[list[int], Finished]:
    end = events[-1]
    assert isinstance(end, Finished)
    outputs = [event for event in events if isinstance(event, Output)]
    assert {event.reused_prompt_tokens for event in outputs} == {end.reused_prompt_tokens}
    return [token for event in outputs for token in event.tokens], end


def item(prompt: list[int], max_tokens: int = 3, **fields: object) -> Generation:
    return Generation(prompt=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def computed(core: EngineCore) -> list[tuple[int, int]]:
    """(start, tokens) of every slice so far."""
    return [(s.start, len(s.tokens)) for step in fake(core).steps for s in step]


# --- what is reused -------------------------------------------------------------------------


def test_a_prompt_computes_only_what_follows_the_longest_known_beginning() -> None:
    core = make_core()
    prompt = list(range(10, 20))  # pages of 4: 8 tokens whole, then 2 and what is generated
    (tokens, end), *_ = run(core, item(prompt))
    assert end.reused_prompt_tokens == 0
    again = [*prompt, *tokens, 7, 8]
    fake(core).steps.clear()
    ((_, end),) = run(core, item(again))
    assert end.reused_prompt_tokens == len(prompt) + 2  # the last token was never computed
    assert computed(core)[0] == (12, 3)
    assert fake(core).copies == []


def test_a_prompt_that_departs_inside_a_page_copies_its_beginning() -> None:
    core = make_core()
    run(core, item(list(range(10, 20))))
    ((_, end),) = run(core, item([10, 11, 12, 13, 14, 15, 99, 98, 97]))
    assert end.reused_prompt_tokens == 6
    assert [tokens for _, _, tokens in fake(core).copies] == [2]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    core = make_core()
    for length in (1, 4, 5, 8, 9):
        prompt = list(range(length))
        (first, _), *_ = run(core, item(prompt))
        ((second, end),) = run(core, item(prompt))
        assert end.reused_prompt_tokens == length - 1
        assert second == first


def test_prompts_that_run_together_share_what_one_of_them_computes() -> None:
    core = make_core()
    prompt = list(range(11))
    answers = run(core, *(item(prompt, seed=seed) for seed in range(3)))
    assert [end.reused_prompt_tokens for _, end in answers] == [0, 8, 8]
    assert core.stats.prompt_tokens == 11 + 3 + 3
    assert (core.stats.prefix_hits, core.stats.prefix_misses) == (2, 1)
    assert core.stats.prompt_tokens_reused == 16


def test_sequences_admitted_later_find_pages_of_one_that_still_runs() -> None:
    core = make_core(banks=2)
    long = core.sequence(item(list(range(9)), 20))
    core.submit(long)
    for _ in range(3):
        core.step()
    later = core.sequence(item([*range(9), 50]))
    core.submit(later)
    events = [event for sequence, event in core.step() or [] if sequence is later]
    assert isinstance(events[0], Output)
    assert events[0].reused_prompt_tokens == 8


@pytest.mark.parametrize(
    "fields", [{"reuse_prefix": False}, {}], ids=["asked by the request", "switched off"]
)
def test_reuse_can_be_declined(fields: dict[str, bool]) -> None:
    core = make_core(reuse=bool(fields))
    prompt = list(range(10))
    run(core, item(prompt))
    ((_, end),) = run(core, item(prompt, **fields))
    assert end.reused_prompt_tokens == 0


def test_what_a_stop_or_a_cancellation_cut_off_keeps_its_whole_pages_only() -> None:
    core = make_core()
    prompt = list(range(10, 20))
    ((tokens, end),) = run(core, item(prompt, 5))
    core = make_core()
    ((_, end),) = run(core, item(prompt, 5, stop_token_sequences=((tokens[0],),)))
    assert end.reason == "stop"
    ((_, end),) = run(core, item([*prompt, 1]))
    assert end.reused_prompt_tokens == 8
    core = make_core()
    sequence = core.sequence(item(prompt, 5))
    core.submit(sequence)
    core.step()
    core.cancel(sequence)
    ((_, end),) = run(core, item([*prompt, 1]))
    assert end.reused_prompt_tokens == 8


def test_a_failed_draw_publishes_nothing_of_its_step() -> None:
    core = make_core()
    sequence = core.sequence(item(list(range(9))))
    core.submit(sequence)
    fake(core).errors[0] = "logits are not finite"
    events = core.step()
    assert events is not None
    assert isinstance(events[0][1], Failed)
    fake(core).errors.clear()
    ((_, end),) = run(core, item(list(range(9))))
    assert end.reused_prompt_tokens == 0


def test_a_page_is_mapped_once_and_again_only_when_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core()
    mapped: list[tuple[int, int, int]] = []
    set_page = fake(core).set_page

    def note(bank: int, index: int, page: int, history: int) -> None:
        mapped.append((bank, index, page))
        set_page(bank, index, page, history)

    monkeypatch.setattr(fake(core), "set_page", note)
    run(core, item(list(range(9)), 8))
    assert [index for _, index, _ in mapped] == [0, 1, 2, 3]
    # Two that computed the same page, since neither could wait for the other: one gives its own up.
    mapped.clear()
    run(core, item(list(range(30, 34)), 4), item(list(range(30, 34)), 4))
    assert sorted(index for _, index, _ in mapped) == [0, 0, 0, 1, 1]
    assert core.scheduler.memory.cache.available == core.scheduler.memory.pool.total


def test_warming_up_leaves_no_page_behind() -> None:
    core = make_core()
    core.warm()
    assert core.scheduler.memory.pool.free == core.scheduler.memory.pool.total


# --- eviction -------------------------------------------------------------------------------


def test_cached_pages_count_as_free_and_the_least_recently_used_go_first() -> None:
    core = make_core(banks=1, pages=10)
    old, young, new = ([start + i for i in range(9)] for start in (10, 40, 70))
    run(core, item(old, 1))  # 3 pages each
    run(core, item(young, 1))
    run(core, item(old, 1))
    assert core.stats.pages_cached == 6
    assert core.stats.pages_used == 0
    run(core, item(new, 20))  # 7 pages: 4 are free, so 3 of the oldest go
    assert core.stats.pages_evicted == 3
    ((_, end),) = run(core, item(old, 1))
    assert end.reused_prompt_tokens == 8
    ((_, end),) = run(core, item(young, 1))
    assert end.reused_prompt_tokens == 0


def test_a_page_may_be_evicted_for_its_own_copy() -> None:
    """The pool has two pages: the source of the copy is the only one that can be given away."""
    core = make_core(banks=1, pages=2)
    ((tokens, _),) = run(core, item([1, 2, 3, 4, 5, 6], 1))
    ((_, end),) = run(core, item([1, 2, 3, 4, 5, 9], 1))
    assert end.reused_prompt_tokens == 5
    alone = make_core(banks=1, pages=2)
    assert run(core, item([1, 2, 3, 4, 5, 6], 1))[0][0] == tokens
    assert run(core, item([1, 2, 8], 1))[0][0] == run(alone, item([1, 2, 8], 1))[0][0]


def test_the_eviction_queue_does_not_grow_with_the_requests() -> None:
    core = make_core(banks=1)
    for _ in range(500):
        run(core, item(list(range(9)), 1))
    assert len(core.scheduler.memory.cache._queue) < 100


def test_the_nearest_page_is_the_one_that_shares_most() -> None:
    cache = PrefixCache(PagePool(9), PAGE)
    for tokens in ((5, 5, 5, 5), (1, 2, 3, 4), (1, 2, 9, 9), (1, 3, 3, 3), (0, 0, 0, 0)):
        cache.release(cache.publish(cache.root, tokens, cache.pool.take()))
    near = cache.nearest(cache.root, (1, 2, 8, 8))
    assert near is not None
    assert (near[0].tokens[:2], near[1]) == ((1, 2), 2)
    assert cache.nearest(cache.root, (7, 7)) is None
    assert common_length((1, 2, 3), (1, 2, 4, 5)) == 2


# --- windows --------------------------------------------------------------------------------


def test_a_sequence_holds_no_more_pages_of_a_window_than_it_sees() -> None:
    core = make_core(banks=1, chunk=4, windows=(6,))
    (history,) = core.scheduler.memory.windows
    sequence = core.sequence(item(list(range(20)), 20))
    core.submit(sequence)
    seen = set()
    while core.step() is not None:
        seen.add(history.held)
    assert max(seen) == 3  # what a chunk sees: 5 positions before its 4, over pages of 4
    assert core.scheduler.memory.cache.unheld == 10  # while all were kept elsewhere
    assert core.stats.kv_bytes_used == 0


def test_a_conversation_goes_on_behind_its_window() -> None:
    core = make_core(banks=1, chunk=4, windows=(6,), window_pages=4)
    prompt = list(range(16))
    ((tokens, _),) = run(core, item(prompt, 8))
    ((_, end),) = run(core, item([*prompt, *tokens, 7, 8], 4))
    assert end.reused_prompt_tokens == 23  # the last token was never computed
    # One that departs where no window was kept computes all of it.
    ((_, end),) = run(core, item([*prompt[:9], 50, 51], 4))
    assert end.reused_prompt_tokens == 0


def test_the_window_before_a_departure_is_kept_once_it_is_known() -> None:
    """Prompts that share 16 tokens: the second one finds a hole there, the third does not."""
    core = make_core(banks=1, chunk=4, windows=(6,), window_pages=6)
    system = list(range(16))
    reused = []
    for first in (30, 40, 50):
        ((_, end),) = run(core, item([*system, *range(first, first + 20)], 4))
        reused.append(end.reused_prompt_tokens)
    assert reused == [0, 0, 16]


def test_windows_bound_what_is_admitted() -> None:
    core = make_core(banks=3, chunk=4, windows=(6,), window_pages=5)  # 3 for each
    for first in (0, 30, 60):
        core.submit(core.sequence(item(list(range(first, first + 12)), 9)))
    core.step()
    assert (len(core.scheduler.running), len(core.scheduler.waiting)) == (1, 2)
    while core.step() is not None:
        assert len(core.scheduler.running) <= 1
    assert core.stats.finished["length"] == 3


# --- everything at once ---------------------------------------------------------------------


def nodes(node: Node) -> Iterator[Node]:
    for child in node.children:
        yield child
        yield from nodes(child)


class PrefixMachine(RuleBasedStateMachine):
    """Prompts over two tokens, so that they share beginnings; few pages, so that some are evicted.

    The executor's tokens are a hash of what it reads through the page table, and it refuses to read
    what was not written or to share a page that is written. A lazy one has two steps under way.
    Where it repeats itself, drafts come true and fail; a sequence alone, cold and without drafts is
    what all are compared with."""

    sequences = Bundle("sequences")

    @initialize(
        banks=st.integers(1, 3),
        pages=st.integers(10, 24),
        chunk=st.integers(1, 24),
        recall=st.sampled_from([None, 1, 2]),
        speculate=st.sampled_from(["off", 1, 3, 9]),
        windows=st.sampled_from([(), (1,), (3,), (6,), (8, 13)]),
        window_pages=st.integers(1, 24),
        lazy=st.booleans(),
    )
    def open(
        self,
        banks: int,
        pages: int,
        chunk: int,
        recall: int | None,
        speculate: Speculate,
        windows: tuple[int, ...],
        window_pages: int,
        lazy: bool,
    ) -> None:
        self.recall = recall
        self.core = make_core(
            banks=banks,
            pages=pages,
            chunk=chunk,
            recall=recall,
            speculate=speculate,
            windows=windows,
            window_pages=window_pages,
            lazy=lazy,
        )
        self.memory = self.core.scheduler.memory
        self.wanted: dict[Sequence, Generation] = {}
        self.events: dict[Sequence, list[Event]] = {}
        self.finished: list[list[int]] = []

    @rule(
        target=sequences,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        continued=st.booleans(),
        max_tokens=st.integers(1, 8),
        stops=st.sets(st.integers(0, VOCABULARY - 1), max_size=40),
        eos=st.booleans(),
        reuse=st.integers(0, 9),
    )
    def submit(
        self,
        prompt: list[int],
        continued: bool,
        max_tokens: int,
        stops: set[int],
        eos: bool,
        reuse: int,
    ) -> Sequence:
        if continued and self.finished:
            prompt = [*self.finished[-1], *prompt][: CONTEXT - max_tokens]
        wanted = Generation(
            prompt=prompt,
            max_tokens=max_tokens,
            stop_token_sequences=() if eos else tuple((stop,) for stop in sorted(stops)),
            eos_ids=frozenset(stops if eos else ()),
            reuse_prefix=reuse > 0,
        )
        sequence = self.core.sequence(wanted)
        self.wanted[sequence] = wanted
        self.events[sequence] = []
        self.core.submit(sequence)
        return sequence

    @rule(sequence=consumes(sequences))
    def cancel(self, sequence: Sequence) -> None:
        self.core.cancel(sequence)
        self.wanted.pop(sequence, None)

    @precondition(lambda self: self.core.scheduler.running or self.core.scheduler.waiting)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for sequence, event in self.core.step() or []:
                self.events[sequence].append(event)
                if isinstance(event, Finished) and sequence in self.wanted:
                    self.check_answer(sequence)

    def check_answer(self, sequence: Sequence) -> None:
        wanted = self.wanted.pop(sequence)
        tokens, end = tokens_and_end(self.events[sequence])
        ((alone, expected),) = run(make_core(banks=1, reuse=False, recall=self.recall), wanted)
        assert tokens == alone
        assert (end.reason, end.stop) == (expected.reason, expected.stop)
        self.finished.append([*wanted.prompt, *tokens])

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if not hasattr(self, "core"):
            return
        cache, pool = self.memory.cache, self.memory.pool
        tree = list(nodes(cache.root))
        running = self.core.scheduler.running
        own = [page for s in running for page in s.holding.pages[s.holding.shared :]]
        shared = [page for s in running for page in s.holding.pages[: s.holding.shared]]
        owned = [*own, *(node.page for node in tree)]
        assert len(owned) == len(set(owned)) == pool.total - pool.free
        assert set(shared) <= {node.page for node in tree if node.holders}
        assert cache.unheld == sum(not node.holders for node in tree)
        for node in tree:
            assert len(node.tokens) == PAGE or (not node.children and not node.holders)
            siblings = node.parent.children
            assert [n.tokens for n in siblings] == sorted({n.tokens for n in siblings})
        for sequence in running:
            path, node = [], sequence.holding.node
            while node is not cache.root:
                path.append(node.page)
                node = node.parent
            assert path[::-1] == sequence.holding.pages[: sequence.holding.shared]
        promised = sum(s.holding.promised for s in running)
        assert promised == self.memory._promised <= cache.available
        assert all(s.holding.promised >= 0 for s in running)

    @invariant()
    def every_page_of_a_window_has_one_owner(self) -> None:
        if not hasattr(self, "core"):
            return
        running, tree = self.core.scheduler.running, set(nodes(self.memory.cache.root))
        for number, history in enumerate(self.memory.windows):
            spans = [sequence.holding.spans[number] for sequence in running]
            held = [(p, n) for s in spans for p, n in zip(s.pages, s.nodes, strict=True)]
            own = [page for page, node in held if node is None]
            kept = {node: kept.page for node, kept in history._kept.items()}
            assert kept.keys() <= tree
            assert all(kept[node] == page for page, node in held if node is not None)
            owned = [*own, *kept.values()]
            assert len(owned) == len(set(owned)) == history.pool.total - history.pool.free
            holders = Counter(node for _, node in held if node is not None)
            assert {n: k.holders for n, k in history._kept.items() if k.holders} == holders
            assert history.reserved == sum(s.reserved for s in spans) <= history.pool.total
            for sequence, span in zip(running, spans, strict=True):
                assert len(span.pages) <= span.reserved
                assert span.end == len(sequence.holding.pages)
                assert span.first <= history.first_page(sequence.consumed)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.scheduler.clear()
        cache = self.memory.cache
        assert cache.available == self.memory.pool.total
        cache.clear()
        assert self.memory.pool.free == self.memory.pool.total
        for history in self.memory.windows:
            assert history.pool.free == history.pool.total
            assert not history.reserved
        assert not cache.root.children


PrefixMachine.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
TestPrefixMachine = PrefixMachine.TestCase
