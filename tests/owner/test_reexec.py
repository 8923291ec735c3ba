"""An owner that replaces its own program: nobody notices."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import msgspec

from ds4_common import client, fdpass, protocol
from ds4_common.errors import OwnerUnavailable
from ds4_common.manifest import read_manifest
from helpers.owner_processes import descriptors_when_alone, reexec, start
from helpers.stack import DEADLINE_SECONDS, Program


def resident_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["RssAnon"].split()[0])


def test_pid_manifest_lock_leases_and_sockets_stay(owner: Program, run: Path) -> None:
    path = str(run / "w")
    text = (run / "w").read_bytes()
    with client.connect(path, "worker", "one") as worker, client.connect(path, "standby") as spare:
        mapped = worker.map_allocations()
        with worker.listener("127.0.0.1", 0, "one") as listener:
            address = listener.getsockname()
        before = worker.status()
        assert reexec(run) > 0
        after = worker.status()  # on the same connection: the lease never ended
        for old, now in zip(before.leases, after.leases, strict=True):
            assert now.age_seconds >= old.age_seconds
            assert msgspec.structs.replace(now, age_seconds=old.age_seconds) == old
        assert after.uptime_seconds > before.uptime_seconds
        assert after.listeners == before.listeners
        again = spare.map_allocations()
        assert {i: bytes(m.view) for i, m in again.items()} == {
            i: bytes(m.view) for i, m in mapped.items()
        }
        with worker.listener("127.0.0.1", 0, "one") as listener:
            assert listener.getsockname() == address
        with client.connect(path, "worker", "two") as new:
            assert new.owner_pid == owner.process.pid
            assert new.welcome.owner_id == read_manifest(path).owner_id
    assert (run / "w").read_bytes() == text
    second = start(Path("none"), run)
    assert second.wait() == 1
    assert f"owns lock {run}/lock pid={owner.process.pid}" in second.text
    assert owner.stop() == 0
    assert {p.name for p in run.iterdir()} == {"lock"}


def test_the_line_protocol_goes_on_in_the_middle_of_a_request(owner: Program, run: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_SECONDS)
        client.connect(str(run / "w.sock"))
        client.send(b"GET")
        reexec(run)
        client.send(b" 0\n")
        reply, fds = fdpass.receive(client)
        assert reply.startswith(b"OK 0 ")
        assert len(fds) == 1
        fdpass.close_all(fds)


def test_replies_that_a_slow_client_has_not_taken_are_delivered_by_the_next_program(
    owner: Program, run: Path
) -> None:
    request = protocol.encode(protocol.GetAllocations())
    with client.connect(str(run / "w"), "worker") as slow:
        sock = slow._sock
        sock.setblocking(False)
        asked = 0
        try:
            while True:
                sock.send(request)
                asked += 1
        except BlockingIOError:
            pass  # both directions are full: the owner holds a packet that it cannot send
        reexec(run)
        sock.setblocking(True)
        for _ in range(asked):
            reply, fds = client.receive_reply(sock, "test")
            assert isinstance(reply, protocol.Allocations)
            assert len(fds) == len(reply.records) > 0
            fdpass.close_all(fds)


def test_attaching_goes_on_during_20_reexecs_and_the_owner_stays_small(
    owner: Program, run: Path
) -> None:
    pid, failures, attached = owner.process.pid, [], [0] * 2
    done = threading.Event()

    def attach_always(number: int) -> None:
        while not done.is_set():
            try:
                with client.connect(str(run / "w"), "worker", f"t{number}") as worker:
                    fetched = worker.fetch_allocations()
                    fdpass.close_all(fd for _, fd in fetched)
                attached[number] += 1
            except Exception as error:  # any failure is the finding
                failures.append(error)
                return

    threads = [threading.Thread(target=attach_always, args=(i,)) for i in range(len(attached))]
    reexec(run)
    with client.connect(str(run / "w"), "worker", "steady") as steady:
        fds, size = descriptors_when_alone(steady, pid), resident_kib(pid)
        for thread in threads:
            thread.start()
        waits = [reexec(run) for _ in range(20)]
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert min(attached) > 0
        assert max(waits) < client.DEADLINE_SECONDS
        assert [x.name for x in steady.status().leases] == ["steady"]
    with client.connect(str(run / "w"), "worker") as last:
        assert descriptors_when_alone(last, pid, at_most=fds) <= fds
        assert len(os.listdir(f"/proc/{pid}/task")) == 2
        assert resident_kib(pid) < size * 1.2


def test_sigusr2_is_a_reexec(owner: Program, run: Path) -> None:
    owner.process.send_signal(signal.SIGUSR2)
    owner.wait_for("reexec: took over 2 allocations")
    with client.connect(str(run / "w"), "worker") as worker:
        assert worker.owner_pid == owner.process.pid
    assert owner.stop() == 0


def test_a_second_reexec_during_the_first_is_refused(owner: Program, run: Path) -> None:
    path = str(run / "w")
    with client.connect(path, "operator") as one, client.connect(path, "operator") as two:
        client.send_request(one._sock, protocol.Reexec(), path)
        client.send_request(two._sock, protocol.Reexec(), path)
        answers: list[object] = []
        for operator in (one, two):
            try:
                answers.append(type(client.receive_reply(operator._sock, path)[0]))
            except OwnerUnavailable as error:
                answers.append(str(error))
    # two connections: the owner may read the second one's request first
    refusal = "another reexec is going on"
    assert answers in ([protocol.Reexeced, refusal], [refusal, protocol.Reexeced])
