"""A deterministic executor without a model, for tests of everything above the executor boundary.

Pages hold tokens. The next token is a hash of all tokens that a bank reads through its page table,
so any mix-up of banks, positions, pages, copies or chunks changes the output. It checks what a real
one relies on: pages mapped, filled up to where they are read, written by nobody else, capacities.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import random
import struct
from collections.abc import Callable, Sequence

from ds4_common.errors import ExecutorFailure
from ds4_worker.executor.api import ExecutorConfig, Sampled, Sampling, Slice, WindowPages


class FakeExecutor:
    """`choose(history)` overrides the next token; `before_step` may raise or block. With `recall`
    the next token depends on the last so many only, except now and then: it repeats itself."""

    def __init__(
        self,
        config: ExecutorConfig | None = None,
        *,
        vocabulary: int = 97,
        page_tokens: int = 4,
        choose: Callable[[list[int]], int] | None = None,
        before_step: Callable[[], None] | None = None,
        rewinds: bool = True,
        divisible: bool = True,
        recall: int | None = None,
        windows: tuple[WindowPages, ...] = (),
    ) -> None:
        self.config = config or ExecutorConfig(banks=2, context_tokens=64)
        self.vocabulary = vocabulary
        self.page_tokens = page_tokens
        per_bank = math.ceil(self.config.context_tokens / page_tokens)
        self.pages = self.config.pages or per_bank * self.config.banks
        self.rewinds, self.divisible = rewinds, divisible
        self.page_bytes = 16 * page_tokens
        self.windows = windows
        self.steps: list[list[Slice]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.prompts: list[list[int]] = []  # of every sequence, when its first token is drawn
        self.closed = False
        self.errors: dict[int, str] = {}  # bank -> why it cannot be sampled
        self._choose = choose
        self._recall = recall
        self.before_step = before_step
        counts = [self.pages, *(window.pages for window in windows)]
        self._pages: list[list[list[int]]] = [[[] for _ in range(n)] for n in counts]
        self._tables: list[list[dict[int, int]]] = [
            [{} for _ in range(self.config.banks)] for _ in counts
        ]
        self._held, self._table = self._pages[0], self._tables[0]  # tokens of each page

    def set_page(self, bank: int, index: int, page: int, history: int = 0) -> None:
        assert 0 <= page < len(self._pages[history])
        self._tables[history][bank][index] = page

    def copy_page(self, source: int, target: int, tokens: int, history: int = 0) -> None:
        held = self._pages[history]
        assert source != target
        assert 0 < tokens <= len(held[source])
        assert self.divisible or tokens == len(held[source]), "a page cannot be cut"
        held[target] = held[source][:tokens]
        if history == 0:
            self.copies.append((source, target, tokens))

    def step(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        if self.before_step is not None:
            self.before_step()
        self._check(slices)
        self.steps.append(list(slices))
        return [sampled for piece in slices for sampled in self._run(piece)]

    def _check(self, slices: Sequence[Slice]) -> None:
        assert slices
        assert sum(len(piece.tokens) for piece in slices) <= self.config.batch_tokens
        drawing = [piece for piece in slices if piece.sample is not None]
        assert sum(len(piece.checks) + 1 for piece in drawing) <= self.config.batch_outputs
        assert len({piece.bank for piece in slices}) == len(slices)
        for history in range(1 + len(self.windows)):
            self._check_pages(slices, history)

    def _first(self, piece: Slice, history: int) -> int:
        """The first page that a slice sees."""
        if not history:
            return 0
        return max(0, piece.start + 1 - self.windows[history - 1].tokens) // self.page_tokens

    def _check_pages(self, slices: Sequence[Slice], history: int) -> None:
        read: list[int] = []
        written: list[int] = []
        for piece in slices:
            end = piece.start + len(piece.tokens)
            assert piece.tokens
            assert end <= self.config.context_tokens
            whole, rest = divmod(piece.start, self.page_tokens)
            table = self._tables[history][piece.bank]
            for index in range(self._first(piece, history), math.ceil(end / self.page_tokens)):
                (read if index < whole else written).append(table[index])
                needed = self.page_tokens if index < whole else rest if index == whole else 0
                held = len(self._pages[history][table[index]])
                assert held >= needed, "a page lacks what is read"
                assert self.rewinds or not needed or held == needed, "a page has run ahead"
        assert len(written) == len(set(written)), "a page is written twice"
        assert not set(written) & set(read), "a page is read and written"

    def _history(self, piece: Slice) -> list[int]:
        """Stores the slice; everything that its bank holds then. What a window still sees must be
        what the history that keeps all holds there."""
        size = self.page_tokens
        pages = range(math.ceil((piece.start + len(piece.tokens)) / size))
        for pool, tables in zip(self._pages, self._tables, strict=True):
            table = tables[piece.bank]
            for position, token in enumerate(piece.tokens, start=piece.start):
                held = pool[table[position // size]]
                del held[position % size :]
                held.append(token)
        kept = [self._held[self._table[piece.bank][index]] for index in pages]
        for history in range(1, 1 + len(self.windows)):
            pool, table = self._pages[history], self._tables[history][piece.bank]
            for index in pages[self._first(piece, history) :]:
                assert pool[table[index]][: len(kept[index])] == kept[index], "other tokens"
        return [token for held in kept for token in held]

    def _run(self, piece: Slice) -> list[Sampled | None]:
        history = self._history(piece)
        assert len(piece.checks) < len(piece.tokens)
        if piece.sample is None:
            assert not piece.checks
            return [None]
        samples = (*piece.checks, piece.sample)
        first = len(history) - len(piece.checks)
        return [self._draw(piece, s, history[:end]) for end, s in enumerate(samples, start=first)]

    def _draw(self, piece: Slice, sample: Sampling, history: list[int]) -> Sampled:
        if sample.index == 0:
            self.prompts.append([*history])
        if piece.bank in self.errors:
            return Sampled(-1, error=self.errors[piece.bank])
        allowed = allowed_tokens(sample, self.vocabulary)
        if sample.forced >= 0:
            token = sample.forced
        elif not allowed:
            return Sampled(-1, error="nothing is allowed")
        elif self._choose is not None:
            token = self._choose(history)
        else:
            recall = self._recall if len(history) % 7 else None
            whole, read = recall is None, history if recall is None else history[-recall:]
            key = b",".join(b"%d" % token for token in read)
            if sample.temperature > 0 and whole:
                key += b"/%d/%d" % (sample.seed, sample.index)
            digest = hashlib.blake2b(key, digest_size=8).digest()
            token = allowed[int.from_bytes(digest, "little") % len(allowed)]
        if sample.logprobs < 0:
            return Sampled(token)
        top = [((token + i) % self.vocabulary, -0.5 - i) for i in range(sample.logprobs)]
        return Sampled(token, -0.5, top)

    def score(self, piece: Slice, targets: Sequence[int], logprobs: int) -> list[Sampled]:
        """Every target has a log-probability that is a function of all tokens before it."""
        assert len(targets) == len(piece.tokens) <= self.config.batch_outputs
        if self.before_step is not None:
            self.before_step()
        self._check([piece])
        history = self._history(piece)
        scores = []
        for position, target in enumerate(targets, start=piece.start + 1):
            value = -float(sum(history[:position]) % 97) - target / 1000
            top = [((target + i) % self.vocabulary, value - i) for i in range(logprobs)]
            scores.append(Sampled(target, value, top, self.errors.get(piece.bank)))
        return scores

    def logits(self, slices: Sequence[Slice]) -> list[list[list[float]]]:
        draw = random.Random(repr(slices))
        return [[[draw.random() for _ in range(self.vocabulary)] for _ in s.tokens] for s in slices]

    def close(self) -> None:
        self.closed = True


def allowed_tokens(sample: Sampling, vocabulary: int) -> range | list[int]:
    """What mask and bans leave."""
    if not sample.mask and sample.adjust is None:
        return range(vocabulary)
    allowed = set(range(vocabulary))
    if sample.mask:
        words = (ctypes.c_uint32 * -(-vocabulary // 32)).from_address(sample.mask)
        allowed = {token for token in allowed if words[token // 32] >> token % 32 & 1}
    if sample.adjust is not None:
        records = ctypes.string_at(sample.adjust.biases, 8 * sample.adjust.n_biases)
        pairs = struct.iter_unpack("<if", records)
        allowed -= {token for token, bias in pairs if bias == -math.inf}
    return sorted(allowed)


def failing_after(steps: int) -> Callable[[], None]:
    """A `before_step` that raises ExecutorFailure at step `steps` (0: the first)."""
    left = steps

    def check() -> None:
        nonlocal left
        if left == 0:
            raise ExecutorFailure("fake executor: broken on purpose")
        left -= 1

    return check
