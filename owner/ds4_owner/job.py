"""What owner and loader child say to each other, one JSON packet at a time.

Owns the messages and the order in which they come:

    owner -> child   Job
    child -> owner   PlanPart..., Planned | Failed
    owner -> child   Measure...         (device memory only; each answered by Measured)
    owner -> child   Load, then Descriptors packets until every piece of memory is there
    child -> owner   (Log | Progress | Hashed | Blob)..., Done | Failed

The child trusts the owner; the owner takes nothing from the child but these records, because the
child parses files that nobody has checked. Transport: a SOCK_SEQPACKET pair, `ds4_common.fdpass`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct, json

from ds4_common.allocation import Allocation
from ds4_common.identity import ShardStat
from ds4_owner.backends import Fill
from ds4_owner.config import OwnerConfig

BLOB_NAMES = ("contract", "image.cpu", "image.cuda", "tokenizer", "frontend", "tensors")
PLAN_PART = 128  # allocations in one packet

ErrorKind: TypeAlias = Literal["usage", "gguf", "budget", "identity", "cuda", "other"]


class Job(Struct, frozen=True, tag="job", forbid_unknown_fields=True):
    """The first packet. The child ends itself when `parent_pid` is not its parent any more."""

    parent_pid: int
    config: OwnerConfig
    granularity: int
    device_uuid: str = ""  # where device memory is wanted


class PlanPart(Struct, frozen=True, tag="plan-part", forbid_unknown_fields=True):
    allocations: tuple[Allocation, ...]


class PlannedModel(Struct, frozen=True, forbid_unknown_fields=True):
    """One model of the plan and its files, for log lines, manifest and identity checks."""

    id: str
    n_bytes: int
    files: tuple[tuple[str, ShardStat], ...]
    raw_bytes: int  # of its raw ranges before artifacts and groups take tensors out
    raw_ranges: int
    replaced: int  # tensors served in another layout only


class Planned(Struct, frozen=True, tag="planned", forbid_unknown_fields=True):
    """The plan is complete. `scratch_bytes`: what loading needs beside the allocations."""

    models: tuple[PlannedModel, ...]
    scratch_bytes: int
    notes: tuple[str, ...]


class Load(Struct, frozen=True, tag="load", forbid_unknown_fields=True):
    """Go on. Descriptors follow: of every allocation by id, then of every blob by name."""

    fill: Fill
    reserve_bytes: int  # 0: no memory checks
    tmpfs: str | None


class Measure(Struct, frozen=True, tag="measure", forbid_unknown_fields=True):
    """How much memory has the device? Any number of times between Planned and Load."""


class Descriptors(Struct, frozen=True, tag="descriptors", forbid_unknown_fields=True):
    count: int


class Measured(Struct, frozen=True, tag="measured", forbid_unknown_fields=True):
    free_bytes: int
    total_bytes: int


class Log(Struct, frozen=True, tag="log", forbid_unknown_fields=True):
    line: str


class Progress(Struct, frozen=True, tag="progress", forbid_unknown_fields=True):
    phase: str
    done_bytes: int
    total_bytes: int


class Hashed(Struct, frozen=True, tag="hashed", forbid_unknown_fields=True):
    allocation: int
    hash128: str
    sample: str = ""  # of device memory (`ds4_common.samples`)


class Fingerprint(Struct, frozen=True, tag="fingerprint", forbid_unknown_fields=True):
    model: str
    value: str


class Blob(Struct, frozen=True, tag="blob", forbid_unknown_fields=True):
    name: str
    n_bytes: int
    hash128: str


class Done(Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """All is written. The child only relieves the page cache after this, and exits."""

    seconds: float  # reading, packing, hashing and writing


class Failed(Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    kind: ErrorKind
    message: str
    exit_code: int = 0  # of kind "cuda"


ToChild: TypeAlias = Job | Measure | Load | Descriptors
ToOwner: TypeAlias = (
    PlanPart | Planned | Measured | Log | Progress | Hashed | Fingerprint | Blob | Done | Failed
)

encode = json.Encoder().encode
decode_to_child = json.Decoder[ToChild](ToChild).decode
decode_to_owner = json.Decoder[ToOwner](ToOwner).decode
