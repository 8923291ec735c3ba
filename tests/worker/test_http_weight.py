"""Bodies that are too much work to decode are refused before anybody else waits for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_worker.http.weight import MAX_WEIGHT, _native
from helpers.fake_server import FakeServer, fake_server

HEAVY = 8
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='"\\,:[]{}aé'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='"\\,:[{a'), inner),
)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def weight(data: bytes, limit: int = 1 << 60) -> int:
    return int(_native().ds4_json_weight(data, len(data), HEAVY, limit))


def expected(value: Any) -> int:
    """Straight from the definition."""
    if isinstance(value, list):
        return HEAVY + max(0, len(value) - 1) + sum(map(expected, value))
    if isinstance(value, dict):
        names = HEAVY * len(value)
        return HEAVY + names + max(0, len(value) - 1) + sum(map(expected, value.values()))
    return 0


@given(JSON, st.booleans(), st.sampled_from([None, 2]))
def test_the_weight_is_that_of_the_values_whatever_their_texts_hold(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert weight(text.encode()) == expected(value)


@given(st.binary(max_size=200), st.integers(0, 50))
def test_any_bytes_have_a_weight_and_counting_ends_above_the_limit(data: bytes, limit: int) -> None:
    assert weight(data, limit) <= limit + HEAVY
    assert min(weight(data, limit), limit) == min(weight(data), limit)


def repeated(before: bytes, item: bytes, count: int, after: bytes) -> bytes:
    return before + b",".join([item] * count) + after


MANY = MAX_WEIGHT // HEAVY + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", repeated(b'{"prompt":[', b"1", MAX_WEIGHT + 2, b"]}")),
        ("completions", repeated(b'{"prompt":[', b"[1]", MANY, b"]}")),
        ("completions", repeated(b'{"prompt":"a","field nobody knows":[', b"{}", MANY, b"]}")),
        ("completions", repeated(b'{"prompt":"a","logit_bias":{', b'"1":1', MANY, b"}}")),
        ("chat/completions", repeated(b'{"messages":[', b"{}", MANY, b"]}")),
        ("responses", repeated(b'{"input":[', b"{}", MANY, b"]}")),
        ("messages", repeated(b'{"messages":[', b"{}", MANY, b"]}")),
        ("embeddings", repeated(b'{"input":[', b"[]", MANY, b"]}")),
    ],
)
def test_a_body_of_too_many_values_is_refused(server: FakeServer, path: str, body: bytes) -> None:
    status, answer = server.request("POST", f"/v1/{path}", body)
    assert status == 400
    assert "send fewer items" in answer["error"]["message"]


def test_a_long_text_is_no_value_however_it_looks(server: FakeServer) -> None:
    body = json.dumps({"prompt": '[{"a":[1,2' * 400_000}).encode()
    status, answer = server.request("POST", "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_million_token_ids_are_not_too_many(server: FakeServer) -> None:
    body = repeated(b'{"prompt":[', b"1", 1_000_000, b"]}")
    status, answer = server.request("POST", "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_schema_beyond_the_limit_is_refused_before_the_library_reads_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llguidance

    def unwanted(*arguments: object, **options: object) -> None:
        raise AssertionError("asked about a schema that is too long")

    monkeypatch.setattr(llguidance.LLMatcher, "grammar_from_json_schema", unwanted)
    body = {"prompt": "a", "guided_json": {"enum": ["x" * 1000] * 300}}
    status, answer = server.request("POST", "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_grammar")
    assert "expected at most" in answer["error"]["message"]
