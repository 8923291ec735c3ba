"""All APIs at once: nothing mixes, nothing leaks, and agents' own requests are understood."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ds4_worker.executor.api import ExecutorConfig
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY
from helpers.fake_server import FakeServer, fake_server
from helpers.scripted import Script, tool_model

VOLATILE = re.compile(r'(chatcmpl-|msg_|resp_|rs_)[0-9a-f]{24}|"(created|\w+_at)":\d+')


def request(index: int) -> tuple[str, dict[str, Any]]:
    """A streaming request of one of the three APIs; its answer is a function of `index`."""
    text, shared = f"question {index}", {"temperature": 0, "max_tokens": 12, "stream": True}
    turns = [{"role": "user", "content": text}]
    return (
        ("/v1/chat/completions", {"messages": turns, "ignore_eos": True, **shared}),
        ("/v1/messages", {"messages": turns, **shared}),
        ("/v1/responses", {"input": turns, **shared}),
    )[index % 3]


def answer(server: FakeServer, index: int) -> str:
    status, text = server.request("POST", *request(index))
    assert status == 200, text
    settled = VOLATILE.sub("", text)
    # How much of a prompt was cached depends on who came before.
    return re.sub(r'"(cache\w*|input)_tokens":\d+', "", settled)


def leave(server: FakeServer, index: int) -> None:
    """Asks, reads a little, and hangs up."""
    path, body = request(index)
    data = json.dumps({**body, "max_tokens": 40}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head.encode() + data)
        connection.recv(256)


def test_streams_of_all_apis_are_the_same_alone_and_among_others() -> None:
    config = ExecutorConfig(banks=4, context_tokens=96)
    executor = FakeExecutor(config, vocabulary=VOCABULARY)
    with fake_server(executor, queue=100) as server:
        alone = [answer(server, index) for index in range(24)]
        order = [*range(24)] * 2
        random.Random(1).shuffle(order)
        with ThreadPoolExecutor(16) as pool:
            gone = [pool.submit(leave, server, index) for index in range(24)]
            together = list(pool.map(lambda index: answer(server, index), order))
            for one in gone:
                one.result()
        assert len(set(alone)) == len(alone)
        assert together == [alone[index] for index in order]
    assert not server.failures


def test_further_apis_cost_a_starting_worker_nothing() -> None:
    code = (
        "import sys, ds4_worker.serve; "
        "late = ('responses', 'anthropic', 'openapi', 'tokens', 'stats', 'metrics'); "
        "print([m for m in late if f'ds4_worker.http.{m}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- requests in the shape in which agents send them

CODE_AGENT = {
    "model": "fake",
    "max_tokens": 32000,
    "temperature": 1,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: v=1; entry=cli"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>be brief</system-reminder>"},
                {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [
        {
            "name": "Read",
            "description": "reads",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        }
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_1"},
}
TERMINAL_AGENT = {
    "model": "fake",
    "instructions": "You help.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions/>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command":["ls"]}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "a\nb"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "runs",
            "strict": False,
            "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "edits",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "client_metadata": {"installation": "x"},
    "service_tier": None,
}


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/messages", CODE_AGENT, "message_stop"),
        ("/v1/responses", TERMINAL_AGENT, "response.completed"),
    ],
)
def test_what_agents_send_is_understood(path: str, body: dict[str, Any], end: str) -> None:
    with fake_server(Script("hm</think>ok"), model=tool_model()) as server:
        events = server.events(path, body)
    assert events[-1]["type"] == end
