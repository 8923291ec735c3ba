"""Builds the blobs a worker starts from: contract, CPU image, tokenizer, frontend.

Owns which blobs there are and in what order they are made. Runs in the loader child only: protobuf
and the recipes stay out of the resident owner. A model that cannot be prepared is an error here;
its weights can be served all the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds4_common.allocation import TensorPlace
from ds4_common.gguf import LogicalModel

if TYPE_CHECKING:
    from ds4_common.contract import prepared_model_pb2 as pb


def served_id(path: str) -> str:
    """The name of a model that nobody named: its file's, without the shard number."""
    return re.sub(r"-\d{5,}-of-\d{5,}$", "", Path(path).stem)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that follows from metadata and plan. Only the fingerprint of the content is
    missing, which is known when it was read."""

    model: LogicalModel
    bundle: pb.Bundle
    image: tuple[str, bytes]  # of the executor that can read the places
    tokenizer: bytes

    def blobs(self, fingerprint: str) -> dict[str, bytes]:
        """Blobs by name, of content with that fingerprint."""
        from ds4_owner.prepare import prepare_frontend

        self.bundle.serving.cache_identity = fingerprint.encode()
        name, image = self.image
        return {
            "contract": self.bundle.SerializeToString(deterministic=True),
            name: image,
            "tokenizer": self.tokenizer,
            "frontend": prepare_frontend(self.model.metadata, self.bundle),
        }


def prepare(
    model: LogicalModel, places: Sequence[TensorPlace], name: str, *, on_device: bool = False
) -> Prepared:
    """Reads no tensor, so a load can begin with it. Raises UnsupportedModel, GgufError or
    TokenizerError for what no recipe can prepare, ContractError when a recipe wrote nonsense."""
    from ds4_common.contract.lower import lower_cpu, lower_cuda
    from ds4_common.tokenizer.build import build_blob
    from ds4_owner.prepare import prepare_model

    by_name = {place.name: place for place in places if place.model == "base"}
    bundle = prepare_model(model.metadata, by_name, served_id=name, fingerprint="")
    image = ("image.cuda", lower_cuda(bundle)) if on_device else ("image.cpu", lower_cpu(bundle))
    return Prepared(model, bundle, image, build_blob(model.metadata))
