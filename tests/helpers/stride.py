"""A grammar made up for tests of the engine: no library, every rule of it in sight."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ds4_common.errors import GrammarFailure


class Stride:
    """A grammar made up for tests: after a token t only t+1 .. t+`reach` may come, counted round
    the first `modulus` tokens; `length` tokens in all; a token of `broken` breaks it."""

    def __init__(
        self,
        length: int = 1 << 30,
        broken: frozenset[int] = frozenset(),
        *,
        modulus: int = 256,
        reach: int = 20,
    ) -> None:
        self.length, self.broken = length, broken
        self.modulus, self.reach = modulus, reach

    def follows(self, last: int, token: int) -> bool:
        return token < self.modulus and 1 <= (token - last) % self.modulus <= self.reach

    def matcher(self) -> StrideMatcher:
        return StrideMatcher(self)


class StrideMatcher:
    def __init__(self, grammar: Stride) -> None:
        self._grammar = grammar
        self._last, self._count = 0, 0
        self._mask = (ctypes.c_uint32 * 16)()
        self._ahead: list[ctypes.Array[ctypes.c_uint32]] = []

    def mask(self) -> int:
        if self._last in self._grammar.broken:
            raise GrammarFailure("broken on purpose")
        return self._write(self._mask, self._last)

    def _write(self, mask: ctypes.Array[ctypes.c_uint32], last: int) -> int:
        ctypes.memset(mask, 0, 64)
        for step in range(1, self._grammar.reach + 1):
            token = (last + step) % self._grammar.modulus
            mask[token // 32] |= 1 << token % 32
        return ctypes.addressof(mask)

    def allows(self, tokens: Sequence[int]) -> int:
        last = self._last
        for count, token in enumerate(tokens):
            if not self._grammar.follows(last, token):
                return count
            last = token
        return len(tokens)

    def ahead(self, tokens: Sequence[int]) -> list[int]:
        self._ahead, masks = [], []
        for count, token in enumerate(tokens[: self.allows(tokens)], start=self._count + 1):
            if count == self._grammar.length or token in self._grammar.broken:
                break
            self._ahead.append((ctypes.c_uint32 * 16)())
            masks.append(self._write(self._ahead[-1], token))
        return masks

    def accept(self, token: int) -> bool:
        if not self._grammar.follows(self._last, token):
            raise GrammarFailure(f"{token} after {self._last}")
        self._last, self._count = token, self._count + 1
        return self._count == self._grammar.length
