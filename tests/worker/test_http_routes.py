"""Paths, keys, origins and metrics: what is around the answers."""

from __future__ import annotations

from helpers.completions import CHAT, HELLO, PROMPT, TEXT, error_of, speaking
from helpers.fake_server import fake_server


def test_health_and_models_tell_what_is_served() -> None:
    with fake_server() as server:
        status, health = server.request("GET", "/health")
        assert (status, health["status"], health["model"]) == (200, "ok", "fake-model")
        listed = server.request("GET", "/v1/models")[1]
        assert [model["id"] for model in listed["data"]] == ["fake-model", "fake"]
        assert server.request("GET", "/v1/models/fake")[1]["context_length"] == 64
        assert server.request("GET", "/v1/models/other")[0] == 404


def test_while_loading_only_health_tells_more_than_503() -> None:
    with fake_server(ready=False) as server:
        status, health = server.request("GET", "/health")
        assert (status, health["status"]) == (503, "loading")
        status, headers, body = server.exchange("POST", CHAT, HELLO)
        assert (status, headers["retry-after"]) == (503, "1")
        assert body["error"]["code"] == "loading"


def test_unknown_paths_and_methods_get_json_errors() -> None:
    with fake_server() as server:
        assert error_of(server, "/nowhere", {})[0] == 404
        status, headers, _ = server.exchange("GET", CHAT)
        assert (status, headers["allow"]) == (405, "POST")
        assert server.request("DELETE", "/health")[0] == 405


def test_an_api_key_guards_everything_but_health() -> None:
    with fake_server(speaking("a"), api_key="s3cret") as server:
        assert server.request("GET", "/health")[0] == 200
        for path in ("/v1/models", "/metrics"):
            assert server.request("GET", path)[0] == 401
        for wrong in ("Bearer x", "Bearer s3cre", "Basic s3cret", "s3cret", "Bearer é"):
            assert server.request("POST", CHAT, HELLO, Authorization=wrong)[0] == 401
        assert server.request("POST", CHAT, HELLO, Authorization="Bearer s3cret")[0] == 200
        assert server.request("POST", CHAT, HELLO, Authorization="bearer  s3cret")[0] == 200


def test_an_api_key_may_hold_any_character() -> None:
    with fake_server(api_key="clé-ключ") as server:
        sent = "clé-ключ".encode().decode("latin-1")  # http.client writes headers as latin-1
        assert server.request("GET", "/v1/models", Authorization=f"Bearer {sent}")[0] == 200
        assert server.request("GET", "/v1/models", **{"x-api-key": sent})[0] == 200


def test_cors_headers_only_when_asked_for() -> None:
    with fake_server(cors=True) as server:
        headers = server.exchange("OPTIONS", CHAT)[1]
        assert headers["access-control-allow-origin"] == "*"
        # Browsers do not take the asterisk for the header that carries the key.
        assert headers["access-control-allow-headers"] == "Authorization, *"
        assert "access-control-allow-origin" in server.exchange("POST", TEXT, {"prompt": "a"})[1]
    with fake_server() as server:
        assert "access-control-allow-origin" not in server.exchange("GET", "/health")[1]


def test_metrics_count_and_name_no_content() -> None:
    with fake_server(speaking("secret")) as server:
        server.request("POST", CHAT, HELLO)
        text = server.request("GET", "/metrics")[1]
    for line in (
        'ds4_sequences_finished_total{reason="stop"} 1.0',
        "ds4_generated_tokens_total 7.0",
        f"ds4_prompt_tokens_total {len(PROMPT)}.0",
        "ds4_first_token_seconds_count 1.0",
        "ds4_between_tokens_seconds_count 6.0",
        "ds4_permits_free 6.0",
    ):
        assert line in text
    assert "secret" not in text
    assert "chatcmpl" not in text
