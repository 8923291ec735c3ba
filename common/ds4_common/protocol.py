"""Messages between an owner and its clients (docs/protocol.md).

Owns the message types, their encoding, and the text of the published line protocol. Transport is
in `fdpass`, policy in the owner. One packet is one JSON object with a `type`; unknown types and
unknown fields are refused on both sides, so a skew of versions is an error and never a guess.

No postponed annotations here, and decoders on demand: that halves the import, which every start of
a worker pays for.
"""

import functools
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ds4_common.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_COMMAND_CHARS = 200
MAX_NAME_CHARS = 64
SEAT_LANES = 4  # of each seat: so many workers of one listening socket can have clients at once

Role: TypeAlias = Literal["worker", "standby", "reader", "inspect", "status", "stop", "operator"]
OwnerState: TypeAlias = Literal["loading", "ready", "failed"]
ErrorCode: TypeAlias = Literal[
    "version",  # the peer speaks another version of this protocol
    "malformed",  # not a message, or one that does not fit here
    "forbidden",  # another user, or a request that this role may not make
    "identity",  # a model file changed since it was loaded
    "loading",  # memory was asked for before it is ready
    "failed",  # loading failed
    "unknown",  # no such allocation or blob
    "address_in_use",  # somebody else listens there
    "address",  # the address cannot be listened on
    "busy",  # no room for another connection or lease
    "handover",  # the next program cannot take over; this one goes on
]


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the records inside messages."""


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of the messages."""


class ArtifactRecord(Record, frozen=True):
    kind: int
    in_dim: int
    out_dim: int
    groups: int
    name: str


class AllocationRecord(Record, frozen=True):
    """`ds4_common.allocation.Allocation` on the wire, the 128-bit hash of its `n_bytes`, and the
    memory object that holds them: no other one has this device and inode until the machine reboots.
    Device memory is no such object: `sample` is a hash of parts of it (`ds4_common.samples`).
    """

    id: int
    model: str
    model_bytes: int
    source_offset: int
    source_bytes: int
    n_bytes: int
    alloc_bytes: int
    hash128: str
    artifact: ArtifactRecord | None = None
    device: int = 0
    inode: int = 0
    sample: str = ""


class FileRecord(Record, frozen=True):
    """One shard as it was when its bytes were read."""

    path: str
    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int


class ModelRecord(Record, frozen=True):
    """A logical model: "base", "mtp" or "drafter". `fingerprint` is 16 hex digits. `files` are its
    shards in order; a welcome lists the first ones and counts the others in `more_files`."""

    id: str
    n_bytes: int
    fingerprint: str
    files: list[FileRecord]
    more_files: int = 0


class BlobRecord(Record, frozen=True):
    name: str
    n_bytes: int
    hash128: str


class DeviceRecord(Record, frozen=True):
    """The device whose memory the allocations are."""

    uuid: str
    name: str
    granularity: int
    integrated: bool  # its memory is the system's


class Progress(Record, frozen=True):
    """How far loading is. `total_bytes` 0: not known yet."""

    phase: str = "starting"
    done_bytes: int = 0
    total_bytes: int = 0


class LeaseRecord(Record, frozen=True):
    pid: int
    uid: int
    role: Role
    name: str
    command: str
    age_seconds: float


class ListenerRecord(Record, frozen=True):
    """A listening socket that the owner holds: `host` and `port`, or `path`."""

    host: str
    port: int
    path: str
    name: str


# Requests


class Hello(Message, frozen=True, tag="hello"):
    version: int
    role: Role
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    command: Annotated[str, Meta(max_length=MAX_COMMAND_CHARS)]


class GetAllocations(Message, frozen=True, tag="get_allocations"):
    """`ids` None: all of them. `with_fds` False: the records only."""

    ids: list[int] | None = None
    with_fds: bool = True


class GetBlobs(Message, frozen=True, tag="get_blobs"):
    names: list[str]


class GetListener(Message, frozen=True, tag="get_listener"):
    """A numeric `host` with `port` (0: any free one, the same for the same `name`), or a `path`.
    `seat`: also what the workers of this socket share."""

    host: str = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    path: str = ""
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""
    seat: bool = False


class WaitReady(Message, frozen=True, tag="wait_ready"):
    """Answered by a `welcome` as soon as loading ends or fails, or after `seconds`."""

    seconds: Annotated[float, Meta(ge=0, le=3600)]


class GetStatus(Message, frozen=True, tag="get_status"):
    pass


