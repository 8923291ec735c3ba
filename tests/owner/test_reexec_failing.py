"""A next program that is stopped, killed, broken or late: the old one goes on, or ends cleanly."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from ds4_common import client, fdpass
from ds4_common.errors import HandoverError, OwnerUnavailable
from ds4_owner import handover, resume, serving, state
from ds4_owner.stop import Change
from helpers.brokers import broker
from helpers.descriptors import open_fds
from helpers.owner_processes import descriptors_when_alone, flags, reexec, start, start_helper
from helpers.stack import DEADLINE_SECONDS, Program

SOURCES = Path(__file__).resolve().parents[2]


# While the next program starts


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An installation of its own, which a test may break."""
    for root, package in (("owner", "ds4_owner"), ("common", "ds4_common")):
        shutil.copytree(SOURCES / root / package, tmp_path / "lib" / package)
    return tmp_path / "lib"


@pytest.fixture
def between(model: Path, run: Path, installed: Path) -> tuple[Program, Path]:
    """An owner whose next program, after a good rehearsal, waits for the end of a fifo, and that
    fifo. The reexec has begun."""
    program = start(model, run, PYTHONPATH=str(installed))
    program.wait_for("ready manifest=")
    fifo = run / "lock-fifo"
    os.mkfifo(fifo)
    program_file = installed / "ds4_owner" / "resume.py"
    waits = (
        "import os\nif not os.environ.get('DS4_OWNER_STATE', 'check:').startswith('check:'):\n"
        f"    open({str(fifo)!r}).read()\n"
    )
    program_file.write_text(program_file.read_text().replace("import os\n", waits, 1))
    return program, fifo


def test_whoever_comes_while_the_next_program_starts_is_served_and_handed_on(
    between: tuple[Program, Path], run: Path
) -> None:
    program, fifo = between
    path = str(run / "w")
    with client.connect(path, "worker", "old") as old, ExitStack() as cleanup:
        leaves = client.connect(path, "worker", "leaves")
        kept = cleanup.enter_context(old.listener("127.0.0.1", 0, "kept"))
        program.process.send_signal(signal.SIGUSR2)
        with open(fifo, "w"):  # opens when the next program does
            new = cleanup.enter_context(client.connect(path, "worker", "new"))
            assert new.welcome.owner_pid == new.owner_pid == program.process.pid
            fdpass.close_all(fd for _, fd in new.fetch_allocations())
            made, seat = new.listener_and_seat("127.0.0.1", 0, "made")
            cleanup.enter_context(made)
            cleanup.callback(fdpass.close_all, seat)
            leaves.close()
            while len(leases(old)) > 2:
                pass  # its end was not seen yet
            with pytest.raises(OwnerUnavailable, match="another reexec is going on"):
                reexec(run)
        program.wait_for("reexec: took over")
        assert leases(old) == leases(new) == ["old", "new"]
        again, same = new.listener_and_seat("127.0.0.1", 0, "made")
        cleanup.callback(fdpass.close_all, same)
        with again, old.listener("127.0.0.1", 0, "kept") as listener:
            assert again.getsockname() == made.getsockname()
            assert listener.getsockname() == kept.getsockname()
        assert [os.fstat(fd).st_ino for fd in same] == [os.fstat(fd).st_ino for fd in seat]
    assert program.stop() == 0


def leases(connection: client.OwnerConnection) -> list[str]:
    return [lease.name for lease in connection.status().leases]


def test_a_stop_while_the_next_program_starts_is_a_clean_stop(
    between: tuple[Program, Path], run: Path
) -> None:
    program, fifo = between
    program.process.send_signal(signal.SIGUSR2)
    with open(fifo, "w"), client.connect(str(run / "w"), "stop") as operator:
        operator.request_stop()
    assert program.wait() == 0
    assert {p.name for p in run.iterdir()} == {"lock", "lock-fifo"}


