"""One executor call: what it is asked, and what its results are to be.

Refuses results that cannot answer the step (`ExecutorFailure`): the detector of a broken executor.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ds4_common.errors import ExecutorFailure
from ds4_worker.engine.memory import Copy
from ds4_worker.engine.sequence import Sequence
from ds4_worker.executor.api import Sampled, Slice


class Step(msgspec.Struct):
    """One executor call: `slices[i]` belongs to `sequences[i]`. Before it, pages are copied, and
    `mappings` (bank, index, page, history) are set."""

    slices: list[Slice]
    sequences: list[Sequence]
    mappings: list[tuple[int, int, int, int]]
    copies: list[Copy]
    scored: tuple[Sequence, Slice] | None = None  # a piece of prompt that goes through `score`
    prompt_tokens: int = 0
    decodes: int = 0  # sequences that decode, those of the first slices
    drafts: int = 0  # tokens in these slices that are guesses
    accepted: int = 0  # of these, that came true
    constrained_decodes: int = 0  # of these, with a grammar
    constrained: bool = False  # whether any draw, of a first token too, is under a grammar
    followed: bool = False  # it was sent off before the results of the one before were there
    discarded: int = 0  # slices whose sequences had ended when the results came


def scored_targets(sequence: Sequence, piece: Slice) -> list[int]:
    """What follows each token of a piece of prompt."""
    begin = piece.start + 1
    return list(sequence.generation.prompt[begin : begin + len(piece.tokens)])


def draws_of(
    step: Step, results: list[Sampled | None]
) -> Iterator[tuple[Slice, Sequence, list[Sampled]]]:
    """Every slice with its sequence and its draws, none in the middle of a prompt."""
    first = 0
    for piece, sequence in zip(step.slices, step.sequences, strict=True):
        end = first + len(piece.checks) + 1
        yield piece, sequence, [drawn for drawn in results[first:end] if drawn is not None]
        first = end


def check_results(step: Step, results: list[Sampled | None], vocabulary: int) -> None:
    """Refuses results that cannot answer the step (the detector of a corrupted executor)."""
    banks = [(piece.bank, piece.sample) for piece in step.slices for _ in (*piece.checks, None)]
    if len(results) != len(banks):
        raise ExecutorFailure(f"executor: {len(results)} results, asked for {len(banks)}")
    for (bank, sample), sampled in zip(banks, results, strict=True):
        if (sampled is None) != (sample is None):
            raise ExecutorFailure(f"executor: bank {bank}: sampled {sampled}, asked otherwise")
        if sampled is None or sampled.error is not None:
            continue
        if not 0 <= sampled.token < vocabulary:
            raise ExecutorFailure(
                f"executor: bank {bank}: token {sampled.token}, vocabulary {vocabulary}"
            )
