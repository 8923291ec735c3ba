"""Writes the program of a decoder whose residual is several streams that exchange.

Owns: how each part of a layer reads one mixture of the streams and writes back to all of them, by
weights that the streams themselves give. Tensor names are those of the GGUF format. Knows no
architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4_common.contract.ops import OUTPUT_ROWS, TOKENS
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.decoder import Layer, write_logits


@dataclass(frozen=True, slots=True)
class Streams:
    """`count` streams of `width`; `mixing` and `iterations` balance what they exchange."""

    width: int
    count: int
    epsilon: float
    mixing: float
    iterations: int
    layers: Sequence[Layer]

    def weights(self, program: TextProgram, s: str, stem: str, *, read_only: bool) -> str:
        """The weights that `stem`'s tensors make of the streams: to read by, or to exchange by."""
        n, wide = self.count, self.count * self.width
        width = n if read_only else n * (2 + n)
        flat = program.scratch("wanted_flat" if read_only else "flat", wide)
        program.op("rms_norm", (s,), (flat,), eps=self.epsilon)
        mix = program.scratch("wanted_mix" if read_only else "mix", width)
        program.op("matmul", (flat, program.weight(f"{stem}_fn.weight", width, wide)), (mix,))
        scale = program.weight(f"{stem}_scale.weight", 1 if read_only else 3)
        base = program.weight(f"{stem}_base.weight", width)
        weights = program.scratch("wanted_weights" if read_only else "weights", width)
        program.op(
            "hyper_weights", (mix, scale, base), (weights,),
            streams=n, eps=self.mixing, iterations=1 if read_only else self.iterations,
        )  # fmt: skip
        return weights


def write_streams(program: TextProgram, vocabulary: int, decoder: Streams) -> None:
    """Writes the whole program: tokens in, logits of the wanted rows out."""
    width, epsilon = decoder.width, decoder.epsilon
    table = program.weight("token_embd.weight", vocabulary, width)
    x, s = program.scratch("x", width), program.scratch("x", width)
    program.op("embed", (TOKENS, table), (x,))
    for copies in range(2, decoder.count + 1):
        wider = program.scratch("streams", copies * width)
        program.op("join_heads", (s, x), (wider,), heads=1)
        s = wider
    normed, branch = program.scratch("normed", width), program.scratch("branch", width)
    for i, layer in enumerate(decoder.layers):
        for part, name in ((layer.attention, "attn"), (layer.feed_forward, "ffn")):
            weights = decoder.weights(program, s, f"blk.{i}.hc_{name}", read_only=False)
            program.op("hyper_read", (s, weights), (x,))
            program.norm(x, f"blk.{i}.{name}_norm.weight", width, normed, epsilon)
            part.write(program, i, normed, branch, width, epsilon)
            program.op("hyper_write", (branch, s, weights), (s,))
    wanted = program.scratch("wanted_streams", decoder.count * width)
    program.op("gather_rows", (s, OUTPUT_ROWS), (wanted,))
    weights = decoder.weights(program, wanted, "output_hc", read_only=True)
    last = program.scratch("wanted", width)
    program.op("hyper_read", (wanted, weights), (last,))
    program.norm(last, "output_norm.weight", width, last, epsilon)
    write_logits(program, vocabulary, last, width, table, program.logits(vocabulary))
