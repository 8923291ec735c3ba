"""Huge pages are faulted in on kernels with and without a call for it."""

from __future__ import annotations

import errno
import mmap
from typing import Any

import pytest

from ds4_owner import fill
from ds4_owner.backends import HUGE_PAGE_BYTES


class Window(mmap.mmap):
    """An area on a kernel whose madvise answers `code`."""

    code = 0
    touched: list[int]

    def madvise(self, *_: Any) -> None:
        if self.code:
            raise OSError(self.code, "madvise")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.touched.append(key)
        super().__setitem__(key, value)


def window(code: int) -> Window:
    area = Window(-1, 3 * HUGE_PAGE_BYTES)
    area.code, area.touched = code, []
    return area


def test_a_kernel_without_the_call_gets_one_store_per_huge_page() -> None:
    with window(errno.EINVAL) as area:
        fill._populate(area)
        assert area.touched == [0, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES]


def test_a_kernel_with_the_call_needs_no_store() -> None:
    with window(0) as area:
        fill._populate(area)
        assert area.touched == []


def test_memory_that_is_not_there_is_an_error_on_every_kernel() -> None:
    with window(errno.ENOMEM) as area, pytest.raises(OSError, match="madvise"):
        fill._populate(area)
