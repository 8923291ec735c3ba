"""What a person types in a conversation: messages, commands, history."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.errors import UsageError
from ds4_worker import repl
from ds4_worker.display import Display
from ds4_worker.http.chat import Message, turn_of
from ds4_worker.http.conversation import Thinking, Turn
from ds4_worker.repl import History, Quit, Talk, escape, read_message, unescape


def typed(*lines: str) -> Callable[[str], str]:
    """A reader of these lines, then the end of input."""
    left = iter(lines)

    def read(prompt: str) -> str:
        for line in left:
            return line
        raise EOFError

    return read


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("hello",), "hello"),
        (("a\\", "b\\", "c"), "a\nb\nc"),
        (('"""', "a", "", "b", '"""'), "\na\n\nb\n"),
        (('"""a', 'b"""'), "a\nb"),
        (('"""a"""',), "a"),
        (('say """ now',), 'say """ now'),
    ],
)
def test_messages_of_one_and_of_several_lines(lines: tuple[str, ...], message: str) -> None:
    assert read_message(typed(*lines)) == message


@pytest.mark.parametrize("lines", [(), ("a\\",), ('"""', "a")])
def test_input_that_ends_inside_a_message_is_the_end(lines: tuple[str, ...]) -> None:
    with pytest.raises(EOFError):
        read_message(typed(*lines))


# --- commands


def talk(**facts: Any) -> Talk:
    session = SimpleNamespace(used_tokens=5, context_tokens=64, reasons=True, **facts)
    return Talk(cast(Any, session), Display(), "be brief", Thinking())


def test_thinking_follows_the_last_command(capsys: pytest.CaptureFixture[str]) -> None:
    one = talk()
    for word, expected in (
        ("/think-max", Thinking(enabled=True, effort="max")),
        ("/nothink", Thinking(enabled=False)),
        ("/think", Thinking(enabled=True)),
    ):
        assert one.obey(word) == ""
        assert one.thinking == expected
    assert "thinking: on\n" in capsys.readouterr().out


def test_ctx_tells_or_resizes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes: list[int] = []
    one = talk(resize=sizes.append)
    one.obey("/ctx")
    one.obey("/ctx 128")
    assert (sizes, capsys.readouterr().out) == ([128], "5 of 64 tokens\n5 of 64 tokens\n")
    for wrong in ("x", "-3", "1", "99999999999"):
        with pytest.raises(UsageError, match="/ctx"):
            one.obey(f"/ctx {wrong}")


def test_unknown_commands_name_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"/jump: no such command; /help"):
        talk().obey("/jump now")
    with pytest.raises(Quit):
        talk().obey("/quit")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    talk().obey("/help")
    said = capsys.readouterr().out
    for word in ("/read", "/save", *repl.THINKING, "/ctx", "/reset", "/quit", "Ctrl-C", '"""'):
        assert word in said


def test_a_file_becomes_the_message_and_a_bad_one_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("text\n")
    assert talk().obey(f"/read {tmp_path / 'm'}") == "text\n"
    (tmp_path / "b").write_bytes(b"\xff")
    for name in ("b", "none", ""):
        with pytest.raises(UsageError, match="cannot read"):
            talk().obey(f"/read {tmp_path / name}")


SAID = [
    Turn(role="user", content="why?"),
    Turn(role="assistant", content="Because.", reasoning="hm\n\nso"),
]


def test_saved_json_is_what_the_api_takes(tmp_path: Path) -> None:
    one = talk()
    one.turns = list(SAID)
    one.obey(f"/save {tmp_path / 'c.json'}")
    messages = msgspec.json.decode((tmp_path / "c.json").read_bytes(), type=list[Message])
    turns = [turn_of(message, "m") for message in messages]
    assert turns == [Turn(role="system", content="be brief"), *SAID]


def test_saved_markdown_reads_as_a_conversation(tmp_path: Path) -> None:
    one = talk()
    one.turns = list(SAID)
    one.obey(f"/save {tmp_path / 'c.md'}")
    assert (tmp_path / "c.md").read_text() == (
        "## System\n\nbe brief\n\n## User\n\nwhy?\n\n## Assistant\n\n> hm\n>\n> so\n\nBecause.\n"
    )


def test_saving_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "c.md").write_text("mine")
    with pytest.raises(UsageError, match="File exists"):
        talk().obey(f"/save {tmp_path / 'c.md'}")
    assert (tmp_path / "c.md").read_text() == "mine"
    with pytest.raises(UsageError, match="names no file"):
        talk().obey("/save")


# --- history


class FakeReadline:
    def __init__(self) -> None:
        self.entries: list[str] = []

    def add_history(self, entry: str) -> None:
        self.entries.append(entry)


def history(path: Path) -> tuple[History, list[str]]:
    readline = FakeReadline()
    return History(str(path), cast(Any, readline)), readline.entries


@given(st.text())
def test_an_entry_is_one_line_of_the_file_and_comes_back(entry: str) -> None:
    line = escape(entry)
    assert "\n" not in line
    assert "\r" not in line
    assert unescape(line) == entry


def test_entries_come_back_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "state" / "ds4" / "history"
    for entry in ("one", "two\nlines", "back\\slash"):
        history(path)[0].add(entry)
    assert history(path)[1] == ["one", "two\nlines", "back\\slash"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.touch(mode=0o644)
    history(path)[0].add("secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_long_history_is_cut_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "history"
    count = 2 * repl.HISTORY_ENTRIES + 1
    path.write_text("".join(f"{i}\n" for i in range(count)))
    kept = history(path)[1]
    assert kept == [str(i) for i in range(count - repl.HISTORY_ENTRIES, count)]
    assert path.read_text().splitlines() == kept
    assert os.listdir(tmp_path) == ["history"]


def test_a_history_that_cannot_be_kept_is_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    one, entries = history(tmp_path / "file" / "ds4" / "history")
    one.add("a")
    one.add("b")
    assert entries == ["a", "b"]
    assert capsys.readouterr().err.count("no history is kept") == 1


def test_the_place_of_the_history_follows_xdg() -> None:
    assert repl.history_path({"XDG_STATE_HOME": "/state"}) == "/state/ds4/history"
    home = os.path.expanduser("~/.local/state/ds4/history")
    assert repl.history_path({}) == repl.history_path({"XDG_STATE_HOME": "relative"}) == home
