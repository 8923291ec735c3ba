"""The conversation on a terminal: reading messages, slash commands, history.

Owns: what a person types - lines that go on, pasted blocks, the history file - and the turns of the
conversation. Ctrl-C stops the answer, or drops the line that is being typed; Ctrl-D leaves.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

import msgspec

from ds4_common.errors import RequestError, UsageError
from ds4_worker import flags
from ds4_worker.display import Display
from ds4_worker.http.conversation import Thinking, Turn
from ds4_worker.session import Session

HISTORY_ENTRIES = 1000
BLOCK = '"""'
HELP = """\
/read FILE         send the text of a file as your message
/save FILE         write the conversation to a new file: Markdown, or JSON messages (FILE.json)
/think, /nothink   reason before answering, or do not
/think-max         reason as thoroughly as the model can
/ctx               tokens of context used so far
/ctx N             give the context N tokens
/reset             forget the conversation
/quit              leave (also Ctrl-D)

A line that ends in \\ goes on in the next one; a message between lines of \"\"\" may hold several.
Ctrl-C stops an answer and keeps what was said. Up and Down walk through earlier messages."""
THINKING = {
    "/think": (Thinking(enabled=True), "thinking: on"),
    "/nothink": (Thinking(enabled=False), "thinking: off"),
    "/think-max": (Thinking(enabled=True, effort="max"), "thinking: as much as it can"),
}


class Quit(Exception):
    """Ends the conversation."""


