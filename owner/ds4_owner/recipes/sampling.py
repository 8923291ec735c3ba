"""How a model wants to be sampled: what its file recommends, else what the server does itself."""

from __future__ import annotations

import math

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.gguf import Metadata
from ds4_owner.recipes.parameters import refuse, whole

PREFIX = "general.sampling."
# field of the contract: (key, the server's own value, lowest, highest)
_NUMBERS = {
    "temperature": ("temp", 1.0, 0.0, 100.0),
    "top_p": ("top_p", 1.0, 1e-6, 1.0),
    "min_p": ("min_p", 0.05, 0.0, 1.0),
    "repeat_penalty": ("penalty_repeat", 1.0, 0.01, 100.0),
}


def sampling_defaults(metadata: Metadata) -> pb.Sampling:
    """What a request that says nothing gets. Raises UnsupportedModel for a recommendation out of
    its range."""
    defaults = pb.Sampling(top_k=whole(metadata, f"{PREFIX}top_k", 0, 0, (1 << 31) - 1))
    for field, (name, own, low, high) in _NUMBERS.items():
        key = PREFIX + name
        value = metadata.get_float(key) if key in metadata else own
        if not math.isfinite(value) or not low <= value <= high:
            raise refuse(key, value, f"a number from {low:g} to {high:g}")
        setattr(defaults, field, value)
    return defaults
