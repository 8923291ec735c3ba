"""The Responses API's answer: recorded sequences field by field, and the official accumulator."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from ds4_common.errors import RequestError
from ds4_worker.http.responses.body import ToolSpec
from ds4_worker.http.responses.objects import (
    InputDetails,
    OutputDetails,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    encode_event,
)
from ds4_worker.http.responses.tools import Toolbox
from ds4_worker.http.responses.writer import ResponseWriter, new_id
from ds4_worker.parse.events import AnswerEvent, Reasoning, Text
from helpers.answer_events import answers, call, joined

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = ResponseUsage(5, InputDetails(2, 3), 7, OutputDetails(1), 12)


def tools() -> Toolbox:
    box = Toolbox()
    specs = [
        ToolSpec(type="function", name="run"),
        ToolSpec(type="custom", name="patch"),
        ToolSpec(type="namespace", name="maps.", tools=[ToolSpec(type="function", name="look")]),
        ToolSpec(type="tool_search"),
    ]
    box.add(specs, "tools")
    return box


def writer(*, show_reasoning: bool = True) -> ResponseWriter:
    response = ResponseObject(id=new_id("resp"), created_at=1, model="m")
    return ResponseWriter(response, tools(), show_reasoning=show_reasoning)


def written(
    answer: list[AnswerEvent], reason: str = "stop", *, show_reasoning: bool = True
) -> tuple[Any, list[dict[str, Any]]]:
    """The response, and the events as a client decodes them."""
    out = writer(show_reasoning=show_reasoning)
    # Decoded at once: what an event said must not change with the answer going on.
    events = [decoded(event) for event in out.begin()]
    for part in answer:
        events += [decoded(event) for event in out.push(part)]
    events += [decoded(event) for event in out.end(reason, USAGE)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return msgspec.to_builtins(out.response), events


def decoded(event: ResponseEvent) -> dict[str, Any]:
    name, data, *rest = encode_event(event).decode().split("\n")
    assert rest == ["", ""]
    value: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {value['type']}"
    assert list(value)[:2] == ["type", "sequence_number"]
    return value


def without_numbers(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in event.items() if k != "sequence_number"} for event in events]


def test_a_stream_is_a_lifecycle_around_items() -> None:
    answer: list[AnswerEvent] = [Reasoning("hm"), Reasoning("m"), Text("Hel"), Text("lo")]
    answer += call(0, "run", '{"a":', "1}")
    response, events = written(answer)
    reasoning, message, function = (item["id"] for item in response["output"])
    assert (reasoning[:3], message[:4], function[:3]) == ("rs_", "msg_", "fc_")
    created, in_progress, *middle, completed = without_numbers(events)
    before = {**response, "output": [], "usage": None, "status": "in_progress"}
    before["completed_at"] = None
    assert created == {"type": "response.created", "response": before}
    assert in_progress == {"type": "response.in_progress", "response": before}
    assert completed == {"type": "response.completed", "response": response}

    def at(kind: str, id_: str, index: int, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "item_id": id_, "output_index": index, **fields}

    def item(kind: str, index: int, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.output_item.{kind}", "output_index": index, "item": fields}

    thought = {"type": "summary_text", "text": "hmm"}
    text = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    shared: dict[str, Any] = {"type": "reasoning", "id": reasoning}
    spoken: dict[str, Any] = {"type": "message", "id": message, "role": "assistant"}
    called = {"type": "function_call", "id": function, "call_id": "call_0", "name": "run"}
    summary: dict[str, Any] = {"id_": reasoning, "index": 0, "summary_index": 0}
    content: dict[str, Any] = {"id_": message, "index": 1, "content_index": 0}
    assert middle == [
        item("added", 0, **shared, status="in_progress", summary=[]),
        at("reasoning_summary_part.added", **summary, part={**thought, "text": ""}),
        at("reasoning_summary_text.delta", **summary, delta="hm"),
        at("reasoning_summary_text.delta", **summary, delta="m"),
        at("reasoning_summary_text.done", **summary, text="hmm"),
        at("reasoning_summary_part.done", **summary, part=thought),
        item("done", 0, **shared, status="completed", summary=[thought]),
        item("added", 1, **spoken, status="in_progress", content=[]),
        at("content_part.added", **content, part={**text, "text": ""}),
        at("output_text.delta", **content, delta="Hel", logprobs=[]),
        at("output_text.delta", **content, delta="lo", logprobs=[]),
        at("output_text.done", **content, text="Hello", logprobs=[]),
        at("content_part.done", **content, part=text),
        item("done", 1, **spoken, status="completed", content=[text]),
        item("added", 2, **called, status="in_progress", arguments=""),
        at("function_call_arguments.delta", function, 2, delta='{"a":'),
        at("function_call_arguments.delta", function, 2, delta="1}"),
        at("function_call_arguments.done", function, 2, arguments='{"a":1}', name="run"),
        item("done", 2, **called, status="completed", arguments='{"a":1}'),
    ]
    assert response["status"] == "completed"
    assert response["usage"] == msgspec.to_builtins(USAGE)
    assert [entry["status"] for entry in response["output"]] == ["completed"] * 3


def test_reasoning_is_shown_only_where_a_summary_was_asked_for() -> None:
    response, events = written([Reasoning("secret"), Text("a")], show_reasoning=False)
    assert [item["type"] for item in response["output"]] == ["message"]
    assert "secret" not in json.dumps(events)
    assert events[2]["output_index"] == 0


def test_reasoning_that_never_closed_is_incomplete() -> None:
    response, _ = written([Reasoning("on and on")])
    assert response["output"][0]["status"] == "incomplete"
    assert response["status"] == "completed"


def test_an_answer_that_was_cut_off_is_incomplete_with_the_reason() -> None:
    cut_off: list[list[AnswerEvent]] = [[Text("a")], call(0, "run", '{"a', closed=False)]
    for answer in cut_off:
        response, events = written(answer, "length")
        assert events[-1]["type"] == "response.incomplete"
        assert response["status"] == response["output"][-1]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_namespaced_tool_is_called_by_the_clients_names() -> None:
    response, events = written(call(0, "maps.look", "{}"))
    (item,) = response["output"]
    assert (item["namespace"], item["name"]) == ("maps.", "look")
    assert events[2]["item"]["namespace"] == "maps."


def test_a_custom_tool_gets_its_input_as_text() -> None:
    response, events = written(call(0, "patch", '{"input": "*** ', 'Begin\\n"}'))
    (item,) = response["output"]
    assert item["id"].startswith("ctc_")
    assert {k: v for k, v in item.items() if k != "id"} == {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_0",
        "name": "patch",
        "input": "*** Begin\n",
    }
    assert [event["type"] for event in events[2:-1]] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert events[3]["delta"] == events[4]["input"] == "*** Begin\n"
    assert written(call(0, "patch", "[1]"))[0]["output"][0]["input"] == "[1]"


def test_a_search_for_tools_has_no_events_of_its_arguments() -> None:
    response, events = written(call(0, "tool_search", '{"query":', '"maps"}'))
    (item,) = response["output"]
    assert item["type"] == "tool_search_call"
    assert (item["execution"], item["call_id"]) == ("client", "call_0")
    assert item["arguments"] == {"query": "maps"}
    assert [event["type"] for event in events[2:-1]] == [
        "response.output_item.added",
        "response.output_item.done",
    ]


@pytest.mark.parametrize("begun", [True, False])
def test_a_failure_is_one_terminal_event_with_what_there_was(begun: bool) -> None:
    out = writer()
    events = out.begin() + out.push(Text("par")) if begun else []
    before = len(events)
    events += out.fail(RequestError("it broke", status=500))
    kinds = [decoded(event)["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[before or 2 :] == ["response.failed"]
    assert [decoded(e)["sequence_number"] for e in events] == list(range(len(events)))
    response = decoded(events[-1])["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "it broke"}
    texts = [part["text"] for item in response["output"] for part in item["content"]]
    assert texts == (["par"] if begun else [])


@given(answers(), st.sampled_from(["stop", "length"]))
def test_fragments_make_no_difference_to_the_response(
    answer: list[AnswerEvent], reason: str
) -> None:
    one, other = written(answer, reason)[0], written(joined(answer), reason)[0]
    for response in (one, other):
        del response["id"], response["completed_at"]
        for item in response["output"]:
            del item["id"]
    assert one == other


@given(answers(), st.sampled_from(["stop", "length"]), st.booleans())
def test_the_official_accumulator_rebuilds_the_response_from_the_events(
    answer: list[AnswerEvent], reason: str, shown: bool
) -> None:
    response, events = written(answer, reason, show_reasoning=shown)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    seen: list[Any] = []
    for event in events:
        seen += state.handle_event(EVENT.validate_python(event))
    last = seen[-1].response
    rebuilt = [item.to_dict() for item in last.output]
    for item in rebuilt:
        item.pop("parsed_arguments", None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    assert rebuilt == response["output"]
    texts = [item["content"][0]["text"] for item in response["output"] if "content" in item]
    assert last.output_text == "".join(texts)
    snapshots = [e.snapshot for e in seen if e.type == "response.output_text.delta"]
    assert snapshots[-1:] == texts[-1:]
