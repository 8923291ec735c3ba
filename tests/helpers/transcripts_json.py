"""Answers in the syntaxes that write calls as JSON."""

from __future__ import annotations

from helpers.transcript import NOW, PARIS, Transcript

_HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

TRANSCRIPTS = [
    # --- Hermes ---
    Transcript(
        case="hermes",
        what="reasoning, text, call",
        answer=f"<think>\nI need the weather.\n</think>\n\nLet me look.\n\n{_HERMES}",
        reasoning="I need the weather.",
        content="Let me look.",
        calls=[PARIS],
        block=_HERMES,
    ),
    Transcript(
        case="hermes",
        what="parallel",
        answer=f'{_HERMES}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n',
        calls=[PARIS, NOW],
        block=f'{_HERMES}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
    ),
    Transcript(
        case="hermes",
        what="arguments first",
        answer='<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        calls=[PARIS],
        whole=True,
    ),
    Transcript(
        case="hermes",
        what="arguments in a string",
        answer='<tool_call>{"name":"get_weather",'
        '"arguments":"{\\"city\\": \\"Paris\\"}"}</tool_call>',
        calls=[PARIS],
        whole=True,
    ),
    Transcript(
        case="hermes",
        what="every kind of JSON",
        answer='<tool_call>{"name": "get_weather", "arguments": '
        '{"city" : "a\\"b\\\\\\u00e9\\ud83d\\ude00\n", "days": -1.50e+3, "x": [ ], "y": { }, '
        '"z": [1, {"q": null}, true, false]} , "id": 7}</tool_call>',
        calls=[
            (
                "get_weather",
                '{"city":"a\\"b\\\\\\u00e9\\ud83d\\ude00\\n","days":-1.50e+3,"x":[],"y":{},'
                '"z":[1,{"q":null},true,false]}',
                True,
            )
        ],
        whole=True,
    ),
    Transcript(
        case="hermes",
        what="a tool of another request",
        answer='Hm.\n<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        content='Hm.\n<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    ),
    Transcript(
        case="hermes",
        what="no JSON",
        answer="Use <tool_call> to call.</tool_call> ",
        content="Use <tool_call> to call.</tool_call> ",
    ),
    Transcript(
        case="hermes",
        what="broken inside the arguments",
        answer='<tool_call>{"name": "get_weather", "arguments": {"city": "P",,}}</tool_call>',
        calls=[("get_weather", '{"city":"P",', False)],
        content=",}}</tool_call>",
    ),
    Transcript(
        case="hermes",
        what="cut off",
        answer='<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        calls=[("get_weather", '{"city":"Par', False)],
    ),
    Transcript(
        case="hermes",
        what="stopped before the closer",
        answer='<tool_call>\n{"name": "now", "arguments": {}}\n',
        calls=[NOW],
        whole=True,
    ),
    Transcript(
        case="hermes",
        what="something else in place of the closer",
        answer='<tool_call>\n{"name": "now", "arguments": {}}\n</tool',
        calls=[("now", "{}", False)],
        content="</tool",
    ),
    Transcript(
        case="hermes",
        what="cut off before its name",
        answer='Ok \n<tool_call>\n{"name": "get_w',
        content='Ok \n<tool_call>\n{"name": "get_w',
    ),
    Transcript(
        case="hermes",
        what="a good call after a bad one",
        answer=f"<tool_call>?</tool_call>\n{_HERMES}",
        content="<tool_call>?</tool_call>",
        calls=[PARIS],
        block=_HERMES,
    ),
    Transcript(
        case="hermes-spelled",
        what="delimiters that are no tokens",
        answer=f"<tool_cal {_HERMES} done",
        content="<tool_cal done",
        calls=[PARIS],
        block=_HERMES,
    ),
    # --- Llama ---
    Transcript(
        case="llama",
        what="call",
        answer='{"name": "get_weather", "parameters": {"city": "Paris"}}',
        calls=[PARIS],
        whole=True,
    ),
    Transcript(
        case="llama",
        what="python tag and parallel calls",
        answer='<|python_tag|>{"type": "function", "name": "get_weather", '
        '"parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        calls=[PARIS, NOW],
        whole=True,
    ),
    Transcript(
        case="llama",
        what="an answer in JSON",
        answer='{"temperature": 20, "name": "Paris"}\nDone.',
        content='{"temperature": 20, "name": "Paris"}\nDone.',
    ),
    Transcript(
        case="llama",
        what="JSON later in the answer",
        answer='See {"name": "now", "parameters": {}}',
        content='See {"name": "now", "parameters": {}}',
    ),
    Transcript(
        case="llama",
        what="python",
        answer="<|python_tag|>print(1)",
        content="<|python_tag|>print(1)",
    ),
    Transcript(
        case="llama",
        what="text after a call",
        answer='{"name": "now", "parameters": {}}; \nthen',
        calls=[NOW],
        content="; \nthen",
        block='{"name": "now", "parameters": {}}',
    ),
    # --- Mistral ---
    Transcript(
        case="mistral",
        what="list",
        answer='Ok.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, '
        '"id": "abcdefghi"}, {"name": "now", "arguments": {}}]',
        content="Ok.",
        calls=[PARIS, NOW],
        block='[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, '
        '"id": "abcdefghi"}, {"name": "now", "arguments": {}}]',
    ),
    Transcript(
        case="mistral",
        what="names, with reasoning",
        answer='[THINK]hm[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
        "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
        reasoning="hm",
        calls=[PARIS, NOW],
        block='[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
        "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
    ),
    Transcript(
        case="mistral",
        what="a name directly before its arguments",
        answer='[TOOL_CALLS]get_weather{"city": "Paris"}',
        calls=[PARIS],
        whole=True,
    ),
    Transcript(
        case="mistral",
        what="a list that breaks after a call",
        answer='[TOOL_CALLS][{"name": "now", "arguments": {}}, oops',
        calls=[NOW],
        content=", oops",
        block='[TOOL_CALLS][{"name": "now", "arguments": {}}',
    ),
    Transcript(
        case="mistral",
        what="unknown name",
        answer="[TOOL_CALLS]rm[ARGS]{}",
        content="[TOOL_CALLS]rm[ARGS]{}",
    ),
]
