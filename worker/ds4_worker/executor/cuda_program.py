"""A lowered image as kernel launches: which kernel, with which parameters, in which order.

Owns: the translation of the image's ops (the same image that the CPU runs) for a given number of
tokens; `cuda_rows` has those that look only at their own row. Pure: addresses are numbers, nothing
is launched. What has no kernel is collected, so that a refusal names all of it. The order of
launches is that of the ops: every launch sees what the ones before it wrote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

from ds4_common.contract import image as im
from ds4_common.errors import UnsupportedModel
from ds4_worker.cuda import kernels as ks
from ds4_worker.cuda.limits import excess
from ds4_worker.cuda.parameters import Cache
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cuda_compressed import CompressedLaunches, row_parts
from ds4_worker.executor.cuda_places import Addresses, Places
from ds4_worker.executor.cuda_rows import Planned, fused

MOST_PARTIAL_BYTES = 128 << 20  # of split attention; more tokens than fit go the other way
SPLIT_TOKENS = 16  # most tokens of a step whose attention is split
MANY_TOKENS = 17  # from here on matrices are multiplied in tiles of columns


def most_parts(image: im.Image, config: ExecutorConfig) -> int:
    """Parts of the longest context."""
    return (config.context_tokens - 1) // ks.part_tokens(image.page_tokens) + 1


def partial_bytes(image: im.Image, config: ExecutorConfig) -> tuple[int, int]:
    """Bytes for the parts of split attention, and the most tokens of a step that they serve."""
    per_token = 0
    for section in image.sections:
        for op in section.ops:
            if op.kind == im.OP_ATTEND:
                width, parts = -(-op.width // 8) * 8, most_parts(image, config)
            elif op.kind == im.OP_ATTEND_ROWS:
                width, parts = image.planes[op.plane].dim, row_parts(image, config, op)
            else:
                continue
            per_token = max(per_token, op.heads * (2 + width) * 4 * parts)
    if not per_token:
        return 0, 0
    tokens = max(1, min(SPLIT_TOKENS, config.batch_tokens, MOST_PARTIAL_BYTES // per_token))
    return tokens * per_token, tokens


def draw_launch(image: im.Image, at: Addresses, rows: int) -> Planned:
    """Draws from the first rows of the logits; as many as are in use, and at most that many."""
    logits, kernel = at.slot(image.logits_slot), ks.KERNELS["sample"]
    parameters = ks.Sample(
        logits=logits.address, logits_stride=logits.stride, samplings=at.samplings,
        sampled=at.sampled, tokens=at.drawn, scratch=at.sample_scratch,
        inputs=at.tokens, row_tokens=at.row_tokens,
        live=at.live(im.SPACE_OUTPUTS), rows=rows, vocabulary=image.vocabulary,
    )  # fmt: skip
    return Planned(ks.Unit(kernel.file), "sample", parameters, kernel.launch(parameters))


def count_launch(image: im.Image, at: Addresses, banks: int) -> Planned:
    """Counts the tokens that the step's notes name."""
    kernel = ks.KERNELS["count_tokens"]
    parameters = ks.Count(
        counts=at.counts, input=at.step, notes=at.notes, tokens=at.tokens, live=at.live_notes,
        rows=banks, vocabulary=image.vocabulary,
    )  # fmt: skip
    return Planned(ks.Unit(kernel.file), "count_tokens", parameters, kernel.launch(parameters))


