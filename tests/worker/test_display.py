"""How answers look on a terminal and in a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_worker import display
from ds4_worker.display import Display, column_after
from ds4_worker.engine.api import Finished
from ds4_worker.parse.events import AnswerEvent, Reasoning, Text
from ds4_worker.session import Pace

XTERM = {"TERM": "xterm"}
THOUGHT: list[AnswerEvent] = [
    Reasoning("why "),
    Reasoning("not"),
    Text("\n\n"),
    Text("So"),
    Text("."),
]


class Screen(io.StringIO):
    """A terminal that shows what it is sent; standard output and error of a program share one."""

    def isatty(self) -> bool:
        return True


def on_terminal(
    events: list[AnswerEvent], environment: dict[str, str] = XTERM, per_second: float = 0.0
) -> str:
    screen = Screen()
    pace = Pace(tokens=11, seconds=10 / per_second) if per_second else Pace()
    Display(screen, screen, environment).show(events, pace)
    return screen.getvalue()


def test_reasoning_is_dimmed_and_stands_apart() -> None:
    assert on_terminal(THOUGHT) == "\x1b[2mwhy not\x1b[22m\n\nSo.\n"


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_terminals_without_colours_get_none(environment: dict[str, str]) -> None:
    assert on_terminal(THOUGHT, environment) == "why not\n\nSo.\n"


def test_a_pipe_gets_the_answer_and_nothing_else() -> None:
    out, err = io.StringIO(), io.StringIO()
    shown = Display(out, err, XTERM)
    shown.show([*THOUGHT, Text("\n")], Pace(tokens=9, seconds=1.0))
    shown.conclude(Pace(tokens=9, seconds=1.0), Finished("stop", 9))
    assert (out.getvalue(), err.getvalue()) == ("So.\n", "")
    assert (shown.text, shown.reasoning) == ("So.\n", "why not")


def test_reasoning_that_never_ends_leaves_the_terminal_undimmed() -> None:
    assert on_terminal([Reasoning("on and on")]) == "\x1b[2mon and on\x1b[22m\n"


def test_what_broke_off_leaves_the_terminal_undimmed_and_at_a_new_line() -> None:
    def broken() -> Iterator[AnswerEvent]:
        yield Reasoning("hm")
        raise LookupError

    screen = Screen()
    with pytest.raises(LookupError):
        Display(screen, screen, XTERM).show(broken(), Pace())
    assert screen.getvalue() == "\x1b[2mhm\x1b[22m\n"


@pytest.mark.parametrize(
    ("finished", "words"),
    [
        (Finished("stop", 3), "[3 tokens, 4.0 tokens/s, first after 0.25 s]\n"),
        (Finished("length", 3), "[3 tokens, 4.0 tokens/s, first after 0.25 s, at the limit]\n"),
        (None, "[3 tokens, 4.0 tokens/s, first after 0.25 s, stopped]\n"),
    ],
)
def test_an_answer_ends_with_its_pace(finished: Finished | None, words: str) -> None:
    screen = Screen()
    pace = Pace(tokens=3, first_seconds=0.25, seconds=0.5)
    Display(screen, screen, {"TERM": "dumb"}).conclude(pace, finished)
    assert screen.getvalue() == words


# --- the pace beside the text


class Emulator:
    """As much of a terminal as the display uses: wrapping, save, restore, erase to the end."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.cells: dict[tuple[int, int], str] = {}
        self.row = self.column = 0
        self._saved = (0, 0)

    def feed(self, text: str) -> None:
        rest = text
        while rest:
            for code, action in (
                ("\x1b7", self._save),
                ("\x1b8", self._restore),
                ("\x1b[K", self._erase),
                ("\x1b[2m", None),
                ("\x1b[22m", None),
            ):
                if rest.startswith(code):
                    if action is not None:
                        action()
                    rest = rest[len(code) :]
                    break
            else:
                self._put(rest[0])
                rest = rest[1:]

    def _save(self) -> None:
        self._saved = (self.row, self.column)

    def _restore(self) -> None:
        self.row, self.column = self._saved

    def _erase(self) -> None:
        for column in range(self.column, self.columns):
            self.cells.pop((self.row, column), None)

    def _put(self, character: str) -> None:
        if character == "\n":
            self.row, self.column = self.row + 1, 0
            return
        width = 2 if character > "\u1100" else 1
        if self.column + width > self.columns:
            self.row, self.column = self.row + 1, 0
        self.cells[self.row, self.column] = character
        self.column += width


PIECES = st.lists(st.text(st.sampled_from("abc  \n漢"), min_size=1, max_size=9), max_size=30)


@given(PIECES, st.integers(8, 40))
def test_the_pace_never_harms_the_text(pieces: list[str], columns: int) -> None:
    events: list[AnswerEvent] = [Text(piece) for piece in pieces]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(display, "_columns", lambda stream: columns)
        shown, plain = Emulator(columns), Emulator(columns)
        shown.feed(on_terminal(events, per_second=31.4))
        plain.feed(on_terminal(events))
    assert shown.cells == plain.cells


def test_the_pace_is_shown_while_there_is_room() -> None:
    assert "31.4 tokens/s" in on_terminal([Text("a"), Text("b")], per_second=31.4)
    assert "tokens/s" not in on_terminal([Text("a" * 75)], per_second=31.4)
    assert "tokens/s" not in on_terminal([Text("a")], {"TERM": "dumb"}, per_second=31.4)


@given(st.text(st.sampled_from("ab\t\n漢\u0301"), max_size=60), st.integers(4, 30))
def test_the_column_stays_on_the_screen(text: str, columns: int) -> None:
    assert 0 <= column_after(0, text, columns) <= columns
