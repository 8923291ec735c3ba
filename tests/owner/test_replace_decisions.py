"""What a replacement concludes and how it words command lines, journals and the order of steps."""

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
from hypothesis import given
from hypothesis import strategies as st

from ds4_common import paths
from ds4_common.errors import UsageError
from ds4_common.protocol import LeaseRecord
from ds4_owner import top
from ds4_owner.budget import Memory
from ds4_owner.replace import client, commands, decisions, machine, processes
from ds4_owner.replace.log import Journal, JournalBusy, steps_done
from ds4_owner.replace.machine import Machine
from ds4_owner.replace.processes import Identity, Listening
from ds4_owner.replace.run import STEPS, pending

GIB = 1 << 30
NAMES = [step.name for step in STEPS]


def a_machine(
    available: int, *, shared: int = 0, swap_free: int = 0, psi: float | None = 0.0
) -> Machine:
    return Machine(128 * GIB, available, GIB, shared, 8 * GIB, swap_free, psi)


# Verdicts


def test_workers_that_survive_are_named_with_the_way_to_end_them() -> None:
    assert decisions.workers_ended([], {}, 5) == ""
    said = decisions.workers_ended([Identity(7, 1, "b")], {7: "stopped"}, 5)
    assert "pid 7 is stopped" in said
    assert "kill -9 7" in said


HAD = Listening(100, "127.0.0.1", 8000)
HAD_PATH = Listening(100, path="/run/a b")


@pytest.mark.parametrize(
    ("had", "now", "owner", "expected"),
    [
        (HAD, [], set(), ""),
        (HAD, [HAD], {100}, ""),  # lent by the owner, which still lives
        (HAD, [HAD], set(), "another process of the worker lives. Find it with: ss -ltnp"),
        (HAD, [Listening(5, "127.0.0.1", 8000)], set(), "another program listens"),
        (HAD, [Listening(5, "127.0.0.1", 8001)], set(), ""),
        (HAD, [Listening(5, "10.0.0.1", 8000)], set(), ""),
        (HAD, [HAD_PATH], {100}, ""),
        (HAD_PATH, [], set(), ""),
        (HAD_PATH, [HAD_PATH], {100}, ""),
        (HAD_PATH, [HAD_PATH], set(), "worker lives. Find it with: ss -lxp | grep -F '/run/a b'"),
        (HAD_PATH, [Listening(5, path="/run/a b")], {100}, "another program listens on unix:/run/"),
        (HAD_PATH, [Listening(5, path="/run/a b")], {5}, ""),  # somebody had removed the first
        (HAD_PATH, [HAD_PATH, Listening(5, path="/run/a b")], {5}, "worker lives"),
        (HAD_PATH, [Listening(5, path="/run/a")], set(), ""),
        (HAD_PATH, [HAD], {5, 100}, ""),
    ],
)
def test_a_socket_is_released_when_at_most_the_owner_holds_it(
    had: Listening, now: list[Listening], owner: set[int], expected: str
) -> None:
    said = decisions.sockets_released([had], now, owner)
    assert expected in said
    assert bool(said) == bool(expected)


def test_new_users_of_the_owner_are_named() -> None:
    assert decisions.nobody_attached([]) == ""
    lease = LeaseRecord(9, 0, "worker", "", "ds4-server -m x", 1.0)
    assert "pid 9 (ds4-server -m x)" in decisions.nobody_attached([lease])


def test_a_stopped_owner_is_to_be_continued_and_a_running_one_is_not() -> None:
    owner = Identity(7, 1, "b")
    assert decisions.owner_ended([], "gone", 1) == ""
    assert "kill -CONT 7" in decisions.owner_ended([owner], "stopped", 1)
    assert "-CONT" not in decisions.owner_ended([owner], "running", 1)


@pytest.mark.parametrize(
    ("after", "back"),
    [
        (a_machine(90 * GIB), True),
        (a_machine(74 * GIB), True),  # 10 % may go to others meanwhile
        (a_machine(50 * GIB), False),
        (a_machine(50 * GIB, shared=0, swap_free=0), False),
        (a_machine(50 * GIB, swap_free=40 * GIB), True),  # it had been swapped out
    ],
)
def test_memory_is_back_when_available_and_swap_grew_by_what_the_owner_held(
    after: Machine, back: bool
) -> None:
    before = a_machine(10 * GIB)
    assert (decisions.memory_returned(70 * GIB, before, after) == "") == back


def test_memory_is_back_when_shared_memory_shrank_whatever_others_took() -> None:
    before, after = a_machine(10 * GIB, shared=75 * GIB), a_machine(12 * GIB, shared=5 * GIB)
    assert decisions.memory_returned(70 * GIB, before, after) == ""


