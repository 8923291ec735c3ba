"""One model as one logical address space, whether it is a single file or split into shards.

Owns: the published rule of split models (names, order, bases), opening and closing of the files,
reads by logical offset. Refuses: any shard but the first as the way in, shards that are missing,
swapped, duplicated or of another split, a wrong tensor total, a tensor in two shards.

A single file's logical size is its file size. Shard i of a split model begins at the sum of the
sizes of the shards before it, each rounded up to the page size of the operating system (the last
one too); what lies between a shard's end and the next page reads as zero.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from ds4_common.errors import GgufError
from ds4_common.gguf.metadata import Metadata
from ds4_common.gguf.parser import Header, parse_header
from ds4_common.gguf.types import GgmlType
from ds4_common.identity import ShardStat

_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the model. `offset` is logical, `file_offset` counts in its shard's file."""

    name: str
    ggml_type: GgmlType
    dims: tuple[int, ...]  # GGUF order: dims[0] is contiguous
    offset: int
    n_bytes: int
    shard: int
    file_offset: int


@dataclass(frozen=True, slots=True)
class Shard:
    """An open file of the model. `file` stays open until the model is closed."""

    index: int
    path: str
    n_bytes: int
    base: int  # logical offset of the file's first byte
    data_offset: int  # of the tensor data in this file
    stat: ShardStat
    file: io.FileIO


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a logical range: bytes of one shard, then `n_zeros` that no file holds."""

    shard: Shard
    file_offset: int
    n_bytes: int
    n_zeros: int


class LogicalModel:
    """An open model. Close it, or use it as a context manager; lazy metadata needs it open."""

    def __init__(
        self, shards: tuple[Shard, ...], headers: list[Header], n_bytes: int, closer: ExitStack
    ) -> None:
        first = shards[0]
        self.path = first.path
        self.n_bytes = n_bytes
        self.shards = shards
        self.tensors = tuple(_logical_tensors(shards, headers))
        self.metadata = Metadata(first.path, headers[0].entries, _reader(first))
        self._by_name = {t.name: t for t in self.tensors}
        self._closer = closer

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LogicalModel:
        """Opens a file, or all shards of the split model whose first shard it is.

        Raises GgufError, nothing else, for whatever the paths hold.
        """
        with ExitStack() as files:
            first_file, first_stat = _open_file(os.fspath(path), files)
            first_header = _header(first_file, os.fspath(path), first_stat)
            paths = _shard_paths(os.fspath(path), first_header)
            opened = [(first_file, first_stat, first_header)]
            for index, shard_path in enumerate(paths[1:], 1):
                file, file_stat = _open_shard(shard_path, index, len(paths), files)
                opened.append((file, file_stat, _header(file, shard_path, file_stat)))
            headers = [header for _, _, header in opened]
            page = mmap.PAGESIZE if len(paths) > 1 else 1
            shards, base = [], 0
            for index, (file, file_stat, header) in enumerate(opened):
                shards.append(
                    Shard(
                        index, paths[index], file_stat.n_bytes, base, header.data_offset,
                        file_stat, file,
                    )
                )  # fmt: skip
                base += -(-file_stat.n_bytes // page) * page
            if len(paths) > 1:
                _check_split(paths, headers)
            _check_names(paths, headers)
            return cls(tuple(shards), headers, base, files.pop_all())

    def tensor(self, name: str) -> TensorInfo | None:
        """The tensor of that name, or None."""
        return self._by_name.get(name)

    def spans(self, offset: int, n_bytes: int) -> Iterator[Span]:
        """The pieces of shards, in order, that make up logical [offset, offset + n_bytes)."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.n_bytes:
            raise GgufError(
                self.path, offset, "logical range", f"{n_bytes} bytes", f"an end <= {self.n_bytes}"
            )
        ends = [shard.base for shard in self.shards[1:]] + [self.n_bytes]
        for shard, end in zip(self.shards, ends, strict=True):
            start, stop = max(offset, shard.base), min(offset + n_bytes, end)
            if start < stop:
                in_file = max(0, min(stop, shard.base + shard.n_bytes) - start)
                yield Span(shard, start - shard.base, in_file, stop - start - in_file)

    def read_into(self, offset: int, buffer: memoryview | bytearray) -> None:
        """Fills `buffer` with the logical bytes at `offset`. GgufError on a file that shrank."""
        view = memoryview(buffer).cast("B")
        done = 0
        for span in self.spans(offset, view.nbytes):
            _read_exactly(span.shard, span.file_offset, view[done : done + span.n_bytes])
            done += span.n_bytes
            if span.n_zeros:
                view[done : done + span.n_zeros] = bytes(span.n_zeros)
                done += span.n_zeros

    def close(self) -> None:
        """Closes the files. Safe to call twice."""
        self._closer.close()

    def __enter__(self) -> LogicalModel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# --- files ---


