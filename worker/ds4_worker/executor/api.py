"""The executor boundary: all that the engine may say to an executor and get back.

Owns: plain data and one Protocol. The engine thread is the only caller; one `step` is one native
call with the GIL released. Nothing here names a tensor, a file or a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

KV_DTYPES = ("f16", "bf16", "f32", "q8_0")  # types of the cache; q8_0: blocks of 32 in a head


MOST_DRAFTS = 63  # in one slice, beside the token before them
MOST_BIASES = 2048  # of a draw, where a device makes it
# In the place of a token: what the step before drew for this bank, wherever that lies by now.
PENDING = -1


class ExecutorConfig(msgspec.Struct, frozen=True):
    """Capacities fixed at load. Nothing is allocated after that."""

    threads: int = 0  # 0: one per core this process may use
    banks: int = 4  # sequences held at once
    context_tokens: int = 8192  # per bank
    pages: int = 0  # KV pages in all; 0: enough for every bank to be full
    kv_dtype: str = "f16"  # one of KV_DTYPES
    batch_tokens: int = 512  # most tokens in one step
    batch_outputs: int = 64  # most sampled rows in one step
    isa: str = "auto"  # or the name of an Isa (ds4_common/quants/native.py) in small letters


class WindowPages(msgspec.Struct, frozen=True):
    """Pages of the layers that see the last `tokens` positions only: a history of its own beside
    the one that keeps all. `most` are needed by one sequence at a time."""

    tokens: int
    pages: int
    most: int
    page_bytes: int


class Adjustments(msgspec.Struct):
    """What changes the logits before they are drawn from: first biases, then penalties of tokens
    seen. Lists are addresses of records in native byte order, or 0 with a count of 0."""

    biases: int = 0  # (int32 id, float32 added to the logit), each id once
    n_biases: int = 0
    seen: int = 0  # (int32 id, int32 occurrences in the output), each id once
    n_seen: int = 0
    repetition: float = 1.0  # of every seen token
    frequency: float = 0.0  # per occurrence in the output
    presence: float = 0.0  # of tokens that occur in the output
    # The output so far, in order: one list of the sequence, to which tokens are added as the caller
    # learns of them. An executor that has seen it before need not look at `seen` again.
    drawn: Sequence[int] | None = None


class Sampling(msgspec.Struct):
    """How to draw one token. temperature <= 0 is argmax. The draw is a pure function of logits,
    these fields, `seed` and `index` (counter-based: a restart or another batch gives the same)."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0  # 0 for the first generated token of a request
    # none; n >= 0: of the chosen token and the n best, of the model's own distribution
    logprobs: int = -1
    mask: int = 0  # address of a uint32 bitmask over the vocabulary (1 = allowed), or 0
    adjust: Adjustments | None = None
    forced: int = -1  # the token to return, whatever the rest says


class Slice(msgspec.Struct):
    """Consecutive tokens of one bank in this step. `sample` asks for a token after the last.

    The last len(checks) tokens may be drafts: guesses of what will be drawn. Then `checks[i]` asks
    for the token that belongs in the place of the i-th of them, and `sample` for the one after all.
    Positions that turn out to be wrong are computed again by a later slice."""

    bank: int
    start: int  # position of tokens[0]
    tokens: Sequence[int]
    sample: Sampling | None = None
    checks: Sequence[Sampling] = ()  # fewer than tokens; none without `sample`

    @property
    def drafts(self) -> Sequence[int]:
        return self.tokens[len(self.tokens) - len(self.checks) :]


class Sampled(msgspec.Struct):
    """One drawn token. With `error` set (logits not finite, nothing allowed by the mask) token is
    -1, and only this sequence failed."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None  # best first
    error: str | None = None


class Executor(Protocol):
    vocabulary: int
    page_tokens: int
    pages: int
    # Whether positions of the last slice may be computed again with other tokens: drafts need that.
    rewinds: bool
    # Whether a page can go on from before its last token; not where it holds state that runs along.
    divisible: bool
    page_bytes: int
    windows: tuple[WindowPages, ...]  # histories 1, 2 ...; pages of history 0 keep all positions
    config: ExecutorConfig

    def set_page(self, bank: int, index: int, page: int, history: int = 0) -> None:
        """Maps logical page `index` (position // page_tokens) of a bank to a physical page. Pages
        that a window has left may stay mapped to what others use."""

    def copy_page(self, source: int, target: int, tokens: int, history: int = 0) -> None:
        """Makes physical page `target` hold the first `tokens` of page `source`, bit for bit."""

    def step(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        """Runs the program over all slices. Of each, in order, what its `checks` and its `sample`
        gave; None where it has no `sample`. Raises ExecutorFailure."""

    def score(self, piece: Slice, targets: Sequence[int], logprobs: int) -> list[Sampled]:
        """Runs a slice; for each of its tokens the log-probability of `targets[i]` coming next, and
        the `logprobs` best. Raises ExecutorFailure."""

    def logits(self, slices: Sequence[Slice]) -> list[list[list[float]]]:
        """Like step, but returns the logits of every token of every slice (tests, scoring)."""

    def close(self) -> None: ...


@runtime_checkable
class FramedExecutor(Executor, Protocol):
    """An executor that runs beside its caller: a step may be sent off while another is under way.

    All it is told takes effect in the order of the calls, so pages may be mapped, copied and used
    again for the step that is sent off next, whatever the one under way still does with them."""

    frames: int  # steps that may be under way at once

    def submit(self, slices: Sequence[Slice]) -> None:
        """Sends a step on its way. While another is under way, its slices may be one PENDING token
        behind a draw of that step, which counts as seen by this one's penalties. Raises
        StepRefused before touching anything, ExecutorFailure."""

    def collect(self) -> list[Sampled | None]:
        """Waits for the earliest step that was not collected; as `step`. Raises ExecutorFailure."""
