"""Listening sockets that the owner holds for its workers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4_common import fdpass
from ds4_common.errors import AddressError, AddressInUse, UsageError
from ds4_common.protocol import SEAT_LANES, GetListener
from ds4_owner import claim
from ds4_owner.claim import bind_unix
from ds4_owner.listeners import Listeners
from helpers.descriptors import open_fds


@pytest.fixture
def held() -> Iterator[Listeners]:
    before = open_fds()
    made = Listeners()
    yield made
    made.close()
    assert open_fds() <= before


def test_the_same_address_is_the_same_socket(held: Listeners) -> None:
    fd, record = held.get(GetListener(host="127.0.0.1", name="a"))
    assert record.port > 0
    assert held.get(GetListener(host="127.0.0.1", name="a"))[0] == fd
    assert held.get(GetListener(host="127.0.0.1", port=record.port))[0] == fd


def test_another_name_gets_another_free_port(held: Listeners) -> None:
    first = held.get(GetListener(host="127.0.0.1", name="a"))[1]
    second = held.get(GetListener(host="127.0.0.1", name="b"))[1]
    assert first.port != second.port
    assert held.records() == [first, second]


def test_a_seat_is_one_per_socket_and_its_lanes_carry_descriptors(held: Listeners) -> None:
    record = held.get(GetListener(host="127.0.0.1", name="a"))[1]
    memory, bell, *lanes = held.seat(record)
    assert held.seat(held.get(GetListener(host="127.0.0.1", port=record.port))[1])[0] == memory
    assert held.seat(held.get(GetListener(host="127.0.0.1", name="b"))[1])[0] != memory
    assert os.fstat(memory).st_size == 0
    os.eventfd_write(bell, 1)
    assert os.eventfd_read(bell) == 1
    for park, take in zip(lanes[::2], lanes[1::2], strict=True):
        with (
            socket.socket(fileno=os.dup(park)) as sender,
            socket.socket(fileno=os.dup(take)) as end,
        ):
            fdpass.send(sender, b"x", [bell])
            data, fds = fdpass.receive(end)
            fdpass.close_all(fds)
            assert (data, len(fds)) == (b"x", 1)
    assert len(lanes) == 2 * SEAT_LANES


def test_a_seat_for_which_there_are_no_descriptors_is_an_address_error(
    held: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = held.get(GetListener(host="127.0.0.1"))[1]

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", fail)
    with pytest.raises(AddressError, match="seat of port"):
        held.seat(record)


def test_clients_wait_in_the_backlog_while_nobody_serves(held: Listeners) -> None:
    fd, record = held.get(GetListener(host="127.0.0.1"))
    with socket.create_connection((record.host, record.port)) as client:
        client.sendall(b"early")
        with socket.socket(fileno=os.dup(fd)) as worker:
            served, _ = worker.accept()
        with served:
            assert served.recv(5) == b"early"


def test_ipv6_works_and_its_wildcard_serves_ipv4_too(held: Listeners) -> None:
    loopback = held.get(GetListener(host="::1"))[1]
    socket.create_connection(("::1", loopback.port)).close()
    anywhere = held.get(GetListener(host="::"))[1]
    socket.create_connection(("127.0.0.1", anywhere.port)).close()


def test_an_address_that_another_program_has_is_named(held: Listeners) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1 port {port}: already in use"):
            held.get(GetListener(host="127.0.0.1", port=port))


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1 ", "300.1.1.1", "\xfc", "192.0.2.1"])
def test_an_address_that_is_not_ours_or_not_numeric_is_refused(held: Listeners, host: str) -> None:
    with pytest.raises(AddressError, match="listen address"):
        held.get(GetListener(host=host))


def test_neither_or_both_kinds_of_address_are_refused(held: Listeners) -> None:
    for request in (GetListener(), GetListener(host="::1", path="/x")):
        with pytest.raises(AddressError, match="either"):
            held.get(request)


def test_unix_listeners_are_private_and_removed_at_the_end(held: Listeners, tmp_path: Path) -> None:
    path = tmp_path / "http"
    fd, record = held.get(GetListener(path=str(path)))
    assert record.path == str(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert held.get(GetListener(path=str(path)))[0] == fd
    held.close()
    assert not path.exists()


def test_a_unix_listener_that_was_cleaned_away_is_made_anew(
    held: Listeners, tmp_path: Path
) -> None:
    path = tmp_path / "http"
    _, record = held.get(GetListener(path=str(path)))
    seat = held.seat(record)
    path.unlink()
    fd, again = held.get(GetListener(path=str(path)))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert held.get(GetListener(path=str(path)))[0] == fd
    assert held.seat(again) == seat, "the worker on the old socket must be asked to make room"


def test_a_dead_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    bound = bind_unix(path, socket.SOCK_STREAM, 1)
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with pytest.raises(AddressInUse, match="somebody answers there"):
            bind_unix(path, kind, 1)
    bound.close()
    assert os.listdir(tmp_path) == []


def test_a_live_socket_whose_backlog_is_full_is_alive(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    bound = bind_unix(path, socket.SOCK_STREAM, 0)
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(path)
        with pytest.raises(AddressInUse):
            bind_unix(path, socket.SOCK_STREAM, 0)
    bound.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(AddressInUse, match="not a socket"):
        bind_unix(str(path), socket.SOCK_STREAM, 1)
    assert path.read_text() == "precious"


def test_a_node_that_somebody_else_put_there_is_not_unlinked(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    ours = bind_unix(path, socket.SOCK_STREAM, 1)
    os.rename(path, path + ".old")
    theirs = bind_unix(path, socket.SOCK_STREAM, 1)
    ours.close()
    assert os.path.exists(path)
    theirs.close()
    assert not os.path.exists(path)
    theirs_again = bind_unix(path, socket.SOCK_STREAM, 1)
    os.unlink(path)
    theirs_again.close()


def test_of_many_that_claim_one_dead_socket_exactly_one_wins(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    start = threading.Barrier(8)
    won: list[claim.BoundSocket] = []
    lost: list[AddressInUse] = []

    def claim() -> None:
        start.wait()
        try:
            won.append(bind_unix(path, socket.SOCK_STREAM, 8))
        except AddressInUse as error:
            lost.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    won[0].close()


def test_a_folder_that_stays_locked_is_an_error_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "_CLAIM_SECONDS", 0.0)
    path = str(tmp_path / "s")
    with (
        claim.claiming(path),
        pytest.raises(AddressInUse, match="stays locked"),
        claim.claiming(path),
    ):
        pass


def test_paths_that_cannot_be_bound_are_named(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="No such file"):
        bind_unix(str(tmp_path / "no" / "s"), socket.SOCK_STREAM, 1)
    with pytest.raises(UsageError, match="at most 107"):
        bind_unix("/" + "s" * 107, socket.SOCK_STREAM, 1)
