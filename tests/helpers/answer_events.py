"""Answers of a model as parts of text, for tests of what writes them down."""

from __future__ import annotations

from hypothesis import strategies as st

from ds4_worker.parse.events import (
    AnswerEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    Reasoning,
    Text,
)


def call(index: int, name: str, *fragments: str, closed: bool = True) -> list[AnswerEvent]:
    """One tool call; its id is `call_<index>`."""
    events: list[AnswerEvent] = [CallOpened(index, f"call_{index}", name)]
    events += [CallArguments(index, fragment) for fragment in fragments]
    return [*events, CallClosed(index)] if closed else events


def joined(answer: list[AnswerEvent]) -> list[AnswerEvent]:
    """The same answer in as few fragments as there can be."""
    events: list[AnswerEvent] = []
    for event in answer:
        last = events[-1] if events else None
        if isinstance(event, CallArguments) and isinstance(last, CallArguments):
            events[-1] = CallArguments(event.index, last.fragment + event.fragment)
        elif isinstance(event, Text) and isinstance(last, Text):
            events[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            events[-1] = Reasoning(last.text + event.text)
        else:
            events.append(event)
    return events


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerEvent]:
    """Reasoning, text, calls, in the order in which models write them, or any of them missing; the
    last call may be cut off."""
    text = st.text(st.characters(codec="utf-8"), max_size=8)
    events: list[AnswerEvent] = [Reasoning(piece) for piece in draw(st.lists(text, max_size=3))]
    events += [Text(piece) for piece in draw(st.lists(text, max_size=3))]
    names = draw(st.lists(st.sampled_from(["look", "run"]), max_size=3))
    for index, name in enumerate(names):
        closed = index + 1 < len(names) or draw(st.booleans())
        arguments = '{"a":"' + draw(st.text("xyz", max_size=4)) + '","b":[1,2]}'
        cut = draw(st.integers(0, len(arguments)))
        pieces = [arguments[:cut], arguments[cut:]] if closed else [arguments[:cut]]
        events += call(index, name, *filter(None, pieces), closed=closed)
    return events
