"""Latent attention: keys and values are made from one short vector per token.

Owns: its two forms. Absorbed: the cache holds the latent vector and the rotated part of the key,
one vector that is key and value of all heads; queries and results pass through a matrix per head.
Expanded: the cache holds the keys and values that the latent stands for. Both give the same result
up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4_common.contract.ops import BANKS, PAGE_TABLE, POSITIONS
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import Rope, write_attention, write_rope


@dataclass(frozen=True, slots=True)
class _Scored:
    """The attention over the cache, as `write_attention` wants it."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Latent:
    """`rank` is the width of the latent, `query_rank` that of the queries' own (0: none); a key is
    `plain_dim` dims that are not rotated, then rope.dim that are and that all heads share."""

    heads: int
    query_rank: int
    rank: int
    plain_dim: int
    value_dim: int
    scale: float
    rope: Rope
    absorbed: bool

    def write(
        self, program: TextProgram, layer: int, x: str, out: str, width: int, epsilon: float
    ) -> None:
        """Reads the normed stream, writes the branch (recipes/decoder.py, Part)."""
        q = self._queries(program, layer, x, width, epsilon)
        latent, turned = (
            program.scratch("latent", self.rank),
            program.scratch("turned", self.rope.dim),
        )
        program.linear_parts(
            x, f"blk.{layer}.attn_kv_a_mqa", width, (latent, turned), (self.rank, self.rope.dim)
        )
        norm = f"blk.{layer}.attn_kv_a_norm.weight"
        program.norm(latent, norm, self.rank, latent, epsilon)
        write_rope(program, self.rope, turned, 1, self.rope.dim)
        values_width = self.heads * self.value_dim
        values = program.scratch("values", values_width)
        attend = self._absorbed if self.absorbed else self._expanded
        attend(program, layer, q, latent, turned, values)
        program.linear(values, f"blk.{layer}.attn_output", values_width, out, width)

    @property
    def _key_dim(self) -> int:
        return self.plain_dim + self.rope.dim

    def _queries(self, program: TextProgram, layer: int, x: str, width: int, epsilon: float) -> str:
        q_width = self.heads * self._key_dim
        q = program.scratch("q", q_width)
        if not self.query_rank:
            program.linear(x, f"blk.{layer}.attn_q", width, q, q_width)
            return q
        short = program.scratch("short_q", self.query_rank)
        program.linear(x, f"blk.{layer}.attn_q_a", width, short, self.query_rank)
        norm = f"blk.{layer}.attn_q_a_norm.weight"
        program.norm(short, norm, self.query_rank, short, epsilon)
        program.linear(short, f"blk.{layer}.attn_q_b", self.query_rank, q, q_width)
        return q

    def _absorbed(
        self, program: TextProgram, layer: int, q: str, latent: str, turned: str, out: str
    ) -> None:
        heads, rank = self.heads, self.rank
        plain = program.scratch("plain_q", heads * self.plain_dim)
        rotated = program.scratch("rotated_q", heads * self.rope.dim)
        for part, first, part_width in (
            (plain, 0, self.plain_dim),
            (rotated, self.plain_dim, self.rope.dim),
        ):
            program.op(
                "slice_heads", (q,), (part,),
                heads=heads, dim=self._key_dim, first=first, width=part_width,
            )  # fmt: skip
        write_rope(program, self.rope, rotated, heads, self.rope.dim)
        absorbed = program.scratch("absorbed_q", heads * rank)
        k_b = program.weight(f"blk.{layer}.attn_k_b.weight", heads, rank, self.plain_dim)
        program.op("matmul_heads", (plain, k_b), (absorbed,))
        query = program.scratch("query", heads * (rank + self.rope.dim))
        key = program.scratch("key", rank + self.rope.dim)
        program.op("join_heads", (absorbed, rotated), (query,), heads=heads)
        program.op("join_heads", (latent, turned), (key,), heads=1)
        mixed = program.scratch("mixed", heads * rank)
        where = (POSITIONS, BANKS, PAGE_TABLE)
        dim = rank + self.rope.dim
        plane = program.rows(f"cache.{layer}.latent", dim)
        program.op("latent_store", (key, *where), (plane,), dim=dim)
        program.op(
            "attend_latent", (query, plane, *where), (mixed,),
            heads=heads, dim=dim, value_dim=rank, scale=self.scale,
        )  # fmt: skip
        v_b = program.weight(f"blk.{layer}.attn_v_b.weight", heads, self.value_dim, rank)
        program.op("matmul_heads", (mixed, v_b), (out,))

    def _expanded(
        self, program: TextProgram, layer: int, q: str, latent: str, turned: str, out: str
    ) -> None:
        heads, both = self.heads, self.plain_dim + self.value_dim
        write_rope(program, self.rope, q, heads, self._key_dim, offset=self.plain_dim)
        expanded = program.scratch("expanded", heads * both)
        program.linear(latent, f"blk.{layer}.attn_kv_b", self.rank, expanded, heads * both)
        plain = program.scratch("plain_k", heads * self.plain_dim)
        v = program.scratch("v", heads * self.value_dim)
        for part, first, part_width in (
            (plain, 0, self.plain_dim),
            (v, self.plain_dim, self.value_dim),
        ):
            program.op(
                "slice_heads", (expanded,), (part,),
                heads=heads, dim=both, first=first, width=part_width,
            )  # fmt: skip
        k = program.scratch("k", heads * self._key_dim)
        program.op("join_heads", (plain, turned), (k,), heads=heads)
        how = _Scored(heads, heads, self._key_dim, self.value_dim, self.scale)
        write_attention(program, layer, how, q, k, v, "", out)
