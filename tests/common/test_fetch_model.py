"""The fetched model is hashed again whenever its file changed."""

from __future__ import annotations

import os
from pathlib import Path

from helpers.fetch_model import state_of, was_checked


def test_only_the_very_file_that_was_hashed_counts_as_checked(tmp_path: Path) -> None:
    model, checked = tmp_path / "m.gguf", tmp_path / "m.sha256-ok"
    model.write_bytes(b"model")
    checked.touch()  # of a version that wrote nothing into it
    assert not was_checked(model, checked)
    checked.write_text(state_of(model))
    assert was_checked(model, checked)
    os.utime(model, ns=(0, 1))
    assert not was_checked(model, checked)
    checked.write_text(state_of(model))
    model.write_bytes(b"another")
    assert not was_checked(model, checked)
    model.unlink()
    assert not was_checked(model, checked)
