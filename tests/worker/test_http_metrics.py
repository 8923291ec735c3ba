"""`GET /metrics`: R51 to R54, and R34: what it counts, what it never names, what it never costs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ds4_worker.engine import core
from ds4_worker.engine.api import Generation, now_ns
from ds4_worker.engine.core import EngineCore
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.http.counters import OTHER, REASONS
from ds4_worker.http.limits import HttpLimits
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import VOCABULARY, ByteDetokenizer
from helpers.fake_server import FakeServer, fake_server
from helpers.gate import Gate

TEXT = "/v1/completions"
# Every label there is, and every word that may stand in it.
WORDS = {
    "reason": {
        *REASONS.values(),
        OTHER,
        *("stop", "length", "cancelled", "failed"),
        *("queue_full", "too_many", "scheduler"),
    },
}


def families(server: FakeServer) -> dict[str, Metric]:
    status, text = server.request("GET", "/metrics")
    assert status == 200
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(server: FakeServer, name: str, **labels: str) -> float:
    """Of one sample."""
    for family in families(server).values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise AssertionError(f"no sample {name}{labels}")


def executor(gate: Gate | None = None, banks: int = 1) -> FakeExecutor:
    config = ExecutorConfig(banks=banks, context_tokens=64)
    return FakeExecutor(config, vocabulary=VOCABULARY, before_step=gate)


def test_r51_the_life_of_requests_is_counted() -> None:
    gate = Gate()
    with fake_server(executor(gate), queue=0) as server:
        connection = server.connect()
        body = b'{"prompt":[97],"max_tokens":9,"ignore_eos":true}'
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % (TEXT.encode(), len(body)) + body)
        gate.wait_until_a_step_is_due()
        assert value(server, "ds4_sequences_running") == 0  # counted when the step is over
        assert value(server, "ds4_permits_free") == 0
        assert server.request("POST", TEXT, {"prompt": "a"})[0] == 429
        assert server.request("POST", TEXT, {"prompt": ["a", "b"]})[0] == 400
        assert server.request("POST", TEXT, {"prompt": 1})[0] == 400
        assert server.request("GET", "/nowhere")[0] == 404
        assert server.request("DELETE", TEXT)[0] == 405
        connection.close()
        while value(server, "ds4_permits_free") == 0:
            pass
        gate.open()
        assert server.request("POST", TEXT, {"prompt": [97], "max_tokens": 1})[0] == 200
        found = {
            (sample.name, sample.labels.get("reason", "")): sample.value
            for family in families(server).values()
            for sample in family.samples
        }
    expected = {
        ("ds4_sequences_admitted_total", ""): 2,
        ("ds4_sequences_submitted_total", ""): 2,
        ("ds4_sequences_rejected_total", "queue_full"): 1,
        ("ds4_sequences_rejected_total", "too_many"): 2,
        ("ds4_sequences_rejected_total", "scheduler"): 0,
        ("ds4_sequences_finished_total", "cancelled"): 1,
        ("ds4_http_refusals_total", "queue_full"): 1,
        ("ds4_http_refusals_total", "invalid"): 2,
        ("ds4_http_refusals_total", "not_found"): 1,
        ("ds4_http_refusals_total", "method"): 1,
        ("ds4_http_disconnects_total", ""): 1,
        ("ds4_http_connections", ""): 1,
    }
    assert expected.items() <= found.items()


def test_r51_capacities_and_the_use_of_them_are_told() -> None:
    with fake_server(executor(banks=3), queue=2) as server:
        server.request("POST", TEXT, {"prompt": [97] * 9, "max_tokens": 3})
        assert value(server, "ds4_banks") == 3
        assert value(server, "ds4_permits") == 5
        assert value(server, "ds4_context_tokens") == 64
        assert value(server, "ds4_kv_pages") == 48
        assert value(server, "ds4_kv_pages_used") == 0
        assert value(server, "ds4_kv_bytes") == 48 * executor().page_bytes
        assert value(server, "ds4_kv_bytes_used") == 0


def test_r51_prefix_reuse_is_counted() -> None:
    with fake_server(executor()) as server:
        for _ in range(2):
            server.request("POST", TEXT, {"prompt": [97] * 20, "max_tokens": 1})
        assert value(server, "ds4_prefix_hits_total") == 1
        assert value(server, "ds4_prefix_misses_total") == 1
        reused = value(server, "ds4_prompt_tokens_reused_total")
        assert 0 < reused < 20
        assert value(server, "ds4_prompt_tokens_total") == 40 - reused
        assert value(server, "ds4_kv_pages_cached") > 0
        assert value(server, "ds4_kv_pages_evicted_total") == 0


def test_r51_drafts_are_counted() -> None:
    body = {"prompt": [97, 98, 99] * 6, "max_tokens": 30, "ignore_eos": True}
    periodic = FakeExecutor(
        ExecutorConfig(banks=2, context_tokens=64),
        vocabulary=VOCABULARY,
        choose=lambda history: 7 if len(history) % 20 == 0 else history[-3],
    )
    with fake_server(periodic, speculate=5) as server:
        usage = server.request("POST", TEXT, body)[1]["usage"]["completion_tokens_details"]
        accepted = value(server, "ds4_draft_tokens_accepted_total")
        offered = value(server, "ds4_draft_tokens_offered_total")
        assert 0 < accepted < offered
        assert usage["accepted_prediction_tokens"] == usage["rejected_prediction_tokens"] == 0
        assert value(server, "ds4_generated_tokens_total") == 30
        assert value(server, "ds4_between_tokens_seconds_count") == 29
        tokens = server.request("GET", "/v1/stats")[1]["tokens"]
        assert (tokens["draft_offered"], tokens["draft_accepted"]) == (offered, accepted)


def test_r51_waiting_and_latencies_are_histograms() -> None:
    with fake_server(executor()) as server:
        body = {"prompt": [[97], [98]], "max_tokens": 5, "ignore_eos": True}
        server.request("POST", TEXT, body)
        tokens = value(server, "ds4_generated_tokens_total")
        assert value(server, "ds4_queue_seconds_count") == 2
        assert value(server, "ds4_first_token_seconds_count") == 2
        assert value(server, "ds4_between_tokens_seconds_count") == tokens - 2
        assert value(server, "ds4_first_token_seconds_bucket", le="+Inf") == 2


def test_r52_labels_are_a_closed_set_whatever_clients_send() -> None:
    secret = "s3cret"
    with fake_server(executor(), limits=HttpLimits(read_seconds=0.05)) as server:
        for body in (
            {"prompt": secret, "max_tokens": 2, "model": secret},
            {"prompt": secret, "max_tokens": 2, "user": secret, "stop": secret},
            {"prompt": secret, secret: secret, "temperature": secret},
        ):
            server.request("POST", TEXT, body, **{"x-request-id": secret})
        server.request("GET", f"/{secret}")
        server.request("GET", f"/v1/models/{secret}")
        server.raw(f"{secret} / HTTP/1.1\r\n\r\n".encode())
        server.raw(f"GET /{secret}".encode())
        text = server.request("GET", "/metrics")[1]
    assert secret not in text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, word in sample.labels.items():
                if label == "status":
                    assert re.fullmatch(r"[1-5]\d\d", word)
                elif label == "le":
                    float(word)
                else:
                    assert word in WORDS[label]


def test_r53_r54_the_metrics_of_grammars_have_their_published_names() -> None:
    with fake_server(executor()) as server:
        found = families(server)
        assert found["flare_mixed_grammar_decode_steps"].type == "counter"
        assert found["flare_constrained_max_inflight"].type == "gauge"
        assert value(server, "flare_mixed_grammar_decode_steps_total") == 0
        assert value(server, "flare_constrained_max_inflight") == 0


@pytest.mark.parametrize("sequences", [1, 4])
def test_r34_the_clock_is_read_per_step_and_never_per_token(
    monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    reads = 0

    def counted() -> int:
        nonlocal reads
        reads += 1
        return now_ns()

    monkeypatch.setattr(core, "now_ns", counted)
    engine = EngineCore(executor(banks=4), ByteDetokenizer)
    for seed in range(sequences):
        body: dict[str, Any] = {"prompt": [97], "max_tokens": 9, "seed": seed}
        engine.submit(engine.sequence(Generation(**body)))
    steps = 0
    while engine.step() is not None:
        steps += 1
    assert engine.stats.generated_tokens == 9 * sequences
    assert steps == 9
    assert reads == sequences + steps + 1, "one per sequence, one per step, one when they began"


def test_a_worker_that_loads_tells_its_http_side() -> None:
    with fake_server(ready=False) as server:
        assert server.request("POST", TEXT, {"prompt": "a"})[0] == 503
        assert value(server, "ds4_http_refusals_total", reason="unavailable") == 1
        assert "ds4_banks" not in families(server)
