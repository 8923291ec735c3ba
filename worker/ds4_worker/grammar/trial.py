"""Compiling a grammar that a request wrote for trial, in a process that may be killed over it.

The library bounds what it builds, but not how long it looks for contradictions in combinations
(`&`, `~`) of counted repetitions: a line of text can take hours, and a thread cannot be stopped. So
it is compiled first where the kernel counts seconds and memory. Owns: that process and its limits.
Refuses nothing but what was killed there: whatever else is wrong the real compiler says, in no more
time. As a program (`python -m ds4_worker.grammar.trial`) it is the process, with a `Task` on stdin.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterable

import msgspec

from ds4_common.errors import GrammarError

CPU_SECONDS = 2  # of which a quarter is starting
MEMORY_BYTES = 2 << 30  # of addresses


class Task(msgspec.Struct, frozen=True):
    """A grammar, and what of the vocabulary it can name: tokens by id, special ones by name."""

    source: str
    n_vocab: int
    eos_ids: list[int]
    special: dict[int, bytes]
    cpu_seconds: int


class Trial:
    """One compilation for trial. `stop` may be called from another thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    @property
    def stopped(self) -> bool:
        return self._stopped

    def run(
        self, source: str, n_vocab: int, eos_ids: Iterable[int], special: dict[int, bytes]
    ) -> None:
        """Raises GrammarError when compiling takes too much, or was stopped. `special`: as
        `Compiler.special_tokens` has it."""
        task = Task(source, n_vocab, list(eos_ids), special, CPU_SECONDS)
        with self._lock:
            if self._stopped:
                raise GrammarError("the compilation was stopped")
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "ds4_worker.grammar.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        process.communicate(msgspec.json.encode(task))
        if self._stopped:
            raise GrammarError("the compilation was stopped")
        if process.returncode:
            raise GrammarError(
                f"the grammar takes more than {task.cpu_seconds} s of computing or "
                f"{MEMORY_BYTES >> 30} GiB to compile; use smaller counts where terminals are "
                "combined with & or ~"
            )

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()


class _Tokens:
    """A vocabulary with every byte and the special tokens; the others have no text."""

    def __init__(self, task: Task) -> None:
        self._special = task.special
        spare = (token for token in range(task.n_vocab) if token not in task.special)
        self._bytes = dict(zip(spare, (bytes([byte]) for byte in range(256)), strict=False))

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return []  # only of interest where tokens are forced

    def token_bytes(self, token: int) -> bytes:
        return self._special.get(token) or self._bytes.get(token, b"")

    def is_control(self, token: int) -> bool:
        return token in self._special

    def is_special(self, token: int) -> bool:
        return token in self._special


def compile_task(task: Task) -> None:
    """Raises GrammarError."""
    from ds4_worker.grammar.compiler import (
        Compiler,
    )  # with the library; who tries has no need of it

    Compiler(_Tokens(task), task.n_vocab, task.eos_ids).compile(task.source)


def main() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (task.cpu_seconds, task.cpu_seconds + 1))
    try:
        compile_task(task)
    except GrammarError:
        return  # the real compiler will say what is wrong with it


if __name__ == "__main__":
    main()
