"""Assembles one text program: buffers, ops, cache, bindings.

Owns: how a recipe's calls become the messages of the contract schema, and the bookkeeping that
makes refusals complete: which tensors were wanted and absent, which were of another shape, which
the recipe never used. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ds4_common.allocation import Layout, TensorPlace
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.ops import (
    BANKS,
    LOGITS,
    OPS,
    OUTPUT_ROWS,
    PAGE_TABLE,
    POSITIONS,
    TOKENS,
)
from ds4_common.errors import UnsupportedModel
from ds4_common.gguf import GgmlType
from ds4_common.quants import PACKED_ROWS, QuantType

PROGRAM = "step"  # one program serves prefill, decode and any mixture of both
PAGE_TOKENS = 64  # where the recipe says nothing else
_VECTOR_TYPES = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
_KERNEL_TYPES = tuple(GgmlType(int(t)) for t in QuantType)
_LISTED = 8  # names shown in an error
_BY_ROWS = (Layout.RAW, Layout.X8, Layout.IQ2_PLANES)  # layouts in which rows follow each other


class TextProgram:
    """Collects one program. What adds a buffer returns the buffer's name for `op`."""

    def __init__(self, places: Mapping[str, TensorPlace], context_tokens: int) -> None:
        self._places = places
        self._buffers: dict[str, pb.Buffer] = {}
        self._ops = pb.OpList()
        self._page_tokens = PAGE_TOKENS
        self._context_tokens = context_tokens
        self._histories: dict[tuple[int, int, int], list[str]] = {}
        self._problems: list[str] = []
        self._used: set[str] = set()  # tensors that the recipe knows
        for name in (TOKENS, POSITIONS, BANKS, OUTPUT_ROWS):
            self._add(pb.Buffer(name=name, dtype=pb.I32, space=pb.TRANSPORT, shape=(0,)))
        self.page(PAGE_TOKENS)

    def page(self, tokens: int) -> None:
        """Makes a page of the cache hold that many tokens; before the first plane."""
        self._page_tokens = tokens
        shape = (0, -(-self._context_tokens // tokens))
        self._add(pb.Buffer(name=PAGE_TABLE, dtype=pb.I32, space=pb.TRANSPORT, shape=shape))

    def has(self, name: str) -> bool:
        """Whether the file has that tensor."""
        return name in self._places

    def weight(self, name: str, *shape: int) -> str:
        """A tensor of the file that must have `shape`, row-major: a matrix is (out, in)."""
        place = self._place(name, shape, _VECTOR_TYPES if len(shape) == 1 else _KERNEL_TYPES)
        if place is None:
            return name
        return self._add_weight(name, place, shape, place.offset, place.n_bytes)

    def table(self, name: str, *shape: int) -> str:
        """A tensor of the file whose entries are numbers of something."""
        place = self._place(name, shape, (GgmlType.I32,))
        if place is None:
            return name
        return self._add_weight(name, place, shape, place.offset, place.n_bytes)

    def optional_weight(self, name: str, *shape: int) -> str:
        """Like `weight`, but "" (an absent input) when the file has no such tensor."""
        return self.weight(name, *shape) if name in self._places else ""

    def row_matrix(self, name: str, width: int) -> str:
        """A vector of the file as the matrix (1, width)."""
        place = self._place(name, (width,))
        if place is None:
            return name
        return self._add_weight(name, place, (1, width), place.offset, place.n_bytes)

    def weight_rows(self, name: str, shape: tuple[int, ...], first: int, count: int) -> str:
        """Rows [first, first + count) of a tensor of that shape, as a weight of its own.
        A vector's rows are its entries."""
        place = self._place(name, shape)
        if place is None:
            return name
        granule = PACKED_ROWS if place.layout == Layout.X8 else 1
        if place.layout not in _BY_ROWS or first % granule or count % granule:
            self._problems.append(
                f"{name}: rows {first} to {first + count} cannot be cut out of layout "
                f"{Layout(place.layout).name}"
            )
            return name
        row_bytes = place.n_bytes // shape[0]
        part, offset = f"{name}[{first}:{first + count}]", place.offset + first * row_bytes
        return self._add_weight(part, place, (count, *shape[1:]), offset, count * row_bytes)

    def head_matrices(self, name: str, heads: int, rows: int, width: int) -> str:
        """A matrix of the file as one of `rows` for each head, of those that follow each other."""
        place = self._place(name, (heads * rows, width))
        if place is None:
            return name
        if place.layout == Layout.X8 and rows % PACKED_ROWS:
            self._problems.append(f"{name}: {rows} rows per head cannot be cut out of packed ones")
        part = f"{name}[{heads} heads]"
        return self._add_weight(part, place, (heads, rows, width), place.offset, place.n_bytes)

    def leave_out(self, prefix: str) -> None:
        """Tensors that the recipe knows and does without: parts of the model that only other uses
        of it need."""
        self._used.update(name for name in self._places if name.startswith(prefix))

    def scratch(self, name: str, width: int) -> str:
        """Activations [tokens, width]. The same name with another width is another buffer."""
        held = self._buffers.get(name)
        if held is not None and held.shape[-1] != width:
            return self.scratch(f"{name}.{width}", width)
        if held is None:
            self._add(pb.Buffer(name=name, dtype=pb.F32, space=pb.SCRATCH, shape=(0, width)))
        return name

    def cache(self, name: str, heads: int, dim: int, window: int = 0) -> str:
        """One plane of the paged KV cache: [pages, page tokens, heads, dim]; nobody reads beyond
        the last `window` positions."""
        kind = pb.SLIDING_WINDOW if window else pb.PAGED_KV
        return self._plane(name, pb.F16, heads, dim, (kind, 1, window))

    def rows(self, name: str, dim: int, ratio: int = 1, window: int = 0) -> str:
        """A plane with one row for each `ratio` tokens; nobody reads beyond the last `window`."""
        kind = pb.SLIDING_WINDOW if window else pb.PAGED_LATENT
        return self._plane(name, pb.F16, 1, dim, (kind, ratio, window))

    def running(self, name: str, vectors: int, dim: int) -> str:
        """A plane with what runs along a sequence, after the last token of each page."""
        return self._plane(name, pb.F32, vectors, dim, (pb.RECURRENT, self._page_tokens, 0))

    def _plane(
        self, name: str, dtype: pb.DType, heads: int, dim: int, history: tuple[int, int, int]
    ) -> str:
        shape = (0, self._page_tokens // history[1], heads, dim)
        self._add(pb.Buffer(name=name, dtype=dtype, space=pb.CACHE, shape=shape))
        self._histories.setdefault(history, []).append(name)
        return name

    def logits(self, vocabulary: int) -> str:
        shape = (0, vocabulary)
        self._add(pb.Buffer(name=LOGITS, dtype=pb.F32, space=pb.TRANSPORT, shape=shape))
        return LOGITS

    def op(
        self, kernel: str, inputs: Collection[str], outputs: Collection[str], **attributes: float
    ) -> None:
        """Appends one op. Attributes equal to the registry's default are left out."""
        defaults = OPS[kernel].attributes
        kept = {key: float(v) for key, v in attributes.items() if v != defaults[key]}
        message = self._ops.ops.add(kernel=kernel, attr=kept)
        absent = [""] * (len(OPS[kernel].inputs) - len(inputs))
        getattr(message, "in").extend([*inputs, *absent])
        message.out.extend(outputs)

    def norm(self, x: str, name: str, width: int, out: str, epsilon: float, heads: int = 1) -> None:
        """out = RMS norm of each of `heads` parts of x by the vector `name` of `width`."""
        self.op("rms_norm", (x, self.weight(name, width)), (out,), eps=epsilon, heads=heads)

    def linear(self, source: str, stem: str, width: int, out: str, out_width: int) -> None:
        """out = source x `stem`.weight^T, times `stem`.scale and plus `stem`.bias when the file has
        them."""
        weight = self.weight(f"{stem}.weight", out_width, width)
        bias = self.optional_weight(f"{stem}.bias", out_width)
        self._matmul(source, weight, self._scales(stem, 1), bias, out)

    def linear_parts(
        self,
        source: str,
        stem: str,
        width: int,
        outs: Sequence[str],
        widths: Sequence[int],
        parts: Sequence[str] = (),
    ) -> None:
        """Like `linear`, for one tensor whose rows are several results one after the other. Without
        a bias of its own, the results have those of `parts`."""
        first, total = 0, sum(widths)
        for out, rows, part in zip(outs, widths, parts or [""] * len(widths), strict=True):
            weight = self.weight_rows(f"{stem}.weight", (total, width), first, rows)
            bias = ""
            if self.has(f"{stem}.bias"):
                bias = self.weight_rows(f"{stem}.bias", (total,), first, rows)
            elif part:
                bias = self.optional_weight(f"{part}.bias", rows)
            self._matmul(source, weight, self._scales(stem, 1), bias, out)
            first += rows

    def experts(
        self, source: str, routes: str, stem: str, shape: tuple[int, int, int], out: str
    ) -> None:
        """out = each token's experts of `stem`.weight, times their `stem`.scale or plus their
        `stem`.bias if there is one."""
        weight = self.weight(f"{stem}.weight", *shape)
        bias = self.optional_weight(f"{stem}.bias", *shape[:2])
        scales = self._scales(stem, shape[0])
        if bias and scales:
            self._problems.append(f"{stem}.scale: got one beside a bias, expected one of them")
        self.op("matmul_experts", (source, routes, weight, bias), (out,))
        if scales:
            self.op("scale_parts", (out, scales, routes), (out,))

    def _matmul(self, source: str, weight: str, scale: str, bias: str, out: str) -> None:
        self.op("matmul", (source, weight, "" if scale else bias), (out,))
        if scale:
            self.op("scale_parts", (out, scale, "", bias), (out,))

    def _scales(self, stem: str, count: int) -> str:
        """What results of `stem`.weight are to be multiplied by, if anything. Scales of the inputs
        are for hardware that rounds activations to the type of the weights."""
        self.leave_out(f"{stem}.input_scale")
        return self.optional_weight(f"{stem}.scale", count)

    def finish(self, bundle: pb.Bundle) -> None:
        """Writes program, buffers, cache and resources into `bundle`. Raises UnsupportedModel
        naming every tensor that is missing, misshapen or left over."""
        extra = sorted(self._places.keys() - self._used)
        found = []
        if self._problems:
            found = [f"tensors do not fit this architecture: {_some(self._problems)}"]
        if extra:
            unknown = f"tensors that this architecture's recipe does not know: {_some(extra)}; "
            found.append(f"{unknown}leaving them out would change the results")
        if found:
            raise UnsupportedModel(", and ".join(found))
        execution = bundle.execution
        execution.frames = 1
        execution.buffers.extend(self._buffers.values())
        execution.programs.add(name=PROGRAM, ops=self._ops)
        width = self._buffers[LOGITS].shape[-1]
        execution.completion.CopyFrom(
            pb.CompletionLayout(buffer=LOGITS, row_words=width, max_tokens=1)
        )
        ends: dict[int, int] = {}
        for buffer in self._buffers.values():
            if buffer.space == pb.WEIGHT:
                number = int(buffer.resource.removeprefix("alloc:"))
                ends[number] = max(ends.get(number, 0), buffer.offset + buffer.bytes)
        for allocation, end in sorted(ends.items()):
            bundle.resources.add(id=f"alloc:{allocation}", kind="allocation", bytes=end)
        model = bundle.serving.model
        model.cache.page_tokens = self._page_tokens
        for (kind, per_record, window), planes in self._histories.items():
            model.cache.histories.add(
                kind=pb.HistoryKind.Name(kind),
                planes=planes,
                tokens_per_record=per_record,
                window_tokens=window,
            )
        model.cache.page_tables.add(buffer=PAGE_TABLE)
        model.programs.append(_program())

    def _place(
        self, name: str, shape: tuple[int, ...], types: Sequence[GgmlType] = _KERNEL_TYPES
    ) -> TensorPlace | None:
        """Where the tensor lies, if it has that shape and one of the types; otherwise the problem
        is noted."""
        self._used.add(name)
        place = self._places.get(name)
        if place is None:
            self._problems.append(f"{name}: missing, expected {_dims(shape)}")
        elif place.dims != tuple(reversed(shape)):
            got = _dims(tuple(reversed(place.dims)))
            self._problems.append(f"{name}: got {got}, expected {_dims(shape)}")
        elif place.ggml_type not in types:
            wanted = ", ".join(t.name for t in types)
            self._problems.append(f"{name}: got type {_type(place)}, expected one of {wanted}")
        else:
            return place
        return None

    def _add_weight(
        self, name: str, place: TensorPlace, shape: tuple[int, ...], offset: int, n_bytes: int
    ) -> str:
        if name not in self._buffers:
            self._add(
                pb.Buffer(
                    name=name,
                    dtype=pb.GGML_BLOCKS,
                    shape=shape,
                    space=pb.WEIGHT,
                    resource=f"alloc:{place.allocation}",
                    offset=offset,
                    ggml_type=place.ggml_type,
                    layout=place.layout,
                    bytes=n_bytes,
                )
            )
        return name

    def _add(self, buffer: pb.Buffer) -> None:
        self._buffers[buffer.name] = buffer


def _program() -> pb.Program:
    """The step program's host bindings: what the packer writes into which transport buffer."""
    program = pb.Program(
        name=PROGRAM,
        operation=pb.MIXED,
        verify_tokens=1,
        state_rows_per_request=1,
        pending_host=True,
    )
    for buffer, source, indexing in (
        (TOKENS, pb.PROMPT_TOKENS, pb.PACKED_TOKEN),
        (TOKENS, pb.PENDING_TOKEN, pb.PACKED_TOKEN),
        (POSITIONS, pb.POSITIONS, pb.PACKED_TOKEN),
        (BANKS, pb.SLOT, pb.PACKED_TOKEN),
        (PAGE_TABLE, pb.PAGE_TABLE, pb.PHYSICAL_ROW),
        (OUTPUT_ROWS, pb.OUTPUT_ROWS, pb.ACTIVE_ROW),
    ):
        program.bindings.add(buffer=buffer, source=source, indexing=indexing)
    return program


def _type(place: TensorPlace) -> str:
    known = {int(ggml_type): ggml_type.name for ggml_type in GgmlType}
    return known.get(place.ggml_type, str(place.ggml_type))


def _dims(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _some(names: Collection[str]) -> str:
    shown = list(names)[:_LISTED]
    more = len(names) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
