"""Headless Chromium for tests of the page, over its debugging pipe: no driver, no package.

Owns: the process and its profile folder, and a `Tab` that acts as a person would (real mouse and
key events) and waits for conditions of the document. Tests that use it skip without a browser.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

DEADLINE_SECONDS = 30.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--mute-audio"),
    "--remote-debugging-pipe",
)
# The browser wants the pipe's ends as descriptors 3 and 4.
_EXEC_WITH_PIPES = """
import os, sys
ends = [os.dup(os.dup(os.dup(int(end)))) for end in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
}
_WAIT = """
new Promise((resolve) => {
  const look = () => { const found = (() => (%s))(); if (found) done(found); };
  const watch = new MutationObserver(look);
  const timer = setInterval(look, 20);
  const done = (found) => { watch.disconnect(); clearInterval(timer); resolve(found); };
  watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  look();
})
"""


class BrowserError(AssertionError):
    """The browser or the page did not do as told."""


class Browser:
    """One Chromium. `send` is the debugging protocol; events go to the tab they belong to."""

    def __init__(self, process: subprocess.Popen[bytes], reader: int, writer: int) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._last_id = 0
        self._lock = threading.Lock()
        self._replies: dict[int, SimpleQueue[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}  # by session
        self._contexts: list[str] = []
        threading.Thread(target=self._listen, name="browser", daemon=True).start()

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its result. Raises BrowserError."""
        reply: SimpleQueue[dict[str, Any]] = SimpleQueue()
        with self._lock:
            self._last_id += 1
            number = self._last_id
            self._replies[number] = reply
            message = {"id": number, "method": method, "params": params}
            if session:
                message["sessionId"] = session
            os.write(self._writer, json.dumps(message).encode() + b"\0")
        try:
            answer = reply.get(timeout=DEADLINE_SECONDS)
        except Empty:
            raise BrowserError(f"{method}: no answer in {DEADLINE_SECONDS:g} s") from None
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _listen(self) -> None:
        data = b""
        while piece := os.read(self._reader, 1 << 16):
            *messages, data = (data + piece).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._replies.pop(message["id"]).put(message)
                elif tab := self._tabs.get(message.get("sessionId", "")):
                    tab.hear(message)

    def open(self, url: str, *, width: int = 1100, height: int = 800, dark: bool = False) -> Tab:
        """A new tab with storage of its own."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        self._contexts.append(context)
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"])
        self._tabs[attached["sessionId"]] = tab
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.send(f"{domain}.enable")
        tab.look(width, height, dark=dark)
        tab.go(url)
        return tab

    def close_tabs(self) -> None:
        while self._contexts:
            self.send("Target.disposeBrowserContext", browserContextId=self._contexts.pop())
        self._tabs.clear()


class Tab:
    """One page. `troubles` collects exceptions, console errors and what the policy blocked."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.troubles: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def hear(self, message: dict[str, Any]) -> None:
        params = message["params"]
        if message["method"] == "Runtime.exceptionThrown":
            self.troubles.append(str(params["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.troubles.append(params["entry"]["text"])
        elif message["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def look(self, width: int, height: int, *, dark: bool = False, touch: bool = False) -> None:
        """The window's size in CSS pixels, and the colours that the person prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait(
            f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})"
        )

    def run(self, script: str) -> Any:
        """The value of an expression (awaited) in the page."""
        done = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            raise BrowserError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait(self, condition: str) -> Any:
        """The first true value of an expression."""
        for _ in range(3):
            try:
                return self.run(_WAIT % condition)
            except BrowserError as error:
                if "navigat" not in str(error) and "context" not in str(error):
                    raise BrowserError(f"waiting for {condition}: {error}") from error
        raise BrowserError(f"waiting for {condition}: the page keeps navigating")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Presses the mouse where the element is."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                **{"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1},
            )

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        name, code, text = _KEYS[key]
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        kind = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.send("Input.dispatchKeyEvent", **common, **kind)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        )


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser; skips the test where there is none."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    to_it, from_us = os.pipe()
    to_us, from_it = os.pipe()
    with tempfile.TemporaryDirectory(prefix="ds4-browser-") as folder:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", _EXEC_WITH_PIPES, str(to_it), str(from_it)),
                *(program, *_FLAGS, f"--user-data-dir={folder}"),
            ],
            pass_fds=(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        browser = Browser(process, to_us, from_us)
        try:
            yield browser
            browser.send("Browser.close")
        finally:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            os.close(from_us)
