"""The manifest: published text, strict reader, atomic writer, explanations."""

from __future__ import annotations

import errno
import os
import socket
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common import manifest as m
from ds4_common.allocation import Allocation, Artifact, ArtifactKind
from ds4_common.errors import ManifestError, UsageError
from ds4_common.silence import explain_silence, process_state

RAW = Allocation(0, "base", 1000, 100, 200, 200, 4096)
DERIVED = Allocation(
    1,
    "base",
    1000,
    300,
    66,
    128,
    4096,
    Artifact(ArtifactKind.IQ2_XXS_ALIGNED, 256, 1, 1, "blk.0.ffn_up_exps.weight"),
)
MANIFEST = m.Manifest(
    owner=m.OwnerRecord(4711, 0, "base", "/tmp/lock"),
    broker="/run/w.sock",
    contents=(m.ContentRecord("base", 1000, "fnv1a-p16m-v1", "47fe0d7eaf8e51e3"),),
    allocations=(RAW, DERIVED),
    backend="memfd",
    owner_id="0123456789abcdef",
)
PUBLISHED = b"""DS4_WEIGHT_SERVER_VMM_DERIVED_V1
owner 4711 0 base /tmp/lock
broker /run/w.sock
content base 1000 fnv1a-p16m-v1 47fe0d7eaf8e51e3
alloc 0 base 1000 100 200 4096
derived-alloc 1 base 1000 300 66 4 256 1 1 128 4096 blk.0.ffn_up_exps.weight
"""


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def test_text_is_the_published_one_plus_comments() -> None:
    lines = lines_of(m.format_manifest(MANIFEST).encode())
    assert b"".join(line for line in lines if not line.startswith(b"#")) == PUBLISHED
    assert [line.split()[1] for line in lines if line.startswith(b"#")] == [
        b"backend", b"owner-id", b"end",
    ]  # fmt: skip


def test_header_says_derived_only_when_something_is() -> None:
    text = m.format_manifest(replace(MANIFEST, allocations=(RAW,)))
    assert text.startswith("DS4_WEIGHT_SERVER_VMM_V1\n")


def test_reader_returns_what_was_written() -> None:
    read = m.parse_manifest(m.format_manifest(MANIFEST).encode())
    assert read == replace(MANIFEST, sealed=True)


numbers = st.integers(0, 2**62)
words = st.text(string.ascii_letters + string.digits + "._-/", min_size=1, max_size=20)


@st.composite
def manifests(draw: st.DrawFn) -> m.Manifest:
    model_bytes = draw(st.integers(1, 2**60))
    allocations = []
    for number in range(draw(st.integers(1, 6))):
        offset = draw(st.integers(0, model_bytes - 1))
        source = draw(st.integers(1, model_bytes - offset))
        artifact, n_bytes = None, source
        if draw(st.booleans()):
            kind = draw(st.sampled_from(ArtifactKind))
            artifact = Artifact(kind, draw(numbers), draw(numbers), draw(numbers), draw(words))
            n_bytes = draw(st.integers(1, 2**60))
        allocations.append(
            Allocation(
                number,
                "base",
                model_bytes,
                offset,
                source,
                n_bytes,
                n_bytes + draw(st.integers(0, 2**21)),
                artifact,
            )
        )
    lock = draw(st.none() | words.filter(lambda w: w != "-"))
    owner = m.OwnerRecord(draw(st.integers(1, 2**22)), draw(st.integers(0, 8)), "both", lock)
    content = m.ContentRecord(
        "base", model_bytes, "fnv1a-p16m-v1", f"{draw(st.integers(0, 2**64 - 1)):016x}"
    )
    return m.Manifest(
        owner, draw(words), (content,), tuple(allocations), {}, draw(words), draw(words), True
    )


@given(manifests())
def test_every_manifest_survives_the_round_trip(manifest: m.Manifest) -> None:
    assert m.parse_manifest(m.format_manifest(manifest).encode()) == manifest


def test_a_manifest_cut_at_any_byte_is_refused() -> None:
    data = m.format_manifest(MANIFEST).encode()
    for size in range(len(data)):
        with pytest.raises(ManifestError):
            m.parse_manifest(data[:size])


