"""The page with a real model behind it, over the death of its worker."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from helpers import stack
from helpers.browser import chromium

DONE = "document.querySelector('.answer:last-of-type')?.getAttribute('aria-busy') === 'false'"
SETTINGS = {"temperature": "0", "max_tokens": "100"}


@pytest.mark.timeout(180)
def test_a_conversation_goes_on_with_the_next_worker(manifest: Path) -> None:
    port = stack.free_port()
    url = f"http://127.0.0.1:{port}/"
    with chromium() as browser:
        with stack.worker(manifest, port) as worker:
            tab = browser.open(url)
            tab.run(f"localStorage.setItem('ds4.settings', {json.dumps(json.dumps(SETTINGS))})")
            tab.go(url)
            tab.wait("document.querySelector('#model').textContent")
            tab.click("#message")
            tab.type("Write a very long story about the sea.")
            tab.press("Enter")
            tab.wait("document.querySelector('.answer .markdown')?.innerText.length > 40")
            worker.stop(signal.SIGKILL)
        with stack.worker(manifest, port):
            tab.wait("document.querySelector('.answer .trouble')")
            assert "broke off" in tab.text(".answer .trouble")
            begun = tab.text(".answer .markdown")
            assert len(begun) > 40
            tab.click(".answer .foot button:last-of-type")
            tab.wait(f"{DONE} && !document.querySelector('.answer .trouble')")
            # The same weights and temperature 0: the same story, to its end.
            assert tab.text(".answer .markdown").startswith(begun.rsplit("\n", 1)[0][:40])
            assert "100 tokens" in tab.text(".answer .pace")
            tab.click("#tab-status")
            tab.wait("document.querySelector('.badge.good')?.innerText === 'alive'")
            assert "100 tokens" in tab.text(".board")
