"""Splits a GGUF file into exactly N shards: `python -m helpers.split IN OUT_PREFIX N`.

Owns: where the cuts fall (shards of about equal bytes, whole tensors). The shards themselves are
written by the `gguf` package, so its idea of a split model is what the project is tested against.
Used by tests and by `make run`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

from ds4_common.gguf import ArrayInfo, LogicalModel, Metadata, ValueType, block_bytes, block_weights


def split_gguf(source: Path, prefix: Path, n_shards: int) -> list[Path]:
    """Writes `<prefix>-0000i-of-0000N.gguf`; returns the paths. One tensor per shard at least."""
    with LogicalModel.open(source) as model:
        if not 2 <= n_shards <= len(model.tensors):
            raise ValueError(f"{source}: cannot make {n_shards} shards of {len(model.tensors)}")
        architecture = model.metadata.get_str("general.architecture")
        writer = gguf.GGUFWriter(prefix.with_name(prefix.name + ".gguf"), architecture)
        _copy_metadata(writer, model.metadata)
        total = sum(t.n_bytes for t in model.tensors)
        done = 0
        for index, tensor in enumerate(model.tensors):
            left, full = len(model.tensors) - index, done >= total * len(writer.tensors) / n_shards
            needed = n_shards - len(writer.tensors)
            if writer.tensors[-1] and needed and (full or left == needed):
                writer.tensors.append({})
            raw = np.memmap(
                model.shards[tensor.shard].path, np.uint8, "r", tensor.file_offset, tensor.n_bytes
            )
            n, *outer = tensor.dims
            row = n // block_weights(tensor.ggml_type) * block_bytes(tensor.ggml_type)
            writer.add_tensor(
                tensor.name,
                raw.reshape(*reversed(outer), row),
                raw_dtype=gguf.GGMLQuantizationType(tensor.ggml_type),
            )
            done += tensor.n_bytes
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return [
        prefix.with_name(f"{prefix.name}-{i:05d}-of-{n_shards:05d}.gguf")
        for i in range(1, n_shards + 1)
    ]


def _copy_metadata(writer: gguf.GGUFWriter, metadata: Metadata) -> None:
    """All entries but the alignment: the writer pads to 32 in every shard."""
    for key in metadata:
        if key in ("general.architecture", "general.alignment"):
            continue
        value = metadata[key]
        if not isinstance(value, ArrayInfo):
            writer.add_key_value(key, value, gguf.GGUFValueType(metadata.type_of(key)))
        elif value.count:  # the package refuses to write empty arrays
            element_type = gguf.GGUFValueType(value.element_type)
            elements = _elements(metadata, key, value)
            writer.add_key_value(key, elements, gguf.GGUFValueType.ARRAY, element_type)


def _elements(
    metadata: Metadata, key: str, info: ArrayInfo
) -> list[bytes] | list[float] | list[int]:
    if info.element_type is ValueType.STRING:
        return metadata.get_strings(key)
    if info.element_type in (ValueType.FLOAT32, ValueType.FLOAT64):
        return list(metadata.get_floats(key))
    return list(metadata.get_ints(key))


def main(arguments: list[str]) -> int:
    if len(arguments) != 3:
        print("usage: python -m helpers.split IN OUT_PREFIX N", file=sys.stderr)
        return 2
    for path in split_gguf(Path(arguments[0]), Path(arguments[1]), int(arguments[2])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
