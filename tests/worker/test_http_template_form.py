"""In which form a template gets tool calls, and what surrounds them, by templates that differ."""

from __future__ import annotations

import itertools

import pytest

from ds4_worker.http.prompt import replay
from ds4_worker.http.replay import Block
from ds4_worker.http.template import ChatTemplate
from ds4_worker.http.template_form import CallForm, TemplateForm, marked_calls

TAGS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}{{ m.content }}{% for t in m.tool_calls %}
{% if (loop.first and m.content) or not loop.first %}{{ '\\n' }}{% endif %}
{% set t = t.function %}<tool_call>
{"name": "{{ t.name }}", "arguments": {% if t.arguments is string %}{{ t.arguments }}
{%- else %}{{ t.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{{ tools }}"""
PARAMETERS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for t in m.tool_calls or [] %}<tool_call>
<function={{ t.function.name }}>
{% for name, value in t.function.arguments | items %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{{ tools }}"""
CONCATENATED = """{% for m in messages %}
{%- if m['role'] == 'assistant' and m['content'] is none %}<|tools|>
{%- for t in m['tool_calls'] %}{{ '<|call|>' + t['function']['name'] + '\\n```json\\n'
    + t['function']['arguments'] + '\\n```<|end|>' }}{% endfor %}<|tools_end|><|eos|>
{%- elif m['role'] == 'assistant' %}{{ m['content'] }}<|eos|>
{%- else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}{{ tools }}"""
BRACKETS = """{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls is defined and m.tool_calls %}[TOOL_CALLS] [
{%- for t in m.tool_calls %}{% if t.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '{"name": "' + t.function.name + '", "arguments": ' + t.function.arguments | tojson }}
{{- ', "id": "' + t.id + '"}' }}{% if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- else %} {{ m.content }}</s>{% endif %}{% endfor %}{{ tools }}"""
BARE = """{% for m in messages %}<|header|>{{ m.role }}<|/header|>\\n\\n
{%- if m.tool_calls %}{% set t = m.tool_calls[0].function %}{"name": "{{ t.name }}", "parameters":
{{- t.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}<|eot|>
{%- endfor %}{{ tools }}"""
NO_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def form_of(source: str) -> TemplateForm:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").form


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TAGS, CallForm(True, "", False)),
        (PARAMETERS, CallForm(True, "", False)),
        (CONCATENATED, CallForm(False, None, False)),
        (BRACKETS, CallForm(True, "", True)),
        (BARE, CallForm(True, "", False)),
        (NO_TOOLS, None),
        (NO_TOOLS + "{{ tools }}", None),
        ("{{ tools }}{{ messages[0].tool_calls }}", None),
        ("{{ tools }}{% endif %}", None),
    ],
)
def test_each_template_gets_calls_in_the_form_it_renders(
    source: str, expected: CallForm | None
) -> None:
    assert form_of(source).calls == expected


def test_arguments_that_are_no_object_are_passed_on_as_text() -> None:
    form = CallForm(True, "", False)
    assert form.arguments('{"a": [1]}') == {"a": [1]}
    assert form.arguments('{"a": ') == '{"a": '
    assert form.arguments("5") == "5"
    assert form.arguments("[" * 100_000) == "[" * 100_000
    assert CallForm(False, "", False).arguments('{"a": 1}') == '{"a": 1}'


def test_a_short_id_is_the_same_for_a_call_and_its_result() -> None:
    form = CallForm(True, "", True)
    assert len(form.id("call_0123")) == 9
    assert form.id("call_0123") == form.id("call_0123") != form.id("call_0124")
    assert form.id("abcdefghi") == "abcdefghi"


@pytest.mark.parametrize(
    ("source", "count"),
    [(BARE, 1), *itertools.product([TAGS, PARAMETERS, CONCATENATED, BRACKETS], [1, 2, 3])],
)
def test_a_block_replaces_exactly_what_the_template_wrote_for_the_calls(
    source: str, count: int
) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    form = template.form
    assert form.calls is not None
    names = [f"mark{i}" for i in range(count)]

    user = {"role": "user", "content": "<tool_call> [TOOL_CALLS] mark"}
    text = template.render([user, form.calls.message("", marked_calls(names))])
    replaced = replay(text, names, Block("SAMPLED"), form)
    assert replaced is not None
    without = template.render([user, {"role": "assistant", "content": "SAMPLED"}])
    assert replaced.replace(" ", "") == without.replace(" ", "")


def test_a_block_is_not_put_where_the_template_wrote_something_else() -> None:
    template = ChatTemplate(TAGS, bos_token="", eos_token="")
    marks = ["mark"]
    wrong = [
        '<tool_call>\n{\'name\': "mark", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "mark", "arguments": {"a": 1}}\n</tool_call>',
        "mark",
        "",
    ]
    right = '<tool_call>\n{"name": "mark", "arguments": {}}\n</tool_call>'
    assert replay(f"a{right}b", marks, Block("S"), template.form) == "aSb"
    assert replay(f"a{right}b{right}", marks, Block("S"), template.form) is None
    for text in wrong:
        assert replay(text, marks, Block("S"), template.form) is None


def test_whitespace_before_a_block_is_the_sampled_one_after_text() -> None:
    template = ChatTemplate(TAGS, bos_token="", eos_token="")
    form = template.form.calls
    assert form is not None
    text = template.render([form.message("said", marked_calls(["mark"]))])
    replaced = replay(text, ["mark"], Block("S", "\n\n\n", after_text=True), template.form)
    assert replaced is not None
    assert "said\n\n\nS" in replaced


def test_probing_asks_each_question_once() -> None:
    template = ChatTemplate(TAGS, bos_token="", eos_token="")
    assert template.form.calls is template.form.calls
    assert template.form.surroundings(2) is template.form.surroundings(2)
