"""The manifest: the text file by which workers find an owner and what it holds.

Owns: the published text format (docs/protocol.md), an atomic writer, a strict reader, and the
explanation of a manifest whose owner does not answer. Where the published reader skips what it
cannot parse - and then imports half a model - this one raises ManifestError with the line. Our
own lines are comments to other readers: `# backend`, `# owner-id` and, last,
`# end <lines> <fnv1a-64>`, which makes a manifest cut at any byte recognisable.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds4_common import paths
from ds4_common.allocation import Allocation, Artifact, ArtifactKind
from ds4_common.errors import ManifestError, UsageError

HEADERS = {
    "DS4_WEIGHT_SERVER_VMM_V1": (True, False),  # (with a broker, with derived records)
    "DS4_WEIGHT_SERVER_VMM_DERIVED_V1": (True, True),
    "DS4_WEIGHT_SERVER_IPC_V1": (False, False),
    "DS4_WEIGHT_SERVER_IPC_DERIVED_V1": (False, True),
    "DS4_WEIGHTD_IPC_V1": (False, False),
}
FINGERPRINT_ALGORITHM = "fnv1a-p16m-v1"
_HANDLE_BYTES = 64  # a CUDA IPC memory handle
_MAX_NUMBER = (1 << 63) - 1
_KINDS = frozenset(ArtifactKind)


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    pid: int
    device: int
    scope: str  # "base", "mtp" or "both"
    lock_path: str | None


@dataclass(frozen=True, slots=True)
class ContentRecord:
    """The identity of one logical model. `fingerprint`: 16 hex digits under `algorithm`."""

    model: str
    model_bytes: int
    algorithm: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says. `handles` are the CUDA IPC handles by allocation id (no broker then).

    `backend`, `owner_id` and `sealed` (the end line was there) come from our own lines."""

    owner: OwnerRecord
    broker: str | None
    contents: tuple[ContentRecord, ...]
    allocations: tuple[Allocation, ...]
    handles: Mapping[int, bytes] = field(default_factory=dict)
    backend: str | None = None
    owner_id: str | None = None
    sealed: bool = False
    skipped: tuple[str, ...] = ()  # "line 7: unknown record 'x'": what the reader did not take

    def content(self, model: str) -> ContentRecord | None:
        return next((c for c in self.contents if c.model == model), None)


def format_manifest(manifest: Manifest) -> str:
    """The text of a manifest. Raises UsageError when a path or name cannot be written, because the
    format has no escaping."""
    backend = manifest.backend or ("vmm" if manifest.broker else "ipc")
    derived = any(a.artifact for a in manifest.allocations)
    family = "VMM" if manifest.broker else "IPC"
    owner = manifest.owner
    lines = [
        f"DS4_WEIGHT_SERVER_{family}{'_DERIVED' if derived else ''}_V1",
        f"# backend {_word(backend, 'backend')}",
    ]
    if manifest.owner_id:
        lines.append(f"# owner-id {_word(manifest.owner_id, 'owner id')}")
    lock = "-" if owner.lock_path is None else _word(owner.lock_path, "lock path")
    lines.append(f"owner {owner.pid} {owner.device} {owner.scope} {lock}")
    if manifest.broker:
        lines.append(f"broker {_word(manifest.broker, 'broker socket path')}")
    for c in manifest.contents:
        lines.append(f"content {c.model} {c.model_bytes} {c.algorithm} {c.fingerprint}")
    lines += [_format_allocation(a, manifest.handles.get(a.id)) for a in manifest.allocations]
    body = "".join(f"{line}\n" for line in lines)
    return f"{body}# end {len(lines)} {_fnv1a64(body.encode()):016x}\n"


def _format_allocation(a: Allocation, handle: bytes | None) -> str:
    model = _word(a.model, "model id")
    where = f"{model} {a.model_bytes} {a.source_offset} {a.source_bytes}"
    if a.artifact is None:
        if handle is not None:
            return f"range {where} {handle.hex()}"
        return f"alloc {a.id} {where} {a.alloc_bytes}"
    d = a.artifact
    what = f"{where} {int(d.kind)} {d.in_dim} {d.out_dim} {d.groups} {a.n_bytes}"
    name = _word(d.name, "tensor name")
    if handle is not None:
        return f"derived-range {what} {handle.hex()} {name}"
    return f"derived-alloc {a.id} {what} {a.alloc_bytes} {name}"


def _word(text: str, what: str) -> str:
    if not text or re.search(r"\s", text) or not text.isprintable():
        raise UsageError(
            f"{what} {text!r} cannot be written to a manifest, whose words are separated by "
            "spaces without escaping; choose another"
        )
    return text


def check_words(manifest_path: str, broker: str, lock_path: str | None) -> None:
    """Raises UsageError for paths that a manifest cannot hold or a socket cannot be bound to. For
    the start of an owner: before it loads, not after."""
    _word(broker, "broker socket path")
    if lock_path is not None:
        _word(lock_path, "lock path")
    paths.check_socket_path(broker, "--broker-socket")
    paths.check_socket_path(paths.control_socket_path(manifest_path), "--manifest")


