"""Model families: which recipe turns which `general.architecture` into a program.

Owns: finding them. A family is one module of `families/`, named after its architecture with `_` for
`-`; its `recipe` writes the program. Workers execute what a recipe wrote and know no family.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from importlib import resources
from types import ModuleType

from ds4_common.errors import UnsupportedModel
from ds4_owner.recipes import families
from ds4_owner.recipes.builder import TextProgram
from ds4_owner.recipes.parameters import Parameters

# (parameters, program, vocabulary, context_tokens, tensors in the file)
Recipe = Callable[[Parameters, TextProgram, int, int, int], None]


def architectures() -> list[str]:
    """Every `general.architecture` that has a recipe, sorted."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(families.__path__))


def recipe_for(architecture: str) -> Recipe:
    """The recipe of an architecture; UnsupportedModel lists the known ones."""
    recipe: Recipe = _family(architecture).recipe
    return recipe


def chat_template_for(architecture: str, tokens: Sequence[bytes]) -> str | None:
    """The chat template of a family whose files come without one: `CHAT_TEMPLATE` of its module, a
    file of this package, where all of `CHAT_MARKS` are tokens of the vocabulary. None otherwise.
    Raises UnsupportedModel as `recipe_for`."""
    family = _family(architecture)
    name: str = getattr(family, "CHAT_TEMPLATE", "")
    if not name or not {mark.encode() for mark in family.CHAT_MARKS} <= set(tokens):
        return None
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _family(architecture: str) -> ModuleType:
    known = architectures()
    if architecture not in known:
        raise UnsupportedModel(
            f"metadata general.architecture: got {architecture!r}, "
            f"expected one of: {', '.join(known)}"
        )
    return importlib.import_module(f"{families.__name__}.{architecture.replace('-', '_')}")
