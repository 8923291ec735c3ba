"""The page's modules under Node, without a browser: for tests of what is pure in them."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds4_worker.http import page

DRIVER = Path(__file__).with_name("page_modules.mjs")


class ScriptError(AssertionError):
    """A function of a module threw."""


class Modules:
    """Calls by name; see page_modules.mjs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, name: str, *arguments: Any) -> Any:
        """The value that the function gives. Raises ScriptError."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"name": name, "args": arguments}) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        if "error" in reply:
            raise ScriptError(reply["error"])
        return reply.get("value")


@contextmanager
def modules() -> Iterator[Modules]:
    """The modules in a Node process; skips the test where there is no Node."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("no Node here: apt-get install nodejs")
    with tempfile.TemporaryDirectory(prefix="ds4-modules-") as folder:
        shutil.copytree(page.FOLDER, folder, dirs_exist_ok=True)
        # Browsers are told by the page that these are modules; Node by this.
        Path(folder, "package.json").write_text('{"type": "module"}')
        with subprocess.Popen(
            [program, str(DRIVER), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        ) as process:
            yield Modules(process)
            assert process.stdin
            process.stdin.close()