def test_a_published_manifest_cut_inside_a_line_is_refused() -> None:
    for size in range(len(PUBLISHED)):
        if not PUBLISHED[:size].endswith(b"\n"):
            with pytest.raises(ManifestError):
                m.parse_manifest(PUBLISHED[:size])


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_changed_byte_is_refused_or_reported(position: int, change: int) -> None:
    data = bytearray(m.format_manifest(MANIFEST).encode())
    data[position % len(data)] ^= change
    try:
        read = m.parse_manifest(bytes(data))
    except ManifestError:
        return
    # A change in the word "backend" or "end" of a comment makes it a foreign manifest: whole, but
    # without our seal.
    assert not read.sealed or read == replace(MANIFEST, sealed=True)


@given(st.binary() | st.text().map(str.encode))
def test_arbitrary_bytes_give_an_error_or_a_manifest(data: bytes) -> None:
    for whole in (data, PUBLISHED + data, b"DS4_WEIGHT_SERVER_VMM_V1\n" + data):
        try:
            assert m.parse_manifest(whole).allocations
        except ManifestError:
            continue


def test_published_manifest_without_comments_is_accepted() -> None:
    read = m.parse_manifest(PUBLISHED)
    assert read.allocations == (RAW, DERIVED)
    assert (read.backend, read.owner_id, read.sealed, read.skipped) == (None, None, False, ())


@pytest.mark.parametrize(
    "header",
    ["DS4_WEIGHT_SERVER_IPC_V1", "DS4_WEIGHTD_IPC_V1", "DS4_WEIGHT_SERVER_IPC_DERIVED_V1"],
)
def test_ipc_manifests_carry_handles_and_no_broker(header: str) -> None:
    handle, other = bytes(range(64)), bytes(64)
    text = f"{header}\nowner 1 0 both -\nrange base 1000 100 200 {handle.hex()}\n"
    if "DERIVED" in header:
        text += f"derived-range base 1000 300 66 4 256 1 1 128 {other.hex()} x.weight\n"
    read = m.parse_manifest(text.encode())
    assert read.handles[0] == handle
    assert read.broker is None
    assert read.owner.lock_path is None
    assert m.parse_manifest(m.format_manifest(read).encode()).handles == read.handles


@pytest.mark.parametrize(
    ("line", "replacement", "says"),
    [
        (0, "DS4_WEIGHT_SERVER_VMM_V2", "line 1: got 'DS4_WEIGHT_SERVER_VMM_V2'"),
        (0, "DS4_WEIGHT_SERVER_VMM_V1", "line 6: got a derived-alloc record"),
        (0, "DS4_WEIGHT_SERVER_IPC_V1", "line 3: got a broker record"),
        (1, "owner 0 0 base -", "line 2: got owner 0 0 base -"),
        (1, "owner 1 0 all -", "scope base|mtp|both"),
        (1, "owner 1 0 base", "line 2: got 3 fields"),
        (1, "owner 1 0 base -\nowner 1 0 base -", "line 3"),
        (1, "", "no owner record"),
        (2, "", "the broker record before it"),
        (2, "broker /a\nbroker /b", "line 4: got a broker record"),
        (3, "content base 1000 fnv1a-p16m-v1 47FE0D7EAF8E51E3", "16 lower-case hex digits"),
        (3, "content base 999 fnv1a-p16m-v1 47fe0d7eaf8e51e3", "line 5: got model size 1000"),
        (3, "content base 1000 x y\ncontent base 1000 x y", "a second content record"),
        (4, "alloc 1 base 1000 100 200 4096", "line 5: got alloc-id 1, expected 0"),
        (4, "alloc 0 base 1000 900 200 4096", "a span that ends at 1100"),
        (4, "alloc 0 base 1000 100 0 4096", "0 bytes in an allocation of 4096"),
        (4, "alloc 0 base 1000 100 200 199", "200 bytes in an allocation of 199"),
        (4, "alloc 0 base 1000 +100 200 4096", "off '+100'"),
        (4, "alloc 0 base 1000 100 200 0x1000", "alloc-bytes '0x1000'"),
        (4, "alloc 0 base 1000 100 200 99999999999999999999", "below 2^63"),
        (4, "alloc 0 base 1000 100 200", "line 5: got 5 fields"),
        (4, "alloc 0 base  1000 100 200 4096", "line 5"),
        (4, "alloc 0 base 1000 100 200 4096 ", "line 5"),
        (4, "range base 1000 100 200 " + "00" * 64, "line 5: got a range record"),
        (5, "", "at least one, as the header announces"),
    ],
)
def test_a_malformed_record_is_named_by_line(line: int, replacement: str, says: str) -> None:
    lines = PUBLISHED.decode().splitlines()
    lines[line] = replacement
    with pytest.raises(ManifestError) as error:
        m.parse_manifest("".join(f"{text}\n" for text in lines if text).encode())
    assert says in str(error.value)


