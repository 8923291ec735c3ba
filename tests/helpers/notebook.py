"""Runs docs/weights.ipynb without Jupyter: `python tests/helpers/notebook.py MANIFEST` rewrites its
outputs from that owner's model.

Owns: executing code cells in one namespace, with what they print. Cells are plain Python.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from ds4_common.paths import MANIFEST_VARIABLE

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "weights.ipynb"


def read() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(NOTEBOOK.read_text())
    return document


def run(document: dict[str, Any], manifest: str) -> list[str]:
    """What each code cell prints, in order. Exceptions of a cell name it."""
    before = os.environ.get(MANIFEST_VARIABLE)
    os.environ[MANIFEST_VARIABLE] = manifest
    namespace: dict[str, Any] = {}
    printed = []
    try:
        for cell in document["cells"]:
            if cell["cell_type"] != "code":
                continue
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), namespace)
            printed.append(output.getvalue())
    finally:
        os.environ.pop(MANIFEST_VARIABLE)
        if before is not None:
            os.environ[MANIFEST_VARIABLE] = before
    return printed


def main() -> None:
    document = read()
    printed = run(document, sys.argv[1])
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(code, printed, strict=True), 1):
        cell["execution_count"] = number
        stream = {
            "name": "stdout",
            "output_type": "stream",
            "text": text.splitlines(keepends=True),
        }
        cell["outputs"] = [stream] if text else []
    NOTEBOOK.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
