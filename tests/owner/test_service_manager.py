"""Owners under a service manager: what they say, leave there, and adopt from there."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4_common import client, fdpass
from ds4_common.manifest import read_manifest
from ds4_owner.stop import Stopped, StopWatch
from helpers.service_manager import ServiceManager, Stored, service_manager
from helpers.stack import DEADLINE_SECONDS


@pytest.fixture
def manager(run: Path) -> Iterator[ServiceManager]:
    with service_manager(run) as made:
        yield made


def flags(model: Path, run: Path, *more: str) -> list[str]:
    return [
        *("ds4_owner.cli", "--base", str(model), "--scope", "base", "--backend", "memfd"),
        *("--manifest", str(run / "w"), "--lock-file", str(run / "lock"), *more),
    ]


def kill(manager: ServiceManager) -> None:
    assert manager.program is not None
    assert manager.program.stop(signal.SIGKILL) == -signal.SIGKILL


def contents(run: Path) -> dict[int, bytes]:
    with client.connect(str(run / "w"), "inspect") as owner:
        return {i: bytes(m.view) for i, m in owner.map_allocations().items()}


def start_and_kill(manager: ServiceManager, arguments: list[str]) -> None:
    manager.start(*arguments)
    manager.wait_ready()
    kill(manager)


# What it says


def test_progress_then_ready_then_stopping_are_told(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    program = manager.start(*flags(model, run))
    manager.wait_ready()
    assert program.stop() == 0
    manager.wait_for(lambda: manager.count("STOPPING", "1") == 1, "STOPPING=1")
    first = manager.messages[0]
    assert first["STATUS"].startswith("load")
    assert int(first["EXTEND_TIMEOUT_USEC"]) >= 60_000_000
    assert not manager.refused


def test_the_watchdog_is_served_in_time_from_the_first_moment(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    manager.start(*flags(model, run), WATCHDOG_USEC="200000")
    manager.wait_for(lambda: manager.count("WATCHDOG", "1") >= 3, "three beats")
    manager.wait_ready()
    seen = manager.count("WATCHDOG", "1")
    manager.wait_for(lambda: manager.count("WATCHDOG", "1") >= seen + 3, "three more beats")


def test_a_watchdog_of_another_process_is_not_served(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    program = manager.start(*flags(model, run), WATCHDOG_PID="1")
    manager.wait_ready()
    assert program.stop() == 0
    assert manager.count("WATCHDOG", "1") == 0


def test_without_a_watchdog_nothing_wakes_an_idle_owner() -> None:
    watch = StopWatch()
    try:
        assert watch._patience_ms(None) is None
        watch.beat_every(1.0, lambda: None)
        patience = watch._patience_ms(None)
        assert patience is not None
        assert 0 <= patience <= 1000
    finally:
        watch.close()


def test_a_signal_reaches_the_wait_itself_and_not_only_pythons_handler() -> None:
    """Otherwise one that comes just before poll() sleeps would be noticed when that returns."""
    watch = StopWatch()
    try:
        signal.raise_signal(signal.SIGTERM)
        assert select.select([watch._signalled], [], [], 0)[0]
        with pytest.raises(Stopped):
            watch.wait(())
        assert not select.select([watch._signalled], [], [], 0)[0]
    finally:
        watch.close()


# What it leaves


def test_everything_that_matters_is_stored_under_valid_names_without_polling(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    manager.start(*flags(model, run))
    with client.connect(str(run / "w"), "worker", wait_seconds=60, appear_seconds=60) as owner:
        held = {f"ds4.memory.{a.id}" for a in owner.describe_allocations()}
        held |= {f"ds4.memory.{blob.name}" for blob in owner.welcome.blobs}
        with owner.listener("127.0.0.1", 0, "a:b"):
            manager.wait_for(lambda: len(manager.names()) == len(held) + 2, "a stored listener")
    others = manager.names() - held
    assert sorted(name.rsplit(".", 1)[0] for name in others) == ["ds4.listener", "ds4.state"]
    assert not any(stored.poll for stored in manager.store)
    assert not manager.refused


def test_a_clean_stop_leaves_nothing_in_the_store(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    program = manager.start(*flags(model, run))
    manager.wait_for(lambda: any("state" in name for name in manager.names()), "a record")
    assert program.stop() == 0
    assert manager.names() == set()


# What the next one adopts


def test_the_owner_after_a_kill_adopts_the_memory_under_the_same_names(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    manager.start(*flags(model, run))
    manager.wait_ready()
    before, bytes_before = read_manifest(str(run / "w")), contents(run)
    memory_before = {os.fstat(s.fd).st_ino for s in manager.store if "memory" in s.name}
    for number in (1, 2):
        kill(manager)
        program = manager.start(*flags(model, run))
        manager.wait_ready(number + 1)
        program.wait_for("adopted 2 allocations")
        assert "uploaded" not in program.text
        after = read_manifest(str(run / "w"))
        assert after.owner.pid == program.process.pid
        assert (after.owner_id, after.allocations) == (before.owner_id, before.allocations)
        assert contents(run) == bytes_before
    assert memory_before == {os.fstat(s.fd).st_ino for s in manager.store if "memory" in s.name}
    assert program.stop() == 0
    assert manager.names() == set()


def test_clients_wait_in_the_backlog_while_no_owner_lives_and_a_worker_registers_again(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    manager.start(*flags(model, run))
    manager.wait_ready()
    path = str(run / "w")
    with client.connect(path, "worker", "one") as owner:
        mapped = owner.map_allocations()
        listener = owner.listener("127.0.0.1", 0, "one")
        address = listener.getsockname()
        listener.close()
        manager.wait_for(lambda: "ds4.state.2" in manager.names(), "the record of a listener")
        first = {i: bytes(m.view[:64]) for i, m in mapped.items()}
        kill(manager)
        assert not owner.owner_alive()
        assert {i: bytes(m.view[:64]) for i, m in mapped.items()} == first
    with socket.create_connection(address, DEADLINE_SECONDS) as caller:
        manager.start(*flags(model, run))
        manager.wait_ready(2)
        with client.connect(path, "worker", "one") as again:
            assert [lease.name for lease in again.status().leases] == ["one"]
            with again.listener("127.0.0.1", 0, "one") as same:
                assert same.getsockname() == address
                same.settimeout(DEADLINE_SECONDS)
                served, _ = same.accept()
                with served:
                    served.send(b"hello")
        assert caller.recv(5) == b"hello"


def test_a_unix_listener_is_adopted_with_its_node(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    manager.start(*flags(model, run))
    manager.wait_ready()
    path, node = str(run / "w"), str(run / "lock-http")
    with client.connect(path, "worker") as owner:
        owner.unix_listener(node, "u").close()
        manager.wait_for(lambda: "ds4.state.2" in manager.names(), "the record of a listener")
    inode = os.stat(node).st_ino
    kill(manager)
    program = manager.start(*flags(model, run))
    manager.wait_ready(2)
    program.wait_for("1 listening sockets")
    assert os.stat(node).st_ino == inode
    assert program.stop() == 0
    assert not os.path.exists(node)


def test_the_seat_of_a_listening_socket_is_adopted_whole(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    def inodes(fds: list[int]) -> list[int]:
        found = [os.fstat(fd).st_ino for fd in fds]
        fdpass.close_all(fds)
        return found

    manager.start(*flags(model, run))
    manager.wait_ready()
    with client.connect(str(run / "w"), "worker") as owner:
        listener, seat = owner.listener_and_seat("127.0.0.1", 0, "one")
        listener.close()
    before = inodes(seat)
    manager.wait_for(lambda: "ds4.state.2" in manager.names(), "the record of a listener")
    assert sum(name.startswith("ds4.seat.") for name in manager.names()) == len(before)
    program = manager.program
    assert program is not None
    program.process.send_signal(signal.SIGUSR2)
    manager.wait_ready(2)
    kill(manager)
    manager.start(*flags(model, run))
    manager.wait_ready(3)
    with client.connect(str(run / "w"), "worker") as owner:
        listener, seat = owner.listener_and_seat("127.0.0.1", 0, "one")
        listener.close()
        assert inodes(seat) == before


def test_a_touched_model_file_is_not_adopted_but_loaded_again(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    start_and_kill(manager, flags(model, run))
    os.utime(model)
    program = manager.start(*flags(model, run))
    manager.wait_ready(2)
    line = program.wait_for("not adopting")
    assert str(model) in line
    assert "modification time" in line
    program.wait_for("uploaded")


def test_another_model_or_layout_is_not_adopted_but_loaded(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    start_and_kill(manager, flags(model, run))
    program = manager.start(*flags(model, run, "--cpu-layout", "raw"))
    manager.wait_ready(2)
    program.wait_for("other settings than it was loaded with: cpu_layout")
    kill(manager)
    other = model.with_name("other.gguf")
    other.write_bytes(model.read_bytes())
    program = manager.start(*flags(other, run, "--cpu-layout", "raw"))
    manager.wait_ready(3)
    program.wait_for("other settings than it was loaded with: base")


def test_how_an_owner_serves_may_change_over_an_adoption(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    start_and_kill(manager, flags(model, run))
    program = manager.start(*flags(model, run, "--metrics-port", "0", "--repack-threads", "1"))
    manager.wait_ready(2)
    program.wait_for("adopted 2 allocations")


def forge(stored: Stored) -> int:
    """Sealed memory of the same size with other bytes."""
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, os.fstat(stored.fd).st_size)
    os.pwrite(fd, b"forged", 0)
    return fd


@pytest.mark.parametrize("what", ["forged", "missing", "record"])
def test_memory_that_is_not_proven_is_not_adopted(
    manager: ServiceManager, model: Path, run: Path, what: str
) -> None:
    start_and_kill(manager, flags(model, run))
    kind = "ds4.state" if what == "record" else "ds4.memory.0"
    stored = next(s for s in manager.store if s.name.startswith(kind))
    if what == "missing":
        manager.store.remove(stored)
    else:
        forged = forge(stored)
        os.close(stored.fd)
        stored.fd = forged
    inodes = {os.fstat(s.fd).st_ino for s in manager.store}
    program = manager.start(*flags(model, run))
    manager.wait_ready(2)
    reasons = {"forged": "got object", "missing": "was not kept", "record": "not sealed"}
    assert reasons[what] in program.wait_for("not adopting")
    program.wait_for("uploaded")
    manager.wait_for(lambda: any("state" in n for n in manager.names()), "a record")
    assert inodes.isdisjoint(os.fstat(s.fd).st_ino for s in manager.store)


def test_foreign_descriptors_are_closed_with_a_line(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        manager.store.append(Stored("web", os.dup(listening.fileno()), False))
        program = manager.start(*flags(model, run))
        manager.wait_ready()
        program.wait_for("closing descriptors that are not the owner's: web")
        links = [os.readlink(f"/proc/{program.process.pid}/fd/{n}")
                 for n in os.listdir(f"/proc/{program.process.pid}/fd")]  # fmt: skip
        assert f"socket:[{os.fstat(listening.fileno()).st_ino}]" not in links


def test_a_store_that_is_too_small_costs_a_load_and_nothing_else(model: Path, run: Path) -> None:
    with service_manager(run, max_descriptors=3) as manager:
        start_and_kill(manager, flags(model, run))
        program = manager.start(*flags(model, run), FDSTORE="3")
        manager.wait_ready(2)
        program.wait_for("not adopting")
        assert "raise FileDescriptorStoreMax=" in program.wait_for("FileDescriptorStoreMax")


def test_a_reexec_is_told_as_a_reload_and_keeps_the_store(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    program = manager.start(*flags(model, run))
    manager.wait_ready()
    manager.wait_for(lambda: any("state" in n for n in manager.names()), "a record")
    before = {n for n in manager.names() if "memory" in n}
    program.process.send_signal(signal.SIGUSR2)
    manager.wait_ready(2)
    reload = next(m for m in manager.messages if m.get("RELOADING") == "1")
    assert int(reload["MONOTONIC_USEC"]) > 0
    program.wait_for("reexec: took over")
    kill(manager)
    assert {n for n in manager.names() if "memory" in n} == before
    program = manager.start(*flags(model, run))
    manager.wait_ready(3)
    program.wait_for("adopted 2 allocations")


def test_a_manager_that_does_not_listen_is_logged_and_ignored(
    manager: ServiceManager, model: Path, run: Path
) -> None:
    program = manager.start(*flags(model, run), NOTIFY_SOCKET=str(run / "nobody"))
    program.wait_for("ready manifest=")
    program.wait_for("service manager at NOTIFY_SOCKET does not listen")
    assert program.stop() == 0
