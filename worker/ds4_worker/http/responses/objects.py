"""What `POST /v1/responses` answers with: items, events and the response itself, typed.

Owns: names, order and presence of fields, as OpenAI's server writes them; every event's
`sequence_number` follows its `type`. `writer.py` decides what is sent when.
"""

from __future__ import annotations

from typing import Any

import msgspec


class TextLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class OutputLogprob(TextLogprob):
    top_logprobs: list[TextLogprob]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[OutputLogprob] = []


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str = ""


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str = "in_progress"
    summary: list[SummaryText] = []


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", omit_defaults=True):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call", omit_defaults=True):
    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class SearchCallItem(msgspec.Struct, tag_field="type", tag="tool_search_call"):
    id: str
    status: str
    call_id: str
    arguments: dict[str, Any]
    execution: str = "client"


CallItem = FunctionCallItem | CustomCallItem | SearchCallItem
OutputItem = ReasoningItem | MessageItem | CallItem


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ReasoningEcho(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """The resource; what the client asked for is repeated in it."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningEcho = msgspec.field(default_factory=ReasoningEcho)
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


# --- events


class _Lifecycle(msgspec.Struct, tag_field="type"):
    sequence_number: int
    response: ResponseObject


class Created(_Lifecycle, tag="response.created"):
    pass


class InProgress(_Lifecycle, tag="response.in_progress"):
    pass


class Completed(_Lifecycle, tag="response.completed"):
    pass


class Incomplete(_Lifecycle, tag="response.incomplete"):
    pass


class Failed(_Lifecycle, tag="response.failed"):
    pass


class _OfItem(msgspec.Struct, tag_field="type"):
    sequence_number: int
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, tag="response.output_item.added"):
    pass


class ItemDone(_OfItem, tag="response.output_item.done"):
    pass


class _InItem(msgspec.Struct, tag_field="type"):
    sequence_number: int
    item_id: str
    output_index: int


class _OfContent(_InItem):
    content_index: int


class ContentAdded(_OfContent, tag="response.content_part.added"):
    part: OutputText


class ContentDone(_OfContent, tag="response.content_part.done"):
    part: OutputText


class TextDelta(_OfContent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[OutputLogprob]


class TextDone(_OfContent, tag="response.output_text.done"):
    text: str
    logprobs: list[OutputLogprob]


class _OfSummary(_InItem):
    summary_index: int


class SummaryAdded(_OfSummary, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryDone(_OfSummary, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryDelta(_OfSummary, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryTextDone(_OfSummary, tag="response.reasoning_summary_text.done"):
    text: str


class ArgumentsDelta(_InItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, tag="response.function_call_arguments.done"):
    arguments: str
    name: str


class CustomInputDelta(_InItem, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_InItem, tag="response.custom_tool_call_input.done"):
    input: str


ResponseEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | ContentAdded
    | ContentDone
    | TextDelta
    | TextDone
    | SummaryAdded
    | SummaryDone
    | SummaryDelta
    | SummaryTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)

_ENCODER = msgspec.json.Encoder()


def encode_event(event: ResponseEvent) -> bytes:
    """As OpenAI's server sends it. Clients of servers without `event:` lines ignore that line."""
    name = str(type(event).__struct_config__.tag)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _ENCODER.encode(event))
