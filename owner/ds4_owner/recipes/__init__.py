"""Model families: which recipe turns which `general.architecture` into a program.

Owns: finding them. A family is one module of `families/`, named after its architecture with `_` for
`-`; its `recipe` writes the program. Workers execute what a recipe wrote and know no family.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

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
    known = architectures()
    if architecture not in known:
        raise UnsupportedModel(
            f"metadata general.architecture: got {architecture!r}, "
            f"expected one of: {', '.join(known)}"
        )
    module = importlib.import_module(f"{families.__name__}.{architecture.replace('-', '_')}")
    recipe: Recipe = module.recipe
    return recipe