class Stop(Message, frozen=True, tag="stop", omit_defaults=True):
    """`unless_used`: refused as long as a process other than the asking one holds a lease."""

    unless_used: bool = False


class Reexec(Message, frozen=True, tag="reexec"):
    """Replace the running program in place. Answered by the next program, or by an error."""


class AcceptFiles(Message, frozen=True, tag="accept_files"):
    """These shards were only touched: the client compared their whole content with what the owner
    holds. `files` are their states as they were read."""

    files: list[FileRecord]


# Replies


class Welcome(Message, frozen=True, tag="welcome"):
    """`owner_id` is random and lives as long as the owner: it tells a reused pid apart. `reason`
    says why loading failed. Models and blobs are empty until the state is "ready"."""

    version: int
    owner_pid: int
    owner_id: str
    state: OwnerState
    reason: str
    progress: Progress
    backend: str
    models: list[ModelRecord]
    blobs: list[BlobRecord]
    allocation_count: int
    allocation_bytes: int
    device: DeviceRecord | None = None


class Allocations(Message, frozen=True, tag="allocations"):
    """Records with one descriptor each, in this order. `remaining`: records in later packets."""

    records: list[AllocationRecord]
    remaining: int


class Blobs(Message, frozen=True, tag="blobs"):
    """Records with one descriptor each, in this order."""

    records: list[BlobRecord]


class Listener(Message, frozen=True, tag="listener"):
    """With one descriptor: a listening socket, shared by everybody who asked for this address. If
    its seat was asked for, with those after it: memory, bell, and two for each of SEAT_LANES."""

    record: ListenerRecord


class Status(Message, frozen=True, tag="status"):
    state: OwnerState
    uptime_seconds: float
    line_requests: int
    connections: int
    line_socket: str
    leases: list[LeaseRecord]
    listeners: list[ListenerRecord]


class Stopping(Message, frozen=True, tag="stopping"):
    """The owner has begun to stop; it is gone when its process is."""


class Reexeced(Message, frozen=True, tag="reexeced"):
    """From the program that took over. `seconds`: how long requests waited."""

    seconds: float


class Accepted(Message, frozen=True, tag="accepted"):
    """Attaching compares with the new states from now on. `count`: how many changed."""

    count: int


class Error(Message, frozen=True, tag="error"):
    code: ErrorCode
    message: str


Request: TypeAlias = (
    Hello
    | GetAllocations
    | GetBlobs
    | GetListener
    | WaitReady
    | GetStatus
    | Stop
    | Reexec
    | AcceptFiles
)
Reply: TypeAlias = (
    Welcome | Allocations | Blobs | Listener | Status | Stopping | Reexeced | Accepted | Error
)

_ENCODER = msgspec.json.Encoder()


@functools.cache
def _request_decoder() -> "msgspec.json.Decoder[Request]":
    return msgspec.json.Decoder(Request)


@functools.cache
def _reply_decoder() -> "msgspec.json.Decoder[Reply]":
    return msgspec.json.Decoder(Reply)


class _AnyHello(Struct):
    type: str
    version: int


def encode(message: Request | Reply) -> bytes:
    return _ENCODER.encode(message)


def encode_record(record: Record) -> bytes:
    return _ENCODER.encode(record)


def decode_request(data: bytes) -> Request:
    """Raises ProtocolError for anything that is not exactly one known request."""
    try:
        return _request_decoder().decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"request of {len(data)} bytes is malformed: {error}") from error


def decode_reply(data: bytes) -> Reply:
    """Raises ProtocolError for anything that is not exactly one known reply."""
    try:
        return _reply_decoder().decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"reply of {len(data)} bytes is malformed: {error}") from error


def hello_version(data: bytes) -> int | None:
    """The version in a hello that this version cannot decode, for an error that names the cause."""
    try:
        hello = msgspec.json.decode(data, type=_AnyHello)
    except msgspec.DecodeError:
        return None
    return hello.version if hello.type == "hello" else None


# The published line protocol: one request per connection.

MAX_LINE_BYTES = 64
LINE_ERROR = b"ERR invalid allocation\n"


def parse_get(line: bytes) -> int | None:
    """The id of `GET <id>\\n`, or None for anything else."""
    if not line.startswith(b"GET ") or not line.endswith(b"\n"):
        return None
    digits = line[4:-1]
    return int(digits) if digits.isdigit() and len(digits) <= 10 else None


def format_get(allocation: int) -> bytes:
    return b"GET %d\n" % allocation


def format_ok(allocation: int, alloc_bytes: int) -> bytes:
    return b"OK %d %d\n" % (allocation, alloc_bytes)
