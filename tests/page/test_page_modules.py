"""What is pure in the page's scripts, under Node: markdown, events, chunks, settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers.node import Modules, ScriptError, modules

TAGS = {
    *("p", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "blockquote", "ul", "ol", "li", "pre"),
    *(
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "a",
        "em",
        "strong",
        "del",
        "code",
        "br",
        "span",
    ),
    None,  # the text of a tight list item
}
SAFE = ("http://", "https://", "mailto:")
MARKS = st.text(st.sampled_from(list("ab \n\t*_~`[]()<>!#>-+1.|:\\h")), max_size=60)
LINES = st.lists(
    st.sampled_from(
        ["", "a", "- a", "  - b", "1. c", "> q", "```", "    x", "| a |", "|---|", "# h", "---"]
    ),
    max_size=14,
).map("\n".join)


@pytest.fixture(scope="module")
def js() -> Iterator[Modules]:
    with modules() as running:
        yield running


def shown(js: Modules, text: str) -> Any:
    return js.call("markdown", text)


def walk(nodes: list[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        if isinstance(node, list):
            yield from walk(node[2:])


def words(node: Any) -> str:
    return node if isinstance(node, str) else "".join(map(words, node[2:]))


# --- markdown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a **b** _c_", ["a ", ["strong", {}, "b"], " ", ["em", {}, "c"]]),
        ("***x***", [["em", {}, ["strong", {}, "x"]]]),
        ("snake_case_name 2 * 3 * 4", ["snake_case_name 2 * 3 * 4"]),
        ("**open", ["**open"]),
        ("~one~ ~~two~~", ["~one~ ", ["del", {}, "two"]]),
        ("`a *b*` ``c`d``", [["code", {}, "a *b*"], " ", ["code", {}, "c`d"]]),
        ("one `never closed", ["one `never closed"]),
        (r"\*no\* \_no\_ \`", ["*no* _no_ `"]),
        ("one\ntwo\\\nthree", ["one", ["br", {}], "two", ["br", {}], "three"]),
        ("<b>x</b> &amp;", ["<b>x</b> &amp;"]),
    ],
)  # fmt: skip
def test_inline_marks(js: Modules, text: str, expected: Any) -> None:
    assert shown(js, text) == [["p", {}, *expected]]


@pytest.mark.parametrize(
    ("text", "label", "href"),
    [
        ("[a *b*](https://e.org/x_(y) 'title')", "a b", "https://e.org/x_(y)"),
        ("<https://e.org/a?b=c>", "https://e.org/a?b=c", "https://e.org/a?b=c"),
        ("see https://e.org/a(b).", "https://e.org/a(b)", "https://e.org/a(b)"),
        ("(https://e.org)", "https://e.org", "https://e.org/"),
        ("[m](mailto:a@e.org)", "m", "mailto:a@e.org"),
        ("![alt](https://e.org/p.png)", "alt", "https://e.org/p.png"),
        ("[x](<https://e.org>)", "x", "https://e.org/"),
    ],
)
def test_links(js: Modules, text: str, label: str, href: str) -> None:
    links = [n for n in walk(shown(js, text)) if isinstance(n, list) and n[0] == "a"]
    assert [(words(link), link[1]) for link in links] == [(label, {"href": href})]


@pytest.mark.parametrize(
    "url",
    [
        *(
            "javascript:alert(1)",
            "JaVaScRiPt:alert(1)",
            "java\nscript:alert(1)",
            "\x01javascript:x",
        ),
        *("data:text/html,<b>", "vbscript:x", "file:///etc/passwd", "blob:https://e.org/x"),
        *("/v1/models", "//e.org/x", "?q", "#top", "", "http:", "https://", "about:blank"),
    ],
)
def test_urls_that_a_page_must_not_link_to(js: Modules, url: str) -> None:
    assert js.call("safeUrl", url) is None
    assert not [n for n in walk(shown(js, f"[x]({url})")) if isinstance(n, list) and n[0] == "a"]


def test_blocks(js: Modules) -> None:
    text = "# A #\ntext\n## B\n***\n> q\n> - r\n\n~~~ js extra\nlet `x`\n~~~\n"
    assert shown(js, text) == [
        ["h1", {}, "A"],
        ["p", {}, "text"],
        ["h2", {}, "B"],
        ["hr", {}],
        ["blockquote", {}, ["p", {}, "q"], ["ul", {}, ["li", {}, [None, {}, "r"]]]],
        ["pre", {"language": "js"}, "let `x`"],
    ]


def test_lists_nest_start_and_hold_blocks(js: Modules) -> None:
    text = "3. a\n  - b\n     - c\n4. d\n   ```\n   x\n   ```\n- [x] e\n- [ ] f"
    inner: list[Any] = ["ul", {}, ["li", {}, [None, {}, "c"]]]
    middle: list[Any] = ["ul", {}, ["li", {}, [None, {}, "b"], inner]]
    assert shown(js, text) == [
        [
            "ol",
            {"start": 3},
            ["li", {}, [None, {}, "a"], middle],
            ["li", {}, [None, {}, "d"], ["pre", {"language": ""}, "x"]],
        ],
        [
            "ul",
            {},
            ["li", {"task": True}, [None, {}, "e"]],
            ["li", {"task": False}, [None, {}, "f"]],
        ],
    ]


def test_a_list_with_blank_lines_has_paragraphs(js: Modules) -> None:
    item = ["li", {}, ["p", {}, "a"]]
    assert shown(js, "- a\n\n- a") == [["ul", {}, item, item]]


CODE_B = ["code", {}, "b"]


def test_tables(js: Modules) -> None:
    text = "| a | `b` |\n|:-:|--:|\n| 1 \\| 2 | 3 | extra |\n| only |\n\nafter"
    table, after = shown(js, text)
    assert table == [
        "table",
        {},
        [
            *("thead", {}),
            ["tr", {}, ["th", {"align": "center"}, "a"], ["th", {"align": "right"}, CODE_B]],
        ],
        [
            *("tbody", {}),
            ["tr", {}, ["td", {"align": "center"}, "1 | 2"], ["td", {"align": "right"}, "3"]],
            ["tr", {}, ["td", {"align": "center"}, "only"], ["td", {"align": "right"}]],
        ],
    ]  # fmt: skip
    assert after == ["p", {}, "after"]


@pytest.mark.parametrize("text", ["a | b\ntext", "| a |\n| b |", "| a | b |\n|---|"])
def test_pipes_without_a_fitting_rule_are_no_table(js: Modules, text: str) -> None:
    assert [node[0] for node in shown(js, text)] == ["p"]


def test_code_that_a_stream_has_not_closed_yet_is_code(js: Modules) -> None:
    assert shown(js, "```py\nx = '*a*'\n# no heading") == [
        ["pre", {"language": "py"}, "x = '*a*'\n# no heading"]
    ]


def test_nesting_beyond_reason_is_text_and_costs_nothing(js: Modules) -> None:
    for text in (">" * 20000, "- " * 20000 + "a", "[" * 20000, "*" * 20001 + "a", "*a " * 20000):
        assert words(["", {}, *shown(js, text)])


PROPERTIES = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@PROPERTIES
@given(st.one_of(MARKS, LINES, st.text(max_size=40)))
@example("[a](javascript:alert(1))")
def test_any_text_gives_known_tags_safe_links_and_loses_no_letter(js: Modules, text: str) -> None:
    nodes = shown(js, text)
    for node in walk(nodes):
        if isinstance(node, list):
            assert node[0] in TAGS
            assert set(node[1]) <= {"href", "align", "start", "task", "language"}
            assert node[1].get("href", "http://").startswith(SAFE)
    if not set(text) & set("[<`\\#~|h"):  # whose syntax takes letters away
        letters = [c for c in text if c in "ab"]
        assert [c for c in words(["", {}, *nodes]) if c in "ab"] == letters


@PROPERTIES
@given(st.one_of(MARKS, LINES), st.one_of(MARKS, LINES))
def test_text_that_follows_leaves_all_but_the_last_block_as_it_was(
    js: Modules, text: str, more: str
) -> None:
    """What makes showing a growing answer cheap: only the end of it is ever made anew."""
    before, after = js.call("sources", text), js.call("sources", text + more)
    settled = len(before) - 1
    if settled > 0:
        kept = [a for a, b in zip(before[:settled], after, strict=False) if a == b]
        # A delimiter row may still make a table of the line before the last block.
        assert len(kept) >= settled - 1


# --- the stream


EVENTS = "event: error\r\ndata: a\r\n\r\n: comment\n\ndata:b\ndata: c\n\nid: 1\ndata\n\ndata: lost"


@PROPERTIES
@given(st.lists(st.integers(0, len(EVENTS)), max_size=8))
def test_any_split_of_a_stream_gives_the_same_events(js: Modules, cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(EVENTS)]
    pieces = [EVENTS[a:b] for a, b in pairwise(places)]
    assert js.call("events", pieces) == [
        {"event": "error", "data": "a"},
        {"event": "message", "data": "b\nc"},
        {"event": "message", "data": ""},
    ]


def test_chunks_add_up_to_a_message(js: Modules) -> None:
    def chunk(**delta: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}

    def call(index: int, **function: str) -> dict[str, Any]:
        identity = {"id": f"c{index}", "type": "function"} if "name" in function else {}
        return chunk(tool_calls=[{"index": index, **identity, "function": function}])

    chunks = [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="hm"),
        chunk(content="a"),
        chunk(content="b"),
        call(0, name="f", arguments=""),
        call(1, name="g", arguments=""),
        call(0, arguments='{"x":'),
        call(1, arguments="{}"),
        call(0, arguments="1}"),
        {"choices": [{"index": 1, "delta": {"content": "another choice"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"completion_tokens": 9}},
    ]
    message = js.call("addChunks", chunks)
    assert (message["content"], message["reasoning_content"]) == ("ab", "hm")
    assert (message["finish_reason"], message["usage"]) == ("tool_calls", {"completion_tokens": 9})
    assert [one["function"] for one in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"x":1}'},
        {"name": "g", "arguments": "{}"},
    ]
    sent = js.call("forRequest", message)
    assert set(sent) == {"role", "content", "reasoning_content", "tool_calls"}
    assert set(sent["tool_calls"][0]) == {"id", "type", "function"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (json.dumps({"error": {"message": "too long", "param": "messages"}}), "too long"),
        ("<html>Bad Gateway</html>", "HTTP 502"),
        ("null", "HTTP 502"),
        ('{"error": "words"}', "HTTP 502"),
    ],
)
def test_an_error_body_of_any_kind_has_a_message(js: Modules, body: str, message: str) -> None:
    assert js.call("errorOf", 502, body)["message"] == message


# --- settings and figures


def test_settings_become_fields_and_empty_ones_none(js: Modules) -> None:
    fields = {"temperature": "0", "top_p": " 0.5 ", "top_k": "", "min_p": "x", "seed": "7"}
    assert js.call("requestFields", {**fields, "thinking": "", "tools": ""}) == {
        "temperature": 0,
        "top_p": 0.5,
        "seed": 7,
    }
    assert js.call("requestFields", {"thinking": "on"}) == {"think": True}
    assert js.call("requestFields", {"thinking": "max"}) == {
        "think": True,
        "reasoning_effort": "max",
    }
    assert js.call("requestFields", {"tools": '[{"type":"function"}]'}) == {
        "tools": [{"type": "function"}]
    }


@pytest.mark.parametrize("tools", ["{", "{}", '"x"'])
def test_tools_that_are_no_array_are_an_error(js: Modules, tools: str) -> None:
    with pytest.raises(ScriptError, match="Tools: "):
        js.call("requestFields", {"tools": tools})


def test_figures_for_people(js: Modules) -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 93 << 20: "93 MiB", 3 << 40: "3.0 TiB"}
    assert {n: js.call("bytes", n) for n in sizes} == sizes
    times = {5.9: "5 s", 65: "1 min 5 s", 3720: "1 h 2 min", 90000: "1 d 1 h"}
    assert {n: js.call("duration", n) for n in times} == times
