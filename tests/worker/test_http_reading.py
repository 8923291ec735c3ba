"""From sampled tokens to a streamed and to a whole chat answer: both say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_worker.engine.api import Event, Generation
from ds4_worker.engine.presenter import Presenter
from ds4_worker.executor.api import Sampled
from ds4_worker.http.answer import Facts, Used
from ds4_worker.http.chat_renderer import ChatRenderer
from ds4_worker.http.conversation import Observation
from ds4_worker.http.reading import ChoiceCollector, ChoiceReader
from ds4_worker.http.replay import CallMemory
from ds4_worker.parse.choose import make_parser
from ds4_worker.parse.events import Tool
from helpers.fake_model import EOS, ByteDetokenizer, ByteTokenizer
from helpers.scripted import tokens, tool_model

MODEL = tool_model()
FACTS = Facts(
    model="m",
    prompts=[[1]],
    choices_per_prompt=1,
    observation=Observation(token_ids=True),
    ingress_ns=0,
    enqueue_ns=0,
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n", "b": [1]}}\n</tool_call>'
PARTS = st.sampled_from(
    [
        *("a", "é ", "\n", "</think>", "<think>", "<tool_call>", "</tool_call>", '{"name": "f"'),
        *(CALL, CALL.replace('"f"', '"g"'), "\n\n" + CALL, '"arguments": {}}', "<", "😀"),
    ]
)


def generation(**fields: Any) -> Generation:
    return Generation(
        prompt=[1],
        eos_ids=frozenset({EOS}),
        pieces=True,
        logprobs=0,
        **{"max_tokens": 10_000, **fields},
    )


def events_of(sampled: Sequence[int], how: Generation) -> Iterator[Event]:
    presenter = Presenter(how, ByteDetokenizer())
    for stamp, token in enumerate(sampled):
        yield presenter.push(Sampled(token, -1.0, []), stamp)
        if presenter.finished is not None:
            yield presenter.end()
            return


def reader_of(how: Generation, ids: Iterator[str]) -> ChoiceReader:
    parser = make_parser(
        MODEL.frontend,
        MODEL.tokenizer,
        tools=[Tool("f")],
        in_reasoning=True,
        new_call_id=lambda: next(ids),
    )
    return ChoiceReader(how, parser, ByteTokenizer().token_bytes)


def numbered() -> Iterator[str]:
    return (f"call_{i}" for i in range(1000))


def streamed(events: Sequence[Event], how: Generation) -> list[dict[str, Any]]:
    reader = reader_of(how, numbered())
    renderer = ChatRenderer(FACTS, ByteTokenizer(), include_usage=False)
    data = renderer.begin(0, 0)
    for event in events:
        piece = reader.read(event)
        if piece is not None:
            data += renderer.piece(0, piece)
    assert reader.end is not None
    data += renderer.end(0, reader.end, Used(prompt_tokens=1, completion_tokens=1))
    lines = [line[6:] for line in data.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines]


def whole(events: Sequence[Event], how: Generation) -> dict[str, Any]:
    reader, collector = reader_of(how, numbered()), ChoiceCollector(how)
    for event in events:
        piece = reader.read(event)
        if piece is not None:
            collector.add(piece)
    assert reader.end is not None
    renderer = ChatRenderer(FACTS, ByteTokenizer(), include_usage=False)
    answer = renderer.whole(
        [collector.choice(reader.end)], Used(prompt_tokens=1, completion_tokens=1)
    )
    (choice,) = json.loads(msgspec.json.encode(answer))["choices"]
    found: dict[str, Any] = choice
    return found


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for delta in (chunk["delta"] for chunk in chunks):
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message.setdefault("reasoning_content", "")
            message["reasoning_content"] += delta["reasoning_content"]
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": part["function"]})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


@settings(deadline=None)
@given(
    parts=st.lists(PARTS, max_size=8),
    limit=st.integers(1, 200),
    stops=st.lists(st.sampled_from(["a", "\n\n", "call>", "é", "}}", "k>"]), max_size=2),
)
def test_a_stream_joined_is_the_whole_answer(
    parts: list[str], limit: int, stops: list[str]
) -> None:
    how = generation(max_tokens=limit, stop_strings=tuple(stops))
    events = list(events_of(tokens("".join(parts)), how))
    chunks, choice = streamed(events, how), whole(events, how)
    assert joined(chunks) == choice["message"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    ids = [token for chunk in chunks for token in chunk.get("token_ids", ())]
    assert ids == choice["token_ids"]
    logprobs = [
        item for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"]["content"]
    ]
    assert logprobs == choice["logprobs"]["content"]
    for call in choice["message"].get("tool_calls", ()):
        if choice["finish_reason"] == "tool_calls":
            assert call["function"]["name"] == "f"


@settings(deadline=None)
@given(parts=st.lists(PARTS, max_size=8))
def test_a_sampled_answer_with_calls_is_remembered_with_a_block_of_itself(
    parts: list[str],
) -> None:
    how, answer = generation(), "".join(parts)
    memory, told = CallMemory(), []
    parser = make_parser(
        MODEL.frontend,
        MODEL.tokenizer,
        tools=[Tool("f")],
        in_reasoning=True,
        new_call_id=lambda: memory.new_id("call_"),
    )
    reader = ChoiceReader(
        how, parser, ByteTokenizer().token_bytes, remember=lambda *what: told.append(what)
    )
    for event in events_of(tokens(answer), how):
        reader.read(event)
    assert reader.end is not None
    assert (reader.end.reason == "tool_calls") == bool(told)
    for ids, block, written, _ in told:
        assert len(ids) == len(set(ids)) >= 1
        assert block in answer
        assert list(written) == tokens(answer)[:-1]