class Talk:
    """The state of one conversation."""

    def __init__(
        self, session: Session, display: Display, system: str | None, thinking: Thinking
    ) -> None:
        self._session = session
        self._display = display
        self._system = [Turn(role="system", content=system)] if system else []
        self.thinking = thinking
        self.turns: list[Turn] = []

    def say(self, text: str) -> None:
        """Sends a message and shows the answer. A refused message is forgotten."""
        session, display = self._session, self._display
        session.interrupted = False
        self.turns.append(Turn(role="user", content=text))
        try:
            prompt = session.prompt([*self._system, *self.turns], self.thinking)
            display.show(session.answer(prompt), session.pace)
        except RequestError as error:
            self.turns.pop()
            print(f"{error}; /reset forgets the conversation, /ctx N makes room")
            return
        display.conclude(session.pace, session.finished)
        reasoning = display.reasoning or None
        self.turns.append(Turn(role="assistant", content=display.text, reasoning=reasoning))

    def obey(self, line: str) -> str:
        """Carries out a slash command; the message to send, "" when there is none. Raises
        UsageError and Quit."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word in THINKING:
            self._think(word)
        elif word == "/read":
            return flags.read_text(rest)
        elif word == "/save":
            save(rest, [*self._system, *self.turns])
            print(f"saved {len(self.turns)} messages to {rest}")
        elif word == "/ctx":
            self._context(rest)
        elif word == "/help":
            print(HELP)
        elif word == "/reset":
            self.turns.clear()
            self._session.used_tokens = 0
        elif word == "/quit":
            raise Quit
        else:
            raise UsageError(f"{word}: no such command; /help lists them")
        return ""

    def _think(self, word: str) -> None:
        self.thinking, said = THINKING[word]
        known = "" if self._session.reasons else "; this model's template may not know of it"
        print(said + known)

    def _context(self, size: str) -> None:
        session = self._session
        if size:
            if not size.isdecimal() or not 2 <= int(size) <= 1 << 24:
                raise UsageError(f"/ctx {size}: expected a number of tokens, 2 or more")
            session.resize(int(size))
        print(f"{session.used_tokens} of {session.context_tokens} tokens")


def converse(
    session: Session, system: str | None, thinking: Thinking, environment: Mapping[str, str]
) -> int:
    """Reads messages until the end of input; the exit code."""
    talk = Talk(session, Display(environment=environment), system, thinking)
    history = History(history_path(environment), load_readline())
    print(f"{session.name}, {session.context_tokens} tokens of context; /help lists the commands")
    while True:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            entry = read_message(input).strip()
        except KeyboardInterrupt:  # drops the line
            print()
            continue
        except EOFError:
            print()
            return 0
        signal.signal(signal.SIGINT, session.interrupt)
        if entry:
            history.add(entry)
        try:
            # A command is one line; a message of several may begin with a slash.
            command = entry.startswith("/") and "\n" not in entry
            message = talk.obey(entry) if command else entry
        except UsageError as error:
            print(error)
            continue
        except Quit:
            return 0
        if message.strip():
            talk.say(message)


def read_message(read_line: Callable[[str], str]) -> str:
    """One message: a line, lines joined by a backslash at their ends, or a block between lines
    of three quotes. Raises EOFError at the end of input."""
    line = read_line("> ")
    if line.strip().startswith(BLOCK):
        return _read_block(line.strip()[len(BLOCK) :], read_line)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read_line(". ")
    return "\n".join([*lines, line])


def _read_block(first: str, read_line: Callable[[str], str]) -> str:
    lines = []
    line = first
    while not line.rstrip().endswith(BLOCK):
        lines.append(line)
        line = read_line(". ")
    lines.append(line.rstrip()[: -len(BLOCK)])
    return "\n".join(lines)


def load_readline() -> ModuleType | None:
    """Line editing, and pasted lines as one message, where Python has them."""
    try:
        import readline
    except ImportError:
        return None  # input() works without
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_auto_history(False)  # a message of several lines is one entry
    return readline


# --- history


class History:
    """Earlier messages, oldest first, in a file of the user's own. One line each: backslashes and
    line breaks are escaped. A file that cannot be used is told of once."""

    def __init__(self, path: str, readline: ModuleType | None) -> None:
        self._path = path
        self._readline = readline
        self._usable = readline is not None
        if readline is not None:
            for entry in self._load():
                readline.add_history(entry)

    def add(self, entry: str) -> None:
        if self._readline is None:
            return
        self._readline.add_history(entry)
        if self._usable:
            self._keep(lambda: append_private(self._path, escape(entry) + "\n"))

    def _load(self) -> list[str]:
        entries: list[str] = []

        def read() -> None:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
            entries.extend(map(unescape, lines[-HISTORY_ENTRIES:]))
            if len(lines) > 2 * HISTORY_ENTRIES:
                replace_private(self._path, "\n".join([*lines[-HISTORY_ENTRIES:], ""]))

        if os.path.exists(self._path):
            self._keep(read)
        return entries

    def _keep(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._usable = False
            print(f"ds4: no history is kept: {self._path}: {error.strerror}", file=sys.stderr)


def history_path(environment: Mapping[str, str]) -> str:
    """`$XDG_STATE_HOME/ds4/history`, else below `~/.local/state`."""
    state = environment.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the specification ignores relative ones
        state = os.path.expanduser("~/.local/state")
    return os.path.join(state, "ds4", "history")


def escape(entry: str) -> str:
    return entry.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def unescape(line: str) -> str:
    parts = line.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\r", "\r") for part in parts)


def append_private(path: str, text: str) -> None:
    """Appends to a file that nobody else may read. Raises OSError."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, text.encode("utf-8", "surrogateescape"))
    finally:
        os.close(fd)


def replace_private(path: str, text: str) -> None:
    """Replaces such a file in one step. Raises OSError."""
    temporary = f"{path}.{os.getpid()}"
    append_private(temporary, text)
    os.replace(temporary, path)


# --- files


def save(path: str, turns: list[Turn]) -> None:
    """Writes a conversation to a new file. Raises UsageError; an existing file stays as it is."""
    if not path:
        raise UsageError("/save FILE: names no file")
    text = as_json(turns) if path.endswith(".json") else as_markdown(turns)
    try:
        with open(os.path.expanduser(path), "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot save to {path!r}: {error.strerror}") from error


def as_json(turns: list[Turn]) -> str:
    """Messages as `/v1/chat/completions` takes them."""
    messages = []
    for turn in turns:
        message = {"role": turn.role, "content": turn.content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        messages.append(message)
    return msgspec.json.format(msgspec.json.encode(messages), indent=2).decode() + "\n"


def as_markdown(turns: list[Turn]) -> str:
    parts = []
    for turn in turns:
        parts.append(f"## {turn.role.capitalize()}")
        if turn.reasoning:
            parts.append("\n".join(f"> {line}".rstrip() for line in turn.reasoning.splitlines()))
        parts.append(turn.content.strip())
    return "\n\n".join(parts) + "\n"
