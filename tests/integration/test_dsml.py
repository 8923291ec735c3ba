"""A model with random weights that writes DSML because a grammar makes it: owner, worker, HTTP."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from ds4_common.gguf import LogicalModel
from ds4_common.tokenizer.build import build_blob
from ds4_common.tokenizer.encoder import Tokenizer
from helpers import stack
from helpers.dsml_model import ASSISTANT, BOS, DSML, EOS, MARKS, USER, write_dsml_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Zürich <&>"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "hours": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days", "hours"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ASK: Any = [{"role": "user", "content": "Which <think> is this?"}]
THINKING = {"type": "enabled", "budget_tokens": 12}
END_THINK, BAR = MARKS.index("</think>"), MARKS.index(DSML)


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    """In a folder short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_dsml_model(Path(folder) / "m.gguf")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Iterator[Tokenizer]:
    with LogicalModel.open(path) as model:
        made = Tokenizer(build_blob(model.metadata))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(path: Path) -> Iterator[OpenAI]:
    port = stack.free_port()
    with stack.owner(path, path.parent), stack.worker(path.parent / "w", port):
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as made:
            yield made


def check(arguments: str) -> dict[str, Any]:
    values = json.loads(arguments)
    assert list(values) == ["city", "days", "hours"]
    assert values["city"] in SCHEMA["properties"]["city"]["enum"]
    assert 1 <= values["days"] <= 99
    assert 1 <= len(values["hours"]) <= 3
    assert {type(hour) for hour in values["hours"]} == {bool}
    return dict(values)


@pytest.mark.parametrize("thinking", [False, THINKING], ids=["direct", "thinking"])
@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_streams_and_is_what_the_tokens_say(
    seed: int, thinking: Any, client: OpenAI, tokenizer: Tokenizer
) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    stream = client.chat.completions.create(
        model="", messages=ASK, tools=TOOLS, tool_choice=named, temperature=2, seed=seed,
        parallel_tool_calls=False, max_tokens=800, stream=True,
        extra_body={"thinking": thinking, "return_token_ids": True},
    )  # fmt: skip
    ids: list[int] = []
    prompt: list[int] = []
    fragments: list[str] = []
    reasoning, reason = "", None
    for event in stream:
        prompt = (event.model_extra or {}).get("prompt_token_ids", prompt)
        for choice in event.choices:
            ids += (choice.model_extra or {}).get("token_ids", ())
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
            reason = choice.finish_reason or reason
            assert not (choice.delta.content or "").strip()
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.function is not None
                    assert call.function.name == "weather"
                elif call.function is not None and call.function.arguments:
                    assert BAR in ids  # fragments come while the block is being written
                    fragments.append(call.function.arguments)
    assert reason == "tool_calls"
    assert len(fragments) > 3
    values = check("".join(fragments))

    text = b"".join(map(tokenizer.token_bytes, prompt)).decode()
    assert text.startswith(f"{BOS}## Tools\n\n")
    assert prompt.count(MARKS.index(BOS)) == 1
    opening = "<think>" if thinking else "</think>"
    assert text.endswith(f"{USER}Which <think> is this?{ASSISTANT}{opening}")

    answer = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    head, found, block = answer.partition(f"<{DSML}tool_calls>")
    assert found
    if thinking:
        assert ids.count(END_THINK) == 1
        thought, _, space = head.partition("</think>")
        assert (reasoning, space.strip()) == (thought, "")
    else:
        assert (reasoning, head.strip()) == ("", "")
    assert block.startswith(
        f'\n<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">'
        f'{values["city"]}</{DSML}parameter>\n<{DSML}parameter name="days" string="false">'
        f'{values["days"]}</{DSML}parameter>\n<{DSML}parameter name="hours" string="false">['
    )
    assert block.endswith(
        f"]</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>"  # nothing may follow it
    )


def test_the_next_turn_holds_the_block_as_it_was_sampled(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    body: Any = {"return_token_ids": True, "thinking": THINKING}
    reply = client.chat.completions.create(
        model="", messages=ASK, tools=TOOLS, tool_choice="required", temperature=2, seed=5,
        max_tokens=2000, extra_body=body,
    )  # fmt: skip
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert calls
    history = [
        *ASK,
        choice.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls),
    ]
    again = client.chat.completions.create(
        model="", messages=history, tools=TOOLS, temperature=0, max_tokens=4, extra_body=body
    )
    ids = (choice.model_extra or {})["token_ids"]
    prompt = (again.model_extra or {})["prompt_token_ids"]
    first = (reply.model_extra or {})["prompt_token_ids"]
    text, before, sampled = (
        b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
        for tokens in (prompt, first, ids)
    )
    assert text.startswith(before)
    begin = sampled.index(f"<{DSML}tool_calls>")
    after = f"{EOS}{USER}{'<tool_result>ok</tool_result>' * len(calls)}{ASSISTANT}<think>"
    assert text.endswith(sampled[begin:] + after)
    block = ids[ids.index(BAR) - 1 :]  # from `<`, before the mark
    tail = tokenizer.encode(after, add_special=False, parse_special=True)
    assert prompt[-len(block + tail) :] == block + tail
