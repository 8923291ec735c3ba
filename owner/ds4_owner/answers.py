"""What the broker answers: every native request turned into packets, without any socket.

Owns: the offer (what is handed out, with borrowed descriptors), paging of replies that carry more
descriptors than one packet may, and the check that model files are still those that were loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ds4_common import fdpass, protocol
from ds4_common.allocation import Allocation, Artifact, ArtifactKind
from ds4_common.errors import AddressInUse, HandoverError, IdentityError
from ds4_common.protocol import (
    AllocationRecord,
    ArtifactRecord,
    BlobRecord,
    DeviceRecord,
    Error,
    ErrorCode,
    FileRecord,
    ModelRecord,
    OwnerState,
    Progress,
    Welcome,
)
from ds4_common.shard_stat import ShardStat
from ds4_owner.lending import Descriptor
from ds4_owner.state import Key, State

# Records that fit a packet beside their fixed fields, counted by their encoded size.
_PAGE_BYTES = fdpass.MAX_PACKET_BYTES - 1024
_FILES_BYTES = 32 * 1024  # the same for the shards that a welcome lists
_MAX_MESSAGE_CHARS = 2000  # of an error, which may quote what a client sent
_MAX_CHANGES = 4  # listed in an identity error


@dataclass(frozen=True, slots=True)
class Packet:
    """One message to send. Descriptors are borrowed from their holder."""

    message: protocol.Reply
    borrowed_fds: tuple[Descriptor, ...] = ()


@dataclass(frozen=True, slots=True)
class Blob:
    """A named, sealed piece of memory: contract, image, tokenizer, frontend."""

    borrowed_fd: int
    n_bytes: int
    hash128: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Everything a ready owner hands out."""

    models: tuple[ModelRecord, ...] = ()
    announced_models: tuple[ModelRecord, ...] = ()  # as a welcome lists them
    allocations: Mapping[int, AllocationRecord] = field(default_factory=dict)
    borrowed_fds: Mapping[int, Descriptor] = field(default_factory=dict)
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    device: DeviceRecord | None = None  # None: host memory


def make_offer(
    allocations: Sequence[Allocation],
    borrowed_fds: Mapping[int, Descriptor],
    hashes: Mapping[int, str],
    blobs: Mapping[str, Blob],
    models: Sequence[ModelRecord],
    device: DeviceRecord | None = None,
    samples: Mapping[int, str] | None = None,
) -> Offer:
    """Joins what the loader made; `samples` are of device memory. KeyError when an allocation lacks
    its descriptor, hash or sample."""
    if device is None or samples is None:
        records = [allocation_record(a, hashes[a.id], borrowed_fds[a.id]) for a in allocations]
    else:
        records = [
            msgspec.structs.replace(
                allocation_record(a, hashes[a.id], borrowed_fds[a.id]), sample=samples[a.id]
            )
            for a in allocations
        ]
    return _offer(records, borrowed_fds, blobs, models, device)


def _offer(
    records: Sequence[AllocationRecord],
    borrowed_fds: Mapping[int, Descriptor],
    blobs: Mapping[str, Blob],
    models: Sequence[ModelRecord],
    device: DeviceRecord | None,
) -> Offer:
    return Offer(
        models=tuple(models),
        announced_models=tuple(_announced(model) for model in models),
        allocations={a.id: a for a in records},
        borrowed_fds={a.id: borrowed_fds[a.id] for a in records},
        blobs=dict(blobs),
        device=device,
    )


def allocation_record(a: Allocation, hash128: str, fd: Descriptor) -> AllocationRecord:
    """`fd`: of the memory that holds it. Device memory is no object of the file system."""
    memory = os.fstat(fd) if isinstance(fd, int) else None
    artifact = None
    if a.artifact is not None:
        d = a.artifact
        artifact = ArtifactRecord(int(d.kind), d.in_dim, d.out_dim, d.groups, d.name)
    return AllocationRecord(
        id=a.id,
        model=a.model,
        model_bytes=a.model_bytes,
        source_offset=a.source_offset,
        source_bytes=a.source_bytes,
        n_bytes=a.n_bytes,
        alloc_bytes=a.alloc_bytes,
        hash128=hash128,
        artifact=artifact,
        device=memory.st_dev if memory else 0,
        inode=memory.st_ino if memory else 0,
    )