def write_manifest(path: str, manifest: Manifest) -> None:
    """Puts the manifest at `path` atomically and durably: readers see the old one, or all of it."""
    data = format_manifest(manifest).encode()
    temporary = path + ".tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(temporary, flags, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.rename(temporary, path)
        except OSError:
            os.unlink(temporary)  # a full disk must not keep half a manifest
            raise
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ManifestError(f"{path}: cannot write the manifest: {error.strerror}") from error


def read_manifest(path: str) -> Manifest:
    """Raises ManifestError: missing, no regular file, unreadable, malformed or cut."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ManifestError(f"{path}: not a manifest: not a regular file")
            data = file.read()
    except OSError as error:
        raise ManifestError(f"{path}: cannot read the manifest: {error.strerror}") from error
    return parse_manifest(data, path)


def _open_at_once(path: str, flags: int) -> int:
    """O_NONBLOCK: a FIFO in place of a manifest must not block the open."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_manifest(data: bytes, path: str = "manifest") -> Manifest:
    """Raises ManifestError naming `path`, the line, what was got and what was expected."""
    reader = _Reader(path)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not a manifest: byte {error.start} is not UTF-8") from error
    if not text.endswith("\n"):
        raise ManifestError(f"{path}: cut: the last line has no end")
    lines = text[:-1].split("\n")
    reader.header(lines[0])
    for number, line in enumerate(lines[1:], 2):
        reader.line(number, line)
    reader.check_end(lines)
    return reader.manifest()


_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_HEX16 = re.compile(r"[0-9a-f]{16}")

# Fields of each record: n = number, w = word, h = IPC handle.
_SHAPES = {
    "owner": ("pid:n", "device:n", "scope:w", "lock-path:w"),
    "broker": ("socket:w",),
    "content": ("id:w", "size:n", "algorithm:w", "fingerprint:w"),
    "alloc": ("alloc-id:n", "id:w", "size:n", "off:n", "bytes:n", "alloc-bytes:n"),
    "derived-alloc": (
        "alloc-id:n", "id:w", "size:n", "src-off:n", "src-bytes:n", "kind:n", "in:n", "out:n",
        "groups:n", "bytes:n", "alloc-bytes:n", "name:w",
    ),
    "range": ("id:w", "size:n", "off:n", "bytes:n", "handle:h"),
    "derived-range": (
        "id:w", "size:n", "src-off:n", "src-bytes:n", "kind:n", "in:n", "out:n", "groups:n",
        "bytes:n", "handle:h", "name:w",
    ),
}  # fmt: skip


