"""Collects the events of one answer.

Owns: which call is open, when whitespace belongs to the answer, the exact text of the calls, and
the promise that nothing is lost: what does not become a call is given back as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ds4_worker.parse.events import (
    AnswerEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    Reasoning,
    Text,
    Tool,
)
from ds4_worker.parse.marks import Marks
from ds4_worker.parse.source import Source


def json_text(text: str) -> str:
    """The characters of a JSON string, without its quotes."""
    return msgspec.json.encode(text)[1:-1].decode()


class Answer:
    """What parsers of one sequence write to. Texts are marked text, as `Source` gives it."""

    def __init__(
        self,
        source: Source,
        marks: Marks,
        tools: Sequence[Tool],
        new_call_id: Callable[[], str],
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.plain = marks.plain
        self.calls = 0
        self._source = source
        self._new_call_id = new_call_id
        self._events: list[AnswerEvent] = []
        self._kind: type[Text] | type[Reasoning] | type[CallArguments] = Text
        self._run: list[str] = []  # fragments of `_kind` that become one event
        self._space: list[str] = []  # whitespace that a block may follow
        self._begin = 0  # the current block's place in the log
        self._in_call = False
        self._complete = 0  # the end of the last complete block there

    def drain(self) -> list[AnswerEvent]:
        """The events since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    def forget_text(self) -> None:
        """What was read is no news, but for calls."""
        self._flush()
        self._events = [e for e in self._events if not isinstance(e, Text | Reasoning)]
        self._space.clear()

    @property
    def block(self) -> str:
        return self.plain(self._source.logged(0, self._complete))

    # --- text ---

    def text(self, text: str) -> None:
        """Visible text, at once."""
        self._add(Text, self.plain(text))

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, self.plain(text))

    def content(self, text: str) -> None:
        """Visible text that a block may follow: whitespace at its end waits."""
        kept = text.rstrip()
        if kept:
            self.keep_space()
            self.text(kept)
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def keep_space(self) -> None:
        """The waiting whitespace is part of the answer."""
        space, self._space = self._space, []
        self.text("".join(space))

    def end(self) -> None:
        """The sequence ended; whitespace between the last call and the end is no answer."""
        if self.calls:
            self._space.clear()
        self.keep_space()

    # --- calls ---

    def begin_block(self, opener: str) -> None:
        """`opener` was just read: what follows may be a call."""
        if not self._source.logging:
            self._source.begin_log(opener)
            self._begin = 0
        else:
            self._begin = self._source.log_size() - bool(opener)

    def give_back(self) -> None:
        """The block is not what it should be. Of a call that is open, nothing can be taken back;
        otherwise what was read since the block began, or since its last call, is text."""
        if not self._in_call:
            self.content(self._source.logged(self._begin))
        self._in_call = False
        if not self._complete:
            self._source.end_log()

    def drop_block(self) -> None:
        """What was read since the block began is markup between texts."""
        if not self._complete:
            self._source.end_log()

    def block_text(self, opener: str) -> str:
        """What was read of the block after its opener."""
        return self._source.logged(self._begin).removeprefix(opener)

    def open_call(self, name: str) -> None:
        self._space.clear()
        self._in_call = True
        self._flush()
        self._events.append(CallOpened(self.calls, self._new_call_id(), name))
        self.calls += 1

    def arguments(self, fragment: str) -> None:
        """JSON text, without marks."""
        self._add(CallArguments, fragment)

    def close_call(self) -> None:
        self._flush()
        self._events.append(CallClosed(self.calls - 1))
        self._in_call = False
        self.end_block()

    def end_block(self) -> None:
        """What was read so far belongs to complete calls."""
        self._begin = self._complete = self._source.log_size()

    # --- inside ---

    def _add(self, kind: type[Text] | type[Reasoning] | type[CallArguments], text: str) -> None:
        if text:
            if kind is not self._kind:
                self._flush()
                self._kind = kind
            self._run.append(text)

    def _flush(self) -> None:
        if self._run:
            text = "".join(self._run)
            self._run.clear()
            self._events.append(
                CallArguments(self.calls - 1, text)
                if self._kind is CallArguments
                else Reasoning(text)
                if self._kind is Reasoning
                else Text(text)
            )
