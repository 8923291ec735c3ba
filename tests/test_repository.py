"""Rules of the repository that no linter knows; each is a promise of docs/design.md section 3."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOTS = ("owner/ds4_owner", "worker/ds4_worker", "common/ds4_common")
# Families of models; a worker that names one has per-model code. (llama.cpp is a program.)
FAMILIES = re.compile(
    r"\b(smollm\w*|(tiny)?llama(?!\.cpp)\w*|mi[sx]tral|qwen\w*|gemma\w*|deepseek\w*|glm\d\w*|phi-?\d|"
    r"gpt-oss|kimi|falcon|mamba)\b",
    re.IGNORECASE,
)


def sources(root: str) -> list[Path]:
    return [p for p in sorted((ROOT / root).rglob("*.py")) if not p.name.endswith("_pb2.py")]


def every_source() -> list[Path]:
    return [path for root in ROOTS for path in sources(root)]


def test_worker_sources_name_no_model_family() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in sources("worker/ds4_worker")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := FAMILIES.search(line))
    ]
    assert found == []


def test_the_family_pattern_finds_a_planted_name() -> None:
    assert FAMILIES.search("if model.name == 'Qwen2-7B':")


def test_no_module_is_called_utils() -> None:
    assert [p for p in every_source() if p.stem in ("utils", "util", "helpers", "misc")] == []


@pytest.mark.parametrize("path", every_source(), ids=lambda p: str(p.relative_to(ROOT)))
def test_module_states_what_it_owns_and_swallows_nothing(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    if text.strip():
        assert ast.get_docstring(tree), "a module opens with what it owns"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            names = ast.unparse(node.type) if node.type else "(bare)"
            broad = names in ("(bare)", "Exception", "BaseException")
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            assert not broad or raises, f"line {node.lineno}: except {names} swallows everything"


def test_every_command_resolves_to_a_function() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for target in scripts.values():
        module, _, function = target.partition(":")
        package = module.split(".")[0]
        room = {"ds4_owner": "owner", "ds4_worker": "worker"}[package]
        path = ROOT / room / (module.replace(".", "/") + ".py")
        names = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        assert function in names, f"{target}: no function {function} in {path}"


def test_documents_link_only_to_files_that_exist() -> None:
    missing = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert missing == []


# Reports from elsewhere


def test_every_report_from_elsewhere_names_tests_that_exist_or_a_reason() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("## What went wrong elsewhere")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 47))
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for number, _, answer in rows:
        named = re.findall(r"`(test_\w+)`", answer)
        assert [name for name in named if name not in tests] == [], f"row {number}"
        reason = re.match(r"cannot happen: .{20}|as \d+\b", answer)
        assert named or reason, f"row {number} has neither a test nor a reason"


def test_no_child_takes_modules_from_the_folder_it_is_started_in() -> None:
    starts = [
        (str(path.relative_to(ROOT)), first)
        for path in every_source()
        for first in re.findall(r"sys\.executable,\s*(\"[^\"]*\")", path.read_text())
    ]
    assert len(starts) >= 10
    assert [start for start in starts if start[1] != '"-P"'] == []