class _Reader:
    """Collects the records of one manifest; every method raises ManifestError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.number = 1
        self.with_broker = self.with_derived = False
        self.owner: OwnerRecord | None = None
        self.broker: str | None = None
        self.contents: list[ContentRecord] = []
        self.allocations: list[Allocation] = []
        self.handles: dict[int, bytes] = {}
        self.backend: str | None = None
        self.owner_id: str | None = None
        self.end: tuple[int, str] | None = None
        self.skipped: list[str] = []
        self.next_id = 0
        self.derived_seen = False

    def fail(self, got: object, expected: str) -> ManifestError:
        return ManifestError(f"{self.path}: line {self.number}: got {got}, expected {expected}")

    def header(self, line: str) -> None:
        if line not in HEADERS:
            raise self.fail(repr(line[:80]), f"one of {', '.join(HEADERS)}")
        self.with_broker, self.with_derived = HEADERS[line]

    def line(self, number: int, line: str) -> None:
        self.number = number
        if self.end is not None:
            raise self.fail(repr(line[:80]), "nothing after the end line")
        if line.startswith("#"):
            self.comment(line)
        elif line:
            name, *words = line.split(" ")
            shape = _SHAPES.get(name)
            if shape is None:
                self.skipped.append(f"line {number}: unknown record {name[:40]!r}")
            else:
                self.record(name, self.fields(name, shape, words))

    def comment(self, line: str) -> None:
        match line.split(" "):
            case ["#", "backend", backend]:
                self.backend = backend
            case ["#", "owner-id", owner_id]:
                self.owner_id = owner_id
            case ["#", "end", count, checksum] if _NUMBER.fullmatch(count):
                self.end = (int(count), checksum)

    def fields(self, name: str, shape: tuple[str, ...], words: list[str]) -> list[str]:
        labels = " ".join(field.partition(":")[0] for field in shape)
        if len(words) != len(shape) or "" in words:
            raise self.fail(f"{len(words)} fields", f"{name} {labels}")
        for field_, word in zip(shape, words, strict=True):
            label, _, kind = field_.partition(":")
            if kind == "n" and not (_NUMBER.fullmatch(word) and int(word) <= _MAX_NUMBER):
                raise self.fail(f"{label} {word[:40]!r}", "a decimal number below 2^63")
            if kind == "h" and not re.fullmatch(rf"[0-9a-f]{{{2 * _HANDLE_BYTES}}}", word):
                raise self.fail(f"{label} of {len(word)} characters", "128 hex digits")
        return words

    def record(self, name: str, words: list[str]) -> None:
        if name == "owner":
            self.owner_record(words)
        elif name == "broker":
            if not self.with_broker or self.broker is not None:
                raise self.fail("a broker record", "none in an IPC manifest, one in a VMM manifest")
            self.broker = words[0]
        elif name == "content":
            self.content_record(words)
        else:
            self.allocation_record(name, words)

    def owner_record(self, words: list[str]) -> None:
        pid, device, scope, lock = words
        if self.owner is not None or int(pid) == 0 or scope not in ("base", "mtp", "both"):
            raise self.fail(f"owner {' '.join(words)}", "one owner, pid > 0, scope base|mtp|both")
        self.owner = OwnerRecord(int(pid), int(device), scope, None if lock == "-" else lock)

    def content_record(self, words: list[str]) -> None:
        model, size, algorithm, fingerprint = words
        if any(c.model == model for c in self.contents):
            raise self.fail(f"a second content record for {model}", "one per model")
        if algorithm == FINGERPRINT_ALGORITHM and not _HEX16.fullmatch(fingerprint):
            raise self.fail(f"fingerprint {fingerprint[:40]!r}", "16 lower-case hex digits")
        self.contents.append(ContentRecord(model, int(size), algorithm, fingerprint))

    def allocation_record(self, name: str, words: list[str]) -> None:
        brokered, derived = name.endswith("alloc"), name.startswith("derived")
        self.derived_seen |= derived
        if brokered != self.with_broker or (derived and not self.with_derived):
            raise self.fail(f"a {name} record", "one that the header announces")
        if brokered and self.broker is None:
            raise self.fail(f"a {name} record", "the broker record before it")
        if brokered:
            if int(words[0]) != self.next_id:
                raise self.fail(f"alloc-id {words[0]}", f"{self.next_id} (ids are contiguous)")
            words = words[1:]
        self.next_id += 1
        model, size, offset, source_bytes = words[0], int(words[1]), int(words[2]), int(words[3])
        artifact, n_bytes = None, source_bytes
        if derived:
            kind, in_dim, out_dim, groups, n_bytes = (int(word) for word in words[4:9])
            if kind not in _KINDS:
                self.skipped.append(f"line {self.number}: unknown artifact kind {kind}")
                return
            artifact = Artifact(ArtifactKind(kind), in_dim, out_dim, groups, words[10])
        tail = words[9 if derived else 4]
        alloc_bytes = int(tail) if brokered else n_bytes
        if not brokered:
            self.handles[self.next_id - 1] = bytes.fromhex(tail)
        self.add(
            Allocation(
                self.next_id - 1, model, size, offset, source_bytes, n_bytes, alloc_bytes, artifact
            )
        )

    def add(self, a: Allocation) -> None:
        if a.source_offset + a.source_bytes > a.model_bytes:
            end = a.source_offset + a.source_bytes
            raise self.fail(f"a span that ends at {end}", f"at most the model's {a.model_bytes}")
        if not 0 < a.n_bytes <= a.alloc_bytes:
            raise self.fail(
                f"{a.n_bytes} bytes in an allocation of {a.alloc_bytes}", "0 < bytes <= alloc-bytes"
            )
        sizes = {c.model: c.model_bytes for c in self.contents}
        sizes |= {b.model: b.model_bytes for b in self.allocations[-1:]}
        if sizes.get(a.model, a.model_bytes) != a.model_bytes:
            raise self.fail(f"model size {a.model_bytes}", f"{sizes[a.model]}, as said before")
        self.allocations.append(a)

    def check_end(self, lines: list[str]) -> None:
        """The end line is required of manifests that carry our first comment."""
        self.number = len(lines)
        if self.end is not None:
            body = "".join(f"{line}\n" for line in lines[:-1]).encode()
            expected = (len(lines) - 1, f"{_fnv1a64(body):016x}")
            if self.end != expected:
                raise self.fail(f"end {self.end}", f"end {expected}: the manifest was changed")
        elif self.backend is not None:
            raise self.fail("the end of the file", "an end line: the manifest is cut")
        if self.owner is None:
            raise self.fail("no owner record", "one: the manifest is cut")
        if not self.next_id:
            raise self.fail("no allocation", "at least one: the manifest is cut")
        if self.with_derived and not self.derived_seen:
            raise self.fail("no derived record", "at least one, as the header announces")

    def manifest(self) -> Manifest:
        if self.owner is None:
            raise self.fail("no owner record", "one")
        return Manifest(
            self.owner, self.broker, tuple(self.contents), tuple(self.allocations), self.handles,
            self.backend, self.owner_id, self.end is not None, tuple(self.skipped),
        )  # fmt: skip


def _fnv1a64(data: bytes) -> int:
    """Standard FNV-1a. In Python: a manifest is a few hundred lines, and this module must not need
    the native library, because it explains failures."""
    state = 14695981039346656037
    for byte in data:
        state = (state ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
    return state


def is_manifest(path: str) -> bool:
    """Whether the file begins like a manifest, whole or not: only such a file may be replaced."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        first = file.readline(80)
    return any(header.encode().startswith(first.rstrip(b"\n")) for header in HEADERS)