def test_who_serves_meanwhile_ends_with_the_owner(between: tuple[Program, Path], run: Path) -> None:
    program, fifo = between
    with client.connect(str(run / "w"), "worker", "old") as old:
        program.process.send_signal(signal.SIGUSR2)
        with open(fifo, "w"):
            assert leases(old) == ["old"]
            assert program.stop(signal.SIGKILL) == -signal.SIGKILL
        assert old._sock.recv(1) == b""
        with pytest.raises(OwnerUnavailable):
            client.connect(str(run / "w"), "worker")


def test_when_nobody_hands_the_connections_on_the_owner_goes_on_without_them(
    between: tuple[Program, Path], run: Path
) -> None:
    program, fifo = between
    path = str(run / "w")
    with client.connect(path, "worker", "old") as old, old.listener("127.0.0.1", 0, "x") as socket_:
        program.process.send_signal(signal.SIGUSR2)
        with open(fifo, "w"):
            children = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children")
            (child,) = map(int, children.read_text().split())
            os.kill(child, signal.SIGKILL)
        program.wait_for("connections are lost")
        assert not old.owner_alive()
        with client.connect(path, "worker", "old") as again:
            assert again.welcome.owner_id == old.welcome.owner_id
            with again.listener("127.0.0.1", 0, "x") as listener:
                assert listener.getsockname() == socket_.getsockname()
            fdpass.close_all(fd for _, fd in again.fetch_allocations())
    assert program.stop() == 0


# Refusals


def test_during_the_load_a_reexec_is_refused_either_way(model: Path, run: Path) -> None:
    program = start_helper("fill", *flags(model, run))
    loader = int(program.wait_for("stuck at fill pid ").rpartition(" ")[2])
    program.process.send_signal(signal.SIGUSR2)
    program.wait_for("reexec refused: the owner is not ready")
    with pytest.raises(OwnerUnavailable, match="not ready; reexec it when it is"):
        reexec(run)
    os.kill(loader, signal.SIGUSR1)
    program.wait_for("ready manifest=")
    reexec(run)
    assert program.stop() == 0


def test_other_roles_may_not_ask(owner: Program, run: Path) -> None:
    with (
        client.connect(str(run / "w"), "worker") as worker,
        pytest.raises(OwnerUnavailable, match="may not send Reexec"),
    ):
        worker.request_reexec()


