"""Where everything that a CUDA executor owns lies, by arithmetic alone: nothing is allocated here.

Owns: the blocks of device memory (one allocation each), the places inside them, and the batch sizes
that get a graph; `cuda_cache` says what a page holds. Scratch is laid out as for the CPU: a slot's
rows follow each other, for as many as the executor has room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from ds4_common.contract import image as im
from ds4_common.errors import ExecutorFailure
from ds4_worker.cuda.kernels import most_expert_tiles
from ds4_worker.cuda.limits import GRID_LIMITS
from ds4_worker.executor.api import MOST_BIASES, MOST_DRAFTS, ExecutorConfig
from ds4_worker.executor.cuda_cache import Arena, CacheLayout, cache_layout
from ds4_worker.executor.cuda_counts import MOST_DRAWN, SEEN_ROOM
from ds4_worker.executor.step_rewinds import REWIND

SAMPLING_BYTES, SAMPLED_BYTES = 88, 176  # native/sampler.h
NOTE_BYTES = 32  # cuda/counts.cu


# Ops whose weight is a vector.
_VECTOR_WEIGHTS = frozenset(
    (
        im.OP_RMS_NORM,
        im.OP_ATTEND,
        im.OP_ROUTE,
        im.OP_HYPER_WEIGHTS,
        im.OP_ATTEND_ROWS,
        im.OP_SCALE_PARTS,
    )
)


_VECTOR_BIASES = frozenset((im.OP_MATMUL, im.OP_HYPER_WEIGHTS, im.OP_COMPRESS, im.OP_SCALE_PARTS))


class Turn(NamedTuple):
    """A rotation: of which rope, and whether it turns back."""

    rope: int
    inverse: bool


class Rows(msgspec.Struct, frozen=True):
    """Rows of one value: the first one's address, and the bytes from one to the next."""

    address: int
    stride: int


class PlanePlaces(msgspec.Struct, frozen=True):
    address: int  # in page 0
    page_stride: int
    page_table: int


class RopePlaces(msgspec.Struct, frozen=True):
    frequency: int  # double[half]
    cosine: int  # float[batch_tokens][half]
    sine: int
    magnitude: float


class KeptPlaces(msgspec.Struct, frozen=True):
    """What slices add to running state: of each plane of state, in a bank's part of "work"."""

    offset: int
    bank_bytes: int
    planes: dict[int, int]


