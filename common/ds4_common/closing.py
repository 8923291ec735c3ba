"""Objects with an end: `with` closes them."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import TypeVar

_T = TypeVar("_T", bound="Closing")


class Closing:
    """A context manager whose block ends with `close`."""

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...
