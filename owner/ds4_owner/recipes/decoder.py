"""Writes the program of a decoder-only transformer from its description.

Owns: the shape that all families of `families/` share - embedding, layers of attention and
feed-forward around a residual stream, output - and how each part becomes ops and tensors. A family
says which parts it has. Tensor names are those of the GGUF format. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ds4_common.contract.ops import (
    BANKS,
    OUTPUT_ROWS,
    PAGE_TABLE,
    POSITIONS,
    TOKENS,
    GatedUnit,
    RouteScore,
)
from ds4_common.errors import UnsupportedModel
from ds4_owner.recipes.builder import TextProgram

ADJACENT, HALVES = 0, 1  # pairs of the rope op


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation: `attributes` are those of the rope op; factors are names of tensors that the file
    may have. `long_factors` serve contexts longer than attributes["original_context"]."""

    dim: int
    style: int
    attributes: Mapping[str, float]
    factors: str = ""
    long_factors: str = ""


class Part(Protocol):
    """One half of a layer: reads the normed stream `x` of `width`, writes its branch to `out`."""

    def write(
        self, program: TextProgram, layer: int, x: str, out: str, width: int, epsilon: float
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Part
    feed_forward: Part


@dataclass(frozen=True, slots=True)
class Decoder:
    """`ffn_norm`: the tensor that norms the stream for the feed-forward part. `post_norms`: tensors
    that norm the attention's and the feed-forward's branch before it joins the stream."""

    width: int
    epsilon: float
    layers: Sequence[Layer]
    embedding_scale: float = 1.0
    ffn_norm: str = "ffn_norm"
    post_norms: tuple[str, str] | None = None
    logit_cap: float = 0.0


def write_decoder(program: TextProgram, vocabulary: int, decoder: Decoder) -> None:
    """Writes the whole program: tokens in, logits of the wanted rows out."""
    width, epsilon = decoder.width, decoder.epsilon
    table = program.weight("token_embd.weight", vocabulary, width)
    x, normed = program.scratch("x", width), program.scratch("normed", width)
    branch = program.scratch("branch", width)
    program.op("embed", (TOKENS, table), (x,), scale=decoder.embedding_scale)
    after = decoder.post_norms or ("", "")
    for i, layer in enumerate(decoder.layers):
        for part, before, post in (
            (layer.attention, "attn_norm", after[0]),
            (layer.feed_forward, decoder.ffn_norm, after[1]),
        ):
            program.norm(x, f"blk.{i}.{before}.weight", width, normed, epsilon)
            part.write(program, i, normed, branch, width, epsilon)
            if post:
                program.norm(branch, f"blk.{i}.{post}.weight", width, branch, epsilon)
            program.op("add", (x, branch), (x,))
    wanted = program.scratch("wanted", width)
    program.op("gather_rows", (x, OUTPUT_ROWS), (wanted,))
    program.norm(wanted, "output_norm.weight", width, wanted, epsilon)
    logits = program.logits(vocabulary)
    write_logits(program, vocabulary, wanted, width, table, logits)
    if decoder.logit_cap:
        program.op("soft_cap", (logits,), (logits,), cap=decoder.logit_cap)


def write_logits(
    program: TextProgram, vocabulary: int, x: str, width: int, table: str, logits: str
) -> None:
    """Logits by the matrix that the file has for them, else by the table of tokens."""
    if program.has("output.weight"):
        program.linear(x, "output", width, logits, vocabulary)
    else:
        bias = program.optional_weight("output.bias", vocabulary)
        program.op("matmul", (x, table, bias), (logits,))


@dataclass(frozen=True, slots=True)
class Attention:
    """Paged attention with grouped heads. Biases are taken where the file has them.

    `head_norms`: q and k are normed per head; `sinks`: each head has a score of its own that takes
    part in the softmax. q, k and v are tensors of their own or rows of one attn_qkv, as the file
    has them; `fused` says which a file with neither lacks.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    rope: Rope
    window: int = 0
    soft_cap: float = 0.0
    head_norms: bool = False
    fused: bool = False
    sinks: bool = False

    def write(
        self, program: TextProgram, layer: int, x: str, out: str, width: int, epsilon: float
    ) -> None:
        widths = (
            self.heads * self.key_dim,
            self.kv_heads * self.key_dim,
            self.kv_heads * self.value_dim,
        )
        q, k, v = (program.scratch(*named) for named in zip("qkv", widths, strict=True))
        stems = [f"blk.{layer}.attn_{name}" for name in ("qkv", *"qkv")]
        apart = program.has(f"{stems[1]}.weight")
        if program.has(f"{stems[0]}.weight") or (self.fused and not apart):
            program.linear_parts(x, stems[0], width, (q, k, v), widths, stems[1:])
        else:
            for name, out_width in zip("qkv", widths, strict=True):
                part = program.scratch(name, out_width)
                program.linear(x, f"blk.{layer}.attn_{name}", width, part, out_width)
        for name, heads in (("q", self.heads), ("k", self.kv_heads)):
            part = program.scratch(name, heads * self.key_dim)
            if self.head_norms:
                norm = f"blk.{layer}.attn_{name}_norm.weight"
                program.norm(part, norm, self.key_dim, part, epsilon, heads=heads)
            write_rope(program, self.rope, part, heads, self.key_dim)
        mixed = program.scratch("mixed", self.heads * self.value_dim)
        sinks = program.weight(f"blk.{layer}.attn_sinks.weight", self.heads) if self.sinks else ""
        write_attention(program, layer, self, q, k, v, sinks, mixed)
        program.linear(mixed, f"blk.{layer}.attn_output", self.heads * self.value_dim, out, width)


def write_rope(
    program: TextProgram, rope: Rope, x: str, heads: int, dim: int, offset: int = 0
) -> None:
    """Rotates dims [offset, offset + rope.dim) of each head of `x` in place."""
    factors, long_factors = (
        program.optional_weight(name, rope.dim // 2) if name else ""
        for name in (rope.factors, rope.long_factors)
    )
    program.op(
        "rope",
        (x, POSITIONS, factors, long_factors),
        (x,),
        heads=heads,
        dim=dim,
        rope_dim=rope.dim,
        style=rope.style,
        offset=offset,
        **rope.attributes,
    )


class Scored(Protocol):
    """What `write_attention` has to know of an attention."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def soft_cap(self) -> float: ...


def write_attention(
    program: TextProgram, layer: int, how: Scored, q: str, k: str, v: str, sinks: str, out: str
) -> None:
    """Stores k and v in the layer's cache, then attends."""
    planes = (
        program.cache(f"cache.{layer}.k", how.kv_heads, how.key_dim, how.window),
        program.cache(f"cache.{layer}.v", how.kv_heads, how.value_dim, how.window),
    )
    extents = {"kv_heads": how.kv_heads, "dim": how.key_dim, "value_dim": how.value_dim}
    program.op("kv_store", (k, v, POSITIONS, BANKS, PAGE_TABLE), planes, **extents)
    program.op(
        "attend_paged",
        (q, *planes, POSITIONS, BANKS, PAGE_TABLE, sinks),
        (out,),
        heads=how.heads,
        scale=how.scale,
        window=how.window,
        soft_cap=how.soft_cap,
        **extents,
    )


@dataclass(frozen=True, slots=True)
class Gated:
    """act(gate x) * up x, then down. `fused`: ffn_up holds gate, then up. `suffix` ends the names
    of the tensors, before the dot. `limit` bounds gate and up."""

    width: int
    act: GatedUnit = GatedUnit.SILU
    fused: bool = False
    suffix: str = ""
    limit: float = 0.0

    def write(
        self, program: TextProgram, layer: int, x: str, out: str, width: int, epsilon: float
    ) -> None:
        del epsilon
        gate = program.scratch(f"gate{self.suffix}", self.width)
        up = program.scratch(f"up{self.suffix}", self.width)
        up_stem = f"blk.{layer}.ffn_up{self.suffix}"
        if self.fused:
            program.linear_parts(x, up_stem, width, (gate, up), (self.width, self.width))
        else:
            program.linear(x, f"blk.{layer}.ffn_gate{self.suffix}", width, gate, self.width)
            program.linear(x, up_stem, width, up, self.width)
        program.op("glu", (gate, up), (gate,), act=self.act, limit=self.limit)
        program.linear(gate, f"blk.{layer}.ffn_down{self.suffix}", self.width, out, width)


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts, and a `shared` one that every token meets, weighed by the sigmoid of its own
    gate when `shared_gate`. Routing attributes are those of route_experts; `unit` are attributes of
    the glu op. A bias of the choice (exp_probs_b) is taken where the file has one. `listed`: a
    table of the file (ffn_gate_tid2eid) names each token's experts; the router only weighs them."""

    count: int
    used: int
    width: int
    score: RouteScore
    normalize: bool
    scale: float
    groups: int = 1
    groups_used: int = 1
    group_top: int = 1
    unit: Mapping[str, float] = field(default_factory=lambda: {"act": GatedUnit.SILU})
    shared: Gated | None = None
    shared_gate: bool = False
    listed: int = 0  # tokens of the table

    def write(
        self, program: TextProgram, layer: int, x: str, out: str, width: int, epsilon: float
    ) -> None:
        routes = self._route(program, layer, x, width)
        gate = self._gate_up(program, layer, x, routes, width)
        each = program.scratch("expert_outputs", self.used * width)
        program.experts(
            gate, routes, f"blk.{layer}.ffn_down_exps", (self.count, width, self.width), each
        )
        program.op("combine_experts", (each, routes), (out,))
        if self.shared is None:
            return
        common = program.scratch("shared", width)
        self.shared.write(program, layer, x, common, width, epsilon)
        if self.shared_gate:
            opening = program.scratch("opening", 1)
            row = program.row_matrix(f"blk.{layer}.ffn_gate_inp_shexp.weight", width)
            program.op("matmul", (x, row), (opening,))
            program.op("gate_row", (common, opening), (common,))
        program.op("add", (out, common), (out,))

    def _route(self, program: TextProgram, layer: int, x: str, width: int) -> str:
        logits = program.scratch("expert_logits", self.count)
        routes = program.scratch("routes", 2 * self.used)
        program.linear(x, f"blk.{layer}.ffn_gate_inp", width, logits, self.count)
        bias = f"blk.{layer}.exp_probs_b.bias"
        choice = [program.optional_weight(bias, self.count)]
        if choice[0] and self.score == RouteScore.LOGITS:
            raise UnsupportedModel(
                f"{bias}: got a bias, expected none where the scores of experts are their logits "
                "(expert_gating_func 3)"
            )
        if self.listed:
            name = f"blk.{layer}.ffn_gate_tid2eid.weight"
            choice = ["", TOKENS, program.table(name, self.listed, self.used)]
            program.leave_out(f"blk.{layer}.exp_probs_b.")
        program.op(
            "route_experts",
            (logits, *choice),
            (routes,),
            score=self.score,
            normalize=self.normalize,
            scale=self.scale,
            groups=self.groups,
            groups_used=self.groups_used,
            group_top=self.group_top,
        )
        return routes

    def _gate_up(self, program: TextProgram, layer: int, x: str, routes: str, width: int) -> str:
        """The gated unit of each expert: [T, used * self.width]."""
        gate = program.scratch("expert_gate", self.used * self.width)
        up = program.scratch("expert_up", self.used * self.width)
        both = f"blk.{layer}.ffn_gate_up_exps"
        shape = (self.count, self.width, width)
        if program.has(f"{both}.weight"):
            merged = program.scratch("expert_gate_up", 2 * self.used * self.width)
            program.experts(x, routes, both, (self.count, 2 * self.width, width), merged)
            for part, first in ((gate, 0), (up, self.width)):
                program.op(
                    "slice_heads", (merged,), (part,),
                    heads=self.used, dim=2 * self.width, first=first, width=self.width,
                )  # fmt: skip
        else:
            program.experts(x, routes, f"blk.{layer}.ffn_gate_exps", shape, gate)
            program.experts(x, routes, f"blk.{layer}.ffn_up_exps", shape, up)
        program.op("glu", (gate, up), (gate,), **self.unit)
        return gate
