"""What a replacement reads of the machine and its processes, and what it asks workers."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds4_common.protocol import LeaseRecord
from ds4_owner import top
from ds4_owner.replace import client, machine, processes
from ds4_owner.replace.machine import Machine
from ds4_owner.replace.processes import Identity, Listening

# The machine

GIB = 1 << 30


def proc(tmp_path: Path, pressure: str | None) -> str:
    folder = tmp_path / "proc"
    (folder / "pressure").mkdir(parents=True)
    fields = {"MemTotal": 100, "MemAvailable": 50, "Cached": 20, "Shmem": 10, "SwapTotal": 9,
              "SwapFree": 4}  # fmt: skip
    lines = [f"{name}:   {n} kB" for name, n in fields.items()] + ["HugePages_Total:  0"]
    (folder / "meminfo").write_text("\n".join(lines))
    if pressure is not None:
        (folder / "pressure/memory").write_text(pressure)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, None), ("some avg10=9.00 avg60=0\nfull avg10=1.25 avg60=0.00 total=5\n", 1.25)],
)
def test_memory_swap_and_pressure_are_read(
    tmp_path: Path, text: str | None, expected: float | None
) -> None:
    seen = machine.read_machine(proc(tmp_path, text))
    assert seen == Machine(100 << 10, 50 << 10, 20 << 10, 10 << 10, 9 << 10, 4 << 10, expected)


class NvmlError(Exception):
    pass


def nvml(**changes: Callable[..., object]) -> SimpleNamespace:
    """The part of nvidia-ml-py that is used."""

    def fail(*_: object) -> object:
        raise NvmlError("Not Supported")

    parts: dict[str, object] = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetComputeRunningProcesses": lambda device: [
            SimpleNamespace(pid=7, usedGpuMemory=GIB), SimpleNamespace(pid=8, usedGpuMemory=None),
        ],
    }  # fmt: skip
    return SimpleNamespace(**(parts | {name: fail for name in changes}))


def test_nvml_adds_up_devices_and_takes_unknown_sizes_for_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert machine.gpu_processes()[0] == {7: 2 * GIB, 8: 0}


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetComputeRunningProcesses"])
def test_an_nvml_that_does_not_work_is_said_and_not_fatal(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(**{broken: print}))
    used, source = machine.gpu_processes()
    assert used == {}
    assert "Not Supported" in source


def test_without_nvml_the_list_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    rows, source = machine.list_processes({os.getpid(): "this test"})
    assert "not installed" in source
    (row,) = (row for row in rows if row.pid == os.getpid())  # beside other users of weights
    assert row.mark == "this test"
    assert "this test" in machine.process_lines([row])[0]


# Processes


def test_a_reused_pid_is_gone() -> None:
    me = processes.identify(os.getpid())
    assert me is not None
    assert processes.state(me) == "running"
    earlier = Identity(me.pid, me.start_ticks - 1, me.boot_id)
    assert processes.state(earlier) == "gone"
    assert processes.state(Identity(me.pid, me.start_ticks, "another boot")) == "gone"


def test_a_signal_reaches_no_process_that_was_given_the_number_since() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        now = processes.identify(child.pid)
        assert now is not None
        earlier = Identity(now.pid, now.start_ticks - 1, now.boot_id)
        assert processes.stop([earlier], signal.SIGKILL, 5) == []
        assert child.poll() is None
        assert processes.stop([now], signal.SIGKILL, 5) == []
        assert child.wait(5) == -signal.SIGKILL


def test_a_listening_socket_is_found_by_number_and_address() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as sock:
            sock.bind((host, 0))
            sock.listen()
            inode = os.fstat(sock.fileno()).st_ino
            expected = Listening(inode, host, sock.getsockname()[1])
            assert expected in processes.listening_of(os.getpid())
        assert inode not in {entry.inode for entry in processes.listening()}


def test_a_listening_unix_socket_is_found_by_number_and_path(tmp_path: Path) -> None:
    path = str(tmp_path / "a socket")
    with socket.socket(socket.AF_UNIX) as sock, socket.socket(socket.AF_UNIX) as peer:
        sock.bind(path)
        inode = os.fstat(sock.fileno()).st_ino
        assert inode not in {entry.inode for entry in processes.listening()}
        sock.listen()
        expected = Listening(inode, path=path)
        assert (str(expected), expected.local) == (f"unix:{path}", True)
        peer.connect(path)
        accepted, _ = sock.accept()
        with accepted:  # it bears the path too, and does not listen
            assert [e for e in processes.listening_of(os.getpid()) if e.path == path] == [expected]
    assert inode not in {entry.inode for entry in processes.listening()}


def test_a_socket_for_packets_is_no_address_of_a_worker(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(tmp_path / "packets"))
        sock.listen()
        inode = os.fstat(sock.fileno()).st_ino
        assert inode not in {entry.inode for entry in processes.listening()}


def test_shared_memory_is_held_by_who_has_it_open_or_mapped() -> None:
    fd = os.memfd_create("ds4-test")
    os.write(fd, bytes(8192))
    info = os.fstat(fd)
    piece = processes.Shared(info.st_dev, info.st_ino)
    assert processes.shared_memory(os.getpid())[piece] == 8192
    assert processes.uses_weights(os.getpid())
    mapped = mmap.mmap(fd, 8192)  # it keeps a descriptor of its own
    os.close(fd)
    assert processes.holders({piece})[0] == {os.getpid(): 1}
    mapped.close()
    assert processes.holders({piece})[0] == {}


def test_a_leaf_of_a_service_is_told_from_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, expected in (
        ("0::/system.slice/ds4-weight-server@a.service\n", "ds4-weight-server@a.service"),
        ("9:name=systemd:/x/y.service\n0::/\n", "y.service"),
        ("0::/user.slice/user@0.service/app.slice/tmux.scope\n", None),
        ("4:memory:/z.service\n", None),
    ):
        monkeypatch.setattr(processes, "_cgroups", lambda pid, text=text: text)
        assert processes.unit(1) == expected


# What workers are asked


def test_samples_without_labels_are_read_and_others_left() -> None:
    text = '# HELP a b\na_total 3.0\nb{x="1"} 4\nc 1.5e+03\nd NaN\n'
    found = client.samples(text)
    assert found["a_total"] == 3
    assert found["c"] == 1500
    assert "b" not in found


def sampled(at: float, tokens: float | None) -> top.WorkerSample:
    lease = LeaseRecord(1, 0, "worker", "", "", 0.0)
    return top.WorkerSample(lease, at, counters={} if tokens is None else {"n": tokens})


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (sampled(12, 30), sampled(10, 10), 10.0),
        (sampled(12, 30), None, None),
        (sampled(12, 3), sampled(10, 10), None),  # the worker was restarted under the same pid
        (sampled(12, None), sampled(10, 10), None),
        (sampled(10, 30), sampled(10, 10), None),
    ],
)
def test_a_rate_needs_two_samples_of_one_process(
    now: top.WorkerSample, before: top.WorkerSample | None, expected: float | None
) -> None:
    assert top.rate("n", now, before) == expected


def test_a_port_that_answers_nonsense_is_a_problem_and_not_an_exception() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: _answer(server))
        thread.start()
        health = client.health(Listening(0, "0.0.0.0", server.getsockname()[1]))
        thread.join()
    assert health.problem
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "refused" in client.health(Listening(0, "127.0.0.1", port)).problem


def test_a_unix_socket_that_answers_nonsense_or_not_at_all_is_a_problem(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        thread = threading.Thread(target=lambda: _answer(server))
        thread.start()
        assert client.health(Listening(0, path=path)).problem
        thread.join()
    assert "refused" in client.health(Listening(0, path=path)).problem
    os.unlink(path)
    assert "No such file" in client.health(Listening(0, path=path)).problem


def _answer(server: socket.socket) -> None:
    peer, _ = server.accept()
    with peer:
        peer.recv(1000)
        peer.sendall(b"SSH-2.0\r\n")
