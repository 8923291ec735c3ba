"""`ds4-weight-server plan FILE --contract`: the contract that loading FILE would prepare.

Owns nothing that stays: parses the file, plans, prepares, writes the protobuf to stdout and ends.
For `ds4 inspect`, whose worker package neither parses GGUF files nor knows recipes.
"""

from __future__ import annotations

import sys

from ds4_common.errors import UsageError
from ds4_common.gguf import LogicalModel
from ds4_common.identity import fingerprint
from ds4_owner import blobs
from ds4_owner.backends import open_backend
from ds4_owner.config import OwnerConfig
from ds4_owner.loader_plan import make_plan
from ds4_owner.prepare import prepare_model


def preview_contract(config: OwnerConfig) -> bytes:
    """The encoded Bundle of the base model. Raises UnsupportedModel, GgufError."""
    path = dict(config.model_files).get("base")
    if path is None:
        raise UsageError("plan --contract needs a base model")
    granularity = open_backend(config.backend, config.device).granularity
    with LogicalModel.open(path) as model:
        load_plan, _ = make_plan(config, {"base": model}, granularity)
        bundle = prepare_model(
            model.metadata,
            {place.name: place for place in load_plan.places if place.model == "base"},
            served_id=config.served_id or blobs.served_id(path),
            fingerprint=fingerprint(model),
        )
    return bundle.SerializeToString(deterministic=True)


def write_contract(config: OwnerConfig) -> int:
    """Writes it to stdout; returns the exit code."""
    sys.stdout.buffer.write(preview_contract(config))
    return 0
