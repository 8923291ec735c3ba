"""The page around the chat: key, loading, status, keyboard, sizes and colours. A real browser."""

from __future__ import annotations

import pytest

from helpers.browser import Browser, Tab
from helpers.fake_server import fake_server
from helpers.scripted_chat import Answer, said, scripted_chat

NAMED = "document.querySelector('#model').textContent === 'fake-model'"
CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const v = c[i] / 255;
    return sum + weight * (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0.99) return c;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.disabled || e.closest(':disabled') || !e.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${e.tagName}.${e.className}: ${ratio.toFixed(2)}`);
  }
  return poor;
})()
"""
TOO_WIDE = """
[...document.querySelectorAll('body *')].filter((e) => e.checkVisibility()
  && !e.closest('pre, .wide, svg, .hidden, .skip, button')
  && e.getBoundingClientRect().right > innerWidth + 1)
  .map((e) => `${e.tagName}.${e.className}`)
"""
UNNAMED = """
[...document.querySelectorAll('button, input, select, textarea, a')].filter((e) =>
  e.checkVisibility() && !e.innerText?.trim() && !e.ariaLabel && !e.labels?.length && !e.title)
  .map((e) => e.outerHTML)
"""


def page(browser: Browser, port: int, **look: int | bool) -> Tab:
    return browser.open(f"http://127.0.0.1:{port}/", **look)  # type: ignore[arg-type]


def test_a_key_is_asked_for_kept_for_the_tab_and_asked_again_when_wrong(browser: Browser) -> None:
    with fake_server(api_key="right") as server:
        tab = page(browser, server.port)
        tab.wait("document.querySelector('#key-dialog').open")
        for key in ("wrong", "right"):
            tab.wait("document.activeElement.id === 'key'")
            tab.type(key)
            tab.press("Enter")
            tab.wait(f"sessionStorage.getItem('ds4.key') === '{key}'")
            if key == "wrong":
                tab.wait("document.querySelector('#key-text').textContent.includes('API key')")
        tab.wait(NAMED)
        assert tab.run("localStorage.getItem('ds4.key')") is None
        tab.go(f"http://127.0.0.1:{server.port}/")
        tab.wait(NAMED)
        assert not tab.run("document.querySelector('#key-dialog').open")


def test_a_key_that_is_not_given_leaves_a_notice(browser: Browser) -> None:
    with fake_server(api_key="right") as server:
        tab = page(browser, server.port)
        tab.wait("document.querySelector('#key-dialog').open")
        tab.click("#key-cancel")
        tab.wait("document.querySelector('#notice').textContent.includes('API key')")


def test_the_page_waits_for_a_model_that_is_loading(browser: Browser) -> None:
    with fake_server(ready=False) as loading, fake_server() as other:
        loading.app.loading_detail = "loading, 40 %"
        tab = page(browser, loading.port)
        tab.wait("document.querySelector('#notice').textContent.includes('loading, 40 %')")
        loading.app.service = other.app.service
        tab.wait(NAMED)
        assert tab.run("document.querySelector('#notice').hidden")
        loading.app.service = None


def test_the_status_tab_shows_the_workers_figures(browser: Browser) -> None:
    class Gone:
        state, detail = "gone", "the owner is gone; serving on"

    with fake_server(owner=Gone(), pid=42) as server:
        body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}
        assert server.request("POST", "/v1/completions", body)[0] == 200
        tab = page(browser, server.port)
        tab.click("#tab-status")
        tab.wait("document.querySelector('.board')")
        board = tab.text(".board")
        for text in ("0 of 2 busy, 0 waiting", "0 of 32 held", "0 of 6 places", "5 tokens"):
            assert text in board
        assert "serving on" in board
        assert tab.text(".badge.warn") == "gone"
        assert tab.run("document.querySelectorAll('.banks span').length") == 2
        assert tab.troubles == []


@pytest.mark.parametrize("width", [360, 700, 1000, 1400])
def test_figures_have_room_beside_open_settings(browser: Browser, width: int) -> None:
    with fake_server() as server:
        tab = page(browser, server.port, width=width)
        tab.click("#tab-status")
        tab.wait("document.querySelector('.board')")
        tab.run("document.querySelector('#open-settings').click()")
        widths = "[...document.querySelectorAll('dd, .card p')].map((e) => e.offsetWidth)"
        assert min(tab.run(widths)) >= 90


def test_status_figures_grey_out_when_the_worker_is_away(browser: Browser) -> None:
    with fake_server() as server:
        tab = page(browser, server.port)
        tab.click("#tab-status")
        tab.wait("document.querySelector('.board')")
        service, server.app.service = server.app.service, None
        tab.wait("document.querySelector('.board.stale')")
        assert "loading" in tab.text("#status .trouble")
        server.app.service = service
        tab.wait("!document.querySelector('.board.stale')")


def test_status_is_polled_only_while_it_is_shown(browser: Browser) -> None:
    with fake_server() as server:
        tab = page(browser, server.port)
        tab.wait(NAMED)
        assert not any("/v1/stats" in url for url in tab.requests)


def test_everything_can_be_done_from_the_keyboard(browser: Browser) -> None:
    with scripted_chat(Answer(said("yes"))) as script:
        tab = page(browser, script.server.port)
        tab.wait(NAMED)
        assert tab.run("document.activeElement.id") == "message"
        tab.type("line one")
        tab.press("Enter", shift=True)
        tab.type("line two")
        tab.press("Enter")
        tab.wait("document.querySelector('.answer')?.getAttribute('aria-busy') === 'false'")
        tab.wait("document.activeElement.id === 'message'")
        tab.press("ArrowUp")
        tab.wait("document.activeElement.closest('.editor')")
        tab.press("Escape")
        tab.wait("!document.querySelector('.editor')")
        tab.run("document.querySelector('#tab-chat').focus()")
        tab.press("ArrowRight")
        tab.wait("!document.querySelector('#status').hidden && location.hash === '#status'")
        assert tab.run("document.activeElement.id") == "tab-status"
        tab.run("document.querySelector('#open-settings').focus()")
        tab.press("Enter")
        tab.wait("document.activeElement.name === 'system'")
        tab.press("Escape")
        tab.wait("document.activeElement.id === 'open-settings'")
    assert script.requests[0]["messages"][0]["content"] == "line one\nline two"


def test_focus_is_visible(browser: Browser) -> None:
    with fake_server() as server:
        tab = page(browser, server.port)
        tab.wait(NAMED)
        for _ in range(12):
            tab.press("Tab")
            style = tab.run(
                "(() => { const e = document.activeElement; const s = getComputedStyle(e);"
                " return [e.id || e.className || e.tagName, s.outlineStyle, s.outlineWidth]; })()"
            )
            assert style[0] in ("BODY", "message") or style[1:] == ["solid", "2px"], style


MARKDOWN = (
    "## Heading\n\nText with `code`, a [link](https://example.org/) and **weight**.\n\n"
    "| a | long column | another long column | and one more |\n|---|---|---:|:-:|\n"
    "| 1 | some words here | 2 | 3 |\n\n> quoted\n\n- [x] done\n- open\n\n```python\n"
    + "x = '"
    + "long " * 30
    + "'\n```\n\n"
    + "w" * 200
)


