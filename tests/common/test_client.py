"""Attaching to an owner: what is mapped, and what outlives whom."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ds4_common import client, fdpass, mapping, paths, protocol
from ds4_common.errors import (
    AddressError,
    AddressInUse,
    BackendError,
    OwnerUnavailable,
    UsageError,
)
from ds4_owner.lending import number
from helpers.brokers import ALLOC_BYTES, Stage, broker, broker_process, content, memory
from helpers.descriptors import open_fds


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with broker(tmp_path) as made:
        made.ready()
        yield made


def mapped_lines(address: int) -> list[str]:
    """The line of /proc/self/maps that begins at an address."""
    with open("/proc/self/maps") as file:
        return [line for line in file if line.startswith(f"{address:x}-")]


# Mapping


def test_mapped_bytes_are_the_owners_read_only_and_aligned_for_huge_pages(stage: Stage) -> None:
    with client.connect(stage.path) as connection:
        mapped = connection.map_allocations()
        assert list(mapped) == [0, 1, 2]
        for number, m in mapped.items():
            assert m.address % mapping.HUGE_PAGE_BYTES == 0
            assert m.n_bytes == ALLOC_BYTES
            assert bytes(m.view[: len(content(number))]) == content(number)
            assert m.view.readonly
            [line] = mapped_lines(m.address)
            assert line.split()[1] == "r--s"
            m.close()
            assert mapped_lines(m.address) == []


def test_nobody_can_make_a_mapping_writable(stage: Stage) -> None:
    with client.connect(stage.path) as connection:
        mapped = connection.map_allocations([0])[0]
        mprotect = mapping._libc.mprotect
        mprotect.argtypes = mapping._madvise.argtypes
        assert mprotect(mapped.address, 4096, 3) == -1
        mapped.close()


def test_mapping_and_blobs_leave_no_descriptor_open(stage: Stage) -> None:
    before = open_fds()
    with client.connect(stage.path) as connection:
        mapped = [*connection.map_allocations().values(), connection.blob("tokenizer")]
        assert len(open_fds() - before) <= 2  # both ends of the connection are in this process
    stage.settle()
    assert open_fds() <= before
    assert bytes(mapped[3].view) == b"tokenizer"
    for m in mapped:
        m.close()


def test_sizes_that_are_no_multiple_of_a_page_are_mapped_apart(tmp_path: Path) -> None:
    fds = [memory(size, b"%d" % size) for size in (1, 5000, ALLOC_BYTES + 1, 3)]
    sizes = [os.fstat(fd).st_size for fd in fds]
    mapped = mapping.map_read_only([(fd, n, n) for fd, n in zip(fds, sizes, strict=True)])
    fdpass.close_all(fds)
    assert [bytes(m.view[:1]) for m in mapped] == [b"1", b"5", b"4", b"3"]
    mapped[1].close()
    assert bytes(mapped[2].view[:1]) == b"4"
    for m in mapped:
        m.close()
        m.close()
    assert mapping.map_read_only([]) == []


def test_a_mapping_that_fails_leaves_nothing_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, reserved = mapping._reserve, []

    def noted(n_bytes: int) -> int:
        reserved.append(range(base := reserve(n_bytes), base + n_bytes))
        return base

    monkeypatch.setattr(mapping, "_reserve", noted)
    good, directory = memory(ALLOC_BYTES, b""), os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BackendError, match="cannot map 4096 bytes"):
        mapping.map_read_only([(good, 1, ALLOC_BYTES), (directory, 1, 4096)])
    (space,) = reserved
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:" in line or "---p" in line:  # what was mapped, what was only reserved
            assert int(line.split("-")[0], 16) not in space
    with pytest.raises(BackendError, match="cannot reserve"):
        mapping.map_read_only([(good, 1, 1 << 60)])
    fdpass.close_all([good, directory])


def test_more_allocations_than_one_packet_holds_arrive_in_order(tmp_path: Path) -> None:
    before = open_fds()
    with broker(tmp_path) as stage:
        stage.ready(600, n_bytes=4096)
        with client.connect(stage.path) as connection:
            order = [599, *range(500), 550]
            mapped = connection.map_allocations(order)
            assert list(mapped) == order
            assert bytes(mapped[599].view[:14]) == content(599)
            assert [r.id for r in connection.describe_allocations()] == list(range(600))
            assert len(connection.fetch_allocations([])) == 0
            for m in mapped.values():
                m.close()
    assert open_fds() <= before


@pytest.mark.parametrize("seals", [0x0, 0x6, 0x8, 0x12])
def test_memory_that_could_still_change_is_refused(tmp_path: Path, seals: int) -> None:
    with broker(tmp_path) as stage:
        stage.ready(seals=seals)
        before = open_fds()
        with client.connect(stage.path) as connection:
            with pytest.raises(BackendError, match="could still change"):
                connection.map_allocations()
            with pytest.raises(BackendError, match="could still change"):
                connection.blob("tokenizer")
        stage.settle()
        assert open_fds() <= before


def test_future_write_seals_will_do(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        stage.ready(seals=0x16)
        with client.connect(stage.path) as connection:
            connection.map_allocations([0])[0].close()


def test_a_descriptor_that_holds_less_than_declared_is_refused(stage: Stage) -> None:
    offer = stage.broker.facts.offer
    os.close(number(offer.borrowed_fds[1]))
    small = memory(4096, b"")
    assert small == number(offer.borrowed_fds[1])  # the lowest free number
    with client.connect(stage.path) as connection:
        with pytest.raises(BackendError, match="allocation 1: descriptor holds 4096 bytes"):
            connection.map_allocations()


# Life and death


def test_mappings_outlive_an_owner_that_was_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "w")
    with broker_process(Path(path)) as process:
        connection = client.connect(path)
        mapped = connection.map_allocations()
        assert connection.owner_alive()
        assert connection.owner_pid == process.pid
        process.kill()
        process.wait()
        assert not connection.owner_alive()
        assert bytes(mapped[1].view[:12]) == content(1)
        with pytest.raises(OwnerUnavailable):
            connection.status()
        connection.close()
        assert not connection.owner_alive()
    for m in mapped.values():
        m.close()


def test_a_listener_outlives_the_worker_that_asked_for_it(stage: Stage) -> None:
    with client.connect(stage.path) as connection:
        with connection.listener("localhost", 0, "http") as listener:
            port = listener.getsockname()[1]
            assert not listener.getblocking()
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.sendall(b"hello")
        with client.connect(stage.path) as connection:
            with connection.listener("127.0.0.1", port) as listener:
                served, _ = listener.accept()
        with served:
            assert served.recv(5) == b"hello"


def test_listener_errors_are_told_apart(stage: Stage, tmp_path: Path) -> None:
    with client.connect(stage.path) as connection:
        with socket.create_server(("127.0.0.1", 0)) as other:
            with pytest.raises(AddressInUse, match="already in use by another program"):
                connection.listener("127.0.0.1", other.getsockname()[1])
        with pytest.raises(AddressError, match="listen address"):
            connection.listener("192.0.2.1", 0)
        with pytest.raises(AddressError, match=r"no\.such\.host\.invalid"):
            connection.listener("no.such.host.invalid", 0)
        with connection.unix_listener(str(tmp_path / "http")) as listener:
            assert listener.getsockname() == str(tmp_path / "http")


def test_children_of_a_worker_inherit_no_descriptor_of_the_owner(stage: Stage) -> None:
    listing = "import os; print(len(os.listdir('/proc/self/fd')))"

    def open_in_a_child() -> str:
        command = [sys.executable, "-I", "-S", "-c", listing]
        return subprocess.run(command, close_fds=False, capture_output=True, text=True).stdout

    before = open_in_a_child()
    with client.connect(stage.path) as connection:
        fetched = connection.fetch_allocations()
        listener = connection.listener("127.0.0.1", 0)
        assert open_in_a_child() == before
        listener.close()
        fdpass.close_all(fd for _, fd in fetched)


def test_nobody_there_is_explained(tmp_path: Path) -> None:
    with pytest.raises(OwnerUnavailable, match=r"w\.ctl: No such file .* no manifest either"):
        client.connect(str(tmp_path / "w"))
    with pytest.raises(UsageError, match="at most 107"):
        client.connect("/" + "x" * 110)


def test_an_owner_that_appears_a_little_later_is_found(tmp_path: Path) -> None:
    found = threading.Event()

    def attach() -> None:
        client.connect(str(tmp_path / "w"), appear_seconds=60, wait_seconds=60).close()
        found.set()

    thread = threading.Thread(target=attach)
    thread.start()
    with broker(tmp_path) as stage:
        stage.ready()
        assert found.wait(60)
    thread.join()


def test_a_worker_proves_that_the_range_it_maps_is_the_range_it_asked_for(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        stage.ready(2)
        offer = stage.broker.facts.offer
        swapped = {0: offer.borrowed_fds[1], 1: offer.borrowed_fds[0]}  # equal in size and seals
        with client.connect(stage.path) as connection:
            connection.map_allocations([0])[0].close()
            stage.broker.facts = replace(
                stage.broker.facts, offer=replace(offer, borrowed_fds=swapped)
            )
            with pytest.raises(BackendError, match="allocation 0: got memory object"):
                connection.map_allocations([0])


# Start-up


def test_attaching_imports_nothing_that_a_start_does_not_need() -> None:
    # An editable install may import things of its own before us: only what we add counts.
    probe = (
        "import sys; before = set(sys.modules); import ds4_common.client; "
        "print('\\n'.join(set(sys.modules) - before))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=environment, check=True
    )
    heavy = {
        "argparse", "asyncio", "json", "logging", "numpy", "pathlib", "psutil", "rich", "tempfile",
        "ds4_common.manifest", "ds4_common.allocation", "ds4_common.gguf", "ds4_common.identity",
    }  # fmt: skip
    assert heavy.isdisjoint(run.stdout.split())


def test_private_owners_live_in_a_folder_of_their_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = paths.make_owners_folder()
    assert folder == str(tmp_path / "ds4")
    assert os.stat(folder).st_mode & 0o777 == 0o700
    os.chmod(folder, 0o777)
    with pytest.raises(OwnerUnavailable, match="nobody else can write to"):
        paths.make_owners_folder()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert paths.owners_folder() == f"/tmp/ds4-{os.getuid()}"


def test_a_worker_killed_at_any_moment_of_attaching_leaves_the_owner_serving(
    stage: Stage,
) -> None:
    before = open_fds()
    steps: list[Callable[[client.OwnerConnection], object]] = [
        lambda c: None,
        lambda c: c.fetch_allocations(),
        lambda c: c.map_allocations(),
        lambda c: c.map_blobs(["image", "tokenizer"]),
        lambda c: c.listener("127.0.0.1", 0, "http"),
        lambda c: c._send(protocol.GetAllocations()),
    ]
    listener_kept = 0
    for step in steps:
        pid = os.fork()
        if pid == 0:
            try:
                step(client.connect(stage.path))
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        stage.settle()
        assert stage.broker.leases() == []
        with client.connect(stage.path, "status") as connection:
            listener_kept = len(connection.status().listeners)
        stage.settle()
    assert listener_kept == 1
    assert len(open_fds() - before) <= listener_kept
