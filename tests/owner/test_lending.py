"""Descriptors made for a send: closed after it, whatever happens, and never kept in an outbox."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from ds4_common import fdpass
from ds4_common.errors import CudaError
from ds4_owner.backends.vmm import DeviceMemory
from ds4_owner.lending import Descriptor, lent, number
from ds4_owner.state import Desk, Kept
from ds4_owner.transport import Client, Transport


class Exported:
    """What a device allocation is to its lender."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.exports, self.closed, self.fails = 0, False, False

    def export_fd(self) -> int:
        if self.fails:
            raise CudaError("no descriptors")
        fd = os.open("/dev/null", os.O_RDONLY)
        self.open.add(fd)
        self.exports += 1
        return fd

    def close(self) -> None:
        self.closed = True

    def still_open(self) -> int:
        return sum(is_open(fd) for fd in self.open)


def is_open(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == "/dev/null"
    except FileNotFoundError:
        return False


@pytest.fixture
def exported() -> Exported:
    return Exported()


@pytest.fixture
def memory(exported: Exported) -> Iterator[DeviceMemory]:
    made = DeviceMemory(exported)  # type: ignore[arg-type]
    yield made
    made.close()
    assert exported.closed
    assert exported.still_open() == 0


def test_a_descriptor_lives_as_long_as_it_is_lent(memory: DeviceMemory, exported: Exported) -> None:
    with lent([0, memory, memory]) as (zero, one, two):
        assert zero == 0
        assert one != two
        assert exported.still_open() == 2
        assert not os.get_inheritable(one)
        assert number(memory) == -1
    assert exported.still_open() == 0


def test_a_held_descriptor_is_lent_again_and_again_until_it_is_let_go(
    memory: DeviceMemory, exported: Exported
) -> None:
    memory.hold()
    memory.hold()
    for _ in range(2):
        with lent([memory]) as (fd,):
            assert fd == number(memory)
    assert exported.exports == exported.still_open() == 1
    memory.let_go()
    assert exported.still_open() == 0


def test_one_that_was_lent_before_is_closed_although_another_is_held_now(
    memory: DeviceMemory, exported: Exported
) -> None:
    with lent([memory]):
        memory.hold()
    assert exported.still_open() == 1
    assert is_open(number(memory))


def test_a_failure_half_way_closes_the_first(memory: DeviceMemory, exported: Exported) -> None:
    broken = Exported()
    broken.fails = True
    with pytest.raises(CudaError), lent([memory, DeviceMemory(broken)]):  # type: ignore[arg-type]
        pass
    assert exported.still_open() == 0


# In the broker's loop


class Desk1:
    """Answers every word with one descriptor."""

    max_request_bytes = 64
    desk: Desk = "native"

    def __init__(self, loop: Transport, descriptor: Descriptor, packets: int) -> None:
        self.loop, self.descriptor, self.packets = loop, descriptor, packets
        self.gone = threading.Event()

    def opened(self, client: Client) -> bool:
        for _ in range(self.packets):
            self.loop.send(client, b"x" * 4096, (self.descriptor,))
        return True

    def received(self, client: Client, data: bytes, intact: bool) -> None:
        self.loop.drop(client)

    def expired(self, client: Client) -> None: ...

    def closed(self, client: Client) -> None:
        self.gone.set()

    def exhausted(self) -> bytes:
        return b""

    def keep(self, client: Client) -> Kept:
        return Kept()

    def take(self, client: Client, kept: Kept) -> None: ...


def serve(memory: DeviceMemory, packets: int) -> tuple[Transport, Desk1, socket.socket, list[str]]:
    said: list[str] = []
    loop = Transport(said.append)
    desk = Desk1(loop, memory, packets)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")
    listener.listen()
    listener.setblocking(False)
    loop.listen(listener, desk)
    return loop, desk, listener, said


def run(loop: Transport) -> threading.Thread:
    thread = threading.Thread(target=loop.run)
    thread.start()
    return thread


def end(loop: Transport, thread: threading.Thread, listener: socket.socket) -> None:
    loop.stop()
    thread.join()
    loop.close()
    loop.release()
    listener.close()


@pytest.mark.parametrize("packets", [1, 500])
def test_an_outbox_holds_no_descriptors_however_long_a_client_takes(
    memory: DeviceMemory, exported: Exported, packets: int
) -> None:
    loop, desk, listener, _ = serve(memory, packets)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(60)
        client.connect(listener.getsockname())
        thread = run(loop)
        for _ in range(packets):
            data, fds = fdpass.receive(client)
            assert (len(data), len(fds)) == (4096, 1)
            fdpass.close_all(fds)
        assert exported.exports >= packets
    assert desk.gone.wait(60)
    end(loop, thread, listener)
    assert exported.still_open() == 0


def test_a_client_that_dies_with_packets_unsent_leaves_nothing_open(
    memory: DeviceMemory, exported: Exported
) -> None:
    loop, desk, listener, _ = serve(memory, 500)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(listener.getsockname())
        thread = run(loop)
        client.recv(1)
    assert desk.gone.wait(60)
    end(loop, thread, listener)
    assert exported.still_open() == 0


def test_a_client_is_dropped_when_no_descriptor_can_be_made_for_it(
    memory: DeviceMemory, exported: Exported
) -> None:
    exported.fails = True
    loop, desk, listener, said = serve(memory, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(60)
        client.connect(listener.getsockname())
        thread = run(loop)
        assert client.recv(1) == b""
    assert desk.gone.wait(60)
    end(loop, thread, listener)
    assert "cannot send to it: no descriptors" in said[0]
