"""The owner's configuration: parsed once from argv and the environment, frozen afterwards.

Owns: the record, and how the published server reads and clamps numbers. `cli` fills it in and
refuses combinations. What is not published: `--cpu-layout`, `--served-id`, `--metrics-port` and the
host backends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ds4_owner.state import LoadValue

MIB = 1 << 20
GIB = 1 << 30

BackendName = Literal["memfd", "shm", "vmm", "ipc"]
Scope = Literal["both", "base", "mtp"]
CpuLayout = Literal["auto", "raw", "packed", "aligned"]
HOST_BACKENDS: tuple[BackendName, ...] = ("memfd", "shm")


@dataclass(frozen=True, slots=True)
class OwnerConfig:
    """Everything one owner start needs to know. Paths as given, sizes in bytes."""

    base: str | None
    mtp: str | None
    drafter: str | None
    manifest: str | None  # None only for a dry run
    scope: Scope
    backend: BackendName
    device: int
    broker_socket: str | None
    lock_file: str | None  # None: no lock
    exit_on_parent_pid: int  # 0: off
    span_bytes: int
    copy_chunk_bytes: int
    reserve_bytes: int | None  # None: not given, see budget.default_reserve; 0: no memory check
    derive_output_certifier: bool
    derive_group_count: int
    derive_q8_f16: tuple[str, ...]
    derive_q8_f32: tuple[str, ...]
    derive_budget_bytes: int  # 0: unlimited
    repack_iq2: bool
    repack_q2k: bool
    repack_q8: bool
    repack_threads: int
    repack_hash: bool
    cpu_layout: CpuLayout
    served_id: str | None
    dry_run: bool
    direct_io: bool
    preflight: bool  # False: report the budget but do not enforce it
    metrics_port: int | None = None  # None: off; 0: any free one

    @property
    def model_files(self) -> tuple[tuple[str, str], ...]:
        """(model id, first shard) in allocation order."""
        pairs = (
            ("base", self.base if self.scope != "mtp" else None),
            ("mtp", self.mtp if self.scope != "base" else None),
            ("drafter", self.drafter),
        )
        return tuple((model, path) for model, path in pairs if path is not None)


_LOAD_FIELDS = (
    "scope", "backend", "span_bytes", "derive_output_certifier", "derive_group_count",
    "derive_budget_bytes", "repack_iq2", "repack_q2k", "repack_q8", "cpu_layout", "served_id",
)  # fmt: skip


def load_key(config: OwnerConfig) -> dict[str, LoadValue]:
    """The settings that decide which bytes an owner holds. Two owners with the same key (and
    unchanged files) hold the same bytes."""
    key: dict[str, LoadValue] = {name: getattr(config, name) for name in _LOAD_FIELDS}
    key |= {model: os.path.abspath(path) for model, path in config.model_files}
    key["derive_q8_f16"] = list(config.derive_q8_f16)
    key["derive_q8_f32"] = list(config.derive_q8_f32)
    return key


def leading_integer(text: str) -> int | None:
    """The unsigned integer a text starts with, as strtoull reads it; None when there is none.

    The published server reads sizes this way, so `--span-mb 512MB` is 512 and `--span-mb x` keeps
    the default. A sign is no digit here: a negative size is garbage, not a huge number.
    """
    match = re.match(r"\s*\+?(\d+)", text)
    return int(match.group(1)) if match else None


def mebibytes(text: str | None, default: int, low: int, high: int) -> int:
    """Bytes of a MiB flag: 0 and garbage keep the default, anything else is clamped."""
    value = leading_integer(text) if text is not None else None
    return max(low, min(high, value or default)) * MIB


def repack_threads(flag: str | None, environ: Mapping[str, str]) -> int:
    """Threads of the loader: flag, else DS4_WS_REPACK_THREADS, else min(6, cores); 1..16."""
    for text in (flag, environ.get("DS4_WS_REPACK_THREADS")):
        value = leading_integer(text) if text else None
        if value:
            return min(value, 16)
    return min(6, len(os.sched_getaffinity(0)))
