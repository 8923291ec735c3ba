"""Attention over a window of recent tokens and over rows that stand for several tokens each.

Owns: how its parts become ops and tensors: one row per token that is key and value in one, rows
that windows of tokens are compressed into, an index that picks among them, and the way back
through a matrix per group of heads. Rows are rounded to the small floats that such models are
trained with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds4_common.contract.ops import BANKS, PAGE_TABLE, POSITIONS, SmallFloat
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import Rope

_PLACE = (POSITIONS, BANKS, PAGE_TABLE)
_BLOCKS = {SmallFloat.E4M3: 64, SmallFloat.E2M1: 32}


@dataclass(frozen=True, slots=True)
class Index:
    """Picks `chosen` compressed rows by rows of its own, of `dim`, under `heads` queries."""

    heads: int
    dim: int
    chosen: int


@dataclass(frozen=True, slots=True)
class Compressed:
    """`ratio` tokens make one compressed row; 0: there are none. With an index, windows overlap:
    a row stands for its own tokens and the window before. The last rope.dim dims are rotated."""

    heads: int
    dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    window: int
    rope: Rope
    ratio: int
    index: Index | None

    def write(
        self, program: TextProgram, layer: int, x: str, out: str, width: int, epsilon: float
    ) -> None:
        """Reads the normed stream, writes the branch (recipes/decoder.py, Part)."""
        stem, q_width = f"blk.{layer}", self.heads * self.dim
        short = program.scratch("short_q", self.query_rank)
        program.linear(x, f"{stem}.attn_q_a", width, short, self.query_rank)
        program.norm(short, f"{stem}.attn_q_a_norm.weight", self.query_rank, short, epsilon)
        q, row = program.scratch("q", q_width), program.scratch("row", self.dim)
        program.linear(short, f"{stem}.attn_q_b", self.query_rank, q, q_width)
        program.op("rms_norm", (q,), (q,), eps=epsilon, heads=self.heads)
        self._rotate(program, q, self.heads, self.dim)
        program.linear(x, f"{stem}.attn_kv", width, row, self.dim)
        program.norm(row, f"{stem}.attn_kv_a_norm.weight", self.dim, row, epsilon)
        self._rotate(program, row, 1, self.dim)
        _round(program, row, 1, self.dim - self.rope.dim, SmallFloat.E4M3)
        recent = program.rows(f"cache.{layer}.rows", self.dim, window=self.window)
        program.op("store_rows", (row, *_PLACE), (recent,))
        compressed, chosen = "", ""
        if self.ratio:
            compressed = self._compress(program, layer, x, "attn", self.dim, width, epsilon)
        if self.index is not None:
            chosen = self._choose(program, layer, self.index, x, short, width, epsilon)
        sinks = program.weight(f"{stem}.attn_sinks.weight", self.heads)
        mixed = program.scratch("mixed", q_width)
        program.op(
            "attend_rows", (q, recent, *_PLACE, compressed, chosen, sinks), (mixed,),
            heads=self.heads, scale=1.0 / math.sqrt(self.dim), window=self.window,
            ratio=self.ratio or 1,
        )  # fmt: skip
        self._rotate(program, mixed, self.heads, self.dim, inverse=1)
        self._output(program, f"{stem}.attn_output", mixed, out, width)

    def _output(self, program: TextProgram, stem: str, mixed: str, out: str, width: int) -> None:
        part = self.heads * self.dim // self.output_groups
        rank = self.output_groups * self.output_rank
        grouped = program.scratch("grouped", rank)
        matrices = program.head_matrices(
            f"{stem}_a.weight", self.output_groups, self.output_rank, part
        )
        program.op("matmul_heads", (mixed, matrices), (grouped,))
        program.linear(grouped, f"{stem}_b", rank, out, width)

    def _compress(
        self,
        program: TextProgram,
        layer: int,
        x: str,
        name: str,
        dim: int,
        width: int,
        epsilon: float,
    ) -> str:
        """Stores the compressed rows of `name`'s compressor; their plane."""
        stem, wide = f"blk.{layer}.{name}_compressor", dim * (2 if self.index else 1)
        k, gate = program.scratch(f"{name}_k", wide), program.scratch(f"{name}_gate", wide)
        program.linear(x, f"{stem}_kv", width, k, wide)
        program.linear(x, f"{stem}_gate", width, gate, wide)
        row = program.scratch(f"{name}_compressed", dim)
        state = program.running(f"cache.{layer}.{name}_state", 3 * wide // dim, dim)
        bias = program.weight(f"{stem}_ape.weight", self.ratio, wide)
        program.op("compress", (k, gate, bias, *_PLACE), (state, row), ratio=self.ratio)
        program.norm(row, f"{stem}_norm.weight", dim, row, epsilon)
        self._rotate(program, row, 1, dim, shift=1 - self.ratio)  # where its window begins
        if name == "attn":
            _round(program, row, 1, dim - self.rope.dim, SmallFloat.E4M3)
        else:
            _spread(program, row, 1, dim)
        plane = program.rows(f"cache.{layer}.{name}_compressed", dim, self.ratio)
        tiles = int(name != "attn")
        program.op("store_rows", (row, *_PLACE), (plane,), ratio=self.ratio, tiles=tiles)
        return plane

    def _choose(
        self,
        program: TextProgram,
        layer: int,
        index: Index,
        x: str,
        short: str,
        width: int,
        epsilon: float,
    ) -> str:
        plane = self._compress(program, layer, x, "indexer", index.dim, width, epsilon)
        stem, q_width = f"blk.{layer}.indexer", index.heads * index.dim
        q, weights = program.scratch("index_q", q_width), program.scratch("index_w", index.heads)
        program.linear(short, f"{stem}.attn_q_b", self.query_rank, q, q_width)
        self._rotate(program, q, index.heads, index.dim)
        _spread(program, q, index.heads, index.dim)
        program.linear(x, f"{stem}.proj", width, weights, index.heads)
        chosen = program.scratch("chosen", index.chosen)
        program.op(
            "index_rows", (q, weights, plane, *_PLACE), (chosen,),
            heads=index.heads, ratio=self.ratio, scale=1.0 / math.sqrt(q_width),
        )  # fmt: skip
        return chosen

    def _rotate(
        self, program: TextProgram, x: str, heads: int, dim: int, shift: int = 0, inverse: int = 0
    ) -> None:
        program.op(
            "rope", (x, POSITIONS), (x,),
            heads=heads, dim=dim, rope_dim=self.rope.dim, style=self.rope.style,
            offset=dim - self.rope.dim, shift=shift, inverse=inverse, **self.rope.attributes,
        )  # fmt: skip


def _round(program: TextProgram, x: str, heads: int, dims: int, kind: SmallFloat) -> None:
    """Rounds the first `dims` of each head. Blocks are smaller where they would not fill them."""
    block = math.gcd(_BLOCKS[kind], dims)
    program.op("round_floats", (x,), (x,), format=kind, block=block, dims=dims, heads=heads)


def _spread(program: TextProgram, x: str, heads: int, dim: int) -> None:
    """What an index compares: values spread over all dims, so that few bits can hold them."""
    program.op("hadamard", (x,), (x,), heads=heads)
    _round(program, x, heads, dim, SmallFloat.E2M1)
