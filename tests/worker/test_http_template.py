"""Chat templates: rendered as their authors expect, and harmless whoever wrote them."""

from __future__ import annotations

import asyncio
import re
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from ds4_common.errors import RequestError
from ds4_worker.http import template as module
from ds4_worker.http.template import ChatTemplate, run_with_deadline

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **extra: Any) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(messages, extra=extra)


# --- what templates rely on


def test_blocks_leave_no_blank_lines_behind() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\nU:{{ m.content }}\n"
    source += "    {% endif %}\n{% endfor %}\n{{ bos_token }}{{ eos_token }}"
    assert render(source) == "U:hi\n<s></s>"


def test_from_json_reads_what_tojson_writes() -> None:
    assert render("""{{ ('{"a": [1, "é"]}' | from_json).a[1] }}""") == "é"
    assert render("{{ {'a': [1, none]} | tojson | from_json | tojson }}") == '{"a": [1, null]}'
    for text in ("{", "9" * 5000, "[" * 100_000):
        with pytest.raises(RequestError):
            render(f"{{{{ '{text}' | from_json }}}}")
    with pytest.raises(RequestError, match="from_json: got int, expected a text"):
        render("{{ 1 | from_json }}")


def test_tojson_writes_what_python_writes() -> None:
    assert render("{{ {'b': 'é', 'a': [1, none]} | tojson }}") == '{"b": "é", "a": [1, null]}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_loop_controls_and_the_generation_tag_are_known() -> None:
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"


def test_concatenation_joins_anything() -> None:
    assert render("{{ 'a' ~ 1 ~ none ~ messages[0].content }}") == "a1Nonehi"


def test_the_date_is_available() -> None:
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))


def test_extra_values_reach_the_template_but_replace_nothing_of_ours() -> None:
    assert render("{{ thinking }}{{ bos_token }}", thinking=True, bos_token="x") == "True<s>"


# --- errors are the client's to read


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "object has no element 5"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{% if %}", "Expected an expression"),
        ("{{ undefined_function() }}", "is undefined"),
    ],
)
def test_an_error_in_a_template_is_a_refusal_with_its_message(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(source)
    assert (caught.value.status, caught.value.code) == (400, "template_error")


# --- hostile templates


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ (messages|attr('__class__')).__name__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_python_objects_are_out_of_reach(source: str) -> None:
    try:
        text = render(source)
    except RequestError:
        return
    assert not re.search(r"class|module|function|built-in|os", text)


@pytest.mark.parametrize(
    "source",
    ["{% do messages.append(1) %}", "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}"],
)
def test_the_conversation_cannot_be_changed(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10 ** 10000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'.zfill(10**9) }}",
        "{{ ('x' * 10**6).replace('x', 'x' * 10**6) }}",
        "{{ ('x' * 10**6) | replace('x', 'x' * 10**6) }}",
        "{{ ('\n' * 10**6) | indent(10**6) }}",
        "{{ range(10**9) | list }}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 10**6 }}{% endfor %}",
        # A long text many times over, in one step
        "{{ range(9999) | join('x' * 10**6) }}",
        "{{ (['x' * 10**6] * 10**4) | join }}",
        "{{ ''.join(['x' * 10**6] * 10**4) }}",
        "{{ (['x' * 10**6] * 10**4) | string | length }}",
        "{{ (['x' * 10**6] * 10**4) | upper | length }}",
        "{{ (['x' * 10**6] * 10**4) | tojson | length }}",
        "{{ ['x' * 10**6] * 10**4 }}",
        "{{ ('%s' * 10**4) % ((['x' * 10**6] * 10**4) | list) }}",
        "{{ ('%(a)s' * 10**4) % {'a': 'x' * 10**6} }}",
        "{{ ('{0}' * 10**4).format('x' * 10**6) }}",
        "{{ ('{a}' * 10**4).format_map({'a': 'x' * 10**6}) }}",
        "{{ '{:>10000000000}'.format('x') }}",
        "{{ '{:{}}'.format('x', 10**10) }}",
        "{{ ([[1] * 10**6] * 10**4) | sum(start=[]) | length }}",
        "{{ [1] | batch(10**9, 0) | list | length }}",
        "{{ [] | slice(10**9) | list | length }}",
        "{{ [1] | tojson(indent=10**10) }}",
    ],
)
def test_no_template_builds_gigabytes(source: str) -> None:
    available = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), available[1]))
    try:
        with pytest.raises(RequestError, match=r"too large|at most|exceeds|must be|expected|range"):
            render(source)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, available)


def test_filters_that_are_bounded_do_what_templates_expect() -> None:
    assert render("{{ [1, 'a'] | join(', ') }} {{ '-'.join(['a', 'b']) }}") == "1, a a-b"
    assert render("{{ messages | join(' ', attribute='content') }}") == "hi"
    assert render("{{ [1, 2] | sum }} {{ [{'n': 2}] | sum(attribute='n', start=1) }}") == "3 3"
    assert render("{{ [1, 2, 3] | batch(2, 0) | list }}") == "[[1, 2], [3, 0]]"
    assert render("{{ [1, 2, 3] | slice(2) | list }}") == "[[1, 2], [3]]"
    assert render("{{ '{:>4}|{}'.format('a', 1) }} {{ '%s-%s' % ('a', 1) }}") == "   a|1 a-1"
    assert render("{{ ' a ' | trim | upper }}{{ {'a': [1]} | string }}") == "A{'a': [1]}"
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


