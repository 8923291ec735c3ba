"""The syntax of a model is read off its chat template: short templates in each style."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.serving_rules import check_frontend
from ds4_common.tokenizer import layout
from ds4_common.tokenizer.pre_tokenizers import PreTokenizer
from ds4_common.tokenizer.vocabulary import Vocabulary
from ds4_owner.recipes.syntax import DSML_PREFIX, detect_syntax


def vocabulary(*texts: str, ends: tuple[str, ...] = ("<eos>",)) -> Vocabulary:
    """A vocabulary of control tokens; the first of `ends` is the end of sequence."""
    every = [text.encode() for text in (*ends, *texts)]
    return Vocabulary(
        kind=layout.KIND_BPE,
        pre=PreTokenizer(()),
        texts=every,
        types=bytes([layout.CONTROL] * len(every)),
        scores=array("f"),
        merges=(),
        ends=tuple(range(len(ends))),
        bos=-1,
        eos=0,
        unk=-1,
        pad=-1,
        add_bos=False,
        add_eos=False,
        add_space_prefix=False,
    )


CHATML = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
JSON_TAGS = (
    """{% if tools %}Answer with <tool_call>{"name": N, "arguments": {}}</tool_call>.{% endif %}"""
)
TEMPLATES: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any] | None]] = {
    "chatml": (CHATML, None, None),
    "json tags with wrapped thinking": (
        JSON_TAGS + "{{ '<think>\\n' + r.strip('\\n') + '\\n</think>\\n\\n' + c }}" + CHATML,
        {"syntax": pb.TOOL_TAGGED_JSON, "open": "<tool_call>", "close": "</tool_call>"},
        {
            "syntax": pb.REASONING_THINK_TAGS,
            "open": "<think>",
            "close": "</think>",
            "wrap_newlines": True,
            "assistant_open": "<|im_start|>assistant",
            "message_end": "<|im_end|>",
        },
    ),
    "function tags": (
        "{% if tools %}<tool_call>\n<function=f>\n<parameter=p>\nv\n</parameter>\n</function>\n"
        '</tool_call> {"arguments": 1}{% endif %}' + CHATML,
        {"syntax": pb.TOOL_FUNCTION_TAGS, "open": "<tool_call>", "wrap_newlines": True},
        None,
    ),
    "argument tags apart": (
        "<tool_call>{{ name }}\n{% for k, v in arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{{ '<think>' + r + '</think>' }}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        {"syntax": pb.TOOL_ARGUMENT_TAGS, "separator": "\n"},
        {"open": "<think>", "wrap_newlines": False, "assistant_open": "<|assistant|>"},
    ),
    "argument tags together": (
        "<tool_call>{{ name }}{% for k, v in arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>",
        {"syntax": pb.TOOL_ARGUMENT_TAGS, "separator": ""},
        None,
    ),
    "DSML with calls": (
        f"{{% set bar = '{DSML_PREFIX}' %}}{{{{ '<' + bar + 'tool_calls>' }}}}</think>"
        "{{ content + eos_token }}"
        "{% if add_generation_prompt %}<\uff5cUser\uff5c>{{ '<\uff5cAssistant\uff5c>' }}"
        "{{ '<think>' }}{% endif %}",
        {
            "syntax": pb.TOOL_DSML,
            "open": f"<{DSML_PREFIX}tool_calls>",
            "close": f"</{DSML_PREFIX}tool_calls>",
        },
        {
            "open": "<think>",
            "terminal_marker": f"<{DSML_PREFIX}tool_calls>",
            "assistant_open": "<\uff5cAssistant\uff5c>",
            "message_end": "<eos>",
            "wrap_newlines": False,
        },
    ),
    "DSML with functions": (
        f"{{% for c in message.tool_calls %}}<{DSML_PREFIX}function_calls>{{% endfor %}}",
        {"open": f"<{DSML_PREFIX}function_calls>"},
        None,
    ),
    "XTML": (
        "{{ '<|open|>think<|sep|>' + r + '<|close|>think<|sep|>' }}",
        {"syntax": pb.TOOL_XTML, "open": "<|open|>tools<|sep|>"},
        {"syntax": pb.REASONING_XTML_THINK, "open": "<|open|>think<|sep|>"},
    ),
    "recipient headers": (
        "{{ '<|start|>assistant to=self<|message|>' + r + '<|eom|>' }}<atem:function_calls>"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        {"syntax": pb.TOOL_RECIPIENT_ATEM, "close": "</atem:function_calls>"},
        {"syntax": pb.REASONING_RECIPIENT_HEADER, "assistant_open": "<|start|>assistant"},
    ),
    "bare JSON": (
        '{% if tools %}{"name": N, "parameters": P}{% endif %}'
        "<|start_header_id|>ipython<|end_header_id|>"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}",
        {"syntax": pb.TOOL_BARE_JSON, "open": "", "close": ""},
        None,
    ),
    "bracket JSON": (
        "[INST] {{ u }} [/INST][TOOL_CALLS]{{ calls | tojson }}",
        {"syntax": pb.TOOL_BRACKET_JSON, "open": "[TOOL_CALLS]", "separator": ""},
        None,
    ),
    "bracket JSON by name, with thinking": (
        "[INST]{{ u }}[/INST][THINK]{{ r }}[/THINK][TOOL_CALLS]{{ n }}[ARGS]{{ a }}",
        {"syntax": pb.TOOL_BRACKET_JSON, "separator": "[ARGS]"},
        {"open": "[THINK]", "close": "[/THINK]", "assistant_open": "[/INST]"},
    ),
    "harmony": (
        "<|start|>assistant<|channel|>analysis<|message|>{{ r }}<|end|>",
        {"syntax": pb.TOOL_HARMONY, "close": "<|call|>"},
        {"syntax": pb.REASONING_HARMONY, "close": "<|end|>"},
    ),
}


@pytest.mark.parametrize("style", TEMPLATES)
def test_a_template_tells_its_syntax(style: str) -> None:
    template, tools, reasoning = TEMPLATES[style]
    found = detect_syntax(template, vocabulary(ends=("<eos>", "<|im_end|>")))
    for got, wanted in ((found.tools, tools), (found.reasoning, reasoning)):
        assert (got is None) == (wanted is None)
        assert {name: getattr(got, name) for name in wanted or ()} == (wanted or {})


@pytest.mark.parametrize("style", TEMPLATES)
def test_what_is_found_is_a_valid_frontend(style: str) -> None:
    found = detect_syntax(TEMPLATES[style][0], vocabulary())
    frontend = pb.Frontend(tokenizer="tokenizer", tools=found.tools, reasoning=found.reasoning)
    resources = {"tokenizer": pb.Resource(id="tokenizer", kind="tokenizer")}
    check_frontend(frontend, resources)


@pytest.mark.parametrize("template", [None, "", "{{ messages }}", "Call <tool_call>."])
def test_without_known_markers_there_is_no_syntax(template: str | None) -> None:
    found = detect_syntax(template, vocabulary())
    assert (found.tools, found.reasoning) == (None, None)


def test_an_opener_that_the_vocabulary_lacks_is_left_out() -> None:
    template = TEMPLATES["bare JSON"][0]
    found = detect_syntax(template, vocabulary("<|python_tag|>"))
    assert found.tools is not None
    assert found.tools.open == "<|python_tag|>"


def test_an_opener_that_is_a_token_ends_reasoning_too() -> None:
    template = TEMPLATES["json tags with wrapped thinking"][0]
    for words, marker in ((vocabulary("<tool_call>"), "<tool_call>"), (vocabulary(), "")):
        found = detect_syntax(template, words)
        assert found.reasoning is not None
        assert found.reasoning.terminal_marker == marker


def test_the_end_of_a_frame_does_not_end_a_generation() -> None:
    words = vocabulary(ends=("<|eot|>", "<|eom|>"))
    assert detect_syntax(TEMPLATES["recipient headers"][0], words).ends(words) == (0,)
    assert detect_syntax(CHATML, words).ends(words) == (0, 1)


@given(st.text(max_size=200), st.sampled_from(sorted(TEMPLATES)), st.integers(0, 400))
def test_any_template_gives_a_valid_frontend(noise: str, style: str, cut: int) -> None:
    template = TEMPLATES[style][0]
    found = detect_syntax(template[:cut] + noise + template[cut:], vocabulary())
    frontend = pb.Frontend(tokenizer="tokenizer", tools=found.tools, reasoning=found.reasoning)
    check_frontend(frontend, {"tokenizer": pb.Resource(id="tokenizer", kind="tokenizer")})
