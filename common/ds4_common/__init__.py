"""What owner and worker share. `attach(manifest)` gives the weights of an owner (docs/weights.md);
importing this package alone imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds4_common.weights import attach as attach

__all__ = ["attach"]


def __getattr__(name: str) -> object:
    if name != "attach":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds4_common import weights

    return weights.attach