class StepInput(msgspec.Struct, frozen=True):
    """Offsets in the block that the host writes for every step and one copy brings over, as far as
    the lists are used. All but the records are int32."""

    live_tokens: int
    live_outputs: int
    live_notes: int
    tokens: int
    positions: int
    banks: int
    rows: int  # token of each output
    sources: int  # of tokens that are pending: which draw of the step before; -1
    samplings: int  # records of native/sampler.h
    notes: int  # what becomes of the counts of banks: records of cuda/counts.cu
    again: int  # of each bank: tokens before its slice that are added to running state once more
    keeps: int  # whether what its slice adds is kept
    shifted: dict[int, int]  # positions of ropes that shift them, by shift
    lists: int  # masks, biases and tokens seen, one after the other; to the end
    mask_bytes: int  # of one
    n_bytes: int

    @classmethod
    def of(cls, config: ExecutorConfig, vocabulary: int, shifts: Iterable[int] = ()) -> StepInput:
        arena = Arena()
        arena.take(12)
        tokens, positions, banks = (arena.take(4 * config.batch_tokens) for _ in range(3))
        rows = arena.take(4 * config.batch_outputs)
        sources = arena.take(4 * config.batch_tokens)
        samplings = arena.take(SAMPLING_BYTES * config.batch_outputs)
        notes = arena.take(NOTE_BYTES * config.banks)
        again, keeps = arena.take(4 * config.banks), arena.take(4 * config.banks)
        shifted = {
            shift: arena.take(4 * config.batch_tokens) for shift in sorted(set(shifts) - {0})
        }
        mask_bytes = 4 * -(-vocabulary // 32)
        of_draws = config.batch_outputs * (mask_bytes + 4 + 8 * MOST_BIASES)
        lists = arena.take(of_draws + 8 * SEEN_ROOM + 4 * MOST_DRAWN * config.banks)
        return cls(
            0, 4, 8, tokens, positions, banks, rows, sources, samplings, notes, again, keeps,
            shifted, lists, mask_bytes, arena.n_bytes,
        )  # fmt: skip

    def positions_of(self, shift: int) -> int:
        return self.shifted[shift] if shift else self.positions


class Places(msgspec.Struct, frozen=True):
    """Offsets and sizes of everything. `blocks` are the allocations to make, in bytes."""

    step: StepInput
    cache: CacheLayout
    pages_per_bank: int
    vectors: dict[int, int]  # weight -> its floats in block "fixed"
    turns: tuple[Turn, ...]
    frequencies: tuple[int, ...]  # of each turn, in "fixed"
    angles: tuple[tuple[int, int], ...]  # cosines and sines of each turn, in "work"
    ones: int  # for norms without weights, in "fixed"
    scratch: tuple[int, int]  # of both spaces, in "work"
    partials: int  # of attention, in "work"
    experts: tuple[int, int, int]  # columns by expert, their tiles, how many; in "work"
    kept: KeptPlaces
    scores: int  # of rows that an index picks from, in "work"
    draws: tuple[int, int, int]  # draws and their tokens in "draws", scratch in "work"
    blocks: dict[str, int]


def plan_places(
    image: im.Image, config: ExecutorConfig, *, partial_bytes: int, kv_type: int
) -> Places:
    """`partial_bytes`: what attention wants for the parts of its contexts. Raises ExecutorFailure
    for capacities out of range, UnsupportedModel for a cache type that the model's heads do not
    fit."""
    _check_capacities(image, config)
    per_bank = -(-config.context_tokens // image.page_tokens)
    cache = cache_layout(image, config, kv_type)
    fixed, work = Arena(), Arena()
    vectors = {
        number: fixed.take(4 * floats_of(image.weights[number])) for number in vectors_of(image)
    }
    turns = turns_of(image)
    halves = [image.ropes[turn.rope].rope_dim // 2 for turn in turns]
    frequencies = tuple(fixed.take(8 * half) for half in halves)
    ones = fixed.take(4 * ones_of(image))
    scratch = (
        work.take(image.token_bytes * config.batch_tokens),
        work.take(image.row_bytes * config.batch_outputs),
    )
    angles = []
    for half in halves:
        n_bytes = 4 * half * config.batch_tokens
        angles.append((work.take(n_bytes), work.take(n_bytes)))
    step = StepInput.of(config, image.vocabulary, (rope.shift for rope in image.ropes))
    partials = work.take(partial_bytes)
    columns, tiles = expert_room(image, config)
    experts = (work.take(4 * columns), work.take(16 * tiles), work.take(4))
    scores = work.take(4 * config.batch_tokens * index_rows_of(image, config))
    kept = kept_places(image)
    kept = msgspec.structs.replace(kept, offset=work.take(kept.bank_bytes * config.banks))
    drawing = Arena()
    draws = (
        drawing.take(SAMPLED_BYTES * config.batch_outputs),
        drawing.take(4 * config.batch_outputs),
        work.take(8 * image.vocabulary * config.batch_outputs),
    )
    return Places(
        step=step, cache=cache, pages_per_bank=per_bank, vectors=vectors,
        turns=turns, ones=ones, scores=scores, frequencies=frequencies, angles=tuple(angles),
        scratch=scratch, partials=partials,
        experts=experts, draws=draws, kept=kept,
        blocks={
            "step": step.n_bytes,
            "table": 4 * len(cache.histories) * config.banks * per_bank,
            "fixed": fixed.n_bytes, "work": work.n_bytes, "draws": drawing.n_bytes,
            "counts": counts_bytes(image) * config.banks, "cache": cache.n_bytes,
        },
    )  # fmt: skip


def counts_bytes(image: im.Image) -> int:
    """Of a bank: how often each token was seen, and whether another one was."""
    return 4 * (image.vocabulary + 1)


def turns_of(image: im.Image) -> tuple[Turn, ...]:
    """The rotations of the program, each once."""
    found = {
        Turn(op.rope, bool(op.mode)): None
        for section in image.sections
        for op in section.ops
        if op.kind == im.OP_ROPE
    }
    return tuple(found)


def ones_of(image: im.Image) -> int:
    """The longest norm without weights."""
    return max(
        (
            image.slots[op.out].width // op.heads
            for section in image.sections
            for op in section.ops
            if op.kind == im.OP_RMS_NORM and op.weight == im.NONE
        ),
        default=0,
    )


def kept_places(image: im.Image) -> KeptPlaces:
    """Before it has an offset. As native/exec_open.c; nothing where pages are too small for all
    drafts of a slice to be taken back."""
    ops = [op for section in image.sections for op in section.ops if op.kind == im.OP_COMPRESS]
    planes: dict[int, int] = {}
    n_bytes = 0
    for op in ops if image.page_tokens > MOST_DRAFTS else ():
        planes[op.plane] = n_bytes
        wide = image.planes[op.plane].kv_heads // 3 * image.planes[op.plane].dim
        n_bytes += 4 * (3 + 2 * REWIND) * wide
    return KeptPlaces(0, n_bytes, planes)


def index_rows_of(image: im.Image, config: ExecutorConfig) -> int:
    """The most rows that an index picks from."""
    ratios = [
        image.planes[op.plane].ratio
        for section in image.sections
        for op in section.ops
        if op.kind == im.OP_INDEX_ROWS
    ]
    return config.context_tokens // min(ratios) if ratios else 0


def expert_room(image: im.Image, config: ExecutorConfig) -> tuple[int, int]:
    """The most columns of a choice of experts, and the most tiles that they make."""
    columns = tiles = 0
    for section in image.sections:
        for op in section.ops:
            if op.kind == im.OP_MATMUL_EXPERTS and len(op.inputs) > 1:
                used = image.slots[op.inputs[1]].width // 2
                experts = image.weights[op.weight].experts
                columns = max(columns, config.batch_tokens * used)
                tiles = max(tiles, most_expert_tiles(config.batch_tokens, used, experts))
    return columns, tiles


def vectors_of(image: im.Image) -> list[int]:
    """Weights that ops read as floats: norms, biases, sinks; and factors of ropes."""
    found = {number for rope in image.ropes for number in (rope.factors, rope.long_factors)}
    for section in image.sections:
        for op in section.ops:
            if op.kind in _VECTOR_WEIGHTS:
                found.add(op.weight)
            if op.kind in _VECTOR_BIASES:
                found.add(op.bias)
    return sorted(found - {im.NONE})


def floats_of(weight: im.Weight) -> int:
    return weight.rows * weight.cols * weight.experts


def _check_capacities(image: im.Image, config: ExecutorConfig) -> None:
    most_rows = GRID_LIMITS[1]  # most kernels have a row of blocks per token
    for name, least, most in (
        ("banks", 1, 4096), ("batch_tokens", 1, most_rows), ("batch_outputs", 1, most_rows),
        ("context_tokens", 1, image.context_tokens),
    ):  # fmt: skip
        got = getattr(config, name)
        if not least <= got <= most:
            raise ExecutorFailure(f"CUDA executor: {name}: got {got}, expected {least} to {most}")


class Addresses:
    """Places in the blocks as they were allocated: what a launch is told."""

    def __init__(
        self,
        image: im.Image,
        config: ExecutorConfig,
        places: Places,
        blocks: Mapping[str, int],
        allocations: Mapping[int, int],
        magnitudes: tuple[float, ...],
    ) -> None:
        """`blocks`: address by name; `allocations`: address of the weights by allocation id."""
        self._image, self._places = image, places
        self._banks = config.banks
        self._capacity = (config.batch_tokens, config.batch_outputs)
        self._fixed, self._work = blocks["fixed"], blocks["work"]
        self._ids = [id_ for id_, _ in image.allocations]
        self._allocations = allocations
        self._magnitudes = magnitudes
        self.step, self.page_table = blocks["step"], blocks["table"]
        self.cache = blocks["cache"]
        self.partials = self._work + places.partials
        columns, tiles, count = places.experts
        self.experts = (self._work + columns, self._work + tiles, self._work + count)
        sampled, drawn, scratch = places.draws
        step = places.step
        self.samplings, self.notes = self.step + step.samplings, self.step + step.notes
        self.tokens, self.row_tokens = self.step + step.tokens, self.step + step.rows
        self.live_notes = self.step + step.live_notes
        self.sampled, self.drawn = blocks["draws"] + sampled, blocks["draws"] + drawn
        self.counts = blocks["counts"]
        self.sample_scratch = self._work + scratch
        self.ones, self.scores = self._fixed + places.ones, self._work + places.scores

    def slot(self, index: int) -> Rows:
        slot = self._image.slots[index]
        start = self._places.scratch[slot.space] + slot.offset * self._capacity[slot.space]
        return Rows(self._work + start, slot.n_bytes)

    def live(self, space: int) -> int:
        """Of the int32 that counts the rows in use."""
        step = self._places.step
        return self.step + (step.live_tokens, step.live_outputs)[space]

    def weight(self, index: int) -> int:
        weight = self._image.weights[index]
        return self._allocations[self._ids[weight.allocation]] + weight.offset

    def kept(self, op: im.ImageOp) -> int:
        """What is kept for the running state of an op, in bank 0; 0 for nothing."""
        kept = self._places.kept
        place = kept.planes.get(op.plane)
        return 0 if place is None else self._work + kept.offset + place

    def vector(self, index: int) -> int:
        """Floats of a weight of one row; 0 for none."""
        return 0 if index == im.NONE else self._fixed + self._places.vectors[index]

    def rope(self, turn: Turn) -> RopePlaces:
        index = self._places.turns.index(turn)
        cosine, sine = self._places.angles[index]
        return RopePlaces(
            self._fixed + self._places.frequencies[index], self._work + cosine,
            self._work + sine, self._magnitudes[index],
        )  # fmt: skip

    def plane(self, index: int) -> PlanePlaces:
        cache = self._places.cache
        history, offset = cache.planes[index]
        table = 4 * history * self._banks * self._places.pages_per_bank
        return PlanePlaces(
            self.cache + cache.bases[history] + offset, cache.histories[history].page_bytes,
            self.page_table + table,
        )  # fmt: skip


# ---- batch sizes ---------------------------------------------------------------------------------


def buckets(batch_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens for which a graph is captured: powers of two, then the capacity."""
    sizes = [1]
    while sizes[-1] * 2 < batch_tokens:
        sizes.append(sizes[-1] * 2)
    if sizes[-1] < batch_tokens:
        sizes.append(batch_tokens)
    return tuple(sizes)
