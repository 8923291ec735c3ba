"""`reexec`: the running program gives everything to the one that is installed now, in one process.

Owns the two steps. First the next program is rehearsed as a child: it gets the very record it
would start from, imports all it needs, decodes, and says so; whatever goes wrong there - a syntax
error, a missing module, a state it cannot read, a crash, a hang - leaves the running program as it
is. Then the broker pauses between two requests, a forked child goes on serving (interim.py), and
execve() replaces the program: same pid, same descriptors, so leases, lock and sockets do not even
notice. Signals stay blocked until the next program has its handlers.

Refuses to leave a half-made handover: when execve() fails, the broker goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from ds4_common.errors import BackendError, HandoverError
from ds4_owner import interim, state
from ds4_owner.progress import log
from ds4_owner.resume import CHECK, CHECKED, STATE_VARIABLE
from ds4_owner.stop import StopWatch

REHEARSAL_SECONDS = 60.0
_EXIT_SECONDS = 5.0  # from the end of its output
_OUTPUT_BYTES = 64 << 10
_SHOWN_CHARS = 600
# -P: what is installed is imported, whatever folder the owner was started in.
COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "ds4_owner.resume")


class Handed(interim.Handed, Protocol):
    """What is handed over, and to a program with which arguments."""

    arguments: tuple[str, ...]

    def hold(self) -> None: ...
    def let_go(self) -> None: ...


def rehearse(owner: Handed, watch: StopWatch) -> None:
    """Lets the next program try, while this one serves. Raises HandoverError when it cannot take
    over, Stopped when it is time to stop."""
    broker = owner.broker
    record = broker.ask(lambda: owner.record(broker.traffic(time.monotonic())))
    fd = state.write(record)
    try:
        process = subprocess.Popen(
            [*COMMAND, *owner.arguments],
            env={**os.environ, STATE_VARIABLE: f"{CHECK}{fd}"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(fd,),
        )  # fmt: skip
    except OSError as error:
        raise HandoverError(f"cannot start {COMMAND[0]}: {error.strerror}") from error
    finally:
        os.close(fd)
    try:
        output = _follow(process, watch)
        code = process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise HandoverError("the next program closed its output and hangs") from error
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    lines = output.strip().splitlines() or ["it said nothing"]
    if code != 0 or lines[-1] != CHECKED:
        raise HandoverError(
            f"the next program failed its rehearsal ({_ended(code)}): {_tail(lines)}"
        )


def _follow(process: subprocess.Popen[bytes], watch: StopWatch) -> str:
    """All that it says until it closes its output. Raises HandoverError after too long."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    output = b""
    give_up = time.monotonic() + REHEARSAL_SECONDS
    while True:
        left = give_up - time.monotonic()
        if left <= 0 or not watch.wait([fd], timeout_ms=int(left * 1000) + 1):
            raise HandoverError(
                f"the next program did not finish its rehearsal in {REHEARSAL_SECONDS:.0f} s"
            )
        data = os.read(fd, _OUTPUT_BYTES)
        if not data:
            return output.decode("utf-8", "replace")
        output = (output + data)[-_OUTPUT_BYTES:]


def _ended(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _tail(lines: Sequence[str]) -> str:
    return " | ".join(line.strip() for line in lines)[-_SHOWN_CHARS:]


def replace_program(owner: Handed) -> None:
    """Becomes the next program. Returns never; raises HandoverError when that failed and this
    program goes on."""
    try:
        owner.hold()
    except BackendError as error:
        owner.let_go()
        raise HandoverError(f"device memory cannot be handed over: {error}") from error
    at = time.monotonic()
    owner.broker.pause()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    passed: list[int] = []
    meanwhile: interim.Interim | None = None
    try:
        meanwhile = interim.fork(owner, at)
        passed = [state.write(meanwhile.record), *state.descriptors(meanwhile.record)]
        for fd in passed:
            os.set_inheritable(fd, True)
        command = [*COMMAND, *owner.arguments]
        log(f"reexec: handing over to {COMMAND[0]}")
        os.execve(command[0], command, {**os.environ, STATE_VARIABLE: str(passed[0])})
    except (OSError, HandoverError) as error:
        for fd in passed[1:]:
            os.set_inheritable(fd, False)
        if passed:
            os.close(passed[0])
        if meanwhile is not None:
            meanwhile.cancel()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise HandoverError(f"cannot become {COMMAND[0]}: {reason}") from error
    finally:  # execve() did not happen
        owner.let_go()
        owner.broker.go_on()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
