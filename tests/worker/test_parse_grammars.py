"""Grammars of tool calls and structured answers, compiled by the library that enforces them, and
read back by the parsers of the same syntax."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import llguidance
import llguidance.numpy
import pytest
from msgspec import structs

from ds4_common.errors import RequestError
from ds4_worker.parse.events import Tool
from ds4_worker.parse.grammars import delimiter_ids, structured_grammar, tool_grammar
from helpers.answers import Case, TinyVocabulary
from helpers.syntaxes import BAR, CASES, TOOLS

EOS = 0  # the byte 0 ends an answer


class _Wrapped:
    """What llguidance asks of a tokenizer."""

    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, case: Case) -> None:
        vocabulary: TinyVocabulary = case.vocabulary
        self._vocabulary = vocabulary
        self.tokens = [vocabulary.token_bytes(t) for t in range(vocabulary.n_vocab)]
        self.tokens[EOS] = b"<eos>"
        special = {t for t in range(vocabulary.n_vocab) if vocabulary.is_control(t)}
        self.special_token_ids = [
            EOS,
            *sorted(special | set(delimiter_ids(case.frontend, vocabulary))),
        ]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def compiled_tokenizer(name: str) -> Any:
    case = CASES[name]
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Wrapped(case)), n_vocab=case.vocabulary.n_vocab
    )


def matcher(name: str, grammar: str) -> Any:
    tokenizer = compiled_tokenizer(name)
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        llguidance.LLMatcher.grammar_from_lark(grammar), tokenizer
    )
    assert not failed, (messages, grammar)
    found = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not found.is_error(), found.get_error()
    return found


def accepts(name: str, grammar: str, answer: str) -> bool:
    """Whether the whole answer is one that the grammar allows."""
    found = matcher(name, grammar)
    tokens = CASES[name].vocabulary.tokens(answer)
    allowed = int(found.validate_tokens(tokens)) == len(tokens)
    return allowed and bool(found.consume_tokens(tokens)) and bool(found.is_accepting())


def tools_of(name: str, tools: tuple[Tool, ...] = TOOLS, **options: Any) -> str:
    case = CASES[name]
    values: dict[str, Any] = {"required": True, "named": None, "parallel": True} | options
    return tool_grammar(case.frontend, case.vocabulary, tools, **values)


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_answer_of_a_tool_grammar_is_complete_calls(name: str) -> None:
    for seed in range(8):
        answer = walk(name, tools_of(name), seed)
        got = CASES[name].parse_tokens(answer)
        assert got.calls
        assert all(complete for *_, complete in got.calls)
        assert not got.content.strip()
        for function, arguments, _ in got.calls:
            schema = next(tool for tool in TOOLS if tool.name == function).parameters
            assert set(schema.get("required", ())) <= json.loads(arguments).keys()


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_named_tool_is_called_once_after_reasoning(name: str) -> None:
    grammar = tools_of(name, named="write.file", parallel=False, in_reasoning=True)
    for seed in range(4):
        got = CASES[name].parse_tokens(walk(name, grammar, seed), in_reasoning=True)
        assert [(function, complete) for function, _, complete in got.calls] == [
            ("write.file", True)
        ]


@pytest.mark.parametrize("name", sorted(CASES))
def test_free_text_is_an_answer_unless_a_call_is_required(name: str) -> None:
    free, required = tools_of(name, required=False), tools_of(name)
    answer = FREE.get(name, "Well, <b>yes</b>.")
    assert accepts(name, free, answer)
    assert not accepts(name, required, answer)
    assert accepts(name, free, CALL[name])
    assert accepts(name, required, CALL[name])


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_structured_answer_follows_its_schema_and_may_be_calls_instead(name: str) -> None:
    case = CASES[name]
    schema = (
        '%json {"type": "object", "properties": {"a": {"type": "string"}}, '
        '"additionalProperties": false}'
    )
    grammar = structured_grammar(case.frontend, case.vocabulary, schema, tools=TOOLS)
    begin, end = STRUCTURED.get(name, ("", ""))
    assert accepts(name, grammar, begin + '{"a": "<b> <tool_c <|x|>"}' + end)
    assert accepts(name, grammar, CALL[name])
    assert not accepts(name, grammar, f"{begin}No.{end}")
    alone = structured_grammar(case.frontend, case.vocabulary, schema)
    assert not accepts(name, alone, CALL[name])


def test_a_prompt_that_ends_inside_the_response_needs_no_opener() -> None:
    case = CASES["xtml"]
    grammar = structured_grammar(case.frontend, case.vocabulary, "/[0-9]+/", tools=TOOLS)
    assert accepts("xtml", grammar, "12<|close|>response<|sep|><|close|>message<|sep|>")
    assert accepts("xtml", grammar, "<|close|>response<|sep|>" + CALL["xtml"])
    inside = structured_grammar(
        case.frontend, case.vocabulary, "/[0-9]+/", tools=TOOLS, in_reasoning=True
    )
    assert not accepts("xtml", inside, "r<|close|>think<|sep|>12<|close|>response<|sep|>")


def test_reasoning_before_a_structured_answer_is_free_and_ends_with_its_token() -> None:
    case = CASES["hermes"]
    grammar = structured_grammar(case.frontend, case.vocabulary, "/[0-9]+/", in_reasoning=True)
    assert accepts("hermes", grammar, "a </thin> b\n</think>\n\n12")
    assert not accepts("hermes", grammar, "12")
    found = matcher("hermes", grammar)
    assert found.consume_tokens(case.vocabulary.spelled("</think>"))
    assert not found.is_accepting()
    assert found.validate_tokens(case.vocabulary.spelled("12")) == 2  # still reasoning


def test_a_literal_answer_is_no_delimiter() -> None:
    case = CASES["hermes"]
    grammar = structured_grammar(case.frontend, case.vocabulary, '%json {"type": "string"}')
    found = matcher("hermes", grammar)
    assert found.consume_tokens(case.vocabulary.spelled('"</think><tool_call>'))
    for token in delimiter_ids(case.frontend, case.vocabulary):
        assert found.validate_tokens([token]) == 0


def test_what_cannot_be_enforced_of_a_schema_is_left_to_the_model() -> None:
    hours = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    tool = Tool(name="now", parameters={"type": "object", "properties": {"hours": hours}})
    for arguments, allowed in (('{"hours": [1, 1]}', True), ('{"hours": ["1"]}', False)):
        answer = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
        assert accepts("hermes", tools_of("hermes", (tool,)), answer) == allowed


@pytest.mark.parametrize(
    ("extra", "key", "allowed"),
    [
        ({}, "a", True),
        ({}, "b", False),
        ({"additionalProperties": True}, "b", True),
        ({"properties": {}}, "b", True),
    ],
)
def test_only_named_parameters_are_written(extra: dict[str, Any], key: str, allowed: bool) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}} | extra
    answer = f'<tool_call>\n{{"name": "now", "arguments": {{"{key}": 1}}}}\n</tool_call>'
    tool = Tool(name="now", parameters=parameters)
    assert accepts("hermes", tools_of("hermes", (tool,)), answer) == allowed


def test_blanks_between_arguments_are_bounded() -> None:
    begin = '<tool_call>\n{"name": "get_weather", "arguments": {"city"'
    found = matcher("hermes", tools_of("hermes"))
    tokens = CASES["hermes"].vocabulary.tokens(begin + " " * 100)
    assert found.validate_tokens(tokens) < len(tokens)


def test_a_model_without_syntax_cannot_be_made_to_call() -> None:
    case = CASES["hermes"]
    plain = structs.replace(case.frontend, tools=None)
    with pytest.raises(RequestError, match="no syntax for calls"):
        tool_grammar(plain, case.vocabulary, TOOLS, required=True, named=None, parallel=True)
    with pytest.raises(RequestError, match="no tool of that name"):
        tools_of("hermes", named="nothing")


# A call of get_weather for Paris as its grammar lays it out, a free answer in its frame where there
# is one, and what stands around a structured one.
CALL = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "hermes-spelled": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
    "</tool_call>",
    "qwen": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "</tool_call>",
    "dsml": f'<{BAR}tool_calls>\n<{BAR}invoke name="get_weather">\n'
    f'<{BAR}parameter name="city" string="true">Paris</{BAR}parameter>\n'
    f"</{BAR}invoke>\n</{BAR}tool_calls>",
    "xtml": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "recipient": ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">'
    '\n<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "llama": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}',
}
STRUCTURED = {
    "xtml": ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    "recipient": (" to=user<|message|>", ""),
    "harmony": ("<|channel|>final<|message|>", ""),
}
FREE = {name: f"{begin}Well.{end}" for name, (begin, end) in STRUCTURED.items()}
# Closers that no token spells: a walk would hardly hit them.
SPELLED_CLOSERS = {"qwen": "\n</parameter>\n", "recipient": "</atem:parameter>\n"}


def walk(name: str, grammar: str, seed: int) -> list[int]:
    """An answer drawn at random, steered to its end: what closes something comes first."""
    found = matcher(name, grammar)
    vocabulary = CASES[name].vocabulary
    draw = random.Random(seed)
    mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary.n_vocab)
    answer: list[int] = []
    planned: list[int] = []
    while not found.is_stopped():
        llguidance.numpy.fill_next_token_bitmask(found, mask)
        bits = mask[0].view("uint8")
        allowed = [t for t in range(vocabulary.n_vocab) if bits[t // 8] >> (t % 8) & 1]
        if allowed == [EOS] or (EOS in allowed and draw.random() < 0.5):
            break
        allowed = [t for t in allowed if t != EOS]
        if not planned and len(allowed) > 100 and draw.random() < 0.1:
            planned = vocabulary.tokens(SPELLED_CLOSERS.get(name, ""))
        ending = [t for t in allowed if t >= 256 or t in b'"}]</\n>']
        printable = [t for t in allowed if 32 <= t < 127] or allowed
        hurried = ending and draw.random() < min(0.95, 0.3 + len(answer) / 400)
        token = draw.choice(ending if hurried else printable)
        if planned and (next_ := planned.pop(0)) in allowed:
            token = next_
        assert found.consume_token(token)
        assert not found.is_error()
        answer.append(token)
        assert len(answer) < 5_000
    return answer
