"""The page in a real browser: a conversation as a person has it, from scripted answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds4_common.errors import RequestError
from helpers.browser import Browser, Tab
from helpers.scripted_chat import Answer, Script, called, said, scripted_chat, thought

DONE = "document.querySelector('.answer:last-of-type')?.getAttribute('aria-busy') === 'false'"
LAST = ".answer:last-of-type"


def open_page(browser: Browser, script: Script, **look: Any) -> Tab:
    tab = browser.open(f"http://127.0.0.1:{script.server.port}/", **look)
    tab.wait("document.querySelector('#model').textContent")
    return tab


def say(tab: Tab, text: str) -> None:
    tab.click("#message")
    tab.type(text)
    tab.press("Enter")


def test_an_answer_is_streamed_and_shown_as_markdown(browser: Browser) -> None:
    answer = Answer(said("# Ti", "tle\n\nSome **bo", "ld** text.\n\n```py\nx =", " 1\n```"))
    with scripted_chat(answer) as script:
        tab = open_page(browser, script)
        say(tab, "hello")
        tab.wait(DONE)
        assert tab.text(".question .text") == "hello"
        assert tab.text(f"{LAST} h1") == "Title"
        assert tab.text(f"{LAST} strong") == "bold"
        assert tab.text(f"{LAST} pre code") == "x = 1"
        assert "4 tokens" in tab.text(f"{LAST} .pace")
        assert "6 of 9 prompt tokens reused" in tab.text(f"{LAST} .pace")
        assert tab.troubles == []
    request = script.requests[0]
    assert request["messages"] == [{"role": "user", "content": "hello"}]
    assert (request["stream"], request["stream_options"]) == (True, {"include_usage": True})


def test_text_appears_while_the_answer_is_being_written(browser: Browser) -> None:
    with scripted_chat(Answer(said("one ", "two"), held=True)) as script:
        tab = open_page(browser, script)
        say(tab, "count")
        tab.wait("document.querySelector('.answer .markdown')?.innerText === 'one two'")
        assert tab.run("document.querySelector('.answer').getAttribute('aria-busy')") == "true"
        script.release()
        tab.wait(DONE)


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_ends_the_request_and_keeps_what_was_said(browser: Browser, by: str) -> None:
    with scripted_chat(Answer(said("half of it"), held=True)) as script:
        tab = open_page(browser, script)
        say(tab, "go")
        tab.wait("document.querySelector('.answer .markdown')?.innerText === 'half of it'")
        if by == "button":
            tab.click("#stop")
        else:
            tab.press("Escape")
        tab.wait(DONE)
        assert script.left.wait(10), "the server never saw the client go"
        assert tab.text(f"{LAST} .markdown") == "half of it"
        assert "Stopped" in tab.text(f"{LAST} .pace")


def test_markup_of_a_model_stays_text_and_bad_links_lead_nowhere(browser: Browser) -> None:
    evil = (
        "<img src=x onerror=alert(1)> <script>alert(2)</script>\n\n"
        "[a](javascript:alert(3)) [b](data:text/html,x) [c](/v1/models) [d](https://example.org/x)"
        "\n\n![e](https://example.org/p.png)\n\n```<b>\n</code><script>alert(4)</script>\n```"
    )
    with scripted_chat(Answer(said(evil))) as script:
        tab = open_page(browser, script)
        say(tab, "x")
        tab.wait(DONE)
        inside = f"{LAST} .markdown"
        assert tab.run(f"document.querySelectorAll('{inside} :is(img, script, b)').length") == 0
        links = (
            f"[...document.querySelectorAll('{inside} a')].map(a => [a.innerText, a.href, a.rel])"
        )
        rel = "noopener noreferrer"
        assert tab.run(links) == [
            ["d", "https://example.org/x", rel],
            ["e", "https://example.org/p.png", rel],
        ]
        assert all(f":{script.server.port}/" in url for url in tab.requests)
        assert tab.troubles == []


def test_reasoning_is_folded_once_the_answer_begins(browser: Browser) -> None:
    with scripted_chat(Answer(thought("I ", "ponder") + said("So."))) as script:
        tab = open_page(browser, script)
        say(tab, "why")
        tab.wait(DONE)
        fold = "document.querySelector('.answer details.reasoning')"
        assert tab.run(f"{fold}.open") is False
        assert tab.run(f"{fold}.querySelector('.markdown').textContent") == "I ponder"
        assert tab.text(f"{LAST} .body > .markdown") == "So."


def test_a_tool_call_is_shown_and_its_result_goes_back(browser: Browser) -> None:
    call = Answer(called("weather", '{"ci', 'ty":"Rome"}'), finish_reason="tool_calls")
    with scripted_chat(call, Answer(said("Sunny."))) as script:
        tab = open_page(browser, script)
        tab.click("#open-settings")
        tab.click("#settings textarea[name=tools]")
        tool = {"type": "function", "function": {"name": "weather"}}
        tab.type(json.dumps([tool]))
        say(tab, "weather?")
        tab.wait("document.querySelector('.results')")
        assert tab.text(".call-head code") == "weather"
        assert json.loads(tab.text(".call pre")) == {"city": "Rome"}
        tab.click(".results textarea")
        tab.type("27 C")
        tab.click(".results button")
        tab.wait("document.querySelector('.answer:last-of-type .markdown')?.innerText === 'Sunny.'")
        tab.wait(DONE)
    assert [request["tools"] for request in script.requests] == [[tool], [tool]]
    function = {"name": "weather", "arguments": '{"city":"Rome"}'}
    assert script.requests[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "27 C"},
    ]


def test_settings_become_request_fields_and_survive_a_reload(browser: Browser) -> None:
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7}
    with scripted_chat(Answer(said("a")), Answer(said("b"))) as script:
        tab = open_page(browser, script)
        tab.click("#open-settings")
        for name, value in {**wanted, "max_tokens": 9, "system": "Be brief."}.items():
            tab.click(f"#settings [name={name}]")
            tab.type(str(value))
        tab.run("document.querySelector('[name=thinking]').value = 'off'")
        say(tab, "one")
        tab.wait(DONE)
        tab.go(f"http://127.0.0.1:{script.server.port}/")
        assert tab.text(f"{LAST} .markdown") == "a"
        say(tab, "two")
        tab.wait("document.querySelectorAll('.answer').length === 2")
        tab.wait(DONE)
    first, second = script.requests
    assert {name: first[name] for name in wanted} == wanted
    assert (first["max_tokens"], first["think"]) == (9, False)
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: second[name] for name in wanted} == wanted
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]


def test_empty_settings_leave_everything_to_the_model(browser: Browser) -> None:
    with scripted_chat(Answer(said("a"))) as script:
        tab = open_page(browser, script)
        say(tab, "one")
        tab.wait(DONE)
    assert set(script.requests[0]) == {"messages", "stream", "stream_options"}


def test_an_answer_can_be_made_again_and_a_question_changed(browser: Browser) -> None:
    answers = [Answer(said(text)) for text in ("first", "second", "third")]
    with scripted_chat(*answers) as script:
        tab = open_page(browser, script)
        say(tab, "question")
        tab.wait(DONE)
        tab.click(f"{LAST} .foot button:last-of-type")
        tab.wait("document.querySelector('.answer .markdown').innerText === 'second'")
        tab.wait(DONE)
        tab.click(".question .foot button")
        tab.wait("document.activeElement.closest('.editor')")
        tab.type(" changed")
        tab.press("Enter")
        tab.wait("document.querySelector('.answer .markdown').innerText === 'third'")
    sent = [request["messages"] for request in script.requests]
    assert sent[0] == sent[1] == [{"role": "user", "content": "question"}]
    assert sent[2] == [{"role": "user", "content": "question changed"}]


def test_new_forgets_the_conversation(browser: Browser) -> None:
    with scripted_chat(Answer(said("a"), held=True)) as script:
        tab = open_page(browser, script)
        say(tab, "secret")
        tab.wait("document.querySelector('.answer .markdown')?.innerText === 'a'")
        tab.click("#clear")
        tab.wait("!document.querySelector('#welcome').hidden")
        assert script.left.wait(10)
        assert tab.run("localStorage.getItem('ds4.conversation')") is None
        assert tab.run("document.querySelectorAll('.answer, .question').length") == 0
        assert tab.run("document.querySelector('#stop').hidden")


def test_a_refusal_is_said_and_the_question_can_be_sent_again(browser: Browser) -> None:
    refusal = RequestError("the prompt has 70 tokens, the context holds 64", code="too_long")
    with scripted_chat(Answer([], refusal=refusal), Answer(said("fine"))) as script:
        tab = open_page(browser, script)
        say(tab, "long")
        tab.wait("!document.querySelector('#notice').hidden")
        assert "the context holds 64" in tab.text("#notice")
        tab.click(".log > .foot button")
        tab.wait(DONE)
        assert tab.run("document.querySelector('#notice').hidden")
    assert script.requests[0] == script.requests[1]


@pytest.mark.parametrize(
    ("answer", "said_so"),
    [
        (Answer(said("half"), failure="the engine failed"), "the engine failed"),
        (Answer(said("half"), broken=True), "its worker is gone"),
    ],
)
def test_an_answer_that_breaks_off_keeps_its_text_and_says_why(
    browser: Browser, answer: Answer, said_so: str
) -> None:
    with scripted_chat(answer, Answer(said("whole"))) as script:
        tab = open_page(browser, script)
        say(tab, "x")
        tab.wait(DONE)
        assert tab.text(f"{LAST} .markdown") == "half"
        assert said_so in tab.text(f"{LAST} .trouble")
        tab.click(f"{LAST} .foot button:last-of-type")
        tab.wait("document.querySelector('.answer .markdown')?.innerText === 'whole'")


def test_tools_that_are_no_json_are_refused_before_anything_is_sent(browser: Browser) -> None:
    with scripted_chat() as script:
        tab = open_page(browser, script)
        tab.click("#open-settings")
        tab.click("#settings textarea[name=tools]")
        tab.type("{")
        assert "Tools: " in tab.text("#tools-error")
        say(tab, "x")
        tab.wait("!document.querySelector('#notice').hidden")
        assert "Tools: " in tab.text("#notice")
    assert script.requests == []
