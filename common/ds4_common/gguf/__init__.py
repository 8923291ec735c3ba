"""Reading GGUF models: `LogicalModel.open(path)`, its tensors and its typed metadata."""

from ds4_common.gguf.metadata import Metadata
from ds4_common.gguf.model import LogicalModel, Shard, Span, TensorInfo
from ds4_common.gguf.parser import ArrayInfo
from ds4_common.gguf.types import GgmlType, ValueType, block_bytes, block_weights

__all__ = [
    "ArrayInfo",
    "GgmlType",
    "LogicalModel",
    "Metadata",
    "Shard",
    "Span",
    "TensorInfo",
    "ValueType",
    "block_bytes",
    "block_weights",
]
