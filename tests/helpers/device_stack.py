"""Owners and clients of device memory as processes on the stand-in driver.

Owns: one simulated device per test (`Device`), the processes on it, and what of its memory is in
use by anybody at all - counted as the stand-in does, by its memfds in /proc.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds4_common.gguf import GgmlType
from helpers import cuda_stand_in
from helpers.descriptors import open_fds
from helpers.stack import DEADLINE_SECONDS, Program, process_environment
from helpers.tiny_gguf import write_tensors

EVERY_KIND = {
    "token_embd.weight": ((1024, 64), GgmlType.F16),
    "blk.0.attn_norm.weight": ((1024,), GgmlType.F32),
    "blk.0.attn_q.weight": ((1024, 2048), GgmlType.Q8_0),
    "blk.0.attn_kv_b.weight": ((512, 4096), GgmlType.Q8_0),
    "blk.0.ffn_gate_exps.weight": ((1024, 33, 3), GgmlType.IQ2_XXS),
    "blk.0.ffn_up_exps.weight": ((1024, 33, 3), GgmlType.IQ2_XS),
    "blk.0.ffn_down_exps.weight": ((512, 130, 3), GgmlType.Q2_K),
    "output.weight": ((1024, 64), GgmlType.Q8_0),
}


def every_kind(folder: Path) -> Path:
    """A model whose load makes raw ranges and every artifact that is on by default."""
    return write_tensors(folder / "kinds.gguf", EVERY_KIND)


def owner_flags(model: Path, run: Path, *more: str, backend: str = "vmm") -> list[str]:
    return [
        *("--base", str(model), "--scope", "base", "--backend", backend, "--reserve-gb", "1"),
        *("--manifest", str(run / "w"), "--lock-file", str(run / "lock"), *more),
    ]


@dataclass
class DeviceClient:
    """A helpers.device_client that is asked and answers."""

    process: subprocess.Popen[str]

    def ask(self, command: str) -> Any:
        answer = self.tell(command)
        assert answer is not None, f"{command}: the client is gone"
        return answer

    def tell(self, command: str) -> Any | None:
        """The answer; None when the client died of it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(DEADLINE_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


@dataclass
class Device:
    """A simulated device that all processes of one test share."""

    settings: dict[str, str] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)
    clients: list[DeviceClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings.setdefault("pool", uuid.uuid4().hex[:12])

    def environment(self, **more: str) -> dict[str, str]:
        """What a process on this device gets beside its own environment."""
        everything = cuda_stand_in.environment({}, **(self.settings | more))
        return {name: value for name, value in everything.items() if value}

    def launch(self, module: str, *arguments: str, **more: str) -> Program:
        self.programs.append(Program.start(module, *arguments, **self.environment(**more)))
        return self.programs[-1]

    def owner(self, model: Path, run: Path, *flags: str, **more: str) -> Program:
        """A ready owner."""
        program = self.launch("ds4_owner.cli", *owner_flags(model, run, *flags), **more)
        program.wait_for("ready manifest=")
        return program

    def client(self, run: Path, **more: str) -> DeviceClient:
        process = subprocess.Popen(
            [sys.executable, "-m", "helpers.device_client", str(run / "w")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=process_environment(**self.environment(**more)),
        )  # fmt: skip
        self.clients.append(DeviceClient(process))
        return self.clients[-1]

    def descriptors(self, pid: int) -> int:
        """How many of the device's memory a process has open."""
        return sum(fd.endswith(f" {self._name}") for fd in open_fds(pid))

    def mappings(self, pid: int) -> int:
        """How many mappings of the device's memory a process has."""
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return sum(line.endswith(self._name) for line in maps)

    @property
    def _name(self) -> str:
        return f"/memfd:sim-device.{self.settings['pool']} (deleted)"

    def used_bytes(self) -> int:
        """Of the device's memory, by whatever process is alive."""
        found: dict[int, int] = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                for fd in (process / "fd").iterdir():
                    with suppress(OSError):
                        if os.readlink(fd) == self._name:
                            found[fd.stat().st_ino] = fd.stat().st_size
                for line in (process / "maps").read_text().splitlines():
                    if line.endswith(self._name):
                        span, _, _, _, inode = line.split()[:5]
                        first, last = (int(part, 16) for part in span.split("-"))
                        found.setdefault(int(inode), last - first)
        return sum(found.values())

    def end(self) -> None:
        for program in self.programs:
            if program.process.poll() is None:
                program.stop(signal.SIGKILL)
            program.wait()  # closes what it wrote to
        for client in self.clients:
            client.end(signal.SIGKILL)


@contextmanager
def device(**settings: str) -> Iterator[Device]:
    made = Device(settings)
    try:
        yield made
    finally:
        made.end()