def test_unknown_records_and_kinds_are_reported_not_dropped_in_silence() -> None:
    text = PUBLISHED.replace(b" 66 4 ", b" 66 33 ") + b"arena 7 kv\n"
    read = m.parse_manifest(text)
    assert read.allocations == (RAW,)
    assert read.skipped == ("line 6: unknown artifact kind 33", "line 7: unknown record 'arena'")


def test_nothing_may_follow_the_end_line() -> None:
    with pytest.raises(ManifestError, match="nothing after the end line"):
        m.parse_manifest(m.format_manifest(MANIFEST).encode() + b"# more\n")


@pytest.mark.parametrize("bad", ["/run/my dir/w.sock", "/run/w\n.sock", ""])
def test_paths_that_the_format_cannot_hold_are_refused(bad: str) -> None:
    with pytest.raises(UsageError):
        m.check_words("/run/w", bad, None)
    if bad:
        with pytest.raises(UsageError):
            m.format_manifest(replace(MANIFEST, broker=bad))


def test_a_socket_path_that_is_too_long_is_refused_before_loading() -> None:
    m.check_words("/" + "m" * 102, "/" + "s" * 106, None)
    with pytest.raises(UsageError, match="108 bytes, at most 107"):
        m.check_words("/" + "m" * 103, "/s", None)
    with pytest.raises(UsageError, match="--broker-socket"):
        m.check_words("/m", "/" + "s" * 107, None)


def test_writing_replaces_the_old_manifest_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_text("old")
    m.write_manifest(str(path), MANIFEST)
    assert m.read_manifest(str(path)) == replace(MANIFEST, sealed=True)
    assert os.listdir(tmp_path) == ["w"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_writing_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot write the manifest: No such file"):
        m.write_manifest(str(tmp_path / "no" / "w"), MANIFEST)


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_old_manifest_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "w"
    path.write_text("old")
    monkeypatch.setattr(os, step, full)
    with pytest.raises(ManifestError, match="cannot write the manifest: No space left"):
        m.write_manifest(str(path), MANIFEST)
    assert (os.listdir(tmp_path), path.read_text()) == (["w"], "old")


def test_a_fifo_in_place_of_a_manifest_is_an_error_and_no_wait(tmp_path: Path) -> None:
    path = tmp_path / "w"
    os.mkfifo(path)
    with pytest.raises(ManifestError, match="not a regular file"):
        m.read_manifest(str(path))
    with pytest.raises(ManifestError, match="cannot read the manifest: Is a directory"):
        m.read_manifest(str(tmp_path))
    assert m.is_manifest(str(path)) is False


def test_only_manifests_look_like_manifests(tmp_path: Path) -> None:
    path = tmp_path / "w"
    for content, expected in ((PUBLISHED, True), (b"DS4_WEIGHT", True), (b"GGUF\x03\n", False)):
        path.write_bytes(content)
        assert m.is_manifest(str(path)) is expected


def test_a_zombie_is_not_a_running_owner() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(process.pid) == "zombie"
    process.wait()
    assert process_state(process.pid) == "gone"
    assert process_state(os.getpid()) == "running"


def test_silence_is_explained_by_what_was_checked(tmp_path: Path) -> None:
    path = str(tmp_path / "w")
    sock = socket.socket(socket.AF_UNIX)
    with sock, pytest.raises(OSError, match="No such file") as error:
        sock.connect(path + ".ctl")
    assert "there is no manifest either" in explain_silence(path, error.value)
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    m.write_manifest(path, replace(MANIFEST, owner=m.OwnerRecord(process.pid, 0, "base", None)))
    text = explain_silence(path, error.value)
    assert f"owner pid {process.pid}, which is gone" in text
    Path(path).write_bytes(PUBLISHED)
    assert "another program" in explain_silence(path, error.value)
    Path(path).write_bytes(PUBLISHED[:-1])
    assert "cut" in explain_silence(path, error.value)
