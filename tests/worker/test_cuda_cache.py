"""CUDA kernels over the KV cache, on any machine: pages by the byte, attention by the bit."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4_worker.cuda import kernels
from ds4_worker.cuda.kernels import CACHE_KERNELS, Unit
from ds4_worker.cuda.parameters import Attend, Cache, KvStore
from helpers.cuda_kernels import F32, Memory, address, module_of
from helpers.kv_table import kv_table
from helpers.quant_blocks import bits
from helpers.vector_table import table

SCALAR = table(0)
PAGE = 16
PART = kernels.part_tokens(PAGE)
TYPES = pytest.mark.parametrize("kv", range(4), ids=kernels.KV_TYPES)


def tile_bytes(kv: int, width: int) -> int:
    code = (2, 4, 2, 1)[kv]
    return PAGE * (width * code + (width // 32 * 2 if kv == 3 else 0))


@dataclass
class World:
    """A cache of some banks, its pages in a strange order, and both ways of looking at it."""

    kv: int
    kv_heads: int
    dim: int
    value_dim: int
    banks: int = 2
    pages_per_bank: int = 40
    latent: bool = False
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        self.width = -(-self.value_dim // 8) * 8
        self.stored = -(-self.dim // 8) * 8 if self.latent else self.width  # of values, in a tile
        self.key_tile = tile_bytes(self.kv, self.stored if self.latent else self.dim)
        self.value_tile = 0 if self.latent else tile_bytes(self.kv, self.width)
        self.stride = (self.kv_heads * (self.key_tile + self.value_tile) + 63) // 64 * 64 + 64
        n = self.banks * self.pages_per_bank
        self.pages = self.memory.array((n, self.stride), np.uint8)
        self.pages[:] = 0xFF  # a NaN, wherever it is read
        order = rng.permutation(n).astype(np.int32).reshape(self.banks, -1)
        self.table = self.memory.array(order.shape, np.int32, order)

    def cache(self) -> Cache:
        return Cache(
            pages=address(self.pages), page_stride=self.stride, page_table=address(self.table),
            pages_per_bank=self.pages_per_bank, page_tokens=PAGE, kv_heads=self.kv_heads,
            dim=self.dim, value_dim=self.value_dim, latent=int(self.latent),
        )  # fmt: skip

    def run(self, name: str, p: ctypes.Structure, descending: bool = False) -> None:
        unit = Unit("cache.cu", kv_type=self.kv)
        module_of(unit).run(name, p, CACHE_KERNELS[name].launch(p), descending)

    def put(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self.memory.array(values.shape, values.dtype, values)

    def store(self, k: F32, v: F32, positions: list[int], banks: list[int]) -> None:
        own, other = self.put(k), self.put(v)
        at, bank = (self.put(np.array(x, np.int32)) for x in (positions, banks))
        p = KvStore(
            cache=self.cache(), k=address(own), v=address(other), positions=address(at),
            banks=address(bank), k_stride=own.strides[0], v_stride=other.strides[0],
            tokens=len(positions),
        )  # fmt: skip
        self.run("kv_store", p)

    def fill(self, tokens: int) -> None:
        rng = np.random.default_rng(2)
        for bank in range(self.banks):
            k = rng.standard_normal((tokens, self.kv_heads * self.dim)).astype(np.float32)
            v = rng.standard_normal((tokens, self.kv_heads * self.value_dim)).astype(np.float32)
            self.store(k, v, list(range(tokens)), [bank] * tokens)

    def tiles(self, bank: int, logical: int, head: int) -> tuple[int, int]:
        """Addresses of the keys and values of a page."""
        base = address(self.pages) + int(self.table[bank, logical]) * self.stride
        values = base if self.latent else base + self.kv_heads * self.key_tile
        return base + head * self.key_tile, values + head * self.value_tile


# --- storing ---


@TYPES
def test_stored_vectors_have_the_bytes_of_the_cpu(kv: int) -> None:
    world = World(kv, kv_heads=2, dim=64, value_dim=32 if kv == 3 else 36)
    rng = np.random.default_rng(3)
    k = (rng.standard_normal((3, 128)) * 10.0 ** rng.uniform(-9, 6, (3, 128))).astype(np.float32)
    v = rng.standard_normal((3, 2 * world.value_dim)).astype(np.float32)
    before = world.pages.copy()
    positions, banks = [5, 16, 37], [1, -1, 0]
    world.store(k, v, positions, banks)
    for token in (0, 2):
        place, page = positions[token] % PAGE, world.table[banks[token], positions[token] // PAGE]
        for head in range(2):
            for x, dim, width, first, tile, across in (
                (k, 64, 64, 0, world.key_tile, True),
                (v, world.value_dim, world.width, 2 * world.key_tile, world.value_tile, False),
            ):
                codes, scales = np.zeros(4 * dim, np.uint8), np.zeros(8, np.uint16)
                own = x[token, head * dim : (head + 1) * dim].copy()
                kv_table(kv).encode(own.ctypes.data, dim, codes.ctypes.data, scales.ctypes.data)
                size = (2, 4, 2, 1)[kv]
                start = first + head * tile
                target = before[page, start : start + tile]
                if kv == 3:
                    blocks = target.reshape(-1, PAGE * 34)
                    for b in range(dim // 32):
                        blocks[b, : 2 * PAGE].view(np.uint16)[place] = scales[b]
                        grid = blocks[b, 2 * PAGE :].reshape((32, PAGE) if across else (PAGE, 32))
                        part = codes[32 * b : 32 * b + 32]
                        if across:
                            grid[:, place] = part
                        else:
                            grid[place] = part
                else:
                    wide = codes[: dim * size].reshape(dim, size)
                    if across:
                        target.reshape(dim, PAGE, size)[:, place] = wide
                    else:
                        target.reshape(PAGE, width, size)[place, :dim] = wide
    np.testing.assert_array_equal(world.pages, before)


# --- attention ---


@dataclass(frozen=True)
class How:
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


def exp(x: np.float32) -> np.float32:
    out = np.array([x], np.float32)
    SCALAR.exp_scaled(out.ctypes.data, out.ctypes.data, 0.0, 1.0, 1)
    return np.float32(out[0])


def part_of(
    world: World, q: F32, bank: int, head: int, base: int, seen: tuple[int, int], cap: float
) -> tuple[np.float32, np.float32, F32]:
    """Maximum, sum and weighted values of one part: the kernels of native/kv.h and op_vector.h."""
    kv, scores = kv_table(world.kv), np.zeros(PART, np.float32)
    first, end = seen
    for at in range(first // PAGE * PAGE, end, PAGE):
        keys, _ = world.tiles(bank, (base + at) // PAGE, head)
        tokens, to = min(end - at, PAGE), scores[at:].ctypes.data
        own_q = q.ctypes.data
        if world.latent:
            width = world.stored
            kv.score_along(own_q, 1, world.dim, keys, keys, PAGE, width, tokens, to, PART)
        else:
            kv.score(own_q, 1, world.dim, keys, keys, PAGE, (tokens + 7) // 8 * 8, to, PART)
    own, n = scores[first:], end - first
    if cap:
        SCALAR.soft_cap(own.ctypes.data, own.ctypes.data, cap, n)
    best = np.float32(SCALAR.max(own.ctypes.data, n))
    total = np.float32(SCALAR.softmax(own.ctypes.data, float(best), n))
    values = np.zeros(world.width, np.float32)
    for at in range(first // PAGE * PAGE, end, PAGE):
        _, tile = world.tiles(bank, (base + at) // PAGE, head)
        start, stop = max(first - at, 0), min(end - at, PAGE)
        kv.accumulate(
            scores[at + start :].ctypes.data, PART, 1, start, stop - start, tile, tile, PAGE,
            world.stored, world.width, values.ctypes.data,
        )  # fmt: skip
    return best, total, values


def by_cpu(world: World, q: F32, scale: float, bank: int, position: int, head: int, sink: Any,
           how: How) -> F32:  # fmt: skip
    """One head of one token, part by part as native/attention.c has it."""
    own = (q * np.float32(scale)).astype(np.float32)
    top, total = np.float32(-np.inf), np.float32(0)
    values = np.zeros(world.width, np.float32)
    low = max(0, position + 1 - how.window) if how.window else 0
    for base in range(low // PART * PART, position + 1, PART):
        seen = (max(low - base, 0), min(position + 1 - base, PART))
        best, part, weighed = part_of(world, own, bank, head, base, seen, how.soft_cap)
        if part == 0:
            continue
        above = max(best, top)
        keep, take = exp(top - above), exp(best - above)
        top, total, values = above, total * keep + part * take, values * keep + weighed * take
    if how.sinks:
        above = max(sink, top)
        keep = exp(top - above)
        total, values = total * keep + exp(sink - above), values * keep
    return (values * (np.float32(1) / total))[: world.value_dim]


@pytest.mark.parametrize("how", [How(), How(window=300, sinks=True), How(window=20, soft_cap=3.0)])
@pytest.mark.parametrize(
    ("shape", "latent"),
    [((2, 3, 32, 32), False), ((1, 20, 96, 64), False), ((1, 20, 96, 64), True)],
    ids=["grouped", "one head", "latent"],
)
@TYPES
def test_both_ways_of_attention_have_the_bits_of_the_cpu(
    kv: int, shape: tuple[int, int, int, int], latent: bool, how: How
) -> None:
    kv_heads, group, dim, value_dim = shape
    world = World(kv, kv_heads, dim, value_dim, latent=latent)
    heads, context = kv_heads * group, 600
    world.fill(context)
    rng = np.random.default_rng(4)
    # runs of one bank, a change of bank inside a tile, a jump, a padding row
    banks = [0, 0, 0, 1, 1, 0, -1]
    positions = [255, 256, 257, 599, 0, 3, 0]
    q = world.put(rng.standard_normal((7, heads * dim)).astype(np.float32))
    sinks = world.put(rng.standard_normal(heads).astype(np.float32))
    at, bank = (world.put(np.array(x, np.int32)) for x in (positions, banks))
    parts = -(-context // PART)
    expected = np.full((7, heads * value_dim), -3, np.float32)
    for token in range(6):
        for head in range(heads):
            expected[token, head * value_dim : (head + 1) * value_dim] = by_cpu(
                world, q[token, head * dim : (head + 1) * dim], 0.3, banks[token],
                positions[token], head // group, sinks[head], how,
            )  # fmt: skip
    for tokens_of_tile in (1, 4):
        tile_tokens, tile_heads = kernels.attend_tile(group, tokens_of_tile)
        y = world.put(np.full((7, heads * value_dim), -3, np.float32))
        p = Attend(
            cache=world.cache(), q=address(q), y=address(y), positions=address(at),
            banks=address(bank), sinks=address(sinks) if how.sinks else 0, q_stride=q.strides[0],
            y_stride=y.strides[0], tokens=7, heads=heads, tile_tokens=tile_tokens,
            tile_heads=tile_heads, part_tokens=PART, most_parts=parts, window=how.window,
            scale=0.3, soft_cap=how.soft_cap,
        )  # fmt: skip
        state = world.memory.array((kernels.attend_part_bytes(p) // 4,), np.float32)
        p.parts = address(state)
        world.run("attend_whole", p, descending=tokens_of_tile == 4)
        np.testing.assert_array_equal(bits(y), bits(expected), err_msg="whole")
        y[:] = -3
        world.run("attend_parts", p, descending=tokens_of_tile == 1)
        world.run("attend_fold", p)
        np.testing.assert_array_equal(bits(y), bits(expected), err_msg="parts")