def to_allocation(r: AllocationRecord) -> Allocation:
    """Back from `allocation_record`."""
    artifact = None
    if r.artifact is not None:
        d = r.artifact
        artifact = Artifact(ArtifactKind(d.kind), d.in_dim, d.out_dim, d.groups, d.name)
    return Allocation(
        r.id, r.model, r.model_bytes, r.source_offset, r.source_bytes, r.n_bytes, r.alloc_bytes,
        artifact,
    )  # fmt: skip


def offer_of(record: State, fds: Mapping[Key, int]) -> Offer:
    """What an owner handed out, from its record and where its memory is open now."""
    named: list[Key] = [*(a.id for a in record.allocations), *(b.name for b in record.blobs)]
    missing = [key for key in named if key not in fds]
    if missing:
        raise HandoverError(f"the owner's state names memory that is not there: {missing[:8]}")
    objects = {piece.key: {"device": piece.device, "inode": piece.inode} for piece in record.memory}
    return _offer(
        [msgspec.structs.replace(a, **objects.get(a.id, {})) for a in record.allocations],
        {a.id: fds[a.id] for a in record.allocations},
        {b.name: Blob(fds[b.name], b.n_bytes, b.hash128) for b in record.blobs},
        record.models,
        record.device,
    )


def file_record(path: str, shard: ShardStat) -> FileRecord:
    """The wire form of a shard's state. `path` is made absolute: clients run elsewhere."""
    return FileRecord(
        path=os.path.abspath(path),
        device=shard.dev,
        inode=shard.inode,
        n_bytes=shard.n_bytes,
        mtime_ns=shard.mtime_ns,
        ctime_ns=shard.ctime_ns,
    )


def changed_files(models: Iterable[ModelRecord]) -> list[str]:
    """What changed on disk since the models were loaded, one line per file."""
    changes = []
    for model in models:
        for file in model.files:
            then = ShardStat(file.device, file.inode, file.n_bytes, file.mtime_ns, file.ctime_ns)
            try:
                difference = then.changes(ShardStat.capture(file.path))
            except OSError as problem:
                difference = problem.strerror or str(problem)
            if difference:
                changes.append(f"{model.id}: {file.path}: {difference}")
    return changes


def renewed(offer: Offer, touched: Sequence[FileRecord]) -> tuple[Offer, int]:
    """The offer with the states of files that were touched, and how many there are.

    Raises IdentityError unless each is known by its path, is the same file of the same size, and
    still is on disk what the client says it read."""
    states = {file.path: file for file in touched}
    known = {file.path: file for model in offer.models for file in model.files}
    for path, now in states.items():
        then = known.get(path)
        if then is None:
            raise IdentityError(f"{path}: not a file of this owner's models")
        if (then.device, then.inode, then.n_bytes) != (now.device, now.inode, now.n_bytes):
            raise IdentityError(f"{path}: not the file that was loaded; restart the owner with it")
        if file_record(path, ShardStat.capture(path)) != now:
            raise IdentityError(f"{path}: changed while it was verified; verify it again")
    models = tuple(
        msgspec.structs.replace(m, files=[states.get(f.path, f) for f in m.files])
        for m in offer.models
    )
    count = sum(known[path] != now for path, now in states.items())
    announced = tuple(_announced(model) for model in models)
    return replace(offer, models=models, announced_models=announced), count


def identity_error(changes: Sequence[str]) -> Error:
    more = len(changes) - _MAX_CHANGES
    shown = "; ".join(changes[:_MAX_CHANGES]) + (f"; and {more} more" if more > 0 else "")
    message = (
        f"model files changed since they were loaded: {shown}; restart the owner with them, or if "
        "they were only touched: ds4-weight-server verify --accept"
    )
    return error("identity", message)


def error(code: ErrorCode, message: str) -> Error:
    """An error that always fits a packet and is always valid text, whatever it quotes."""
    return Error(code, _text(message[:_MAX_MESSAGE_CHARS]))


def _text(path: str) -> str:
    """Without the surrogates by which Python spells names that are not UTF-8."""
    return path.encode(errors="surrogateescape").decode(errors="replace")


def _announced(model: ModelRecord) -> ModelRecord:
    files: list[FileRecord] = []
    size = 0
    for file in model.files:
        shown = msgspec.structs.replace(file, path=_text(file.path))
        size += len(protocol.encode_record(shown))
        if files and size > _FILES_BYTES:
            break
        files.append(shown)
    more = len(model.files) - len(files)
    return msgspec.structs.replace(model, files=files, more_files=more)


