"""What drafts from a sequence's own past gain where there is something to copy, and cost elsewhere.

Owns: the texts, and asking for the same answers with drafts and without, in turn. The answers are
compared token by token: they are the same, or the figure is void.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ds4_common.errors import Ds4Error
from ds4_common.tokenizer.encoder import StreamDetokenizer
from ds4_worker.bench.report import Row, summarise
from ds4_worker.bench.speed import Mapped
from ds4_worker.engine.api import Generation, Output, Speculate
from ds4_worker.engine.core import EngineCore

_CODE = '''\
def read_lines(path, encoding="utf-8"):
    """Returns the lines of a file, without their ends."""
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]


def count_words(lines):
    """Returns how often each word occurs in the lines."""
    counts = {}
    for line in lines:
        for word in line.split():
            counts[word] = counts.get(word, 0) + 1
    return counts


def most_common(counts, limit=10):
    """Returns the words that occur most often, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, _ in ordered[:limit]]
'''
_EDITED = _CODE.replace("count_words", "count_tokens").replace("word", "token")
_TEXT = (
    "The harbour of the old town lies in a bay that is open to the west. Twice a day the ferry "
    "brings visitors from the island of Varn, most of whom walk up to the lighthouse, drink a cup "
    "of coffee in Mrs. Oldenburg's kitchen and take the boat at half past four. In winter there is "
    "no ferry at all; then the 214 people who live here have the place to themselves, and the "
    "only light on the pier is the lamp of the harbour master, Joren Pell, who counts the gulls. "
)
_RANDOM_TOKENS = 128
_FEW = 24  # tokens that a text is drawn from in which nearly every end has occurred before


class Rate(NamedTuple):
    """What one engine did with some requests."""

    per_second: float  # tokens, after the prompts
    cpu_seconds: float  # of all threads, per token: what others do to the machine hardly shows


class Repeated:
    """One model, with drafts and without; the two never run at once."""

    def __init__(self, model: Mapped, speculate: Speculate) -> None:
        tokenizer = model.tokenizer
        choices: tuple[Speculate, Speculate] = ("off", speculate)
        # They share the executor's pages, so neither may rely on those of an earlier answer.
        self._cores = [
            EngineCore(
                model.executor,
                lambda: StreamDetokenizer(tokenizer, text_start=False),
                reuse_prefixes=False,
                speculate=choice,
            )
            for choice in choices
        ]

    def rates(self, items: Sequence[Generation]) -> tuple[Rate, Rate]:
        """Without drafts and with them."""
        plain, drafted = (self._run(core, items) for core in self._cores)
        if plain[0] != drafted[0]:
            raise Ds4Error("drafts have changed an answer: that is a bug, please report it")
        return plain[1], drafted[1]

    def accepted(self) -> tuple[int, int]:
        """Drafts that came true, and drafts offered, so far."""
        stats = self._cores[1].stats
        return stats.draft_tokens_accepted, stats.draft_tokens_offered

    @staticmethod
    def _run(core: EngineCore, items: Sequence[Generation]) -> tuple[list[list[int]], Rate]:
        sequences = [core.sequence(item) for item in items]
        for sequence in sequences:
            core.submit(sequence)
        while any(sequence.bank < 0 or sequence.prefilling for sequence in sequences):
            core.step()
        tokens, cpu, start = 0, time.process_time(), time.perf_counter()
        while (events := core.step()) is not None:
            tokens += sum(isinstance(event, Output) for _, event in events)
        seconds = time.perf_counter() - start
        rate = Rate(tokens / seconds, (time.process_time() - cpu) / tokens)
        return [sequence.output for sequence in sequences], rate


def _again(model: Mapped, first: str, second: str, shown: int) -> Generation:
    """A text, and the beginning of its second version: the answer is the rest of that."""
    prompt = f"{first}\n\n{first}\n\n{second[:shown]}"
    ids = model.tokenizer.encode(prompt, add_special=True, parse_special=False)
    rest = model.tokenizer.encode(second[shown:], add_special=False, parse_special=False)
    return Generation(prompt=ids, max_tokens=len(rest), temperature=0.0)


def _unlike_anything(model: Mapped, draw: random.Random) -> Generation:
    ids = [draw.randrange(model.executor.vocabulary) for _ in range(64)]
    seed = draw.getrandbits(32)
    return Generation(prompt=ids, max_tokens=_RANDOM_TOKENS, temperature=1.2, seed=seed)


def _of_few_tokens(model: Mapped, draw: random.Random) -> Generation:
    """Drawn evenly from few tokens: there are drafts all the time, and hardly one is right."""
    few = draw.sample(range(model.executor.vocabulary), _FEW)
    return replace(
        _unlike_anything(model, draw),
        prompt=[draw.choice(few) for _ in range(64)],
        temperature=10.0,
        logit_bias=tuple((token, 300.0) for token in few),
    )


def measure(model: Mapped, speculate: Speculate, streams: int, runs: int) -> list[Row]:
    """Every figure beside the same without drafts, measured in turn with it."""
    pair, draw = Repeated(model, speculate), random.Random(5)
    cases = {
        "copying a text": ([_again(model, _TEXT, _TEXT, 60)], ">= 1.5"),
        "writing code again": ([_again(model, _CODE, _CODE, 60)], ">= 1.5"),
        "renaming in code": ([_again(model, _CODE, _EDITED, 330)], ""),
        f"copying a text, {streams} streams": (
            [_again(model, _TEXT, _TEXT, 60 + i) for i in range(streams)],
            "",
        ),
    }
    rows: list[Row] = []

    def add(name: str, goal: str, samples: Sequence[tuple[Rate, Rate]]) -> None:
        rows.append(
            summarise(
                name,
                "tokens/s",
                [drafted.per_second for _, drafted in samples],
                reference=statistics.median(plain.per_second for plain, _ in samples),
                reference_name="without drafts",
                goal=goal,
            )
        )
        shares = [drafted.per_second / plain.per_second for plain, drafted in samples]
        rows.append(summarise(f"{name}, pair by pair", "share", shares, goal=goal))
        shares = [plain.cpu_seconds / drafted.cpu_seconds for plain, drafted in samples]
        rows.append(summarise(f"{name}, tokens per CPU second, pair by pair", "share", shares))

    for name, (items, goal) in cases.items():
        before = pair.accepted()
        add(name, goal, [pair.rates(items) for _ in range(runs)])
        hits, offered = (now - then for now, then in zip(pair.accepted(), before, strict=True))
        if offered:
            rows.append(summarise(f"{name}: drafts that came true", "share", [hits / offered]))
    random_texts = {"random text": _unlike_anything, f"{_FEW} random tokens": _of_few_tokens}
    for text, make in random_texts.items():
        for count in (1, streams):
            name = text if count == 1 else f"{text}, {count} streams"
            known = pair.accepted()[1]
            samples = [pair.rates([make(model, draw) for _ in range(count)]) for _ in range(runs)]
            add(name, ">= 0.97", samples)
            share = (pair.accepted()[1] - known) / (runs * count * _RANDOM_TOKENS)
            rows.append(summarise(f"{name}: drafts offered", "per token", [share]))
    return rows
