"""`ds4-weight-server verify`: are memory and files what was loaded, byte for byte?

Owns the command: what is compared at which pace, the report, and `--accept`, which tells the owner
that files were touched only. Runs beside a serving owner as a client of it; reads everything once,
throttled, with low priority, and leaves no second copy in the page cache. Refuses to accept a file
unless every byte that the owner made of it was compared and only its times changed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from ds4_common import client, fdpass, tensor_directory
from ds4_common.allocation import Allocation
from ds4_common.errors import IdentityError, UsageError
from ds4_common.protocol import ModelRecord
from ds4_owner import recheck, status
from ds4_owner.answers import to_allocation
from ds4_owner.arguments import Parser
from ds4_owner.progress import LoadView, size
from ds4_owner.recheck import FileCheck, Finding, Held, ReadMemory

DEFAULT_RATE = 1.0  # GB/s
NICENESS = 10
_NAP_SECONDS = 0.01  # the shortest sleep that is worth one


class Pace:
    """Keeps the average rate, and the progress."""

    def __init__(self, bytes_per_second: float, view: LoadView) -> None:
        self._rate = bytes_per_second  # 0: unlimited
        self._view = view
        self._start = time.monotonic()
        self.done_bytes = 0

    def advance(self, n_bytes: int) -> None:
        self.done_bytes += n_bytes
        self._view.update(self.done_bytes)
        if self._rate:
            ahead = self._start + self.done_bytes / self._rate - time.monotonic()
            if ahead > _NAP_SECONDS:
                time.sleep(ahead)


class Report(msgspec.Struct):
    """`ok`: everything is as it was loaded, and attaching works."""

    manifest: str
    ok: bool
    compared_bytes: int
    seconds: float
    findings: list[Finding]
    files: list[FileCheck]
    accepted: int = 0


def main(arguments: Sequence[str]) -> int:
    """0 when all is as it was loaded. Raises IdentityError when not, other Ds4Errors."""
    options = _parse(arguments)
    path = status.only_owner(options.manifest)
    os.nice(NICENESS)
    with client.connect(path, "operator") as owner:
        report = verify(owner, path, options.rate * 1e9)
        if options.accept:
            _accept(owner, report)
    print(msgspec.json.encode(report).decode() if options.json else as_text(report))
    if not report.ok:
        raise IdentityError(summary(report))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    text = "compare all bytes of an owner, and of its model files, with what was loaded"
    parser = Parser(prog="ds4-weight-server verify", description=text, allow_abbrev=False)
    parser.add_argument("--manifest", metavar="FILE", help="of which owner (see status)")
    parser.add_argument(
        "--rate", metavar="GB/S", type=float, default=DEFAULT_RATE,
        help=f"most bytes to read per second, 0 for no limit (default: {DEFAULT_RATE})",
    )  # fmt: skip
    parser.add_argument(
        "--accept", action="store_true",
        help="let workers attach again when model files were touched but hold the same bytes",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    if not 0 <= options.rate < float("inf"):
        raise UsageError(f"--rate {options.rate}: expected GB/s, or 0 for no limit")
    return options


def verify(owner: client.OwnerConnection, manifest: str, bytes_per_second: float) -> Report:
    """Compares everything. Raises OwnerUnavailable when the owner is not ready."""
    with ExitStack() as cleanup:
        held = _fetch(owner, cleanup)
        models = owner.welcome.models
        memory = sum(a.n_bytes for a, _, _ in held.allocations.values())
        total = memory + sum(n for n, _, _ in held.blobs.values())
        before = {model.id: recheck.stat_files(model) for model in models}
        readable = [m for m in models if all(f.now is not None for f in before[m.id])]
        names = {model.id for model in readable}
        total += sum(a.n_bytes for a, _, _ in held.allocations.values() if a.model in names)
        view = LoadView(total, verb="check")
        pace = Pace(bytes_per_second, view)
        start = time.monotonic()
        try:
            findings = list(recheck.check_memory(held, pace.advance))
            sound = held.without({finding.name for finding in findings})
            for model in readable:
                findings += recheck.check_files(model, sound, pace.advance)
        finally:
            view.close()
        files = [f for model in models for f in before[model.id]]
        findings += _moved(models, files)
        findings += _replaced(files, {f.name for f in findings})
    ok = not findings and all(f.state == "unchanged" for f in files)
    seconds = round(time.monotonic() - start, 3)
    return Report(manifest, ok, pace.done_bytes, seconds, findings, files)


def _moved(models: Sequence[ModelRecord], files: Sequence[FileCheck]) -> list[Finding]:
    """Files that changed while they were compared: nothing is known about them."""
    after = {f.path: f for model in models for f in recheck.stat_files(model)}
    return [
        Finding("file", f.path, "changed while it was compared; verify it again")
        for f in files
        if after[f.path].now != f.now
    ]


def _replaced(files: Sequence[FileCheck], different: set[str]) -> list[Finding]:
    """Files that are gone, or other ones than were loaded, whatever they hold."""
    findings = []
    for file in files:
        if file.state == "missing":
            findings.append(Finding("file", file.path, f"missing: {file.changes}"))
        elif file.state == "changed":
            text = f"not the file that was loaded: {file.changes}"
            if file.path not in different:
                text += "; no difference in content was found: restart the owner with it"
            findings.append(Finding("file", file.path, text))
    return findings


def _fetch(owner: client.OwnerConnection, cleanup: ExitStack) -> Held:
    names = [blob.name for blob in owner.welcome.blobs]
    records, fds = owner.fetch_blobs(names)
    cleanup.callback(fdpass.close_all, fds)
    blobs = {
        b.name: (b.n_bytes, b.hash128, recheck.host_memory(fd))
        for b, fd in zip(records, fds, strict=True)
    }
    n_bytes, _, read = blobs[tensor_directory.BLOB_NAME]
    directory = bytearray(n_bytes)
    read(0, memoryview(directory))
    places = tensor_directory.decode(bytes(directory))
    if owner.welcome.device is not None:
        return Held(_on_device(owner, cleanup), blobs, places, on_device=True)
    fetched = owner.fetch_allocations()
    cleanup.callback(fdpass.close_all, [fd for _, fd in fetched])
    return Held(
        {r.id: (to_allocation(r), r.hash128, recheck.host_memory(fd)) for r, fd in fetched},
        blobs, places,
    )  # fmt: skip


def _on_device(
    owner: client.OwnerConnection, cleanup: ExitStack
) -> dict[int, tuple[Allocation, str, ReadMemory]]:
    """Device memory, mapped here and read through a pinned buffer."""
    from ds4_common.cuda.ranges import map_ranges
    from ds4_common.cuda.reading import DeviceReader

    ranges = cleanup.enter_context(map_ranges(owner, prove=False))
    reader = cleanup.enter_context(DeviceReader(recheck.CHUNK_BYTES))

    def memory(address: int) -> ReadMemory:
        return lambda offset, view: reader.read_into(address + offset, view)

    return {
        i: (to_allocation(held.record), held.record.hash128, memory(held.address))
        for i, held in ranges.ranges.items()
    }


def _accept(owner: client.OwnerConnection, report: Report) -> None:
    """Renews the owner's record of touched files. Raises IdentityError when more changed."""
    touched = [f.now for f in report.files if f.state == "touched" and f.now is not None]
    if report.findings or not touched:
        return
    unlisted = sum(model.more_files for model in owner.welcome.models)
    if unlisted:
        raise IdentityError(
            f"{unlisted} more shards are not listed and cannot be accepted: restart the owner"
        )
    report.accepted = owner.accept_files(touched)
    report.ok = True


def as_text(report: Report) -> str:
    lines = [f"compared {size(report.compared_bytes)} in {report.seconds:.1f} s"]
    lines += [f"{finding.subject} {finding.name}: {finding.text}" for finding in report.findings]
    different = {finding.name for finding in report.findings}
    for file in report.files:
        if file.path in different:
            continue
        if file.state == "touched":
            verdict = "accepted" if report.accepted else "touched only"
            lines.append(f"file {file.path}: {verdict}, same content: {file.changes}")
        else:
            lines.append(f"file {file.path}: as it was loaded")
    return "\n".join(lines)


def summary(report: Report) -> str:
    if report.findings:
        count = len(report.findings)
        return f"{count} of the things compared are not what was loaded; see the report"
    return (
        "model files were touched but hold the bytes that were loaded; workers are refused until"
        " this is accepted: ds4-weight-server verify --accept"
    )