@dataclass(frozen=True, slots=True)
class OwnerFacts:
    """What every welcome repeats."""

    backend: str
    owner_id: str
    state: OwnerState = "loading"
    reason: str = ""
    progress: Progress = field(default_factory=Progress)
    offer: Offer = field(default_factory=Offer)
    pid: int = field(default_factory=os.getpid)  # also of who answers meanwhile (interim.py)


def welcome(facts: OwnerFacts) -> Packet:
    offer = facts.offer
    return Packet(
        Welcome(
            version=protocol.PROTOCOL_VERSION,
            owner_pid=facts.pid,
            owner_id=facts.owner_id,
            state=facts.state,
            reason=_text(facts.reason[:_MAX_MESSAGE_CHARS]),
            progress=facts.progress,
            backend=facts.backend,
            models=list(offer.announced_models),
            blobs=[blob_record(name, blob) for name, blob in offer.blobs.items()],
            allocation_count=len(offer.allocations),
            allocation_bytes=sum(a.alloc_bytes for a in offer.allocations.values()),
            device=offer.device,
        )
    )


def blob_record(name: str, blob: Blob) -> BlobRecord:
    return BlobRecord(name=name, n_bytes=blob.n_bytes, hash128=blob.hash128)


def allocations(facts: OwnerFacts, request: protocol.GetAllocations) -> list[Packet]:
    """The allocations asked for, in as many packets as their descriptors and records need."""
    if refusal := _not_ready(facts):
        return [refusal]
    offer = facts.offer
    ids = list(offer.allocations) if request.ids is None else request.ids
    unknown = [i for i in ids if i not in offer.allocations]
    if unknown or len(set(ids)) != len(ids):
        wrong = f"unknown allocations {unknown[:8]}" if unknown else "an allocation asked for twice"
        known = len(offer.allocations)
        return [Packet(error("unknown", f"{wrong}; there are {known}"))]
    records = [offer.allocations[i] for i in ids]
    packets, sent = [], 0
    for page in _pages(records):
        sent += len(page)
        fds = tuple(offer.borrowed_fds[r.id] for r in page) if request.with_fds else ()
        packets.append(Packet(protocol.Allocations(page, len(records) - sent), fds))
    return packets or [Packet(protocol.Allocations([], 0))]


def _pages(records: list[AllocationRecord]) -> Iterable[list[AllocationRecord]]:
    page: list[AllocationRecord] = []
    page_bytes = 0
    for record in records:
        size = len(protocol.encode_record(record)) + 1
        if page and (page_bytes + size > _PAGE_BYTES or len(page) == fdpass.MAX_FDS):
            yield page
            page, page_bytes = [], 0
        page.append(record)
        page_bytes += size
    if page:
        yield page


def blobs(facts: OwnerFacts, request: protocol.GetBlobs) -> Packet:
    if refusal := _not_ready(facts):
        return refusal
    held = facts.offer.blobs
    unknown = [name for name in request.names if name not in held]
    if unknown or len(request.names) > fdpass.MAX_FDS:
        asked = f"unknown blobs {unknown[:8]}" if unknown else f"{len(request.names)} blobs asked"
        return Packet(error("unknown", f"{asked}; there are {sorted(held)}"))
    records = [blob_record(name, held[name]) for name in request.names]
    return Packet(protocol.Blobs(records), tuple(held[n].borrowed_fd for n in request.names))


def _not_ready(facts: OwnerFacts) -> Packet | None:
    if facts.state == "ready":
        return None
    if facts.state == "failed":
        return Packet(error("failed", f"loading failed: {facts.reason}"))
    return Packet(error("loading", "the owner is still loading; wait for it first"))


def listener_error(problem: Exception) -> Packet:
    code: ErrorCode = "address_in_use" if isinstance(problem, AddressInUse) else "address"
    return Packet(error(code, str(problem)))


def line_reply(offer: Offer, line: bytes) -> tuple[bytes, Descriptor | None, int | None]:
    """(reply, descriptor, allocation id) to one line of the published protocol."""
    allocation = protocol.parse_get(line)
    record = None if allocation is None else offer.allocations.get(allocation)
    if record is None:
        return protocol.LINE_ERROR, None, None
    reply = protocol.format_ok(record.id, record.alloc_bytes)
    return reply, offer.borrowed_fds[record.id], record.id