class Program(CompressedLaunches):
    """The launches of an image for any number of tokens. Raises UnsupportedModel with everything
    that has no kernel."""

    def __init__(
        self,
        image: im.Image,
        config: ExecutorConfig,
        places: Places,
        addresses: Addresses,
    ) -> None:
        super().__init__(image, config, places, addresses)
        self._kv = ks.Unit("cache.cu", kv_type=ks.KV_TYPES.index(config.kv_dtype))
        self._missing: dict[str, None] = {}  # ordered
        self._formats = [slot.act_format for slot in image.slots]
        self._sorted = im.NONE  # the routes whose columns are sorted by expert
        self._split_tokens = partial_bytes(image, config)[1]
        for tokens in (1, MANY_TOKENS, config.batch_tokens):
            for planned in self.launches(tokens):
                if problem := excess(planned.launch):
                    self._missing[f"{planned.kernel} of {tokens} tokens ({problem})"] = None
        if self._missing:
            raise UnsupportedModel(
                f"CUDA executor: no kernels for: {'; '.join(self._missing)}; serve this model"
                " without --cuda, or load it with another layout"
            )

    def launches(self, tokens: int) -> list[Planned]:
        """For steps of at most that many tokens; outputs are at most as many, and at most the
        executor's capacity."""
        self._tokens = tokens
        self._rows = (tokens, min(tokens, self._config.batch_outputs))
        self._sorted = im.NONE
        planned = [self._pending(), *map(self._angles, self._places.turns)]
        for section in self._image.sections:
            for ops in fused(section.ops, self._formats):
                planned += self._translate(section.space, ops)
        return planned

    def _translate(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        method = _METHODS.get(ops[0].kind)
        if method is None:
            self._missing[f"op {_NAMES.get(ops[0].kind, ops[0].kind)}"] = None
            return
        try:
            yield from method(self, space, ops)
        except KeyError as error:
            self._missing[str(error.args[0])] = None

    # ---- matrices --------------------------------------------------------------------------------

    def _product(self, space: int, op: im.ImageOp) -> ks.Matvec:
        weight = self._image.weights[op.weight]
        act, y = self._at.slot(op.inputs[0]), self._at.slot(op.out)
        return ks.Matvec(
            weight=self._at.weight(op.weight), acts=act.address, y=y.address,
            live=self._at.live(space), act_stride=act.stride, y_stride=y.stride,
            rows=weight.rows, cols=weight.cols, columns=self._rows[space], experts=1, used=1,
            act_columns=1,
        )  # fmt: skip

    @property
    def _many(self) -> bool:
        """Whether products go in tiles, which read a weight once for all of their columns."""
        return self._tokens >= MANY_TOKENS

    def _matmul(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        """Products of the same columns, which do not depend on each other. For few columns those
        with matrices of one type are one launch."""
        most, left = 1 if self._many else 1 + ks.MORE_MATRICES, list(ops)
        while left:
            first = left[0]
            alike = [op for op in left if self._alike(op, first)][:most]
            left = [op for op in left if op not in alike]
            yield self._products(space, alike)

    def _alike(self, op: im.ImageOp, other: im.ImageOp) -> bool:
        a, b = self._image.weights[op.weight], self._image.weights[other.weight]
        return (a.ggml_type, a.layout, a.cols) == (b.ggml_type, b.layout, b.cols)

    def _products(self, space: int, ops: Sequence[im.ImageOp]) -> Planned:
        op, *others = ops
        weight, p = self._image.weights[op.weight], self._product(space, op)
        p.bias = self._at.vector(op.bias)
        unit = self._weight_unit(op.weight)
        if self._many:
            whole = ks.Matmul(product=p)
            return Planned(unit, "matmul", whole, ks.matmul_launch(whole, weight.ggml_type))
        for i, other in enumerate(others):
            more = self._product(space, other)
            p.more_weight[i], p.more_y[i], p.more_y_stride[i] = more.weight, more.y, more.y_stride
            p.more_rows[i], p.more_bias[i] = more.rows, self._at.vector(other.bias)
        return Planned(unit, "matvec", p, ks.matvec_launch(p, weight.ggml_type, weight.layout))

    def _matmul_experts(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        weight, p = self._image.weights[op.weight], self._product(space, op)
        p.experts = p.used = weight.experts
        p.act_columns = self._image.slots[op.inputs[0]].columns
        if len(op.inputs) > 1:
            routes = self._at.slot(op.inputs[1])
            p.routes, p.route_stride = routes.address, routes.stride
            p.used = self._width(op.inputs[1]) // 2
        if op.bias != im.NONE:
            p.bias = self._at.weight(op.bias)
            if self._image.weights[op.bias].ggml_type or p.bias % 4:
                raise KeyError("biases of experts that are no aligned F32")
        unit = self._weight_unit(op.weight)
        if p.routes and self._many:
            if self._sorted != op.inputs[1]:
                self._sorted = op.inputs[1]
                yield self._sorting(p)
            columns, tiles, count = self._at.experts
            grouped = ks.Matmul(product=p, sorted=columns, tiles=tiles, n_tiles=count)
            launch = ks.matmul_experts_launch(grouped, weight.ggml_type)
            yield Planned(unit, "matmul", grouped, launch)
        else:
            launch = ks.matvec_experts_launch(p, weight.ggml_type, weight.layout)
            yield Planned(unit, "matvec_experts", p, launch)

    def _sorting(self, p: ks.Matvec) -> Planned:
        columns, tiles, count = self._at.experts
        return self._planned("sort_experts", ks.SortExperts(
            routes=p.routes, live=p.live, columns=columns, tiles=tiles, n_tiles=count,
            routes_stride=p.route_stride, tokens=p.columns, used=p.used, experts=p.experts,
            tile_columns=ks.MATMUL_TILE,
        ))  # fmt: skip

    def _route(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        if op.out == self._sorted:
            self._sorted = im.NONE
        tokens, table = 0, 0
        if op.bias != im.NONE:  # chosen by the token, not by the scores
            tokens, table = self._at.step + self._places.step.tokens, self._at.weight(op.bias)
        logits, routes = self._at.slot(op.inputs[0]), self._at.slot(op.out)
        yield self._planned("route", ks.Route(
            logits=logits.address, bias=self._at.vector(op.weight), routes=routes.address,
            live=self._at.live(space), logits_stride=logits.stride, routes_stride=routes.stride,
            rows=self._rows[space], experts=self._width(op.inputs[0]),
            used=self._width(op.out) // 2, score=op.mode, groups=op.groups,
            groups_used=op.groups_used, group_top=op.width, normalize=op.normalize,
            scale=op.value, tokens=tokens, table=table,
        ))  # fmt: skip

    # ---- the cache -------------------------------------------------------------------------------

    def _cache(self, plane: int, value_dim: int) -> Cache:
        held, at = self._image.planes[plane], self._at.plane(plane)
        return Cache(
            pages=at.address, page_stride=at.page_stride, page_table=at.page_table,
            pages_per_bank=self._places.pages_per_bank, page_tokens=self._image.page_tokens,
            kv_heads=held.kv_heads, dim=held.dim, value_dim=value_dim,
            latent=held.kind == im.PLANE_LATENT,
        )  # fmt: skip

    def _kv_store(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        k = self._at.slot(op.inputs[0])
        p = ks.KvStore(
            cache=self._cache(op.plane, self._image.planes[op.plane].value_dim), k=k.address,
            positions=self._positions, banks=self._banks, live=self._at.live(space),
            k_stride=k.stride, tokens=self._tokens,
        )  # fmt: skip
        if len(op.inputs) > 1:  # not a latent, which is both
            v = self._at.slot(op.inputs[1])
            p.v, p.v_stride = v.address, v.stride
        yield self._cached("kv_store", p)

    def _cached(self, name: str, parameters: ctypes.Structure) -> Planned:
        launch = ks.CACHE_KERNELS[name].launch(parameters)
        return Planned(self._kv, name, parameters, launch)

    def _attend(self, space: int, ops: Sequence[im.ImageOp]) -> Iterator[Planned]:
        (op,) = ops
        q, y = self._at.slot(op.inputs[0]), self._at.slot(op.out)
        group = op.heads // self._image.planes[op.plane].kv_heads
        split = self._tokens <= self._split_tokens
        # Few tokens are mostly of different sequences, which share nothing in a tile.
        tile_tokens, tile_heads = ks.attend_tile(group, 1 if split else self._tokens)
        p = ks.Attend(
            cache=self._cache(op.plane, op.width), q=q.address, y=y.address,
            positions=self._positions, banks=self._banks, live=self._at.live(space),
            sinks=self._at.vector(op.weight), parts=self._at.partials,
            q_stride=q.stride, y_stride=y.stride, tokens=self._tokens,
            heads=op.heads, tile_tokens=tile_tokens, tile_heads=tile_heads,
            part_tokens=ks.part_tokens(self._image.page_tokens),
            most_parts=most_parts(self._image, self._config), window=op.window, scale=op.value,
            soft_cap=op.limit,
        )  # fmt: skip
        for name in ("attend_parts", "attend_fold") if split else ("attend_whole",):
            yield self._cached(name, p)


_Method = Callable[[Program, int, Sequence[im.ImageOp]], Iterator[Planned]]
_METHODS: dict[int, _Method] = {
    im.OP_EMBED: Program._embed,
    im.OP_RMS_NORM: Program._rms_norm,
    im.OP_ROPE: Program._rope,
    im.OP_KV_STORE: Program._kv_store,
    im.OP_ADD: Program._add,
    im.OP_GLU: Program._glu,
    im.OP_GATHER: Program._gather,
    im.OP_QUANTIZE: Program._quantize,
    im.OP_SOFT_CAP: Program._soft_cap,
    im.OP_GATE_ROW: Program._gate_row,
    im.OP_SCALE_PARTS: Program._scale_parts,
    im.OP_SLICE_HEADS: Program._slice_heads,
    im.OP_JOIN_HEADS: Program._join_heads,
    im.OP_COMBINE: Program._combine,
    im.OP_MATMUL: Program._matmul,
    im.OP_ATTEND: Program._attend,
    im.OP_ROUTE: Program._route,
    im.OP_HYPER_WEIGHTS: Program._hyper_weights,
    im.OP_HYPER_READ: Program._hyper_read,
    im.OP_HYPER_WRITE: Program._hyper_write,
    im.OP_HADAMARD: Program._hadamard,
    im.OP_ROUND_FLOATS: Program._round_floats,
    im.OP_COMPRESS: Program._compress,
    im.OP_STORE_ROWS: Program._store_rows,
    im.OP_INDEX_ROWS: Program._index_rows,
    im.OP_ATTEND_ROWS: Program._attend_rows,
    im.OP_MATMUL_EXPERTS: Program._matmul_experts,
}


_NAMES = {getattr(im, name): name[3:].lower() for name in dir(im) if name.startswith("OP_")}
