"""One browser for all tests of this room; each test opens tabs of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.browser import Browser, chromium


@pytest.fixture(scope="session")
def running_browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    yield running_browser
    running_browser.close_tabs()