def _open_file(path: str, files: ExitStack) -> tuple[io.FileIO, ShardStat]:
    try:
        file = files.enter_context(io.FileIO(path, opener=_open_at_once))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise GgufError(path, 0, "file type", "not a regular file", "a GGUF file")
        return file, ShardStat.capture(file.fileno())
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise GgufError(path, 0, "open", error, "a readable GGUF file") from error


def _open_at_once(path: str, flags: int) -> int:
    """O_NONBLOCK: a FIFO in place of a model must not block the open."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)


def _header(file: io.FileIO, path: str, file_stat: ShardStat) -> Header:
    return parse_header(file.fileno(), path, file_stat.n_bytes)


def _read_exactly(shard: Shard, offset: int, view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        try:
            n = os.preadv(shard.file.fileno(), [view[done:]], offset + done)
        except OSError as error:
            raise GgufError(shard.path, offset + done, "read", error, "readable bytes") from error
        if n == 0:
            raise GgufError(
                shard.path,
                offset + done,
                "read",
                "end of file: the file shrank after it was opened",
                f"{view.nbytes - done} more bytes",
            )
        done += n


def _reader(shard: Shard) -> Callable[[int, int], bytes]:
    def read(offset: int, n_bytes: int) -> bytes:
        data = bytearray(n_bytes)
        _read_exactly(shard, offset, memoryview(data))
        return bytes(data)

    return read


# --- split models ---


def _shard_paths(path: str, header: Header) -> list[str]:
    """Paths of all shards, from the name and `split.count` of the first."""
    count = _split_int(path, header, "split.count") if "split.count" in header.entries else 1
    if count <= 1:
        return [path]
    folder, name = os.path.split(path)
    match = _SPLIT_NAME.fullmatch(name)
    if match is None:
        expected = f"<prefix>-00001-of-{count:05d}.gguf"
        raise GgufError(path, 0, f"name of a model split into {count} shards", name, expected)
    if int(match["count"]) != count:
        raise GgufError(path, 0, "split.count", count, f"{match['count']}, as in the file's name")
    names = [f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    if name != names[0]:
        raise GgufError(path, 0, "shard to open", name, f"the first one, {names[0]}")
    return [os.path.join(folder, n) for n in names]


def _open_shard(path: str, index: int, count: int, files: ExitStack) -> tuple[io.FileIO, ShardStat]:
    if os.path.lexists(path):
        return _open_file(path, files)
    folder, name = os.path.split(path)
    suffix = f"-{index + 1:05d}-of-{count:05d}.gguf"
    try:
        others = sorted(n for n in os.listdir(folder or ".") if n.endswith(suffix))[:3]
    except OSError as error:
        raise GgufError(path, 0, f"shard {index + 1} of {count}", error, name) from error
    got = f"no such file, but {', '.join(others)} (of another model?)" if others else "no such file"
    raise GgufError(path, 0, f"shard {index + 1} of {count}", got, name)


def _split_int(path: str, header: Header, key: str) -> int:
    entry = header.entries.get(key)
    value = None if entry is None else entry.value
    if entry is None or isinstance(value, bool) or not isinstance(value, int):
        got = "no such key" if entry is None else entry.type.name
        raise GgufError(path, entry.offset if entry else 0, f"metadata {key!r}", got, "an integer")
    return value


def _check_split(paths: list[str], headers: list[Header]) -> None:
    total = sum(len(header.tensors) for header in headers)
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        count = _split_int(path, header, "split.count")
        if count != len(paths):
            raise GgufError(path, 0, "split.count", count, f"{len(paths)}, as in {paths[0]}")
        number = _split_int(path, header, "split.no")
        if number != index:
            owner = os.path.basename(paths[number]) if 0 <= number < count else "another split"
            raise GgufError(
                path, 0, "split.no", f"{number}: the content of {owner}",
                f"{index} (shards were swapped, duplicated or renamed)",
            )  # fmt: skip
    for path, header in zip(paths, headers, strict=True):
        declared = _split_int(path, header, "split.tensors.count")
        if declared != total:
            raise GgufError(
                path, 0, "split.tensors.count", declared, f"{total}, the sum over all shards"
            )


def _check_names(paths: list[str], headers: list[Header]) -> None:
    seen: dict[str, str] = {}
    for path, header in zip(paths, headers, strict=True):
        for tensor in header.tensors:
            if tensor.name in seen:
                raise GgufError(
                    path, tensor.file_offset, f"tensor {tensor.name}",
                    f"one more, already in {seen[tensor.name]}", "distinct names over all shards",
                )  # fmt: skip
            seen[tensor.name] = path


def _logical_tensors(shards: tuple[Shard, ...], headers: list[Header]) -> Iterator[TensorInfo]:
    for shard, header in zip(shards, headers, strict=True):
        for raw in header.tensors:
            yield TensorInfo(
                raw.name, raw.ggml_type, raw.dims, shard.base + raw.file_offset, raw.n_bytes,
                shard.index, raw.file_offset,
            )  # fmt: skip
