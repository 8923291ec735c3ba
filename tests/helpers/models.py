"""Finds the real model the tests use; never downloads (the Makefile does that)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.fetch_model import NAME, cache_folder


def smollm2_path() -> Path:
    """Path of the real small model; fails the test with the remedy when it is missing."""
    path = Path(os.environ.get("DS4_TEST_MODEL") or cache_folder() / NAME)
    if not path.is_file():
        pytest.fail(f"model file {path} is missing; fetch it with: make model")
    return path
