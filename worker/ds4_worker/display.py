"""How an answer looks on a terminal, and in a pipe.

Owns: reasoning dimmed, the live pace, and what goes where. On a terminal everything is shown, and
beside the text stands the pace so far, erased before the next piece. In a pipe the answer's text is
all there is: no reasoning, no colours, no pace. The pace goes to standard error, and only when that
is a terminal.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Iterable, Mapping
from typing import TextIO

from ds4_worker.engine.api import Finished
from ds4_worker.parse.events import AnswerEvent, Reasoning, Text
from ds4_worker.session import Pace

DIM, PLAIN = "\x1b[2m", "\x1b[22m"
_ERASE_LINE_END, _SAVE, _RESTORE = "\x1b[K", "\x1b7", "\x1b8"
_REFRESH_SECONDS = 0.25


class Display:
    """One answer at a time. `text` is what was said so far, without the reasoning."""

    def __init__(
        self,
        out: TextIO = sys.stdout,
        err: TextIO = sys.stderr,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        plain = environment.get("TERM") in (None, "", "dumb")
        self._out, self._err = out, err
        self._shows_reasoning = out.isatty()
        self._dims = out.isatty() and not plain and "NO_COLOR" not in environment
        # The pace can stand beside the text only where both are the same screen.
        self._live = out.isatty() and err.isatty() and not plain
        self._tells_pace = err.isatty()
        self._reset()

    def _reset(self) -> None:
        self.text = ""
        self.reasoning = ""
        self._dimmed = False
        self._column = 0
        self._note = ""
        self._measured_at = 0.0
        self._pace_shown = False

    def show(self, events: Iterable[AnswerEvent], pace: Pace) -> None:
        """Writes an answer as it comes. `pace` is read while `events` are."""
        self._reset()
        try:
            for event in events:
                self._piece(event)
                self._show_pace(pace)
        finally:
            self._erase_pace()
            self._dim(False)
            self._write("" if self._column == 0 and self.text else "\n")
            self._out.flush()

    def conclude(self, pace: Pace, finished: Finished | None) -> None:
        """One line about the whole answer, for people."""
        if not self._tells_pace or not pace.tokens:
            return
        words = ["1 token" if pace.tokens == 1 else f"{pace.tokens} tokens"]
        if pace.per_second:
            words.append(f"{pace.per_second:.1f} tokens/s")
        words.append(f"first after {pace.first_seconds:.2f} s")
        if finished is None:
            words.append("stopped")
        elif finished.reason == "length":
            words.append("at the limit")
        line = f"[{', '.join(words)}]"
        self._err.write(f"{DIM}{line}{PLAIN}\n" if self._dims else f"{line}\n")
        self._err.flush()

    def _piece(self, event: AnswerEvent) -> None:
        if isinstance(event, Text):
            text = event.text
            if not self.text:
                # Models put blank lines between reasoning and answer; the screen has its own.
                text = text.lstrip("\n") if self.reasoning else text
                if text and self.reasoning and self._shows_reasoning:
                    self._start_answer()
            self.text += text
        elif isinstance(event, Reasoning):
            self.reasoning += event.text
            if not self._shows_reasoning:
                return
            self._dim(True)
            text = event.text
        else:
            return  # calls: the terminal offers no tools
        self._erase_pace()
        self._write(text)
        self._out.flush()

    def _start_answer(self) -> None:
        self._erase_pace()
        self._dim(False)
        self._write("\n\n" if self._column else "\n")

    def _dim(self, dimmed: bool) -> None:
        if self._dims and dimmed != self._dimmed:
            self._out.write(DIM if dimmed else PLAIN)
            self._dimmed = dimmed

    def _write(self, text: str) -> None:
        self._out.write(text)
        if self._live and text:
            self._column = column_after(self._column, text, _columns(self._out))
        elif text:
            self._column = 0 if text.endswith("\n") else 1

    def _show_pace(self, pace: Pace) -> None:
        """Drawn again after every piece, with a figure that can be read before it changes."""
        if not self._live or not pace.per_second:
            return
        now = time.monotonic()
        if now - self._measured_at >= _REFRESH_SECONDS:
            self._measured_at = now
            self._note = f"  {pace.per_second:.1f} tokens/s"
        if self._column + len(self._note) >= _columns(self._out):
            return  # it would wrap, and could not be erased
        self._pace_shown = True
        shown = f"{DIM}{self._note}{PLAIN}" if self._dims else self._note
        self._err.write(f"{_SAVE}{shown}{_RESTORE}")
        self._err.flush()

    def _erase_pace(self) -> None:
        if self._pace_shown:
            # Not every terminal restores what it saved of the colours.
            self._out.write(_ERASE_LINE_END + (DIM if self._dimmed else ""))
            self._pace_shown = False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80  # a terminal that does not tell its size


def column_after(column: int, text: str, columns: int) -> int:
    """Where the cursor is after `text` on a screen of so many columns."""
    _, newline, rest = text.rpartition("\n")
    if newline:
        column = 0
    for character in rest:
        if character == "\t":
            column = min(column // 8 * 8 + 8, columns - 1)
            continue
        width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if unicodedata.combining(character):
            width = 0
        column = column + width if column + width <= columns else width
    return column
