"""The prefix cache over any sequence of requests: it changes nothing, and a page has one owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

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

from ds4_worker.engine.api import Event, Finished, Generation, Speculate
from ds4_worker.engine.prefix import Node
from ds4_worker.engine.sequence import Sequence
from helpers.fake_model import VOCABULARY
from helpers.prefixes import CONTEXT, PAGE, make_core, run, tokens_and_end


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
