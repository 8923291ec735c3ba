"""Nothing that a client says breaks the broker, or costs anybody but that client."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common import client, fdpass, protocol
from ds4_common.errors import (
    IdentityError,
    OwnerUnavailable,
)
from ds4_common.protocol import FileRecord, ModelRecord
from ds4_owner import answers, native_desk
from helpers.broker_clients import HELLO, control_client, everybody_is_served, line_client, reply_to
from helpers.brokers import Stage, broker

# Nothing that a client says breaks the broker

words = st.text(max_size=20) | st.sampled_from(
    ["/tmp/\0x", "127.0.0.1\0", "::1", "\x1b[2J", "x" * 64]
)


numbers = st.integers(-(2**63), 2**63)


fields = st.fixed_dictionaries(
    {"type": st.sampled_from(["hello", "get_allocations", "get_blobs", "get_listener", "wait_ready",
                              "get_status", "stop", "welcome", ""])},
    optional={
        "version": st.just(1) | numbers,
        "role": st.sampled_from(["worker", "inspect", "stop", "king"]),
        "name": words, "command": words, "host": words,
        "path": st.sampled_from(["", "relative", "/tmp/\0x", "/no/folder/x", "/" + "x" * 200]),
        "port": st.integers(-1, 70000), "seconds": st.floats(-1, 0.001) | st.none(),
        "ids": st.lists(numbers, max_size=5) | st.none(), "with_fds": st.booleans(),
        "names": st.lists(words, max_size=5), "surprise": words,
    },
)  # fmt: skip


def test_no_sequence_of_packets_breaks_the_broker(stage: Stage) -> None:
    @settings(deadline=None)
    @given(
        st.booleans(),
        st.lists(fields.map(msgspec.json.encode) | st.binary(max_size=50), max_size=6),
    )
    def converse(polite: bool, packets: list[bytes]) -> None:
        with control_client(stage) as sock:
            try:
                for packet in [HELLO, *packets] if polite else packets:
                    sock.send(packet or b"?")
            except (BrokenPipeError, ConnectionResetError):
                pass  # it has heard enough
        with line_client(stage) as sock:
            sock.sendall(packets[0][:60] + b"\n" if packets else b"\n")
            sock.recv(64)

    converse()
    stage.settle()
    everybody_is_served(stage)
    assert stage.broker._thread.is_alive()


def test_replies_fit_a_packet_whatever_clients_call_themselves(stage: Stage) -> None:
    nasty = protocol.Hello(1, "worker", "\U0001f600" * 64, '"\\' * 100)
    with ExitStack() as leases:
        for _ in range(native_desk.MAX_LEASES):
            sock = leases.enter_context(control_client(stage))
            assert isinstance(reply_to(sock, protocol.encode(nasty)), protocol.Welcome)
        status = reply_to(sock, protocol.encode(protocol.GetStatus()))
        assert isinstance(status, protocol.Status)
        assert len(status.leases) == native_desk.MAX_LEASES
        last = status.leases[-1]
        assert last.name == "\U0001f600" * 16
        huge = b'{"type":"get_status","' + b"x" * 100_000 + b'":1}'
        assert isinstance(reply_to(sock, huge), protocol.Error)


def test_control_characters_of_a_client_do_not_reach_a_terminal(stage: Stage) -> None:
    with client.connect(stage.path, "worker", "\x1b[2Jx\n"):
        assert stage.broker.leases()[0].name == "?[2Jx?"


def test_a_model_of_a_thousand_shards_with_odd_names_is_announced(tmp_path: Path) -> None:
    odd = os.fsdecode(b"/models/\xff/" + b"m" * 200)
    files = [FileRecord(odd, 1, 2, 3, 4, 5)] * 1000
    with broker(tmp_path) as stage:
        stage.ready(models=(ModelRecord("base", 1, "0" * 16, files),))
        with client.connect(stage.path, "status") as connection:
            [model] = connection.welcome.models
        assert model.files[0].path.startswith("/models/\ufffd/")
        assert len(model.files) + model.more_files == 1000
        with pytest.raises(IdentityError, match="and 996 more"):
            client.connect(stage.path)


def test_a_reply_that_cannot_be_sent_costs_only_its_client(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = protocol.Error("busy", "x" * fdpass.MAX_PACKET_BYTES)
    monkeypatch.setattr(stage.broker._native, "_status", lambda: answers.Packet(big))
    with client.connect(stage.path) as connection:
        with pytest.raises(OwnerUnavailable, match="closed the connection"):
            connection.status()
    assert any("cannot send to it: packet of" in line for line in stage.log)
    everybody_is_served(stage)


def test_too_many_descriptors_in_flight_are_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, refusals = fdpass.send, [errno.ETOOMANYREFS] * 2

    def busy_send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
        if fds and refusals:
            raise OSError(refusals.pop(), "too many references")
        send(sock, data, fds)

    monkeypatch.setattr(fdpass, "send", busy_send)
    everybody_is_served(stage)
    assert refusals == []


def test_a_defect_in_the_broker_stops_the_owner_instead_of_leaving_it_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    with broker(tmp_path) as stage:
        monkeypatch.setattr(answers, "welcome", None)
        with pytest.raises(OwnerUnavailable):
            client.connect(stage.path)
        assert stage.stop_asked.wait(30)
    assert [hook.exc_type for hook in seen] == [TypeError]
    assert os.listdir(tmp_path) == []