def test_a_small_owner_is_not_lost_in_the_noise() -> None:
    assert decisions.memory_returned(8 << 20, a_machine(GIB), a_machine(GIB - (16 << 20))) == ""


@pytest.mark.parametrize(("psi", "fit"), [(None, True), (0.0, True), (19.9, True), (20.0, False)])
def test_pressure_at_which_the_guard_trips_stops_a_replacement(
    psi: float | None, fit: bool
) -> None:
    assert (decisions.calm(a_machine(GIB, psi=psi)) == "") == fit


def test_returned_memory_counts_only_against_limits_that_the_owner_counts_against() -> None:
    memory = Memory(100, 10, cgroup_left=20, tmpfs_left=30)
    given_back = decisions.with_returned(memory, 50, same_cgroups=False, tmpfs=False)
    assert (given_back.available, given_back.cgroup_left, given_back.tmpfs_left) == (60, 20, 30)
    given_back = decisions.with_returned(memory, 500, same_cgroups=True, tmpfs=True)
    assert (given_back.available, given_back.cgroup_left, given_back.tmpfs_left) == (100, 520, 530)


def test_memory_of_a_device_is_missing_until_its_driver_says_it_is_free() -> None:
    GB = 1 << 30
    assert decisions.device_missing(100 * GB, before=2 * GB, now=2 * GB) == 100 * GB
    assert decisions.device_missing(100 * GB, before=2 * GB, now=60 * GB) == 42 * GB
    assert decisions.device_missing(100 * GB, before=2 * GB, now=95 * GB) == 0  # within the slack
    assert decisions.device_missing(100 * GB, before=2 * GB, now=110 * GB) == 0
    assert decisions.device_missing(64 << 20, before=GB, now=GB) == 0  # less than others move


# The order of steps


def test_a_run_whose_next_owner_died_when_it_was_ready_looks_at_memory_again() -> None:
    done = set(NAMES) - {"ask"}
    left = pending(done, owner_begun=True, owner_died=True)
    assert [step.name for step in left] == NAMES[NAMES.index("recheck") :]


@given(st.sets(st.sampled_from(NAMES)), st.booleans())
def test_a_resumed_run_repeats_no_stop_that_is_done_and_skips_no_step_that_is_not(
    done: set[str], begun: bool
) -> None:
    left = [step.name for step in pending(done, owner_begun=begun)]
    assert left == NAMES[len(NAMES) - len(left) :]  # the end of the table, in order
    assert set(NAMES) - set(left) <= done
    assert set(NAMES) - done <= set(left)


@pytest.mark.parametrize(
    ("first", "begun", "begin"),
    [
        ("stop-owner", False, "stop-owner"),
        ("start-owner", False, "recheck"),  # the machine may have changed since
        ("start-owner", True, "start-owner"),  # the new weights may be there: they would not fit
        ("ask", True, "start-workers"),
    ],
)
def test_a_resumed_run_looks_again_before_it_loads(first: str, begun: bool, begin: str) -> None:
    done = set(NAMES[: NAMES.index(first)])
    assert pending(done, owner_begun=begun)[0].name == begin


# Command lines


def test_an_owner_takes_over_how_it_runs_and_nothing_of_the_old_model() -> None:
    running = (
        "--base old.gguf --manifest w --scope=base --backend memfd --lock-file lock --span-mb 512"
        " --no-repack-q8-aligned --drafter d.gguf --served-id old --derive-q8-f16 t --reserve-gb 8"
        " --exit-on-parent-pid 5"
    ).split()
    found = commands.next_owner(running, "/run", ["--reserve-gb", "4"], "/here", "/run/w", "/run/w")
    assert (
        list(found.options)
        == (
            "--scope base --backend memfd --lock-file /run/lock --span-mb 512"
            " --no-repack-q8-aligned --reserve-gb 4"
        ).split()
    )
    assert found.left_out == (
        "--drafter d.gguf", "--served-id old", "--derive-q8-f16 t", "--exit-on-parent-pid 5",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("running", "given_", "expected"),
    [
        ("", "", "--scope base"),
        ("", "--mtp m.gguf", "--mtp /here/m.gguf --scope both"),
        ("--repack-q8-aligned", "--no-repack-q8-aligned", "--no-repack-q8-aligned --scope base"),
        ("--no-lock", "--lock-file l", "--lock-file /here/l --scope base"),
        ("--lock-file /o/k.lock", "", "--lock-file /o/n.lock --scope base"),  # a private owner's
        ("--scope base", "--scope both --mtp /m", "--scope both --mtp /m"),
    ],
)
def test_given_flags_win_over_running_ones(running: str, given_: str, expected: str) -> None:
    found = commands.next_owner(running.split(), "/o", given_.split(), "/here", "/o/k", "/o/n")
    assert " ".join(found.options) == expected


