"""Flags and start-up refusals of the worker's programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds4_common.errors import OwnerUnavailable, UsageError
from ds4_worker import cli, flags, oneshot, private_owner
from ds4_worker.flags import Flag, Group
from helpers.stack import process_environment


def run(module: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=process_environment(**environment),
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stderr


def test_documented_defaults() -> None:
    config = cli.server_config(["--manifest", "/m"], {})
    assert (config.host, config.port, config.max_queue) == ("127.0.0.1", 8000, 64)
    assert (config.engine.banks, config.engine.prefill_chunk, config.engine.live_chunk) == (
        4,
        512,
        128,
    )
    assert config.drain_seconds == 5.0
    assert config.api_key is None


def test_flags_win_over_the_environment() -> None:
    environment = {"DS4_CUDA_WEIGHT_IPC_MANIFEST": "/env", "DS4_API_KEY": "env"}
    assert cli.server_config([], environment).manifest == "/env"
    assert cli.server_config([], environment).api_key == "env"
    chosen = cli.server_config(["--manifest", "/flag", "--api-key", "flag"], environment)
    assert (chosen.manifest, chosen.api_key) == ("/flag", "flag")


def test_published_spellings_are_understood() -> None:
    argv = ["-m", "f", "-c", "4096", "-t", "2", "-n", "9", "--batched-session", "3", "--cors"]
    config = cli.server_config(argv, {})
    assert config.model == "f"
    assert (config.engine.context_tokens, config.engine.threads, config.engine.banks) == (
        4096,
        2,
        3,
    )
    assert (config.max_tokens, config.cors) == (9, True)
    assert cli.server_config(["--port=0", "--host=localhost"], {}).host == "127.0.0.1"


def test_an_api_key_may_come_from_the_first_line_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\nrest\n")
    assert cli.server_config(["--api-key", f"@{file}"], {}).api_key == "secret"
    file.write_text("\n")
    with pytest.raises(UsageError, match="first line is empty"):
        cli.read_api_key(f"@{file}")


def test_an_api_key_file_has_a_flag_and_a_variable_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    environment = {"DS4_API_KEY_FILE": str(file)}
    assert cli.server_config(["--api-key-file", str(file)], {}).api_key == "secret"
    assert cli.server_config([], environment).api_key == "secret"
    assert cli.server_config(["--api-key", "flag"], environment).api_key == "flag"
    assert cli.server_config([], {**environment, "DS4_API_KEY": "env"}).api_key == "env"


def test_a_host_may_be_a_unix_socket_or_bring_its_port() -> None:
    config = cli.server_config(["--host", "unix:/run/x.sock"], {})
    assert (config.host, config.port, config.socket_path) == ("", 0, "/run/x.sock")
    config = cli.server_config(["--host", "[::1]:8080"], {})
    assert (config.host, config.port, config.socket_path) == ("::1", 8080, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bogus"], "unknown flag '--bogus'"),
        (["--man", "x"], "unknown flag '--man'"),
        (["file.gguf"], "unknown argument 'file.gguf'"),
        (["--port"], "--port needs a value"),
        (["--cors=1"], "--cors takes no value"),
        (["--port", "x"], "--port: got 'x', expected an integer"),
        (["--port", "65536"], "--port: got 65536, expected 0 to 65535"),
        (["--max-seqs", "0"], "--max-seqs: got 0, expected 1 to 64"),
        (["--speculate", "on"], "--speculate: got 'on', expected auto, off or 1 to 63"),
        (["--speculate", "64"], "--speculate: got '64', expected auto, off or 1 to 63"),
        (["--kv-dtype", "q8"], "--kv-dtype: got 'q8', expected"),
        (["--drain-seconds", "nan"], "--drain-seconds: got nan"),
        (["--api-key", "@/nonexistent"], "--api-key @/nonexistent"),
        (["--api-key-file", "/nonexistent"], "/nonexistent"),
        (["--api-key-file", "f", "--api-key", "k"], "exclude each other"),
        (["--host", "unix:/x", "--port", "1"], "has no port"),
        (["--metal"], "runs on CPUs and CUDA devices; leave out --metal"),
        (["--cuda-copy"], "--cuda-copy needs --cuda"),
        (["--cuda-cache", "/tmp"], "--cuda-cache needs --cuda"),
        (["--cuda", "--cuda-cache", "~nobody-here/x"], "no such home folder"),
    ],
)
def test_a_bad_flag_is_a_usage_error_that_names_it(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cli.server_config(argv, {})
    assert message in str(caught.value)


@pytest.mark.parametrize("module", ["ds4_worker.cli", "ds4_worker.oneshot"])
def test_an_unknown_flag_ends_with_code_2_and_one_line(module: str) -> None:
    code, errors = run(module, "--bogus")
    assert (code, errors.count("\n")) == (2, 1)


def test_without_a_model_or_manifest_the_programs_say_what_to_give() -> None:
    for module, arguments in (("ds4_worker.cli", ()), ("ds4_worker.oneshot", ("-p", "x"))):
        code, errors = run(module, *arguments)
        assert code == 2
        assert "give -m FILE, or --manifest FILE" in errors


def test_a_dead_owner_is_one_clear_message_and_code_1(tmp_path: Path) -> None:
    code, errors = run("ds4_worker.cli", "--manifest", str(tmp_path / "w"))
    assert (code, errors.count("\n")) == (1, 1)
    assert "no owner answers" in errors


def test_forbidding_a_private_owner_is_respected(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    code, errors = run("ds4_worker.cli", "-m", str(model), "--owner", "none")
    assert code == 2
    assert "--owner none" in errors


def test_a_place_where_no_owner_can_live_is_one_clear_message(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    place = tmp_path / "missing" / "w"
    code, errors = run("ds4_worker.cli", "-m", str(model), "--owner", str(place))
    assert (code, errors.count("\n")) == (1, 1)
    assert f"cannot start a private owner at {place}: " in errors


def test_a_missing_model_file_is_named(tmp_path: Path) -> None:
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
    code, errors = run("ds4_worker.cli", "-m", str(tmp_path / "none.gguf"), **runtime)
    assert code == 2
    assert "none.gguf: No such file" in errors


def test_a_file_that_is_no_model_shows_the_private_owners_own_words(tmp_path: Path) -> None:
    model = tmp_path / "bad.gguf"
    model.write_bytes(b"not a model")
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
    code, errors = run("ds4_worker.cli", "-m", str(model), "--port", "0", **runtime)
    assert code == 1
    assert "bad.gguf: at byte 0: magic: got b'not '" in errors


def test_a_private_owner_that_could_not_even_log_is_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(OwnerUnavailable, match=r"nothing in its log .*w\.log; is that disk full"):
        private_owner.ensure_owner(str(tmp_path / "model.gguf"), str(tmp_path / "w"))


@pytest.mark.parametrize("stays", [False, True], ids=["told whole", "longer than what is told"])
def test_the_log_of_an_owner_that_never_answered_stays_where_the_error_names_it(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\nhead -c {9000 if stays else 90} /dev/zero | tr '\\0' x\nexit 1\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    log = tmp_path / "w.log"
    with pytest.raises(OwnerUnavailable, match="exit code 1:\nxxx") as refused:
        private_owner.ensure_owner(str(tmp_path / "model.gguf"), str(tmp_path / "w"))
    assert (str(log) in str(refused.value)) == log.exists() == stays
    assert not (tmp_path / "w.start").exists()


def test_the_lock_of_a_start_is_held_by_one_at_a_time_though_its_file_goes(tmp_path: Path) -> None:
    manifest, held = str(tmp_path / "w"), []

    def start() -> None:
        for _ in range(200):
            with private_owner._start_lock(manifest):
                held.append(1)
                assert len(held) == 1
                held.pop()

    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(start) for _ in range(4)]:
            one.result()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("groups", [cli.GROUPS, oneshot.GROUPS])
def test_help_lists_every_flag_within_a_terminals_width(groups: tuple[Group, ...]) -> None:
    text = flags.help_text("x", groups)
    assert all(len(line) <= 100 for line in text.split("\n"))
    for group in groups:
        for flag in group.flags:
            assert all(name in text for name in flag.names)


def test_no_two_flags_share_a_spelling() -> None:
    for groups in (cli.GROUPS, oneshot.GROUPS):
        names = [name for group in groups for flag in group.flags for name in flag.names]
        assert len(names) == len(set(names))


def test_the_last_of_several_values_counts_and_all_are_kept() -> None:
    groups = (Group("g", (Flag(("--a",), "N", ""), Flag(("--b",), "", ""))),)
    options = flags.parse(["--a", "1", "--b", "--a=2"], groups)
    assert options.text("--a") == "2"
    assert options.all("--a") == ("1", "2")
    assert options.given("--b")
    assert not flags.parse([], groups).given("--b")


def test_starting_a_server_imports_nothing_heavy() -> None:
    """What a worker needs for its first answer is on a budget; these come later, or never."""
    code = (
        "import sys; import ds4_worker.cli, ds4_worker.serve, ds4_worker.executor.cpu;"
        "print(sorted({'numpy', 'jinja2', 'google.protobuf', 'prometheus_client', 'tokenizers',"
        " 'argparse', 'gguf', 'psutil', 'rich', 'json'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_flags_of_stops_and_replay() -> None:
    def config(*arguments: str) -> tuple[bool, bool, int]:
        found = cli.server_config(["--manifest", "/m", *arguments], {})
        return found.ignore_eos, found.ignore_eos_in_reasoning, found.tool_memory_ids

    assert config() == (False, False, 100_000)
    assert config("--ignore-eos", "--ignore-eos-in-reasoning") == (True, True, 100_000)
    assert config("--tool-memory-max-ids", "5") == (False, False, 5)
    assert config("--tool-memory-max-ids", "5", "--disable-exact-dsml-tool-replay")[2] == 0
