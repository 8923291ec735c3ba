"""`ds4 inspect` shows contract and plan of files and of running owners."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds4_common.errors import Ds4Error, LoaderError, UsageError
from ds4_worker.inspect import contract_sections, inspect
from helpers.bundles import valid_bytes
from helpers.stack import owner
from helpers.tiny_gguf import TinyLlama, write_llama


def facts(text: str) -> dict[str, str]:
    """The indented "name  value" lines."""
    pairs = re.findall(r"^  (.+?)  +(.+)$", text, re.MULTILINE)
    return {name: value.strip() for name, value in pairs}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny.gguf", TinyLlama(biases=True))


def test_a_file_shows_what_loading_it_would_prepare(model: Path) -> None:
    text = inspect(str(model))
    shown = facts(text)
    assert shown["served id"] == "tiny"
    assert shown["context"] == "256 tokens"
    assert shown["ends of generation"] == "0 2"
    assert shown["bos"] == "1, not added"
    assert shown["PAGED_KV"] == "4 planes: 4 of [0, 64, 2, 16]"
    assert (shown["matmul"], shown["attend_paged"]) == ("15", "2")
    assert shown["total"].startswith("35 ")
    assert "plan: " in text
    assert "memory needed" in text


def test_a_manifest_shows_what_its_owner_holds(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with owner(model, tmp_path / "run") as program:
        text = inspect(str(tmp_path / "run" / "w"))
        assert f"owner pid {program.process.pid}" in text
    shown = facts(text)
    assert "valid, format 1, model version 1" in text
    assert shown["matmul"] == "15"
    assert {"contract", "image.cpu", "tokenizer", "frontend"} <= shown.keys()


def test_a_model_without_recipe_still_shows_its_plan(tmp_path: Path) -> None:
    experts = TinyLlama(metadata={"llama.expert_count": 4})
    text = inspect(str(write_llama(tmp_path / "experts.gguf", experts)))
    assert "contract: none" in text
    assert "metadata 'llama.expert_used_count': got no such key" in text
    assert "plan: " in text


def test_a_damaged_file_is_refused_in_the_owners_words(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:100])
    with pytest.raises(LoaderError, match=r"tiny\.gguf"):
        inspect(str(model))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        inspect(str(tmp_path / "nothing"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("hello\n")
    with pytest.raises(Ds4Error, match=r"notes\.txt"):
        inspect(str(other))


def test_an_invalid_contract_is_shown_as_such() -> None:
    (section,) = contract_sections(valid_bytes() + b"\xfa\x3f\x01x")
    assert section.startswith("contract: INVALID")
    assert "unknown field number 1023" in section