@pytest.mark.parametrize(
    ("size", "dark"), [((360, 700), True), ((800, 600), False), ((1280, 800), True)], ids=str
)
def test_nothing_overflows_and_every_text_can_be_read(
    browser: Browser, size: tuple[int, int], dark: bool
) -> None:
    with scripted_chat(Answer(said(MARKDOWN), finish_reason="length")) as script:
        tab = page(browser, script.server.port, width=size[0], height=size[1], dark=dark)
        tab.wait(NAMED)
        assert tab.run(CONTRAST) == []
        tab.type("question " * 12)
        tab.press("Enter")
        tab.wait("document.querySelector('.answer')?.getAttribute('aria-busy') === 'false'")
        for view, go in (
            ("chat", "0"),
            ("settings", "document.querySelector('#open-settings').click()"),
            (
                "status",
                "document.querySelector('#close-settings').click(), "
                "document.querySelector('#tab-status').click()",
            ),
        ):
            tab.run(go)
            if view == "status":
                tab.wait("document.querySelector('.board')")
            assert tab.run(CONTRAST) == [], view
            assert tab.run(TOO_WIDE) == [], view
            assert tab.run(UNNAMED) == [], view
            assert tab.run("document.documentElement.scrollWidth") == size[0], view
        assert tab.troubles == []
