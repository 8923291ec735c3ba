"""Tensors whose contents are indices: every entry must name something that the model has.

Owns which inputs of which ops are such tables, and the check of their contents, which the loader
makes before anything is loaded. An entry that names nothing would otherwise fail the first request
that meets it. Reads these tensors only: a few MB in the largest known models.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from ds4_common.contract.ops import OPS
from ds4_common.errors import GgufError
from ds4_common.gguf import LogicalModel

if TYPE_CHECKING:
    from ds4_common.contract import prepared_model_pb2 as pb

_PART_BYTES = 4 << 20
# op -> (input that holds the table, input whose row width counts what its entries name, their name)
_TABLES = {"route_experts": ("table", "logits", "an expert")}


def check_index_tables(model: LogicalModel, bundle: pb.Bundle) -> None:
    """Raises GgufError, naming tensor, row and entry, for the first index that is out of range.

    `bundle` is the validated contract of `model`."""
    buffers = {buffer.name: buffer for buffer in bundle.execution.buffers}
    for program in bundle.execution.programs:
        for op in program.ops.ops:
            if op.kernel not in _TABLES:
                continue
            role, counted, named = _TABLES[op.kernel]
            roles = [name.rstrip("?") for name in OPS[op.kernel].inputs]
            given = dict(zip(roles, getattr(op, "in"), strict=False))
            if given.get(role):
                _check(model, given[role], buffers[given[counted]].shape[-1], named)


def _check(model: LogicalModel, name: str, count: int, named: str) -> None:
    """Every int32 of tensor `name` must lie in [0, count)."""
    tensor = model.tensor(name)
    if tensor is None:
        raise GgufError(model.path, 0, f"tensor {name}", "none", "one, for the contract uses it")
    for start in range(0, tensor.n_bytes, _PART_BYTES):
        part = bytearray(min(_PART_BYTES, tensor.n_bytes - start))
        model.read_into(tensor.offset + start, part)
        indices = array("i", bytes(part))
        if 0 <= min(indices) and max(indices) < count:
            continue
        at = next(i for i, index in enumerate(indices) if not 0 <= index < count)
        row, entry = divmod(start // 4 + at, tensor.dims[0])
        raise GgufError(
            model.shards[tensor.shard].path, tensor.file_offset + start + 4 * at,
            f"tensor {name}, row {row}, entry {entry}", indices[at],
            f"{named} from 0 to {count - 1}",
        )  # fmt: skip
