"""ds4-profile without tmux: its commands, its refusals, its load, and the names of the steps."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common import client
from ds4_common.errors import Ds4Error, UsageError
from ds4_worker import cli as server_cli
from ds4_worker.address import Address
from ds4_worker.engine import ranges
from ds4_worker.engine.api import Generation
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.profile import cli, commands, load, target, tools
from ds4_worker.profile.commands import Settings
from helpers import stack
from helpers.brokers import broker
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY, ByteDetokenizer
from helpers.tiny_gguf import write_llama

# Commands


@pytest.mark.parametrize("name", tools.TOOLS)
def test_a_tool_runs_the_workers_command_and_writes_the_report(name: str) -> None:
    report = f"/out/worker-1{tools.TOOLS[name].suffix}"
    line = tools.wrapped(name, report, ["ds4-server", "--port", "1"])
    assert line[-3:] == ["ds4-server", "--port", "1"]
    assert any(report in word for word in line[:-3])
    assert Path(line[0]).name in (name, "env")


def test_no_tool_is_the_plain_command() -> None:
    assert tools.wrapped("none", "", ["ds4-server"]) == ["ds4-server"]


@given(st.sets(st.integers(1, 9)), st.sampled_from(sorted(tools.TOOLS)))
def test_a_report_never_overwrites_one_of_any_tool(numbers: set[int], name: str) -> None:
    taken = [f"worker-{number}.data" for number in numbers]
    report = Path(tools.next_report("/out", name, taken))
    number = int(report.name.split(".")[0].removeprefix("worker-"))
    assert number not in numbers
    assert all(before in numbers for before in range(1, number))


def test_a_pane_shows_its_command_and_becomes_it() -> None:
    command = ["printf", "%s|", "two words", "it's", "$HOME"]
    done = subprocess.run(
        ["sh", "-c", commands.shell_line(command)], capture_output=True, text=True, check=True
    )
    shown, _, printed = done.stdout.partition("\n\n")
    assert shown == "$ " + commands.shown(command)
    assert printed == "two words|it's|$HOME|"


def test_print_shows_every_command_and_runs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, manifest = tmp_path / "m.gguf", tmp_path / "w"
    arguments = ["open", "-m", str(model), "--manifest", str(manifest), "--print", "--port", "81"]
    assert cli.main([*arguments, "--tool", "perf", "--", "--ctx", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    by_role = dict(zip(lines[::2], lines[1::2], strict=True))
    assert list(by_role) == ["# owner", "# worker", "# status", "# load"]
    assert f"--base {model} --scope base --manifest {manifest}" in by_role["# owner"]
    assert by_role["# worker"].endswith("--ctx 64")
    words = shlex.split(by_role["# worker"])
    assert words[words.index("--") - 1].endswith("worker-1.data")
    assert "--port 81 --requests 8" in by_role["# load"]
    assert list(tmp_path.iterdir()) == []


def test_the_flags_page_knows_exactly_the_flags_of_every_verb() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "flags.md").read_text()
    section = page.partition("\n## `ds4-profile`")[2].partition("\n## ")[0]
    written = set(re.findall(r"`(-{1,2}[a-z-]+)", section)) - {"--"}
    verbs = [a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    known = {
        name
        for verb in verbs[0].choices.values()
        for action in verb._actions
        for name in action.option_strings
    }
    assert written == known - {"-h", "--help"}


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["open"], "name a model with -m, or an owner with --manifest"),
        (["open", "--manifest", "/nowhere/w"], "no owner answers at /nowhere/w.*with -m"),
        (["open", "-m", "m.gguf", "--manifest", "w", "--print", "--port", "0"],
         "--port 0: .*give one"),
        (["open", "-m", "m.gguf", "--manifest", "w", "--print", "--port", "65536"], "--port 65536"),
        (["load", "--host", "unix:"], "--host unix:: expected a path"),
        (["load", "--host", "unix:/s", "--port", "1"], "leave out --port"),
        (["load", "--name", "b", "--port", "1"], "leave out --host and --port"),
        (["load", "--name", "b"], "name a model with -m, or an owner with --manifest"),
        (["load", "--manifest", "w"], "give its --name, too"),
        (["open", "-m", "m.gguf", "--manifest", "w", "--print", "--max-tokens", "0"],
         "--max-tokens 0: expected at least 1"),
        (["open", "--tool", "gdb"], "invalid choice: 'gdb'"),
        (["load", "--requests", "0"], "nothing to send"),
        (["load", "--requests", "many"], "invalid int value"),
        ([], r"required: open\|restart\|load\|close"),
    ],
)  # fmt: skip
def test_wrong_usage_exits_2_and_says_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("DS4_CUDA_WEIGHT_IPC_MANIFEST", raising=False)
    assert cli.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", tools.TOOLS)
def test_a_missing_tool_is_named_with_the_way_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "find_program", lambda _: None)
    with pytest.raises(UsageError, match=f"no program {name} here; install "):
        tools.require(name)
    tools.require("none")


def test_missing_tmux_and_libtmux_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tools, "find_program", lambda _: None)
    assert cli.main(["close"]) == 2
    assert "apt-get install tmux" in capsys.readouterr().err
    monkeypatch.setattr(tools, "find_program", lambda _: "/usr/bin/tmux")
    monkeypatch.setitem(sys.modules, "libtmux", None)
    assert cli.main(["close"]) == 2
    assert "pip install 'ds4[tmux]'" in capsys.readouterr().err


# The load


@contextmanager
def serving() -> Iterator[int]:
    """The port of a real worker of a tiny model."""
    with tempfile.TemporaryDirectory(prefix="ds4-p-") as folder:
        model, port = write_llama(Path(folder) / "tiny.gguf"), stack.free_port()
        with stack.owner(model, Path(folder)), stack.worker(Path(folder) / "w", port):
            yield port


def test_the_load_sends_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "3", "--prompt-tokens", "20", "--max-tokens", "7", "--concurrency", "2"]
    with serving() as port:
        assert cli.main(["load", "--port", str(port), *flags]) == 0
        metrics = stack.request(port, "GET", "/metrics")[1]
        assert cli.main(["load", "--port", str(port), "--prompt-tokens", "999"]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split()[:5] for line in lines[:3]] == [
        [str(number), "prompt", "21", "tokens", "7"] for number in (1, 2, 3)
    ]
    assert lines[3].startswith("3 requests, medians: first token ")
    assert "ds4_generated_tokens_total 21.0" in metrics
    assert "HTTP 400" in captured.err


@pytest.mark.parametrize("where", ["unix", "name"])
def test_a_load_finds_a_worker_at_its_socket_and_by_its_name(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="ds4-p-") as folder:
        path, manifest = Path(folder) / "http", Path(folder) / "w"
        flags = ["--host", f"unix:{path}"]
        if where == "name":
            flags = ["--name", "b", "--manifest", str(manifest)]
        model = write_llama(Path(folder) / "tiny.gguf")
        with stack.owner(model, Path(folder)), stack.worker(manifest, path, "--name", "b"):
            assert cli.main(["load", *flags, "--prompt-tokens", "9", "--max-tokens", "2"]) == 0
    assert "8 requests, medians" in capsys.readouterr().out


def test_a_name_of_several_workers_is_refused_with_their_addresses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with tempfile.TemporaryDirectory(prefix="ds4-p-") as folder, broker(Path(folder)) as stage:
        stage.ready()
        with client.connect(stage.path) as connection:
            for path in ("a", "b"):
                connection.unix_listener(f"{folder}/{path}", "twin").close()
            assert cli.main(["load", "--name", "twin", "--manifest", stage.path]) == 2
    assert f"choose one: {folder}/a, {folder}/b" in capsys.readouterr().err


def test_a_load_without_a_worker_gives_up_with_the_reason(tmp_path: Path) -> None:
    for worker, reason in (
        (target.at(Address("127.0.0.1", stack.free_port())), "http://127.0.0.1:.*refused"),
        (target.at(Address(path=str(tmp_path / "s"))), "unix:.*/s: .*No such file"),
        (target.named("b", str(tmp_path / "w")), "no owner answers at .*/w"),
    ):
        with pytest.raises(Ds4Error, match=f"no healthy worker in 0 s: {reason}"):
            load.wait_until_healthy(worker, seconds=0)
    with tempfile.TemporaryDirectory(prefix="ds4-p-") as folder, broker(Path(folder)) as stage:
        with pytest.raises(Ds4Error, match="no worker --name b has asked"):
            load.wait_until_healthy(target.named("b", stage.path), seconds=0)


def test_the_decode_rate_counts_tokens_after_the_first() -> None:
    assert load.Done(5, 11, 0.5, 1.5).decode_rate == 10
    assert load.Done(5, 1, 0.5, 0.5).decode_rate == 0


def test_settings_survive_the_session() -> None:
    import msgspec

    settings = Settings(manifest="/w", tool="perf", worker_flags=("--ctx", "64"))
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


# Names of the steps


class Annotations:
    """Records the ranges that are opened, and that each is closed before the next."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        assert self.open == 0
        self.names.append(name)
        self.open += 1
        yield
        self.open -= 1


