"""Compiling a grammar that a request wrote for trial, in a process that may be killed over it.

The library bounds what it builds, but not how long it looks for contradictions in combinations
(`&`, `~`) of counted repetitions: a line of text can take hours, and a thread cannot be stopped. So
it is compiled first where the kernel counts seconds and memory. Owns: that process and its limits.
Refuses nothing but what was killed there: whatever else is wrong the real compiler says, in no more
time. What goes wrong with the process itself is never called the grammar's fault. As a program
(`python -m ds4_worker.grammar.trial`) it is the process, with a `Task` on stdin.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable

import msgspec

from ds4_common.errors import GrammarError, GrammarUntried

# -P: nothing is imported from the folder that the worker was started in.
COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "ds4_worker.grammar.trial")
CPU_SECONDS = 2  # of which a quarter is starting
MEMORY_BYTES = 2 << 30  # of addresses
WAIT_SECONDS = 60.0  # by the clock; a process that gets no core, or no memory, has to end as well
_NO_MEMORY = 3  # exit code: Python ran into the limit; the library aborts
_TOO_MUCH = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV, _NO_MEMORY)


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
        """Raises GrammarError when compiling takes too much, or was stopped; GrammarUntried when
        that could not be found out. `special`: as `Compiler.special_tokens` has it."""
        task = Task(source, n_vocab, list(eos_ids), special, CPU_SECONDS)
        code = self._compile(msgspec.json.encode(task))
        if self._stopped:
            raise GrammarError("the compilation was stopped")
        if code in _TOO_MUCH:
            raise GrammarError(
                f"the grammar takes more than {task.cpu_seconds} s of computing or "
                f"{MEMORY_BYTES >> 30} GiB to compile; use smaller counts where terminals are "
                "combined with & or ~"
            )
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise GrammarUntried(
                f"the process that compiles the grammar for trial ended with {how}, and not because"
                " of the grammar: is the machine out of memory? Send the request again"
            )

    def _compile(self, data: bytes) -> int:
        """The exit code of the process, or what killed it (negative)."""
        if self._stopped:
            return 0
        try:
            # A group of its own: Ctrl-C is the worker's.
            process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,
            )
        except OSError as error:
            raise GrammarUntried(
                f"no process to compile the grammar for trial can be started ({error.strerror});"
                " send the request again when the machine has less to do"
            ) from error
        with process:  # closed and waited for, whatever happens
            with self._lock:
                self._process = process
                if self._stopped:
                    process.kill()
            try:
                process.communicate(data, timeout=WAIT_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise GrammarUntried(
                    f"the process that compiles the grammar for trial got less than {CPU_SECONDS} s"
                    f" of computing in {WAIT_SECONDS:g} s; send the request again when the machine"
                    " has less to do"
                ) from error
            finally:
                process.kill()  # nothing, where it has ended
        return process.returncode

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
    # It comes with the library, of which who tries has no need.
    from ds4_worker.grammar.compiler import Compiler

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
    except MemoryError:
        sys.exit(_NO_MEMORY)


if __name__ == "__main__":
    main()
