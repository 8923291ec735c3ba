"""docs/http-rules.md has a row for every rule of serving; it and docs/engine.md name tests that
exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "http-rules.md").read_text()
ENGINE_PAGE = (ROOT / "docs" / "engine.md").read_text()
ROW = re.compile(r"^\| R(\d+)(?: to R(\d+))? \| .+ \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


def test_every_rule_has_one_row() -> None:
    rules = [
        number
        for first, last, _ in ROW.findall(PAGE)
        for number in range(int(first), int(last or first) + 1)
    ]
    assert rules == list(range(1, 55))


def test_every_test_that_proves_a_rule_exists() -> None:
    files = (ROOT / "tests" / "worker").glob("test_*.py")
    known = {name for file in files for name in TEST.findall(file.read_text())}
    for first, _, cell in ROW.findall(PAGE + ENGINE_PAGE):
        named = re.findall(r"`(\w+)`", cell)
        assert named, f"R{first} has no test"
        assert set(named) <= known, f"R{first}: {set(named) - known}"


def test_every_test_with_a_number_is_on_the_page() -> None:
    files = (ROOT / "tests" / "worker").glob("test_*.py")
    numbered = {
        name
        for file in files
        for name in TEST.findall(file.read_text())
        if re.match(r"test_r\d\d_", name)
    }
    assert numbered <= set(re.findall(r"`(test_\w+)`", PAGE + ENGINE_PAGE))
