"""The CPU executor: packs a step into preallocated buffers and makes one native call.

Owns: the buffers of one engine, and turning its error messages into exceptions. Refuses: any
per-element work, and steps the engine refuses (`StepRefused`, nothing was touched). Imports neither
numpy nor protobuf. Single-threaded: the engine thread is the caller.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ds4_common.contract import image as image_format
from ds4_common.errors import ExecutorFailure, NativeLibraryError, StepRefused
from ds4_common.native import buffers
from ds4_common.quants.native import Isa
from ds4_worker.executor.api import (
    MOST_DRAFTS,
    ExecutorConfig,
    Sampled,
    Sampling,
    Slice,
    WindowPages,
)
from ds4_worker.executor.records import (
    SAMPLED_RECORD,
    SAMPLING_BYTES,
    SLICE_RECORD,
    Allocation,
    History,
    Info,
    OpenConfig,
    engine_library,
    pack_sampling,
    read_sampled,
)

# A buffer, or (address, bytes) that the caller keeps mapped.
MemorySource = memoryview | tuple[int, int]

_ISAS = {"auto": -1} | {isa.name.lower(): isa.value for isa in Isa}
_KV_DTYPES = {"f16": 0, "f32": 1, "bf16": 2, "q8_0": 3}  # native/kv.h
_SECTION_KINDS = (  # native/image.h, and the last two
    "rows", "matmul", "attend", "experts", "compress", "index", "attend_rows", "sample", "around",
)  # fmt: skip
_REFUSED = 1  # native/exec.h DS4_STEP_REFUSED
_ALL_ROWS, _SAMPLE_ROWS = 1, 2  # native/exec.h DS4_STEP_ALL_ROWS, DS4_STEP_SAMPLE_ROWS


class Spent(msgspec.Struct, frozen=True):
    """What a section of the program took, without the profile's own readings of the clock: from its
    beginning to the next one's; of that the busiest thread's tasks, the rest is handing out tasks
    and waiting for them; and the tasks of all threads together."""

    kind: str
    seconds: float
    busy_seconds: float
    work_seconds: float


class _Pinned:
    """Addresses of Python buffers, which stay exported (cannot be unmapped) until `release`."""

    def __init__(self) -> None:
        self._views: list[buffers.View] = []

    def address(self, source: MemorySource | bytes) -> tuple[int, int]:
        """(address, bytes) of a contiguous buffer."""
        if isinstance(source, tuple):
            return source
        view = buffers.hold(source)
        self._views.append(view)
        return view.address, view.n_bytes

    def release(self) -> None:
        while self._views:
            self._views.pop().release()


class CpuExecutor:
    """Runs a CPU image over the weights of `allocations` (id -> memory, read-only is enough).

    The memory must stay mapped until `close`; buffers given as memoryviews are held exported.
    Raises ExecutorFailure when the image does not check out or memory is short.
    """

    def __init__(
        self,
        image: memoryview | bytes,
        allocations: Mapping[int, MemorySource],
        config: ExecutorConfig,
    ) -> None:
        self._engine = ctypes.c_void_p()
        self._pinned = _Pinned()
        self._library = engine_library()
        self._map_nothing()
        try:
            self._open(image, allocations, config)
        except BaseException:
            self.close()
            raise

    def _open(
        self,
        image: memoryview | bytes,
        allocations: Mapping[int, MemorySource],
        config: ExecutorConfig,
    ) -> None:
        table = (Allocation * max(1, len(allocations)))()
        for entry, (id_, source) in zip(table, allocations.items(), strict=False):
            entry.id = id_
            entry.data, entry.n_bytes = self._pinned.address(source)
        address, n_bytes = self._pinned.address(image)
        native = OpenConfig(
            image=address,
            image_bytes=n_bytes,
            abi=image_format.image_abi(),
            allocations=ctypes.addressof(table),
            n_allocations=len(allocations),
            threads=config.threads,
            banks=config.banks,
            context_tokens=config.context_tokens,
            pages=config.pages,
            batch_tokens=config.batch_tokens,
            batch_outputs=config.batch_outputs,
            kv_type=_choice("kv_dtype", config.kv_dtype, _KV_DTYPES),
            isa=_choice("isa", config.isa, _ISAS),
        )
        error = ctypes.create_string_buffer(256)
        if self._library.ds4_engine_open(
            ctypes.byref(native), ctypes.byref(self._engine), error, len(error)
        ):
            raise ExecutorFailure(f"CPU executor: {error.value.decode(errors='replace')}")
        info = Info()
        self._library.ds4_engine_info(self._engine, ctypes.byref(info))
        if info.struct_bytes != SLICE_RECORD.size + SAMPLING_BYTES + SAMPLED_RECORD.size:
            raise NativeLibraryError(
                f"native library: step records of {info.struct_bytes} bytes, expected "
                f"{SLICE_RECORD.size + SAMPLING_BYTES + SAMPLED_RECORD.size}; "
                "rebuild it with: python common/ds4_common/native/build.py"
            )
        self.config = config
        self.vocabulary: int = info.vocabulary
        self.page_tokens: int = info.page_tokens
        keeper, *windows = self._histories(info.histories)
        self.pages, self.page_bytes = keeper.pages, keeper.page_bytes
        self.windows = tuple(windows)
        self.pages_per_bank: int = info.pages_per_bank
        self.rewinds: bool = info.rewinds > MOST_DRAFTS
        self.divisible: bool = not info.forward_only
        self.threads: int = info.threads
        self.isa = Isa(info.isa).name.lower()
        self._sections: int = info.sections
        self._logits_stride: int = info.logits_stride
        self._map_buffers(config)

    def _histories(self, count: int) -> list[WindowPages]:
        found = []
        for history in range(count):
            facts = History()
            self._library.ds4_engine_history(self._engine, history, ctypes.byref(facts))
            found.append(WindowPages(facts.window, facts.pages, facts.most, facts.page_bytes))
        return found

    def _map_buffers(self, config: ExecutorConfig) -> None:
        """Views over the engine's own step buffers; they live as long as the engine."""

        def buffer(name: str, ctype: type[ctypes.Array[ctypes.c_char]]) -> memoryview:
            address = getattr(self._library, f"ds4_engine_{name}")(self._engine)
            return memoryview(ctype.from_address(address)).cast("B")

        outputs, banks = config.batch_outputs, config.banks
        self._slices = buffer("slices", ctypes.c_char * (SLICE_RECORD.size * banks))
        self._tokens = buffer("tokens", ctypes.c_char * (4 * config.batch_tokens)).cast("i")
        self._samplings = buffer("samplings", ctypes.c_char * (SAMPLING_BYTES * outputs))
        self._sampled = buffer("sampled", ctypes.c_char * (SAMPLED_RECORD.size * outputs))
        tables = (1 + len(self.windows)) * banks
        page_table = ctypes.c_char * (4 * tables * self.pages_per_bank)
        self._page_table = buffer("page_table", page_table).cast("i")
        logits = ctypes.c_char * (4 * outputs * self._logits_stride)
        self._logits = buffer("logits", logits).cast("f")

    def _map_nothing(self) -> None:
        self._slices = self._samplings = self._sampled = memoryview(bytearray())
        self._tokens = self._page_table = memoryview(bytearray()).cast("i")
        self._logits = memoryview(bytearray()).cast("f")

    def set_page(self, bank: int, index: int, page: int, history: int = 0) -> None:
        """Maps logical page `index` of a bank to a physical page; -1 unmaps it."""
        if not (0 <= bank < self.config.banks and 0 <= index < self.pages_per_bank):
            raise StepRefused(
                f"page table: got bank {bank}, index {index}; expected below "
                f"{self.config.banks} and {self.pages_per_bank}"
            )
        pages = self._pages_of(history)
        if not -1 <= page < pages:
            raise StepRefused(f"page table: got page {page}, expected -1 to {pages - 1}")
        self._require_open()
        table = history * self.config.banks + bank
        self._page_table[table * self.pages_per_bank + index] = page

    def copy_page(self, source: int, target: int, tokens: int, history: int = 0) -> None:
        """Makes page `target` hold the first `tokens` of page `source`. Raises StepRefused when
        `source` holds fewer."""
        self._require_open()
        self._pages_of(history)
        if self._library.ds4_engine_copy_page(self._engine, history, source, target, tokens):
            raise StepRefused(self._message())

    def map_own_pages(self) -> None:
        """Gives every bank its own consecutive pages, those of a window in turn: for programs
        without a page allocator. Raises StepRefused when there are fewer."""
        for history in range(1 + len(self.windows)):
            most = self.windows[history - 1].most if history else self.pages_per_bank
            for bank in range(self.config.banks):
                for index in range(self.pages_per_bank):
                    self.set_page(bank, index, bank * most + index % most, history)

    def _pages_of(self, history: int) -> int:
        if not 0 <= history <= len(self.windows):
            raise StepRefused(f"history: got {history}, expected at most {len(self.windows)}")
        return self.windows[history - 1].pages if history else self.pages

    def step(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        """Runs the program over all slices; the draws of each. Raises StepRefused before touching
        anything when a slice does not fit, ExecutorFailure when the engine broke."""
        outputs = self._pack(slices)
        self._run(len(slices), outputs)
        results: list[Sampled | None] = []
        row = 0
        for piece in slices:
            if piece.sample is None:
                results.append(None)
                continue
            for sample in (*piece.checks, piece.sample):
                results.append(self._result(row, sample))
                row += 1
        return results

    def score(self, piece: Slice, targets: Sequence[int], logprobs: int) -> list[Sampled]:
        """The log-probability of each target after its token of the slice, and the best ones: by
        the sampler, so that they are those of a generation to the bit."""
        if len(targets) != len(piece.tokens):
            raise StepRefused(f"score: {len(targets)} targets for {len(piece.tokens)} tokens")
        results = []
        for first, count in self._parts(piece):
            samples = [
                Sampling(temperature=0.0, logprobs=logprobs, forced=target)
                for target in targets[first : first + count]
            ]
            for row, sample in enumerate(samples):
                pack_sampling(self._samplings, row * SAMPLING_BYTES, sample)
            self._run(1, 0, _ALL_ROWS | _SAMPLE_ROWS)
            results += [self._result(row, sample) for row, sample in enumerate(samples)]
        return results

    def logits(self, slices: Sequence[Slice]) -> list[list[list[float]]]:
        """The logits of every token of every slice."""
        return [[list(row) for row in self.logit_rows(piece)] for piece in slices]

    def logit_rows(self, piece: Slice) -> Iterator[memoryview[float]]:
        """The logits of every token of a slice; each view holds until the next one is asked for."""
        for _, count in self._parts(piece):
            self._run(1, 0, _ALL_ROWS)
            for start in range(0, count * self._logits_stride, self._logits_stride):
                yield self._logits[start : start + self.vocabulary]

    def _parts(self, piece: Slice) -> Iterator[tuple[int, int]]:
        """Packs a slice in parts that fit the engine's output rows, which changes no bit: the first
        token and the number of tokens of each."""
        most = min(self.config.batch_tokens, self.config.batch_outputs)
        for first in range(0, len(piece.tokens), most):
            tokens = piece.tokens[first : first + most]
            self._pack([Slice(piece.bank, piece.start + first, tokens)])
            yield first, len(tokens)

    def profile(self, enabled: bool) -> list[Spent]:
        """Switches the built-in profile on or off; returns what it had collected since it was
        switched on, section by section in program order, then the sampler, and what lies around
        the sections in the native call."""
        self._require_open()
        count = self._sections + 2
        times, kinds = (ctypes.c_double * (3 * count))(), (ctypes.c_int32 * count)()
        self._library.ds4_engine_profile(self._engine, int(enabled), times, kinds)
        return [
            Spent(_SECTION_KINDS[kind], *(time / 1e9 for time in times[3 * i : 3 * i + 3]))
            for i, kind in enumerate(kinds)
        ]

    def native_allocations(self) -> int:
        """How often the engine has allocated memory; constant after loading."""
        self._require_open()
        return int(self._library.ds4_engine_allocations(self._engine))

    def close(self) -> None:
        """Stops the threads, frees the engine, releases the buffers. Safe to call twice."""
        if self._engine:
            self._map_nothing()  # the views' memory goes away
            self._library.ds4_engine_close(self._engine)
            self._engine = ctypes.c_void_p()
        self._pinned.release()

    def _pack(self, slices: Sequence[Slice]) -> int:
        """Writes slices, tokens and sampling records; returns the number of output rows."""
        self._require_open()
        config = self.config
        if len(slices) > config.banks:
            raise StepRefused(f"step: got {len(slices)} slices, expected at most {config.banks}")
        used = outputs = 0
        tokens = self._tokens
        for i, piece in enumerate(slices):
            ids = piece.tokens
            count = len(ids)
            if used + count > config.batch_tokens:
                raise StepRefused(
                    f"step: got more than {config.batch_tokens} tokens (batch_tokens)"
                )
            rows, sample = 0, piece.sample
            if sample is not None:
                rows = len(piece.checks) + 1
                if outputs + rows > config.batch_outputs:
                    most = config.batch_outputs
                    raise StepRefused(f"step: got more than {most} outputs (batch_outputs)")
                for row, how in enumerate((*piece.checks, sample), start=outputs):
                    pack_sampling(self._samplings, row * SAMPLING_BYTES, how)
                outputs += rows
            elif piece.checks:
                raise StepRefused(f"step: slice {i} of bank {piece.bank}: checks without a sample")
            try:
                SLICE_RECORD.pack_into(
                    self._slices, i * SLICE_RECORD.size, piece.bank, piece.start, used, count, rows
                )
                for token in ids:
                    tokens[used] = token
                    used += 1
            except (struct.error, ValueError, TypeError) as error:
                raise StepRefused(f"step: slice {i} of bank {piece.bank}: {error}") from error
        return outputs

    def _run(self, slices: int, outputs: int, flags: int = 0) -> None:
        status = self._library.ds4_engine_step(self._engine, slices, outputs, flags)
        if status:
            if status == _REFUSED:
                raise StepRefused(f"step: {self._message()}")
            raise ExecutorFailure(f"CPU executor: {self._message()}")

    def _message(self) -> str:
        message: bytes = self._library.ds4_engine_error(self._engine)
        return message.decode(errors="replace")

    def _require_open(self) -> None:
        if not self._engine:
            raise ExecutorFailure("CPU executor: used after close")

    def _result(self, row: int, sample: Sampling) -> Sampled:
        return read_sampled(self._sampled, row * SAMPLED_RECORD.size, sample)


def _choice(field: str, got: str, choices: Mapping[str, int]) -> int:
    if got not in choices:
        raise ExecutorFailure(f"executor config {field}: got {got!r}, expected {sorted(choices)}")
    return choices[got]
