"""What `status` shows of one owner.

Owns: gathering the facts over the control socket and their two forms, JSON (complete) and text
(summed up per kind; a model may have hundreds of ranges). Sizes are bytes in JSON.
"""

from __future__ import annotations

import msgspec

from ds4_common import client, paths
from ds4_common.allocation import ArtifactKind
from ds4_common.protocol import (
    AllocationRecord,
    BlobRecord,
    DeviceRecord,
    LeaseRecord,
    ListenerRecord,
    ModelRecord,
    Progress,
)
from ds4_owner import tables
from ds4_owner.progress import size
from ds4_owner.resident import resident
from ds4_owner.tables import Row, Section


class Memory(msgspec.Struct, frozen=True):
    """`resident_bytes` is the owner process; `own_bytes` of it is not shared weights."""

    ranges_bytes: int
    artifacts_bytes: int
    blobs_bytes: int
    resident_bytes: int | None
    own_bytes: int | None


class Report(msgspec.Struct, frozen=True):
    manifest: str
    control_socket: str
    line_socket: str
    pid: int
    owner_id: str
    state: str
    reason: str
    progress: Progress
    backend: str
    device: DeviceRecord | None
    uptime_seconds: float
    broker_requests: int
    connections: int
    memory: Memory
    models: list[ModelRecord]
    ranges: list[AllocationRecord]
    artifacts: list[AllocationRecord]
    blobs: list[BlobRecord]
    leases: list[LeaseRecord]
    listeners: list[ListenerRecord]


def gather(manifest_path: str) -> Report:
    """Asks the owner of a manifest. Raises OwnerUnavailable when it does not answer."""
    with client.connect(manifest_path, "status") as connection:
        status = connection.status()
        welcome = connection.welcome
        held = connection.describe_allocations() if status.state == "ready" else []
        pid = connection.owner_pid
    ranges = [a for a in held if a.artifact is None]
    artifacts = [a for a in held if a.artifact is not None]
    parts = resident(pid)
    return Report(
        manifest=manifest_path,
        control_socket=paths.control_socket_path(manifest_path),
        line_socket=status.line_socket,
        pid=pid,
        owner_id=welcome.owner_id,
        state=status.state,
        reason=welcome.reason,
        progress=welcome.progress,
        backend=welcome.backend,
        device=welcome.device,
        uptime_seconds=status.uptime_seconds,
        broker_requests=status.line_requests,
        connections=status.connections,
        memory=Memory(
            ranges_bytes=sum(a.alloc_bytes for a in ranges),
            artifacts_bytes=sum(a.alloc_bytes for a in artifacts),
            blobs_bytes=sum(b.n_bytes for b in welcome.blobs),
            resident_bytes=parts.get("resident"),
            own_bytes=parts["resident"] - parts["shared"] if "shared" in parts else None,
        ),
        models=welcome.models,
        ranges=ranges,
        artifacts=artifacts,
        blobs=welcome.blobs,
        leases=status.leases,
        listeners=status.listeners,
    )


def as_json(report: Report) -> str:
    return msgspec.json.encode(report).decode()


def as_text(report: Report, terminal: bool) -> str:
    """Tables: set by rich on a terminal, plain columns otherwise."""
    sections = [s for s in _sections(report) if s[2]]
    return tables.drawn_text(sections) if terminal else tables.plain_text(sections)


def _sections(report: Report) -> list[Section]:
    memory, progress, device = report.memory, report.progress, report.device
    state = report.state
    if state == "loading":
        share = 100 * progress.done_bytes / max(progress.total_bytes, 1)
        state = f"loading: {progress.phase}, {share:.0f} % of {size(progress.total_bytes)}"
    elif state == "failed":
        state = f"failed: {report.reason}"
    owner: list[Row] = [
        ("pid", str(report.pid)),
        ("state", state),
        ("backend", report.backend),
        *([("device", f"{device.name}, {device.uuid}")] if device else []),
        ("up", _age(report.uptime_seconds)),
        ("ranges", f"{len(report.ranges)}, {size(memory.ranges_bytes)}"),
        ("artifacts", f"{len(report.artifacts)}, {size(memory.artifacts_bytes)}"),
        ("blobs", f"{len(report.blobs)}, {size(memory.blobs_bytes)}"),
        ("own memory", "unknown" if memory.own_bytes is None else size(memory.own_bytes)),
        ("broker requests", str(report.broker_requests)),
    ]
    kinds: dict[int, list[AllocationRecord]] = {}
    for record in report.artifacts:
        if record.artifact is not None:
            kinds.setdefault(record.artifact.kind, []).append(record)
    names = {int(kind): kind.name.lower() for kind in ArtifactKind}
    artifacts: list[Row] = [
        (names.get(kind, str(kind)), str(len(held)), size(sum(a.alloc_bytes for a in held)))
        for kind, held in sorted(kinds.items())
    ]
    models: list[Row] = [
        (m.id, size(m.n_bytes), m.fingerprint, m.files[0].path if m.files else "")
        for m in report.models
    ]
    leases: list[Row] = [
        (str(x.pid), x.role, x.name, _age(x.age_seconds), x.command) for x in report.leases
    ]
    listeners: list[Row] = [(x.path or f"{x.host} port {x.port}", x.name) for x in report.listeners]
    return [
        (f"owner of {report.manifest}", ("", ""), owner),
        ("models", ("id", "size", "fingerprint", "first file"), models),
        ("artifacts", ("kind", "count", "size"), artifacts),
        ("leases", ("pid", "role", "name", "age", "command"), leases),
        ("listening sockets", ("address", "name"), listeners),
    ]


def _age(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s"
