"""What a broker says while its owner loads, of files that change, and where it may be."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4_common import client, protocol
from ds4_common.errors import (
    AddressInUse,
    IdentityError,
    OwnerUnavailable,
    UsageError,
)
from ds4_common.identity import ShardStat
from ds4_common.protocol import ModelRecord
from ds4_owner.answers import file_record
from helpers.broker_clients import HELLO, control_client, everybody_is_served, reply_to
from helpers.brokers import Stage, broker, broker_process

# Loading


def test_a_worker_sees_loading_go_on_and_gets_nothing_before_it_is_over(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        stage.broker.set_progress("reading", 10, 100)
        with pytest.raises(OwnerUnavailable, match="still loading \\(reading, 10 of 100 bytes\\)"):
            client.connect(stage.path)
        with client.connect(stage.path, wait_seconds=None) as connection:
            assert connection.welcome.state == "loading"
            with pytest.raises(OwnerUnavailable, match="still loading"):
                connection.map_allocations()
            assert connection.wait_ready(0.0).progress.done_bytes == 10
        assert not os.path.exists(stage.path + ".sock")


def test_those_who_wait_are_answered_when_loading_ends(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        waiting = threading.Thread(target=stage.ready)
        with client.connect(stage.path, wait_seconds=None) as connection:
            waiting.start()
            welcome = connection.wait_ready(60)
            waiting.join()
            assert (welcome.state, welcome.allocation_count) == ("ready", 3)
            connection.map_allocations()


def test_those_who_wait_hear_why_loading_failed_even_when_the_owner_stops_at_once(
    tmp_path: Path,
) -> None:
    with broker(tmp_path) as stage, control_client(stage) as sock:
        assert isinstance(reply_to(sock, HELLO), protocol.Welcome)
        sock.send(protocol.encode(protocol.WaitReady(60)))
        stage.settle()
        stage.broker.failed("model.gguf: truncated")
        stage.broker.stop()
        reply = protocol.decode_reply(sock.recv(65536))
        assert isinstance(reply, protocol.Welcome)
        assert (reply.state, reply.reason) == ("failed", "model.gguf: truncated")


def test_a_failed_owner_gives_its_reason_to_whoever_comes_later(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        stage.broker.failed("no room")
        with pytest.raises(OwnerUnavailable, match="failed to load: no room"):
            client.connect(stage.path)
        with client.connect(stage.path, wait_seconds=None) as connection:
            with pytest.raises(OwnerUnavailable, match="no room"):
                connection.blob("tokenizer")


def test_a_request_while_waiting_is_a_breach_and_a_hangup_is_noticed(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        with control_client(stage) as sock:
            reply_to(sock, HELLO)
            sock.send(protocol.encode(protocol.WaitReady(60)))
            reply = reply_to(sock, protocol.encode(protocol.GetStatus()))
            assert isinstance(reply, protocol.Error)
        with control_client(stage) as sock:
            reply_to(sock, HELLO)
            sock.send(protocol.encode(protocol.WaitReady(60)))
        stage.settle()
        assert stage.broker.leases() == []


# Identity


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Stage, Path]]:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    record = file_record(str(file), ShardStat.capture(file))
    run = tmp_path / "run"
    run.mkdir()
    with broker(run) as stage:
        stage.ready(models=(ModelRecord("base", 7, "0" * 16, [record]),))
        client.connect(stage.path).close()
        yield stage, file


def rewrite_and_restore_mtime(file: Path) -> None:
    """Other bytes of equal size in the same inode, with the old modification time."""
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of some file systems is coarse
        file.write_bytes(b"WEIGHTS")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file: file.write_bytes(b"other weights"), "size in bytes 7 -> 13"),
        (rewrite_and_restore_mtime, r"loaded: base: \S+: change time \(ns\)"),
        (lambda file: os.utime(file, ns=(0, 0)), "modification time"),
        (lambda file: file.unlink(), "No such file"),
    ],
)
def test_a_model_file_that_changed_is_refused_by_name_but_operators_get_in(
    served: tuple[Stage, Path], change: object, says: str
) -> None:
    stage, file = served
    assert callable(change)
    change(file)
    with pytest.raises(IdentityError, match=says) as error:
        client.connect(stage.path)
    assert str(file) in str(error.value)
    for role in ("status", "stop"):
        client.connect(stage.path, role).close()


# Claiming paths


def test_a_second_owner_of_the_same_manifest_is_refused(stage: Stage) -> None:
    with (
        pytest.raises(AddressInUse, match="somebody answers there"),
        broker(Path(stage.path).parent),
    ):
        pass
    everybody_is_served(stage)


def test_what_a_killed_owner_left_is_replaced_and_said(tmp_path: Path) -> None:
    with broker_process(tmp_path / "w") as process:
        process.kill()
        process.wait()
        assert sorted(os.listdir(tmp_path)) == ["w", "w.ctl", "w.sock"]
        with pytest.raises(OwnerUnavailable, match=f"owner pid {process.pid}, which is gone"):
            client.connect(str(tmp_path / "w"))
    with broker(tmp_path) as stage:
        assert stage.log == [f"removing stale manifest {stage.path} of owner pid {process.pid}"]
        assert os.listdir(tmp_path) == ["w.ctl"]
        stage.ready()
        everybody_is_served(stage)


def test_a_damaged_manifest_is_removed_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_text("DS4_WEIGHT_SERVER_VMM_V1\nowner 1")
    with broker(tmp_path) as stage:
        assert "removing damaged manifest" in stage.log[0]
    path.write_text("my thesis")
    with pytest.raises(UsageError, match="not a manifest"), broker(tmp_path):
        pass
    assert os.listdir(tmp_path) == ["w"]


def test_a_manifest_whose_broker_answers_elsewhere_is_not_stale(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "elsewhere"))
        other.listen()
        (tmp_path / "w").write_text(
            f"DS4_WEIGHT_SERVER_VMM_V1\nowner 1 0 base -\nbroker {tmp_path}/elsewhere\n"
            "alloc 0 base 9 0 9 9\n"
        )
        with pytest.raises(AddressInUse, match="still answers"), broker(tmp_path):
            pass


def test_sockets_are_for_their_user_only(stage: Stage) -> None:
    for suffix in (".ctl", ".sock"):
        assert os.stat(stage.path + suffix).st_mode & 0o777 == 0o600
