"""`ds4` on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers import stack

ANSWER = "Hello! How can I assist you today?"


def run(
    manifest: Path, *arguments: str, text: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds4_worker.oneshot", "--manifest", str(manifest), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env=stack.process_environment(**environment),
    )


def test_one_prompt_one_answer(manifest: Path) -> None:
    done = run(manifest, "-p", "Hello", "--temp", "0")
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWER + "\n", "")


def test_a_prompt_may_come_from_a_pipe_or_a_file(manifest: Path, tmp_path: Path) -> None:
    assert run(manifest, "--temp", "0", text="Hello").stdout == ANSWER + "\n"
    file = tmp_path / "prompt.txt"
    file.write_text("Hello")
    assert run(manifest, "--temp", "0", "--prompt-file", str(file)).stdout == ANSWER + "\n"


def test_a_raw_prompt_is_continued(manifest: Path) -> None:
    flags = ("--raw-prompt", "-p", "The capital of France is", "-n", "2", "--temp", "0")
    assert run(manifest, *flags).stdout == " Paris.\n"


def test_a_seed_makes_an_answer_reproducible(manifest: Path) -> None:
    flags = ("-p", "Tell me a story", "-n", "12", "--seed", "5")
    assert run(manifest, *flags).stdout == run(manifest, *flags).stdout
    assert run(manifest, *flags).stdout != run(manifest, *flags[:-1], "6").stdout


def test_an_empty_prompt_is_a_usage_error(manifest: Path) -> None:
    done = run(manifest, text=" \n")
    assert (done.returncode, done.stderr) == (2, "ds4: the prompt is empty\n")


def test_a_reader_that_leaves_early_is_no_error(manifest: Path) -> None:
    command = [sys.executable, "-m", "ds4_worker.oneshot", "--manifest", str(manifest)]
    with subprocess.Popen(
        [*command, "-p", "Count to one hundred", "-n", "100"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=stack.process_environment(),
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


SILENCE_SECONDS = 2.0


class Terminal:
    """The far end of a pseudo-terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen = ""

    def type(self, line: str) -> None:
        self.press(line + "\n")

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str, again: Callable[[], None] | None = None) -> str:
        """Everything shown up to and with `text`; blocks until it has come. `again` is done at the
        start, and whenever nothing is shown for a while."""
        if again is not None:
            again()
        while text not in self._seen:
            while again is not None and not select.select([self._fd], [], [], SILENCE_SECONDS)[0]:
                again()
            self._seen += os.read(self._fd, 4096).decode(errors="replace")
        shown, _, self._seen = self._seen.partition(text)
        return shown + text


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where programs of a test keep what outlives them."""
    return tmp_path / "state"


@contextmanager
def conversation(
    manifest: Path, state: Path, *flags: str, term: str = "dumb"
) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """At temperature 0: a drawn end of the answer would come before what a test waits for."""
    command = [sys.executable, "-m", "ds4_worker.oneshot", "--manifest", str(manifest)]
    far, near = pty.openpty()
    termios.tcsetwinsize(near, (24, 80))
    process = subprocess.Popen(
        [*command, "--temp", "0", *flags],
        stdin=near,
        stdout=near,
        stderr=near,
        env=stack.process_environment(TERM=term, XDG_STATE_HOME=str(state)),
        start_new_session=True,
    )
    os.close(near)
    try:
        yield Terminal(far), process
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(far)


@pytest.mark.timeout(120)
def test_a_conversation_remembers_and_obeys_its_commands(
    manifest: Path, state: Path, tmp_path: Path
) -> None:
    file = tmp_path / "message.txt"
    file.write_text("Hello")
    with conversation(manifest, state, "-n", "40") as (terminal, _):
        assert "8192 tokens of context; /help" in terminal.wait_for("> ")
        terminal.type(f"/read {file}")
        terminal.wait_for(ANSWER)
        terminal.wait_for("> ")
        terminal.type("/ctx")
        assert "41 of 8192 tokens" in terminal.wait_for("tokens")
        terminal.type("/help")
        terminal.wait_for("/quit")
        terminal.type("/read /nonexistent")
        terminal.wait_for("cannot read")
        terminal.type("/dance")
        terminal.wait_for("no such command")
        terminal.type("And what is the capital of France?")
        terminal.wait_for("Paris")
        terminal.wait_for("> ")
        terminal.type("/reset")
        terminal.type("/ctx")
        terminal.wait_for("0 of 8192")
        terminal.type("/quit")


@pytest.mark.timeout(120)
def test_ctrl_c_stops_the_answer_and_not_the_conversation(manifest: Path, state: Path) -> None:
    with conversation(manifest, state) as (terminal, process):
        terminal.wait_for("> ")
        terminal.type("Write a very long story about the sea.")
        terminal.wait_for("sea")
        terminal.wait_for(" the")
        process.send_signal(signal.SIGINT)
        terminal.wait_for("stopped]")
        terminal.wait_for("> ")
        terminal.type(f"/save {state}.md")
        terminal.wait_for("saved 2 messages")
        terminal.type("/quit")


@pytest.mark.timeout(120)
def test_ctrl_d_leaves_and_ctrl_c_drops_the_line(manifest: Path, state: Path) -> None:
    with conversation(manifest, state) as (terminal, process):
        terminal.wait_for("> ")
        terminal.press("half a mess")
        terminal.wait_for("half a mess")
        # The terminal echoes before the program reads: a signal that comes between waits for the
        # next key, or for the next signal.
        terminal.wait_for("> ", again=lambda: process.send_signal(signal.SIGINT))
        terminal.press("\x04")
    assert not (state / "ds4" / "history").exists()


BRACKETED = "\x1b[200~one\ntwo\x1b[201~"


@pytest.mark.timeout(120)
def test_messages_of_several_lines_arrive_whole(manifest: Path, state: Path) -> None:
    saved = state.with_suffix(".json")
    with conversation(manifest, state, "-n", "2", term="xterm") as (terminal, _):
        for keys in ("a \\\nb\n", '"""c\n\nd"""\n', BRACKETED + "\n"):
            terminal.wait_for("> ")
            terminal.press(keys)
            terminal.wait_for("at the limit]")
        terminal.wait_for("> ")
        terminal.type(f"/save {saved}")
        terminal.wait_for("saved 6 messages")
        terminal.type("/quit")
    said = [m["content"] for m in json.loads(saved.read_text()) if m["role"] == "user"]
    assert said == ["a \nb", "c\n\nd", "one\ntwo"]


@pytest.mark.timeout(120)
def test_history_outlives_the_conversation_and_belongs_to_its_user(
    manifest: Path, state: Path
) -> None:
    with conversation(manifest, state, "-n", "1", term="xterm") as (terminal, _):
        terminal.wait_for("> ")
        terminal.press("first\\\nline\n")
        terminal.wait_for("at the limit]")
        terminal.type("/quit")
    file = state / "ds4" / "history"
    assert file.read_text() == "first\\nline\n/quit\n"
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (
        0o600,
        0o700,
    )
    with conversation(manifest, state, "-n", "1", term="xterm") as (terminal, _):
        terminal.wait_for("> ")
        terminal.press("\x1b[A\x1b[A\n")  # up, up
        terminal.wait_for("line")
        terminal.wait_for("at the limit]")
        terminal.type("/quit")


def test_one_shot_answers_leave_no_history(manifest: Path, state: Path) -> None:
    run(manifest, "-p", "Hello", "-n", "1", XDG_STATE_HOME=str(state))
    assert not state.exists()


@pytest.mark.timeout(120)
def test_the_context_can_be_resized_and_the_conversation_goes_on(
    manifest: Path, state: Path
) -> None:
    with conversation(manifest, state, "-n", "40") as (terminal, _):
        terminal.wait_for("> ")
        terminal.type("/ctx 128")
        terminal.wait_for("0 of 128 tokens")
        terminal.type("Hello")
        terminal.wait_for(ANSWER)
        terminal.type("/ctx 1000000")
        terminal.wait_for("--ctx 1000000: ")
        terminal.type("/ctx many")
        terminal.wait_for("expected a number")
        terminal.type("/ctx 256")
        terminal.wait_for("of 256 tokens")
        terminal.type("And what is the capital of France?")
        terminal.wait_for("Paris")
        terminal.type("/nothink")
        terminal.wait_for("thinking: off")
        terminal.type("/quit")


@pytest.mark.timeout(120)
def test_the_pace_stands_beside_the_text_while_it_comes(manifest: Path, state: Path) -> None:
    with conversation(manifest, state, "-n", "12", term="xterm") as (terminal, _):
        terminal.wait_for("> ")
        terminal.type("Count to one hundred")
        shown = terminal.wait_for("at the limit]")
        assert re.search(r"\x1b7\x1b\[2m  [\d.]+ tokens/s\x1b\[22m\x1b8", shown)
        assert "[12 tokens, " in shown
        terminal.type("/quit")


def test_the_prompts_tokens_can_be_listed(manifest: Path) -> None:
    done = run(manifest, "--raw-prompt", "-p", "Hello world", "--dump-tokens")
    assert done.stdout == '19556\t"Hello"\n905\t" world"\n'


def test_log_probabilities_of_the_greedy_answer_go_to_a_file(
    manifest: Path, tmp_path: Path
) -> None:
    file = tmp_path / "logprobs.json"
    flags = ("-p", "Hello", "-n", "3", "--dump-logprobs", str(file), "--logprobs-top-k", "2")
    done = run(manifest, *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    dump = json.loads(file.read_text())
    assert dump["finish_reason"] == "length"
    assert "".join(token["text"] for token in dump["tokens"]) == "Hello! How"
    for token in dump["tokens"]:
        assert [one["logprob"] for one in token["top"]] == sorted(
            (one["logprob"] for one in token["top"]), reverse=True
        )
        assert token["id"] == token["top"][0]["id"]
        assert bytes(token["bytes"]).decode() == token["text"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--frobnicate",), "unknown flag '--frobnicate'"),
        (("--think", "--nothink"), "--think and --nothink exclude each other"),
        (("--dump-tokens", "--dump-logprobs", "x"), "exclude each other"),
        (("--logprobs-top-k", "3"), "needs --dump-logprobs"),
        (("--dump-logprobs", "x", "--logprobs-top-k", "21"), "expected 0 to 20"),
        (("--dump-logprobs", "/nonexistent/x"), "/nonexistent/x: No such file"),
    ],
)
def test_flags_that_do_not_fit_are_usage_errors(
    manifest: Path, flags: tuple[str, ...], said: str
) -> None:
    done = run(manifest, "-p", "Hello", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
