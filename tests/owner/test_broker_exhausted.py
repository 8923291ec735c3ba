"""A broker without descriptors left."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from ds4_common import client, protocol
from ds4_common.errors import OwnerUnavailable
from ds4_owner.state import Desk, Kept
from ds4_owner.transport import Client, Transport
from helpers.broker_clients import HELLO, everybody_is_served, reply_to
from helpers.brokers import Stage, broker_process, content


def attach_for_ever(leases: ExitStack, path: str) -> None:
    while True:
        leases.enter_context(client.connect(path))


def test_without_descriptors_newcomers_are_told_and_the_others_go_on(stage: Stage) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with client.connect(stage.path, "status") as old, ExitStack() as taken:
        newcomer = taken.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        while (fd := os.dup(0)) < highest:
            taken.callback(os.close, fd)
        taken.callback(os.close, fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, limits[1]))
        try:
            newcomer.connect(stage.path + ".ctl")
            reply = protocol.decode_reply(newcomer.recv(65536))
            assert old.status().state == "ready"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(reply, protocol.Error)
    assert (reply.code, "no file descriptors left" in reply.message) == ("busy", True)
    everybody_is_served(stage)


def test_the_reserve_survives_when_the_last_descriptor_goes_to_a_newcomer(stage: Stage) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as taken:
        newcomers = [
            taken.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            for _ in range(5)
        ]
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        while (fd := os.dup(0)) < highest:
            taken.callback(os.close, fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, limits[1]))
        os.close(fd)  # room for exactly one newcomer
        try:
            for newcomer in newcomers:
                newcomer.settimeout(30)
                newcomer.connect(stage.path + ".ctl")
            replies = [reply_to(newcomers[0], HELLO)]
            replies += [protocol.decode_reply(newcomer.recv(65536)) for newcomer in newcomers[1:]]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(replies[0], protocol.Welcome)
    assert all(isinstance(reply, protocol.Error) for reply in replies[1:])
    everybody_is_served(stage)


def test_accepting_pauses_when_even_the_reserve_is_lost_and_goes_on_later(stage: Stage) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = stage.broker._transport
    with ExitStack() as taken:
        newcomer = taken.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        os.close(loop._reserve)
        loop._reserve = -1
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        while (fd := os.dup(0)) < highest:
            taken.callback(os.close, fd)
        taken.callback(os.close, fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, limits[1]))
        try:
            newcomer.connect(stage.path + ".ctl")
            stage.settle()
            assert loop._paused_until is not None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert isinstance(reply_to(newcomer, HELLO), protocol.Welcome)


def test_a_socket_that_is_added_while_accepting_pauses_is_served_afterwards() -> None:
    class Greeter:
        max_request_bytes = 64
        desk: Desk = "line"

        def opened(self, client: Client) -> bool:
            loop.send(client, b"hello")
            return True

        def received(self, client: Client, data: bytes, intact: bool) -> None:
            loop.drop(client)

        def expired(self, client: Client) -> None: ...

        def closed(self, client: Client) -> None: ...

        def exhausted(self) -> bytes:
            return b""

        def keep(self, client: Client) -> Kept:
            return Kept()

        def take(self, client: Client, kept: Kept) -> None: ...

    loop = Transport(lambda line: None)
    with ExitStack() as cleanup:
        first, late = (cleanup.enter_context(socket.create_server(("", 0))) for _ in range(2))
        for listener in (first, late):
            listener.setblocking(False)
        loop.listen(first, Greeter())
        loop._pause(OSError(errno.ENOMEM, "no memory"))
        loop.listen(late, Greeter())
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            for listener in (first, late):
                with socket.create_connection(listener.getsockname(), timeout=60) as client:
                    assert client.recv(64) == b"hello"
        finally:
            loop.stop()
            thread.join()
            loop.close()
            loop.release()


def test_an_owner_with_32_descriptors_serves_as_many_as_it_can(tmp_path: Path) -> None:
    path = tmp_path / "w"
    with broker_process(path, allocations=12, open_file_limit=32):
        with ExitStack() as leases:
            first = leases.enter_context(client.connect(str(path)))
            with pytest.raises(OwnerUnavailable, match="no file descriptors left"):
                attach_for_ever(leases, str(path))
            assert first.status().leases
        with client.connect(str(path)) as connection:
            mapped = connection.map_allocations()
            assert bytes(mapped[11].view[:13]) == content(11)