GROW = "{% set n = namespace(s=_) %}{% for i in range(40) %}{% set n.s = "  # doubles n.s
GROWN = " %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        # between argument and result
        "{{ {'a': 1} | tojson(indent=10**10) }}",
        "{{ [1, 2] | tojson(separators=(',' * 10**6, ':')) }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ '{:>2000000000}'.format('a') }}",
        "{{ '{a:>{w}}'.format_map({'a': 1, 'w': 10**9}) }}",
        "{{ ('{0}' * 10**5).format('x' * 10**6) }}",
        "{{ '%s' * 10**3 % (('a' * 10**6,) * 10**3) }}",
        "{{ ('\t' * 10**3).expandtabs(tabsize=10**8) }}",
        "{{ ('a' * 10**6).translate({97: 'b' * 10**3}) }}",
        "{{ ('x' * 10**6) | replace('', 'b' * 10**3) }}",
        "{{ 1.5 | round(10**9, 'floor') }}",
        "{{ strftime_now('%Y' * 5000000) }}",
        # numbers whose division takes minutes
        "{{ 7 ** 5000000 // 3 ** 4000000 }}",
        "{{ ('f' * 10**6) | int(0, 16) % (('e' * 10**6) | int(0, 16)) }}",
        # many references to one large value
        "{{ range(100000) | join('a' * 10**6) }}",
        "{{ [['a' * 10**3] * 10**3] * 10**3 }}",
        "{{ ([1] * 10**5) | map(attribute='x', default='a' * 10**7) | join }}",
        "{{ ','.join(['a' * 10**5] * 10**5) }}",
        "{{ ([range(1000) | list] * 10**5) | sum(start=[]) }}",
        # values that hold each other: exponential to write, compare and hash
        GROW.replace("_", "1") + "[n.s, n.s]" + GROWN + "{{ n.s }}",
        GROW.replace("_", "1") + "(n.s, n.s)" + GROWN + "{{ {n.s: 1} }}",
        GROW.replace("_", "1") + "{'a': n.s, 'b': n.s}" + GROWN + "{{ n.s == 1 }}",
        GROW.replace("_", "1") + "dict(a=n.s, b=n.s)" + GROWN,
        GROW.replace("_", "1") + "namespace(a=n.s, b=n.s)" + GROWN + "{{ n.s }}",
        GROW.replace("_", "'a'").replace(".s = ", ".s %}") + "{{ n.s }}{{ n.s }}{% endset" + GROWN,
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
        + GROW.replace("_", "'a'")
        + "f(n.s)"
        + GROWN,
        # many values, each of which would do
        "{% set n = namespace(s=[]) %}{% for i in range(10**4) %}"
        "{% set n.s = [n.s, 'a' * 10**7 ~ i] %}{% endfor %}",
    ],
)
def test_no_template_works_for_long_where_nothing_can_interrupt_it(source: str) -> None:
    with pytest.raises(RequestError, match=r"too large|unsafe|expected numbers|cannot be printed"):
        render(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a-%s-%d' % ('b', 2) }}{{ '{:>4}'.format('x') }}", "a-b-2   x"),
        ("{{ messages | map(attribute='content') | join(', ') }}", "hi"),
        ("{{ [1, 2, 3] | sum }}{{ [3, 1] | sort | join('-') }}", "61-3"),
        ("{{ 'abc' | replace('b', 'xx') }}{{ 'abab'.replace('a', '', 1) }}", "axxcbab"),
        ("{{ ' - '.join(messages | map(attribute='role')) }}", "user"),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }} {% endfor %}", "3 7 "),
        ("{% set x %}a{{ bos_token }}{% endset %}{{ x ~ (1, 'b') }}", "a<s>(1, 'b')"),
        ("{{ dict(a=1) | items | list }}{{ 2 ** 10 // 3 }}", "[('a', 1)]341"),
        ("{{ 'x' if 'user' in ('user', 'tool') else 'y' }}{{ 2.5 | round }}", "x2.0"),
    ],
)
def test_ordinary_templates_are_untouched_by_the_bounds(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
        "{{ 5 | dictsort }}",
        "{{ '\\ud800' }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    ],
)
def test_what_python_says_of_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(RequestError, match="refuses this conversation"):
        render(source)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_no_template_runs_for_ever() -> None:
    with pytest.raises(RequestError, match=r"ran for more than 0\.1 s"):
        asyncio.run(run_with_deadline(lambda: render(LOOP), seconds=0.1))


def test_the_loop_goes_on_while_a_template_renders() -> None:
    async def both() -> str:
        slow = asyncio.ensure_future(run_with_deadline(lambda: render(LOOP), seconds=60))
        quick = await run_with_deadline(lambda: render("{{ messages[0].content }}"))
        assert not slow.done()
        slow.cancel()
        return quick

    assert asyncio.run(both()) == "hi"


def test_a_rendering_that_nobody_waits_for_is_ended() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            render(LOOP)
        finally:
            ended.set()

    async def leave() -> None:
        waiting = asyncio.ensure_future(run_with_deadline(work, seconds=3600))
        await asyncio.to_thread(begun.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(leave())
    assert ended.wait(60)


def test_a_template_is_compiled_once_and_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds4_worker.http import sandbox

    made = []
    original = sandbox.make_environment

    def counting(limit: int) -> Any:
        made.append(limit)
        return original(limit)

    monkeypatch.setattr(sandbox, "make_environment", counting)
    template = ChatTemplate("{{ messages[0].content }}", bos_token="", eos_token="")
    template.warm().join()
    assert template.render(USER) == template.render(USER) == "hi"
    assert made == [module.MAX_CHARS]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "Expected an expression"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "SyntaxError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError"),
    ],
)
def test_a_template_that_does_not_compile_is_reported_by_the_first_request(
    source: str, message: str
) -> None:
    template = ChatTemplate(source, bos_token="", eos_token="")
    template.warm().join()
    with pytest.raises(RequestError, match=message):
        template.render(USER)
