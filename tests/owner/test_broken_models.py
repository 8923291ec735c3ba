"""Every key and every tensor of every family, broken one at a time: a refusal that names what is
wrong, or a model that runs. Never another exception, and nothing left out in silence."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ds4_common.allocation import TensorPlace
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.lower import lower_image
from ds4_common.errors import GgufError, TokenizerError, UnsupportedModel
from ds4_common.gguf import GgmlType, LogicalModel, Metadata, block_bytes, block_weights
from ds4_common.gguf.parser import ArrayInfo, Entry
from ds4_common.gguf.types import ValueType as V
from golden import tiny
from golden.deepseek4.cases import REAL
from helpers.prepared import prepare_places, raw_places

FAMILIES = [tiny.cases_of(family) for family in tiny.FAMILIES]
CASES = [cases[0] for cases in FAMILIES] + [cases[-1] for cases in FAMILIES if cases[1:]] + [REAL]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.id))
REFUSALS = (UnsupportedModel, GgufError, TokenizerError)
FAR = 1 << 50  # offsets of arrays that are no part of the file

SCALARS: dict[str, tuple[V, int | float | bool | bytes]] = {
    "zero": (V.UINT32, 0), "one": (V.UINT32, 1), "three": (V.UINT32, 3), "negative": (V.INT32, -1),
    "large": (V.UINT32, 2**32 - 1), "huge": (V.UINT64, 2**63 + 5),
    "0.0": (V.FLOAT32, 0.0), "-2.5": (V.FLOAT32, -2.5), "NaN": (V.FLOAT32, math.nan),
    "infinite": (V.FLOAT32, math.inf), "1e30": (V.FLOAT64, 1e30), "1e-30": (V.FLOAT64, 1e-30),
    "text": (V.STRING, b"x"), "no text": (V.STRING, b"\xff"), "true": (V.BOOL, True),
    "false": (V.BOOL, False),
}  # fmt: skip
ARRAYS: dict[str, tuple[V, bytes]] = {
    "empty": (V.INT32, b""),
    "two": (V.INT32, struct.pack("<2i", 1, 2)),
    "negative ones": (V.INT32, struct.pack("<8i", *[-1] * 8)),
    "large ones": (V.UINT64, struct.pack("<64Q", *[2**62] * 64)),
    "floats": (V.FLOAT32, struct.pack("<64f", *[math.nan] * 64)),
    "texts": (V.STRING, struct.pack("<Qc", 1, b"a")),
}


def with_entry(metadata: Metadata, key: str, entry: Entry | None, data: bytes = b"") -> Metadata:
    """The metadata with another value under a key, or without it."""
    entries = dict(metadata._entries)
    entries.pop(key, None)
    if entry is not None:
        entries[key] = entry

    def read(offset: int, n_bytes: int) -> bytes:
        return data[:n_bytes] if offset >= FAR else metadata._read(offset, n_bytes)

    return Metadata("broken.gguf", entries, read)


def broken(metadata: Metadata, key: str) -> Iterator[tuple[str, Metadata]]:
    yield "deleted", with_entry(metadata, key, None)
    for name, (kind, value) in SCALARS.items():
        yield name, with_entry(metadata, key, Entry(kind, value, 0))
    sizes = {V.INT32: 4, V.UINT64: 8, V.FLOAT32: 4}
    for name, (kind, data) in ARRAYS.items():
        count = len(data) // sizes[kind] if kind in sizes else 1
        info = ArrayInfo(kind, count, FAR, len(data))
        yield name, with_entry(metadata, key, Entry(V.ARRAY, info, 0), data)


def opened(case: tiny.Case, folder: Path) -> tuple[Metadata, dict[str, TensorPlace]]:
    """Metadata and places of the case, read whole."""
    path = tiny.write_gguf(case, folder / "case.gguf")
    data = path.read_bytes()
    with LogicalModel.open(path) as model:
        metadata = Metadata("case.gguf", model.metadata._entries, lambda o, n: data[o : o + n])
        return metadata, raw_places(model)


def check(what: str, prepare: Callable[[], pb.Bundle], names: tuple[str, ...]) -> pb.Bundle | None:
    """The prepared model, which must lower; None where it was refused, as a refusal must be."""
    try:
        bundle = prepare()
    except REFUSALS as refusal:
        text = str(refusal)
        assert any(name in text for name in names), f"{what}: {text}"
        assert any(w in text for w in ("expected", "does not know", "supported", "known are")), text
        return None
    lower_image(bundle)
    return bundle


@EACH
def test_a_broken_value_is_refused_by_name_or_makes_a_model_that_runs(
    case: tiny.Case, tmp_path: Path
) -> None:
    metadata, places = opened(case, tmp_path)
    for key in metadata:
        if not key.startswith(case.architecture) and case is not CASES[0]:
            continue  # what all families have alike
        for name, other in broken(metadata, key):
            names: tuple[str, ...] = (key, "blk.", "output", "token_embd", f"{case.architecture}.")
            if key.startswith("tokenizer."):
                names = (key, "tokenizer.", "token_embd")
            check(f"{key} {name}", partial(prepare_places, other, places), names)


def changed(place: TensorPlace) -> Iterator[tuple[str, TensorPlace | None]]:
    yield "missing", None
    yield "transposed", replace(place, dims=place.dims[::-1])
    yield "wider", replace(place, dims=(place.dims[0] + 1, *place.dims[1:]))
    yield "empty", replace(place, dims=(0, *place.dims[1:]))
    yield "flat", replace(place, dims=(math.prod(place.dims),))
    yield "deeper", replace(place, dims=(*place.dims, 1))
    for kind in (GgmlType.I8, GgmlType.I32, GgmlType.F64, GgmlType.Q8_1, GgmlType.Q8_K):
        if place.dims[0] % block_weights(kind) == 0:
            n_bytes = math.prod(place.dims) // block_weights(kind) * block_bytes(kind)
            yield kind.name, replace(place, ggml_type=kind, n_bytes=n_bytes)


# Tensors that a file may do without; layers that only predict are left out whatever they hold.
def is_optional(name: str) -> bool:
    return (
        name.endswith((".bias", ".scale"))
        or name in ("output.weight", "rope_freqs.weight")
        or ("rope_factors" in name or "nextn" in name)
    )


@EACH
def test_a_broken_tensor_is_refused_by_its_name(case: tiny.Case, tmp_path: Path) -> None:
    metadata, places = opened(case, tmp_path)
    whole = prepare_places(metadata, places)
    used = {buffer.name.partition("[")[0] for buffer in whole.execution.buffers}
    for name, place in places.items():
        for what, other in changed(place):
            if other == place or (other is not None and other.dims == place.dims == (1,)):
                continue
            made: Mapping[str, TensorPlace] = {
                **{n: p for n, p in places.items() if n != name},
                **({name: other} if other is not None else {}),
            }
            bundle = check(f"{name} {what}", partial(prepare_places, metadata, made), (name,))
            if bundle is not None and name in used:
                served = f"{name}: {what} was served"
                assert what == "missing", served
                assert is_optional(name), served
    for extra in ("blk.0.mystery.weight", "v.blk.0.attn_q.weight", "blk.7777.attn_norm.weight"):
        with_extra = {**places, extra: replace(places["output_norm.weight"], name=extra)}
        with pytest.raises(UnsupportedModel, match=extra.replace(".", r"\.")):
            prepare_places(metadata, with_extra)
