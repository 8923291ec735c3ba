"""`status` and `stop` against real owner processes, living, hung, dead and replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ds4_common import client, manifest, paths
from ds4_common.errors import Ds4Error, OwnerUnavailable, UsageError
from ds4_common.protocol import FileRecord, ModelRecord
from ds4_common.silence import process_state
from ds4_owner import report, status
from helpers.brokers import Stage, broker, broker_process, own_command


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The owners' folder of this test: no private owner of the user is ever touched."""
    monkeypatch.delenv(paths.MANIFEST_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return Path(paths.make_owners_folder())


@pytest.fixture
def stage(folder: Path) -> Iterator[Stage]:
    with broker(folder) as made:
        made.ready(models=(ModelRecord("base", 3 << 22, "47fe0d7eaf8e51e3", []),))
        yield made


def test_json_tells_everything_about_one_owner(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    with client.connect(stage.path, "worker", "w [1]"):
        assert status.main(["status", "--json", "--manifest", stage.path]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["backend"], told["pid"]) == ("ready", "memfd", os.getpid())
    assert [r["n_bytes"] for r in told["ranges"]] == [4 << 20] * 3
    assert told["memory"]["ranges_bytes"] == 3 * (4 << 20)
    assert told["memory"]["blobs_bytes"] == len("tokenizer" + "image")
    assert 0 < told["memory"]["own_bytes"] <= told["memory"]["resident_bytes"]
    [lease] = told["leases"]
    assert (lease["pid"], lease["name"], lease["role"]) == (os.getpid(), "w [1]", "worker")
    assert lease["command"] == own_command()
    assert lease["age_seconds"] >= 0


def test_text_is_plain_when_piped_and_drawn_on_a_terminal(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    with client.connect(stage.path, "worker", "w [1]"):
        assert status.main(["status"]) == 0
        drawn = report.as_text(report.gather(stage.path), terminal=True)
    plain = capsys.readouterr().out
    for text in (plain, drawn):
        for word in ("3, 12.00 MiB", "47fe0d7eaf8e51e3", "w [1]", "memfd", str(os.getpid())):
            assert word in text
    assert plain.isascii()
    assert not drawn.isascii()


def test_output_whose_reader_left_is_no_error(stage: Stage) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ds4_owner.cli", "status", "--manifest", stage.path]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_loading_and_a_failed_owner_say_so(folder: Path) -> None:
    with broker(folder) as stage:
        stage.broker.set_progress("reading", 1 << 30, 4 << 30)
        text = report.as_text(report.gather(stage.path), terminal=False)
        assert "loading: reading, 25 % of 4.00 GiB" in text
        stage.broker.failed("no room")
        assert "failed: no room" in report.as_text(report.gather(stage.path), terminal=False)


def test_without_a_manifest_all_private_owners_are_shown(
    stage: Stage, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with broker_process(folder / "dead") as process:
        process.kill()
    assert status.main(["status", "--json"]) == 1
    told = capfd.readouterr()
    assert [json.loads(line)["manifest"] for line in told.out.splitlines()] == [stage.path]
    assert f"no owner answers at {folder}/dead" in told.err


def test_the_environment_names_an_owner(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.MANIFEST_VARIABLE, stage.path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    assert status.main(["status"]) == 0


def test_no_owner_at_all_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("status", "stop"):
        with pytest.raises(OwnerUnavailable, match="no private owner in"):
            status.main([command])
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    with pytest.raises(OwnerUnavailable, match="/nonexistent/ds4"):
        status.main(["status"])


def test_stop_ends_only_when_the_process_is_gone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with broker_process(folder / "w") as process:
        assert status.main(["stop"]) == 0
        assert process.poll() == 0
    assert f"owner pid {process.pid} has ended" in capsys.readouterr().err
    assert os.listdir(folder) == []


def test_stop_names_who_keeps_the_memory(folder: Path) -> None:
    said: list[str] = []
    path = folder / "w"
    with broker_process(path) as process, client.connect(str(path), "worker", "a"):
        with client.connect(str(path), "status"):  # no lease, no memory
            assert status.stop(str(path), said.append) == 0
    pid = os.getpid()
    assert said == [
        f"owner pid {process.pid} has ended",
        f"pid {pid} (worker) goes on and keeps the memory that it has mapped; "
        f"to have that back: kill {pid}",
    ]


def test_stop_among_several_owners_wants_to_know_which(folder: Path) -> None:
    served = FileRecord("/models/a.gguf", 0, 0, 3 << 22, 0, 0)
    with broker_process(folder / "dead") as process:
        process.kill()
    with broker(folder) as stage:
        stage.ready(models=(ModelRecord("base", 3 << 22, "47fe0d7eaf8e51e3", [served]),))
        with pytest.raises(UsageError, match="several owners") as refused:
            status.main(["stop"])
        assert not stage.stop_asked.is_set()
    assert f"\n  {stage.path}  /models/a.gguf" in str(refused.value)
    assert f"\n  {folder}/dead  (does not answer)" in str(refused.value)


def test_several_owners_are_told_apart_by_an_empty_line(
    stage: Stage, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with broker_process(folder / "other"):
        assert status.main(["status"]) == 0
    first, second = folder / "other", stage.path
    told = capsys.readouterr().out
    assert told.startswith(f"owner of {first}\n")
    assert f"\n\nowner of {second}\n" in told


def test_an_owner_that_does_not_end_gets_sigterm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "STOP_SECONDS", 0.001)
    with broker_process(folder / "w", deaf=True) as process:
        assert status.stop(str(folder / "w"), lambda text: None) == 0
        assert process.wait(30) == 0


def test_a_hung_owner_gets_sigterm_and_if_it_stays_the_operator_decides(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DEADLINE_SECONDS", 0.02)
    monkeypatch.setattr(status, "TERMINATE_SECONDS", 0.02)
    path = str(folder / "w")
    said: list[str] = []
    with broker_process(folder / "w") as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with pytest.raises(OwnerUnavailable, match=f"kill -9 {process.pid}"):
            status.stop(path, said.append)
        assert said == [f"owner pid {process.pid} does not answer; sending SIGTERM"]
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0  # the signal had been waiting for it


def test_an_owner_that_is_gone_already_is_success(folder: Path) -> None:
    said: list[str] = []
    with broker_process(folder / "w") as process:
        process.kill()  # not waited for: a zombie is gone too
        while process_state(process.pid) == "running":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert status.stop(str(folder / "w"), said.append) == 0
        process.wait()
        assert status.stop(str(folder / "w"), said.append) == 0
    assert (
        said
        == [f"owner pid {process.pid} is gone already; its next start removes what it left"] * 2
    )


def rewrite_owner(path: Path, pid: int) -> None:
    """A dead owner's manifest whose pid now belongs to somebody else."""
    old = manifest.read_manifest(str(path))
    manifest.write_manifest(str(path), replace(old, owner=replace(old.owner, pid=pid)))


def test_a_reused_pid_is_never_signalled(folder: Path) -> None:
    path = folder / "w"
    with broker_process(path) as process:
        process.kill()
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert stranger.stdin is not None
    rewrite_owner(path, stranger.pid)
    with pytest.raises(Ds4Error, match=r"not signalled: .* now another program"):
        status.stop(str(path), lambda text: None)
    assert stranger.poll() is None
    stranger.communicate(b"\n")


def test_another_owner_under_a_reused_pid_is_never_signalled(folder: Path) -> None:
    path = folder / "w"
    with broker_process(path) as process:
        process.kill()
    command = [sys.executable, "-c", "input()", "ds4-weight-server"]
    stranger = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert stranger.stdin is not None
    rewrite_owner(path, stranger.pid)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    with pytest.raises(Ds4Error, match="the number was reused"):
        status.stop(str(path), lambda text: None)
    assert stranger.poll() is None
    stranger.communicate(b"\n")


def test_stop_without_manifest_file_and_socket_is_an_error(folder: Path) -> None:
    with pytest.raises(OwnerUnavailable, match="no manifest either"):
        status.stop(str(folder / "nothing"), lambda text: None)
