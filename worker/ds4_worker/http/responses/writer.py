"""One answer of the Responses API: a state machine from parts of an answer to items and events.

Owns: which item is open, indices, sequence numbers, ids. One item is open at a time, and closed
before the next one is added. Reasoning is shown where a summary of it was asked for. A call appears
under the client's name for the tool and in the form of the tool's kind; the input of a custom tool
and the arguments of a search are sent as a whole, since they are not the JSON text that the model
writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ds4_common.errors import RequestError
from ds4_worker.http.responses.objects import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    Completed,
    ContentAdded,
    ContentDone,
    Created,
    CustomCallItem,
    CustomInputDelta,
    CustomInputDone,
    Failed,
    FunctionCallItem,
    Incomplete,
    IncompleteDetails,
    InProgress,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    OutputLogprob,
    OutputText,
    ReasoningItem,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    SearchCallItem,
    SummaryAdded,
    SummaryDelta,
    SummaryDone,
    SummaryText,
    SummaryTextDone,
    TextDelta,
    TextDone,
)
from ds4_worker.http.responses.tools import CUSTOM_INPUT, TOOL_SEARCH, Toolbox
from ds4_worker.parse.events import (
    AnswerEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    Reasoning,
)

# OpenAI's word. The reason is that the output limit, or the end of the context, was reached.
MAX_OUTPUT_TOKENS = "max_output_tokens"

_Event = TypeVar("_Event", bound=ResponseEvent)


def new_id(prefix: str) -> str:
    return f"{prefix}_{os.urandom(12).hex()}"


class ResponseWriter:
    """`response` is complete after `end` or `fail`."""

    def __init__(self, response: ResponseObject, toolbox: Toolbox, *, show_reasoning: bool) -> None:
        self.response = response
        self._toolbox = toolbox
        self._show_reasoning = show_reasoning
        self._open: OutputItem | None = None
        self._pieces: list[str] = []  # of the open item
        self._logprobs: list[OutputLogprob] = []
        self._events: list[ResponseEvent] = []
        self._next = 0
        self._begun = False

    def begin(self) -> list[ResponseEvent]:
        self._begun = True
        self._emit(Created, self._snapshot())
        self._emit(InProgress, self._snapshot())
        return self._take()

    def push(
        self, event: AnswerEvent, logprobs: Sequence[OutputLogprob] = ()
    ) -> list[ResponseEvent]:
        """The events for the next part of the answer. `logprobs`: of the tokens of a text."""
        if isinstance(event, CallOpened):
            self._close()
            self._add(self._call_item(event))
        elif isinstance(event, CallArguments):
            self._pieces.append(event.fragment)
            if isinstance(self._open, FunctionCallItem):
                self._emit(ArgumentsDelta, *self._place, event.fragment)
        elif isinstance(event, CallClosed):
            self._close(finished=True)
        elif isinstance(event, Reasoning):
            if self._show_reasoning and event.text:
                self._reason(event.text)
        elif event.text:
            self._say(event.text, logprobs)
        return self._take()

    def end(self, reason: str, usage: ResponseUsage) -> list[ResponseEvent]:
        """`reason`: length when the answer was cut off by a limit."""
        cut_off = reason == "length"
        self._close(finished=isinstance(self._open, MessageItem) and not cut_off)
        response = self.response
        response.usage = usage
        if cut_off:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails(MAX_OUTPUT_TOKENS)
            self._emit(Incomplete, response)
        else:
            response.status = "completed"
            response.completed_at = int(time.time())
            self._emit(Completed, response)
        return self._take()

    def fail(self, error: RequestError) -> list[ResponseEvent]:
        """The one terminal event of a response that could not be completed."""
        events = [] if self._begun else self.begin()
        self._settle(finished=False)
        self.response.status = "failed"
        self.response.error = ResponseError("server_error", str(error))
        self._emit(Failed, self.response)
        return events + self._take()

    # --- items ------------------------------------------------------------------------------

    def _reason(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            self._close()
            self._add(ReasoningItem(new_id("rs")))
            self._emit(SummaryAdded, *self._place, 0, SummaryText())
        self._pieces.append(text)
        self._emit(SummaryDelta, *self._place, 0, text)

    def _say(self, text: str, logprobs: Sequence[OutputLogprob]) -> None:
        if not isinstance(self._open, MessageItem):
            self._close()
            self._add(MessageItem(new_id("msg")))
            self._emit(ContentAdded, *self._place, 0, OutputText())
        self._pieces.append(text)
        self._logprobs += logprobs
        self._emit(TextDelta, *self._place, 0, text, list(logprobs))

    def _call_item(self, event: CallOpened) -> CallItem:
        offered = self._toolbox.find(event.name)
        namespace = offered.namespace
        if offered.kind == "custom":
            id_ = new_id("ctc")
            return CustomCallItem(id_, "in_progress", event.id, offered.name, "", namespace)
        if offered.kind == TOOL_SEARCH:
            return SearchCallItem(new_id("tsc"), "in_progress", event.id, {})
        id_ = new_id("fc")
        return FunctionCallItem(id_, "in_progress", event.id, offered.name, "", namespace)

    def _add(self, item: OutputItem) -> None:
        self._open = item
        self._pieces, self._logprobs = [], []
        self.response.output.append(item)
        self._emit(ItemAdded, self._index, msgspec.structs.replace(item))

    def _close(self, *, finished: bool | None = None) -> None:
        """Ends the open item, if there is one. By itself a call is not finished by what follows,
        everything else is."""
        item = self._open
        if item is None:
            return
        place = self._place
        self._settle(finished=not isinstance(item, CallItem) if finished is None else finished)
        if isinstance(item, ReasoningItem):
            self._emit(SummaryTextDone, *place, 0, item.summary[0].text)
            self._emit(SummaryDone, *place, 0, item.summary[0])
        elif isinstance(item, MessageItem):
            content = item.content[0]
            self._emit(TextDone, *place, 0, content.text, content.logprobs)
            self._emit(ContentDone, *place, 0, content)
        elif isinstance(item, FunctionCallItem):
            self._emit(ArgumentsDone, *place, item.arguments, item.name)
        elif isinstance(item, CustomCallItem):
            self._emit(CustomInputDelta, *place, item.input)
            self._emit(CustomInputDone, *place, item.input)
        self._emit(ItemDone, self._index, item)

    def _settle(self, *, finished: bool) -> None:
        """Completes the open item's fields."""
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        self._open = None
        item.status = "completed" if finished else "incomplete"
        if isinstance(item, ReasoningItem):
            item.summary = [SummaryText(text)]
        elif isinstance(item, MessageItem):
            item.content = [OutputText(text, logprobs=self._logprobs)]
        elif isinstance(item, FunctionCallItem):
            item.arguments = text
        elif isinstance(item, CustomCallItem):
            item.input = custom_input(text)
        else:
            item.arguments = json_object(text) or {}

    # --- events -----------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    @property
    def _place(self) -> tuple[str, int]:
        """Id and index of the open item."""
        return self.response.output[-1].id, self._index

    def _snapshot(self) -> ResponseObject:
        return msgspec.structs.replace(self.response, output=list(self.response.output))

    def _emit(self, kind: Callable[..., _Event], *fields: object) -> None:
        self._events.append(kind(self._next, *fields))
        self._next += 1

    def _take(self) -> list[ResponseEvent]:
        events, self._events = self._events, []
        return events


def custom_input(arguments: str) -> str:
    """The text that a model gave a custom tool; what is not its one argument is passed on raw."""
    value = (json_object(arguments) or {}).get(CUSTOM_INPUT)
    return value if isinstance(value, str) else arguments


def json_object(text: str) -> dict[str, object] | None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None