@pytest.mark.parametrize(
    "flags", ["stray", "--reserve-gb", "--base x", "--manifest x", "--dry-run", "--scope mtp"]
)
def test_flags_that_a_replacement_cannot_mean_are_refused(flags: str) -> None:
    with pytest.raises(UsageError):
        commands.next_owner([], "/", flags.split(), "/", "/w", "/w")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-m old.gguf --port 1", "-m /new --port 1"),
        ("--model old.gguf", "--model /new"),
        ("--model=old.gguf", "--model=/new"),
        ("-mold.gguf", "-m/new"),
        ("--manifest w -c 5", "--manifest /o/n -c 5"),
        ("--manifest=/o/w", "--manifest=/o/n"),
        ("--owner /o/w -m a", "--owner /o/n -m /new"),
        ("--manifest /other", "--manifest /other"),
        ("--port 8000", "--port 8000"),
    ],
)
@pytest.mark.parametrize("program", ["python -m ds4_worker.cli", "/v/python /v/bin/ds4-server"])
def test_a_worker_keeps_its_flags_but_for_model_and_manifest(
    program: str, words: str, expected: str
) -> None:
    argv = f"{program} {words}".split()
    start = commands.next_worker(argv, {}, "/o", "/o/w", "/o/n", "/new")
    assert start is not None
    assert " ".join(start.argv) == f"{program} {expected}"
    told = start.environment.get(paths.MANIFEST_VARIABLE)
    assert told == (None if "--manifest" in words else "/o/n")


@given(st.lists(st.text(min_size=1), max_size=6))
def test_command_lines_of_other_programs_are_never_rewritten(words: list[str]) -> None:
    argv = ["vim", *(word for word in words if "ds4" not in word)]
    assert commands.next_worker(argv, {}, "/", "/w", "/w", "/new") is None


def test_only_variables_that_a_start_depends_on_are_kept() -> None:
    kept = commands.kept_environment({"DS4_API_KEY": "k", "AWS_SECRET": "s", "PATH": "p"})
    assert kept == {"DS4_API_KEY": "k", "PATH": "p"}


def test_a_worker_key_is_found_where_the_worker_finds_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from file\nmore\n")
    assert commands.api_key([], {}, "/") is None
    assert commands.api_key(["--port", "1"], {"DS4_API_KEY": "env"}, "/") == "env"
    assert commands.api_key(["--api-key", "k"], {"DS4_API_KEY": "env"}, "/") == "k"
    assert commands.api_key(["--api-key=@key"], {}, str(tmp_path)) == "from file"
    assert commands.api_key(["--api-key-file", "key"], {}, str(tmp_path)) == "from file"
    by_file = {"DS4_API_KEY_FILE": "key"}
    assert commands.api_key([], by_file, str(tmp_path)) == "from file"
    assert commands.api_key([], {**by_file, "DS4_API_KEY": "env"}, str(tmp_path)) == "env"
    with pytest.raises(UsageError, match="no-such"):
        commands.api_key(["--api-key", "@no-such"], {}, str(tmp_path))


# The journal


def test_a_journal_tells_the_last_run_and_survives_a_cut_last_line(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    with Journal(path) as journal:
        journal.run = "1"
        journal.write("done", "inspect")
        journal.write("end")
        assert journal.unfinished() == []
        journal.run = "2"
        journal.write("plan", model="x")
        journal.write("done", "stop-owner", n=1)
    size = os.path.getsize(path)
    with open(path, "ab") as file:
        file.write(b'{"time":1,"run":"2","kind":"do')
    with Journal(path) as again:
        assert os.path.getsize(path) == size
        assert steps_done(again.unfinished()) == {"stop-owner"}
        assert again.facts("plan") == {"model": "x"}
        assert again.facts("done", "inspect") is None


def test_a_journal_that_is_held_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    with Journal(path), pytest.raises(JournalBusy, match="another replacement"):
        Journal(path)


@pytest.mark.parametrize("text", ["a secret without an end", "line\n", '{"time":1}\n', "{}\nx"])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "j"
    path.write_text(text)
    with pytest.raises(UsageError, match="--log"):
        Journal(str(path))
    assert path.read_text() == text


# The machine


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
