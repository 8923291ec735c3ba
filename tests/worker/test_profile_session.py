"""ds4-profile with a real tmux: the owner stays, workers come and go under a tool."""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds4_common import client
from ds4_worker.address import Address
from ds4_worker.profile import cli, commands, load, target
from ds4_worker.profile.session import Pane, ProfileSession
from helpers import stack
from helpers.tiny_gguf import write_llama

pytestmark = pytest.mark.skipif(
    shutil.which("tmux") is None or importlib.util.find_spec("libtmux") is None,
    reason="needs tmux and libtmux",
)

# Stands for a profiler: runs the worker as its child, and writes its report when that has ended.
FAKE_PERF = """#!/bin/sh
while [ "$1" != -- ]; do [ "$1" = -o ] && out=$2; shift; done
shift
trap '' INT
"$@"
echo "exit $?" > "$out"
"""


@dataclass
class Desk:
    """A tmux server of its own, a model, and ds4-profile on both."""

    folder: Path
    socket: str
    port: int

    @property
    def manifest(self) -> Path:
        return self.folder / "w"

    def profile(self, verb: str, *arguments: str) -> int:
        where = ("--session", "s", "--socket", self.socket)
        return cli.main([verb, *where, *arguments])

    def open(self, *arguments: str) -> int:
        return self.open_at("--port", str(self.port), *arguments)

    def open_at(self, *arguments: str) -> int:
        return self.profile(
            "open", "--manifest", str(self.manifest),
            "--out", str(self.folder / "out"), "--prompt-tokens", "9", "--max-tokens", "3",
            "--requests", "2", *arguments,
        )  # fmt: skip

    def wait_until_healthy(self) -> None:
        load.wait_until_healthy(target.at(Address("127.0.0.1", self.port)))

    def panes(self) -> dict[str, Pane]:
        return ProfileSession.find("s", self.socket).panes()

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self.socket, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def text(self, role: str) -> str:
        return self.tmux("capture-pane", "-p", "-J", "-t", self.panes()[role].id)

    def finished(self, role: str) -> str:
        """All that a command wrote that has ended. tmux scrolls by a line to say that it has, so
        the first line may lie above what the pane shows."""
        pane = self.panes()[role]
        if not pane.dead:
            pidfd = os.pidfd_open(pane.pid)
            assert select.select([pidfd], [], [], stack.DEADLINE_SECONDS)[0]
            os.close(pidfd)
        return self.tmux("capture-pane", "-p", "-J", "-S", "-", "-t", pane.id)

    def workers(self) -> list[int]:
        with client.connect(str(self.manifest), "status") as connection:
            return [x.pid for x in connection.status().leases if x.role == "worker"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with tempfile.TemporaryDirectory(prefix="ds4-p-") as name:
        monkeypatch.setenv("TMUX_TMPDIR", name)
        monkeypatch.delenv("DS4_CUDA_WEIGHT_IPC_MANIFEST", raising=False)
        tools = Path(name) / "bin"
        tools.mkdir()
        (tools / "perf").write_text(FAKE_PERF)
        (tools / "perf").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        found = Desk(Path(name), "test", stack.free_port())
        yield found
        owner = found.panes().get("owner")
        subprocess.run(["tmux", "-L", found.socket, "kill-server"], capture_output=True)
        if owner is not None and not owner.dead:  # its hangup ends it; the folder must outlive that
            try:
                pidfd = os.pidfd_open(owner.pid)
            except ProcessLookupError:
                return
            select.select([pidfd], [], [], stack.DEADLINE_SECONDS)
            os.close(pidfd)


def test_open_starts_owner_worker_status_and_load(
    desk: Desk, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.open("-m", str(model)) == 0
    said = capsys.readouterr().out
    assert "started in tmux session s: owner, worker, status, load" in said
    assert "look at it with: tmux -L test attach-session -t s" in said
    assert "2 requests, medians: first token" in desk.finished("load")
    panes = desk.panes()
    assert desk.workers() == [panes["worker"].pid]
    assert "ready manifest=" in desk.text("owner")
    assert f"$ {commands.shown(commands.program('ds4-server', 'ds4_worker.cli'))}" in (
        desk.text("worker")
    )
    assert desk.open("-m", str(model)) == 0
    assert "nothing, all runs" in capsys.readouterr().out
    assert desk.panes() == panes


def test_restart_changes_the_worker_and_leaves_the_owner(desk: Desk, model: Path) -> None:
    desk.open("-m", str(model), "--tool", "perf")
    desk.finished("load")
    before, (worker,) = desk.panes(), desk.workers()
    assert worker != before["worker"].pid, "the worker runs under the tool"
    assert desk.profile("restart", "--requests", "3", "--tool", "none") == 0
    # The tool saw its worker drain and had written its report before the next one started.
    assert (desk.folder / "out" / "worker-1.data").read_text() == "exit 0\n"
    assert "3 requests, medians" in desk.finished("load")
    after = desk.panes()
    assert (after["owner"], after["status"]) == (before["owner"], before["status"])
    assert desk.workers() == [after["worker"].pid]


def test_close_ends_the_worker_and_keeps_the_owner_until_asked(desk: Desk, model: Path) -> None:
    desk.open("-m", str(model))
    desk.finished("load")
    assert desk.profile("close") == 0
    assert list(desk.panes()) == ["owner"]
    assert desk.workers() == []
    assert desk.profile("close", "--owner") == 0
    assert not desk.manifest.exists()
    assert desk.profile("close") == 2


def test_an_owner_that_runs_elsewhere_is_used_and_left(
    desk: Desk, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stack.owner(model, desk.folder) as owner:
        assert desk.open() == 0
        assert f"owner pid {owner.process.pid} runs already" in capsys.readouterr().out
        assert "owner" not in desk.panes()
        desk.wait_until_healthy()
        assert desk.profile("close", "--owner") == 0
        assert desk.panes() == {}
        assert owner.process.poll() is None
        assert desk.workers() == []


@pytest.mark.parametrize("where", ["--host unix:{folder}/http", "--port 0 --name b"])
def test_a_worker_anywhere_is_opened_loaded_and_restarted(
    where: str, desk: Desk, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk.folder)
    with stack.owner(model, desk.folder):
        assert desk.open_at(*where.format(folder=".").split()) == 0
        assert "2 requests, medians" in desk.finished("load")
        assert desk.profile("restart", "--requests", "1") == 0
        assert "1 requests, medians" in desk.finished("load")
        assert desk.profile("close") == 0


def test_a_session_of_the_users_own_is_joined_and_survives(desk: Desk, model: Path) -> None:
    desk.tmux("new-session", "-d", "-s", "s", "-n", "mine", "exec cat")
    with stack.owner(model, desk.folder):
        assert desk.profile("restart") == 2, "it is no profiling session yet"
        assert desk.open() == 0
        desk.wait_until_healthy()
        assert desk.profile("close") == 0
    assert desk.tmux("list-windows", "-t", "s", "-F", "#{window_name}") == "mine\n"


def test_a_worker_that_cannot_start_shows_why_and_is_replaced_by_restart(
    desk: Desk, model: Path
) -> None:
    with stack.owner(model, desk.folder):
        assert desk.open("--requests", "0", "--", "--ctx", "1") == 0
        assert "--ctx: got 1, expected 2" in desk.finished("worker")
        assert "load" not in desk.panes()
        assert desk.profile("restart", "--", "--ctx", "64") == 0
        desk.wait_until_healthy()
        assert "ctx=64" in desk.text("worker")
