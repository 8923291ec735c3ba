"""Chat and text completions of a model that says what it is told."""

from __future__ import annotations

from typing import Any

from ds4_worker.executor.api import ExecutorConfig
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import EOS, VOCABULARY
from helpers.fake_server import FakeServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
PROMPT = list(b"[user]hi\n[assistant]")


def speaking(text: str, *, context_tokens: int = 64, banks: int = 2) -> FakeExecutor:
    """Says `text`, then ends. Prompts have to end with `]`."""
    script = [*text.encode(), EOS]

    def choose(history: list[int]) -> int:
        end = max(i for i, token in enumerate(history) if token == ord("]"))
        token: int = script[len(history) - 1 - end]
        return token

    config = ExecutorConfig(banks=banks, context_tokens=context_tokens)
    return FakeExecutor(config, vocabulary=VOCABULARY, choose=choose)


def error_of(server: FakeServer, path: str, body: object) -> tuple[int, Any]:
    status, reply = server.request("POST", path, body)
    assert set(reply) == {"error"}
    return status, reply["error"]
