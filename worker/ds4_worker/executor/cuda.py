"""The CUDA executor: a lowered image as captured graphs over weights in device memory.

Owns: device and pinned memory, the loaded kernels, one graph per batch size, and the frames of the
steps that are under way. Everything is allocated, compiled and captured while it is made; a step is
one launch of a graph between small copies. All draws are made on the device, where the next step
may read them before the host does: masks and biases go along with the step, the tokens that
penalties apply to are counted there. Refuses: steps that do not fit
(`StepRefused`, nothing was touched), programs with ops or weights that have no kernels
(UnsupportedModel). A failure of the device ends it: ExecutorFailure with the exit code of the
failure. Called from one thread at a time.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn, TypeVar

from ds4_common.contract import image as im
from ds4_common.cuda.device import Context
from ds4_common.cuda.memory import DeviceBuffer, PinnedBuffer
from ds4_common.cuda.stream import ExecutableGraph, Stream
from ds4_common.errors import CudaError, ExecutorFailure, StepRefused
from ds4_worker.executor import cuda_places, rope_frequencies
from ds4_worker.executor.api import (
    ExecutorConfig,
    Sampled,
    Sampling,
    Slice,
    WindowPages,
)
from ds4_worker.executor.cuda_cache import kv_type as kv_type_of
from ds4_worker.executor.cuda_code import Code, Functions
from ds4_worker.executor.cuda_counts import Book, Note, parts_ahead
from ds4_worker.executor.cuda_frames import NOTHING, Draw, Frame, check_biases, drawn_by, draws_of
from ds4_worker.executor.cuda_places import Addresses, Turn, buckets, ones_of
from ds4_worker.executor.cuda_program import Program, count_launch, draw_launch, partial_bytes
from ds4_worker.executor.cuda_rows import Planned
from ds4_worker.executor.cuda_vectors import check_allocations, read_vectors
from ds4_worker.executor.records import SAMPLED_RECORD
from ds4_worker.executor.step_checks import StepChecks, StepLimits

FRAMES = 2  # steps under way at once
_Held = TypeVar("_Held", Stream, DeviceBuffer, PinnedBuffer, ExecutableGraph, Frame)


class CudaExecutor:
    """Runs an image over weights at device addresses: `allocations` maps ids to (address, bytes),
    which must stay mapped until `close`. The context must be current in the calling thread."""

    def __init__(
        self,
        image: im.Image,
        allocations: Mapping[int, tuple[int, int]],
        config: ExecutorConfig,
        context: Context,
        code: Code,
    ) -> None:
        self.config = config
        self._image, self._context = image, context
        self._cleanup = ExitStack()
        self._open = True
        self._under_way: deque[Frame] = deque()  # steps that were not collected, the earliest first
        self.allocated = 0  # times that memory was taken, code loaded or a graph made
        check_allocations(image, allocations)
        try:
            self._load({id_: address for id_, (address, _) in allocations.items()}, code)
        except BaseException:
            self.close()
            raise

    # ---- loading ---------------------------------------------------------------------------------

    def _load(self, allocations: Mapping[int, int], code: Code) -> None:
        image, config = self._image, self.config
        kv_type = kv_type_of(config.kv_dtype)
        places = cuda_places.plan_places(
            image, config, partial_bytes=partial_bytes(image, config)[0], kv_type=kv_type
        )
        self._places = places
        self.vocabulary = image.vocabulary
        self.page_tokens = image.page_tokens
        keeper, *windows = places.cache.histories
        self.pages, self.pages_per_bank = keeper.pages, places.pages_per_bank
        self.page_bytes = keeper.page_bytes
        self.windows: tuple[WindowPages, ...] = tuple(windows)
        self.divisible = not image.forward_only
        self.rewinds = self.divisible or bool(places.kept.planes)
        vectors = read_vectors(image, allocations)
        found = [self._frequencies(turn, vectors) for turn in places.turns]
        # What has no kernels is refused before memory is taken.
        self._program(allocations, dict.fromkeys(places.blocks, 0), [m for _, m in found])
        self._stream = self._keep(Stream())
        blocks = {
            name: self._keep(DeviceBuffer(n_bytes, f"executor, {name}")).address
            for name, n_bytes in places.blocks.items()
        }
        self._cache = blocks["cache"]
        self._take_pinned(blocks)
        self._fill_fixed(blocks["fixed"], vectors, [f for f, _ in found])
        program = self._program(allocations, blocks, [m for _, m in found])
        self._functions = Functions(code)
        self._cleanup.callback(self._functions.close)
        self._graphs = {size: self._capture(program.launches(size)) for size in
                        buckets(config.batch_tokens)}  # fmt: skip
        addresses = self._addresses(allocations, blocks, [m for _, m in found])
        self._sampled_address = addresses.sampled
        self._draw_graphs = {rows: self._capture([draw_launch(image, addresses, rows)]) for rows in
                             buckets(config.batch_outputs)}  # fmt: skip
        self._count_graph = self._capture([count_launch(image, addresses, config.banks)])
        self._stream.synchronize()

    def _frequencies(
        self, turn: Turn, vectors: Mapping[int, Sequence[float]]
    ) -> tuple[list[float], float]:
        """Of a rotation, with its magnitude: what turns back has the angles of the other sign."""
        rope = self._image.ropes[turn.rope]
        factors = vectors.get(rope_frequencies.factors_of(rope, self.config.context_tokens))
        found, magnitude = rope_frequencies.frequencies(rope, factors)
        return [-value for value in found] if turn.inverse else found, magnitude

    def _program(
        self, allocations: Mapping[int, int], blocks: Mapping[str, int], magnitudes: Sequence[float]
    ) -> Program:
        addresses = self._addresses(allocations, blocks, magnitudes)
        return Program(self._image, self.config, self._places, addresses)

    def _addresses(
        self, allocations: Mapping[int, int], blocks: Mapping[str, int], magnitudes: Sequence[float]
    ) -> Addresses:
        return Addresses(
            self._image, self.config, self._places, blocks, allocations, tuple(magnitudes)
        )

    def _keep(self, made: _Held) -> _Held:
        self.allocated += 1
        self._cleanup.callback(made.close)
        return made

    def _take_pinned(self, blocks: Mapping[str, int]) -> None:
        config, places, image = self.config, self._places, self._image
        self._step_address, self._table_address = blocks["step"], blocks["table"]
        embedded = [op.weight for s in image.sections for op in s.ops if op.kind == im.OP_EMBED]
        known = min([image.vocabulary, *(image.weights[i].rows for i in embedded)])
        # What is drawn must be what can be put in: else the host looks at every token.
        self.frames = FRAMES if known == image.vocabulary else 1
        fixed = (places, config, blocks["step"], blocks["counts"])
        taken = (Frame(*fixed) for _ in range(self.frames))
        self._idle = deque(map(self._keep, taken))
        self._drawn = NOTHING  # by the step that was sent off last
        self._book = Book(config.banks)
        self._sent = 0  # steps
        self._table = memoryview(bytearray(places.blocks["table"])).cast("i")
        slot = image.slots[image.logits_slot]
        self._logits_stride = slot.n_bytes
        self._logits = self._keep(PinnedBuffer(slot.n_bytes, "a row of logits"))
        self._logits_view = self._logits.view.cast("f")
        self._cleanup.callback(self._logits_view.release)
        start = places.scratch[im.SPACE_OUTPUTS] + slot.offset * config.batch_outputs
        self._logits_address = blocks["work"] + start
        self._checks = StepChecks(
            StepLimits(
                banks=config.banks,
                histories=tuple((h.tokens, h.pages) for h in places.cache.histories),
                pages_per_bank=places.pages_per_bank,
                page_tokens=image.page_tokens, context_tokens=config.context_tokens,
                batch_tokens=config.batch_tokens, batch_outputs=config.batch_outputs,
                forward_only=image.forward_only, rewinds=bool(places.kept.planes),
                vocabulary=known,
            ),
            self._table,
        )  # fmt: skip

    def _fill_fixed(
        self, address: int, vectors: Mapping[int, Sequence[float]], found: list[list[float]]
    ) -> None:
        """Vectors and frequencies, which never change."""
        n_bytes = self._places.blocks["fixed"]
        if not n_bytes:
            return
        with PinnedBuffer(n_bytes, "vectors and frequencies") as stage:
            for number, offset in self._places.vectors.items():
                values = vectors[number]
                struct.pack_into(f"<{len(values)}f", stage.view, offset, *values)
            ones = ones_of(self._image)
            struct.pack_into(f"<{ones}f", stage.view, self._places.ones, *(1.0,) * ones)
            for offset, frequency in zip(self._places.frequencies, found, strict=True):
                struct.pack_into(f"<{len(frequency)}d", stage.view, offset, *frequency)
            self._stream.upload(address, stage.address, n_bytes)
            self._stream.synchronize()

    def _capture(self, launches: Sequence[Planned]) -> ExecutableGraph:
        self._functions.load(launches)
        self._stream.begin_capture()
        for planned in launches:
            self._functions.launch(self._stream, planned)
        graph = self._stream.end_capture()
        try:
            made = self._keep(graph.instantiate())
        finally:
            graph.close()
        made.upload(self._stream)
        return made

    # ---- the boundary ----------------------------------------------------------------------------

    def set_page(self, bank: int, index: int, page: int, history: int = 0) -> None:
        """Maps logical page `index` of a bank to a physical page; -1 unmaps it."""
        self._require_open()
        self._checks.set_page(bank, index, page, history)

    def copy_page(self, source: int, target: int, tokens: int, history: int = 0) -> None:
        """Makes page `target` hold the first `tokens` of page `source`. Raises StepRefused when
        `source` holds fewer."""
        self._require_open()
        self._checks.copy_page(source, target, tokens, history)
        n_bytes = self._places.cache.histories[history].page_bytes
        if not n_bytes:
            return
        first = self._cache + self._places.cache.bases[history]
        with self._device():
            self._stream.copy(first + target * n_bytes, first + source * n_bytes, n_bytes)

    def map_own_pages(self) -> None:
        """Gives every bank its own consecutive pages, those of a window in turn: for programs
        without a page allocator. Raises StepRefused when there are fewer."""
        for history, pages in enumerate(self._places.cache.histories):
            most = pages.most if history else self.pages_per_bank
            for bank in range(self.config.banks):
                for index in range(self.pages_per_bank):
                    self.set_page(bank, index, bank * most + index % most, history)

    def step(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        """Runs the program over all slices; the draws of each. Raises StepRefused before touching
        anything when a slice does not fit, ExecutorFailure when the device broke."""
        self.submit(slices)
        return self.collect()

    def submit(self, slices: Sequence[Slice]) -> None:
        """Sends a step on its way. The slices stay as they are until it is collected."""
        self._require_open()
        rows: list[int] = []
        wanted: list[Sampling | None] = []
        end = 0
        for piece in slices:
            end += len(piece.tokens)
            if piece.sample is not None:
                rows += range(end - 1 - len(piece.checks), end)
                wanted += piece.checks
            wanted.append(piece.sample)
        if not self._idle:
            raise StepRefused(f"step: {len(self._under_way)} steps are under way; collect one")
        self._checks.check(slices, self._drawn.positions)
        draws = draws_of(slices)
        check_biases(draws)
        frame = self._idle[0]
        frame.wanted = wanted
        self._send(frame, slices, rows, draws)
        self._drawn = drawn_by(slices) if self.frames > 1 else NOTHING

    def collect(self) -> list[Sampled | None]:
        """Waits for the earliest step that was not collected; the draws of each of its slices."""
        self._require_open()
        if not self._under_way:
            raise StepRefused("collect: no step is under way")
        frame = self._arrived()
        draws = iter(frame.drawn())
        return [None if how is None else next(draws) for how in frame.wanted]

    def score(self, piece: Slice, targets: Sequence[int], logprobs: int) -> list[Sampled]:
        """The log-probability of each target after its token of the slice, and the best ones."""
        if len(targets) != len(piece.tokens):
            raise StepRefused(f"score: {len(targets)} targets for {len(piece.tokens)} tokens")
        results: list[Sampled] = []
        for part in self._parts(piece):
            first = part.start - piece.start
            forced = [
                Sampling(temperature=0.0, logprobs=logprobs, forced=target)
                for target in targets[first : first + len(part.tokens)]
            ]
            frame = self._alone(part, [Draw(part.bank, 0, how) for how in forced])
            results += frame.drawn()
        return results

    def logits(self, slices: Sequence[Slice]) -> list[list[list[float]]]:
        """The logits of every token of every slice."""
        return [[list(row) for row in self.logit_rows(piece)] for piece in slices]

    def logit_rows(self, piece: Slice) -> Iterator[memoryview[float]]:
        """The logits of every token of a slice; each view holds until the next one is asked for.
        Other steps wait until the last one was."""
        for part in self._parts(piece):
            self._alone(part, ())
            sent = self._sent
            for row in range(len(part.tokens)):
                if self._sent != sent:
                    raise StepRefused("logits: another step ran before all rows were read")
                with self._device():
                    address = self._logits_address + row * self._logits_stride
                    self._stream.download(self._logits.address, address, self._logits_stride)
                    self._stream.synchronize()
                yield self._logits_view[: self.vocabulary]

    def _parts(self, piece: Slice) -> Iterator[Slice]:
        """A slice in parts that fit the output rows."""
        most = min(self.config.batch_tokens, self.config.batch_outputs)
        for first in range(0, len(piece.tokens), most):
            yield Slice(piece.bank, piece.start + first, piece.tokens[first : first + most])

    def _alone(self, part: Slice, draws: Sequence[Draw]) -> Frame:
        """Runs a slice with an output row of every token, and waits for it."""
        self._require_open()
        if self._under_way:
            raise StepRefused("step: every row of a slice is wanted at once; collect the others")
        self._checks.check([part])
        frame = self._idle[0]
        frame.wanted, self._drawn = [], NOTHING
        self._send(frame, [part], range(len(part.tokens)), draws)
        return self._arrived()

    # ---- a step ----------------------------------------------------------------------------------

    def _send(
        self, frame: Frame, slices: Sequence[Slice], rows: Sequence[int], draws: Sequence[Draw]
    ) -> None:
        """Sends off checked slices in a frame. When it has arrived, what was drawn from those rows
        is on the host."""
        self._idle.remove(frame)  # before anything of it runs: `close` waits for what may
        self._under_way.append(frame)
        self._sent += 1
        notes, noted = self._book.note(slices), self._checks.book(slices)
        with self._device():
            stream, (first, end) = self._stream, self._checks.take_changed()
            self._count_ahead(frame, notes)
            count = frame.pack(slices, rows, draws, self._drawn.numbers, noted, notes)
            if end:
                staged = frame.stage_table(self._table, first, end)
                stream.upload(self._table_address + 4 * first, staged, 4 * (end - first))
            stream.upload(self._step_address, frame.input_address, frame.used)
            size = next(size for size in self._graphs if size >= max(count, len(rows)))
            self._graphs[size].launch(stream)
            if notes:
                self._count_graph.launch(stream)
            if draws:
                size = next(size for size in self._draw_graphs if size >= len(draws))
                self._draw_graphs[size].launch(stream)
                n_bytes = len(draws) * SAMPLED_RECORD.size
                stream.download(frame.sampled_address, self._sampled_address, n_bytes)
            stream.record(frame.done)

    def _count_ahead(self, frame: Frame, notes: Sequence[Note]) -> None:
        for part in parts_ahead(notes):
            frame.pack_notes([part])
            self._stream.upload(self._step_address, frame.input_address, frame.used)
            self._count_graph.launch(self._stream)
            self._stream.synchronize()  # then the frame can be written again

    def _arrived(self) -> Frame:
        """Waits for the earliest frame under way."""
        frame = self._under_way[0]
        with self._device():
            frame.done.synchronize()
        self._under_way.popleft()
        self._idle.append(frame)
        return frame

    @contextmanager
    def _device(self) -> Iterator[None]:
        """The context is current, and a failure of the device is the executor's."""
        try:
            self._context.enter()  # the engine's thread is another one than the loading one's
            yield
        except CudaError as error:
            self._broken(error)

    def _broken(self, error: CudaError) -> NoReturn:
        failure = ExecutorFailure(f"CUDA executor: {error}")
        failure.exit_code = error.exit_code
        raise failure from error

    def _require_open(self) -> None:
        if not self._open:
            raise ExecutorFailure("CUDA executor: used after close")

    def close(self) -> None:
        """Gives everything back. Safe to call twice, from any thread."""
        if not self._open:
            return
        self._open = False
        self._context.reenter()
        if self._under_way:
            with suppress(CudaError):  # of a lost context, whose first failure was told
                self._stream.synchronize()  # nothing is freed under a running kernel
        self._cleanup.close()