def test_prefill_decode_and_mixed_steps_have_their_names() -> None:
    config = ExecutorConfig(banks=2, context_tokens=64, batch_tokens=8)
    annotations = Annotations()
    core = EngineCore(
        FakeExecutor(config, vocabulary=VOCABULARY), ByteDetokenizer,
        prefill_chunk=4, live_chunk=4, annotate=annotations,
    )  # fmt: skip
    core.submit(core.sequence(Generation(prompt=[1, 2, 3, 4, 5], max_tokens=3, seed=1)))
    core.step()
    core.step()
    core.submit(core.sequence(Generation(prompt=[1, 2], max_tokens=1, seed=1)))
    while core.step() is not None:
        assert annotations.open == 0
    assert annotations.names == [
        "prefill",  # the middle of a prompt
        "prefill+sample",
        "prefill+decode+sample",
        "decode+sample",
    ]


def test_ranges_are_those_of_the_nvtx_package_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, str]] = []
    package = types.ModuleType("nvtx")
    package.annotate = lambda name, domain: seen.append((name, domain))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", package)
    annotate = ranges.nvtx_annotate()
    assert annotate is not None
    annotate("decode")
    assert seen == [("decode", "ds4")]
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert ranges.nvtx_annotate() is None
    assert "pip install nvtx" in capsys.readouterr().err


def test_nvtx_is_looked_for_only_under_a_profiler() -> None:
    assert not server_cli.server_config(["--manifest", "w"], {}).engine.nvtx
    for variables in ({"NVTX_INJECTION64_PATH": "/opt/libToolsInjection64.so"}, {"DS4_NVTX": "1"}):
        assert server_cli.server_config(["--manifest", "w"], variables).engine.nvtx