BROKEN = {
    "syntax": ("broker.py", "def (:\n", "SyntaxError"),
    "import": ("fdstore.py", "import no_such_module\n", "no_such_module"),
    "state": (
        "state.py",
        "STATE_VERSION = 99\n_READABLE = (99,)\n",
        "state has version 2, this program reads 99",
    ),
    "crash": ("answers.py", "import os\nos.abort()\n", "killed by signal 6"),
    "exit": ("resume.py", "raise SystemExit(0)\n", "it said nothing"),
    "field": ("state.py", "State.__annotations__\nclass State(State): new: int\n", "new"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_bad_next_program_leaves_the_old_one_serving(
    model: Path, run: Path, installed: Path, how: str
) -> None:
    program = start(model, run, PYTHONPATH=str(installed))
    program.wait_for("ready manifest=")
    module, text, reason = BROKEN[how]
    broken = installed / "ds4_owner" / module
    good = broken.read_text()
    head, separator, tail = good.partition("\nif __name__")
    broken.write_text(f"{head}\n{text}{separator}{tail}")
    with client.connect(str(run / "w"), "worker", "one") as worker:
        with pytest.raises(HandoverError, match=reason):
            reexec(run)
        program.wait_for("reexec failed, this program goes on")
        assert [lease.name for lease in worker.status().leases] == ["one"]
        fds = descriptors_when_alone(worker, program.process.pid)
        program.process.send_signal(signal.SIGUSR2)  # the operator tries again
        while program.text.count("reexec failed") < 2:
            program.process.poll()
            worker.status()
        assert descriptors_when_alone(worker, program.process.pid, at_most=fds) <= fds
        broken.write_text(good)
        reexec(run)
        assert [lease.name for lease in worker.status().leases] == ["one"]
    assert program.stop() == 0


@pytest.fixture
def hanging(model: Path, run: Path, installed: Path) -> tuple[Program, int]:
    """An owner whose next program hangs, and the pid of that program's rehearsal."""
    program = start(model, run, PYTHONPATH=str(installed))
    program.wait_for("ready manifest=")
    fifo = run / "lock-fifo"
    os.mkfifo(fifo)
    hang = f"import os\nopen({str(fifo)!r}, 'w').write(str(os.getpid()))\nimport time\n"
    hang += "time.sleep(600)\n"
    (installed / "ds4_owner" / "fdstore.py").write_text(hang)
    program.process.send_signal(signal.SIGUSR2)
    return program, int(fifo.read_text())


def test_an_owner_killed_during_the_rehearsal_takes_it_along(
    hanging: tuple[Program, int], model: Path, run: Path
) -> None:
    program, rehearsal = hanging
    pidfd = os.pidfd_open(rehearsal)
    assert program.stop(signal.SIGKILL) == -signal.SIGKILL
    assert select.select([pidfd], [], [], DEADLINE_SECONDS)[0]
    os.close(pidfd)
    again = start(model, run)
    again.wait_for("ready manifest=")
    assert again.stop() == 0


def test_a_stop_during_the_rehearsal_is_a_clean_stop(
    hanging: tuple[Program, int], run: Path
) -> None:
    program, rehearsal = hanging
    with client.connect(str(run / "w"), "worker") as worker:  # it is served meanwhile
        assert worker.status().state == "ready"
    assert program.stop() == 0
    assert not os.path.exists(f"/proc/{rehearsal}")
    assert {p.name for p in run.iterdir()} == {"lock", "lock-fifo"}


def test_an_operator_who_asks_while_a_reexec_fails_learns_how_the_next_one_ends(
    hanging: tuple[Program, int], run: Path, installed: Path
) -> None:
    program, rehearsal = hanging
    shutil.copy(SOURCES / "owner" / "ds4_owner" / "fdstore.py", installed / "ds4_owner")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(reexec, run)
        program.wait_for("reexec requested by pid")
        os.kill(rehearsal, signal.SIGKILL)
        program.wait_for("reexec failed, this program goes on")
        assert answer.result(DEADLINE_SECONDS) >= 0
    assert program.stop() == 0


def test_when_execve_itself_fails_the_broker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        kept = state.read(int(environment[resume.STATE_VARIABLE])).traffic
        assert kept is not None
        inherited = [kept.control.fd, kept.line.fd, kept.interim_fd]
        assert all(os.get_inheritable(fd) for fd in inherited)
        assert not any(os.get_inheritable(fd) for fd in connections)
        raise OSError(12, "Cannot allocate memory")

    with broker(tmp_path) as stage:
        stage.ready()
        change = Change()
        owner = serving.Owner((), {}, stage.broker, {}, -1, change)
        monkeypatch.setattr(os, "execve", fails)
        with client.connect(stage.path, "worker", "one") as worker:
            before = open_fds()
            traffic = stage.broker.ask(lambda: stage.broker.traffic(0))
            connections = [x.fd for x in traffic.connections]
            with pytest.raises(HandoverError, match="Cannot allocate memory"):
                handover.replace_program(owner)
            assert not os.get_inheritable(traffic.control.fd)
            assert open_fds() <= before
            assert [lease.name for lease in worker.status().leases] == ["one"]
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        change.close()


def test_a_record_that_is_not_sealed_or_not_ours_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    with pytest.raises(HandoverError, match="not sealed"):
        state.read(fd)
    os.close(fd)
    for data, reason in ((b"{", "malformed"), (b'{"version": 1}', "malformed"),
                         (b'{"version": 7}', "version 7")):  # fmt: skip
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.write(fd, data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0xF)
        with pytest.raises(HandoverError, match=reason):
            state.read(fd)
        os.close(fd)
