"""`/v1/stats`, and the rates in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds4_worker.engine.stats import RecentRate
from helpers.fake_server import fake_server

SECOND = 1_000_000_000


def test_stats_tell_what_the_worker_holds_and_has_done() -> None:
    with fake_server(pid=42) as server:
        body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}
        assert server.request("POST", "/v1/completions", body)[0] == 200
        status, stats = server.request("GET", "/v1/stats")
    assert status == 200
    assert (stats["model"], stats["state"], stats["pid"]) == ("fake-model", "ok", 42)
    assert stats["sequences"] == {
        "running": 0,
        "waiting": 0,
        "submitted": 1,
        "finished": {"stop": 0, "length": 1, "cancelled": 0, "failed": 0},
    }
    assert stats["banks"] == {"used": 0, "total": 2}
    assert stats["kv_pages"] == {"used": 0, "cached": 2, "total": 32}
    assert stats["kv_cache"] == {"dtype": "f16", "bytes_used": 0, "bytes_total": 32 * 64}
    assert stats["places"] == {"used": 0, "total": 6}
    assert stats["tokens"]["prompt_reused"] == 0
    assert (stats["tokens"]["prompt"], stats["tokens"]["generated"]) == (4, 5)  # BOS too
    memory = stats["memory"]
    assert memory["resident_bytes"] >= memory["private_bytes"] > 0
    assert stats["uptime_seconds"] > 0


def test_stats_name_the_owners_state_and_need_the_key() -> None:
    class Gone:
        state, detail = "gone", "the owner is gone"

    with fake_server(owner=Gone(), api_key="k") as server:
        assert server.request("GET", "/v1/stats")[0] == 401
        _, stats = server.request("GET", "/v1/stats", Authorization="Bearer k")
    assert stats["owner"] == {"state": "gone", "detail": "the owner is gone"}


def test_stats_of_a_worker_that_loads_are_503() -> None:
    with fake_server(ready=False) as server:
        assert server.request("GET", "/v1/stats")[0] == 503


def test_a_rate_counts_whole_seconds_only_and_forgets_old_ones() -> None:
    rate = RecentRate(window_seconds=4)
    rate.add(30, 0)
    assert rate.per_second(SECOND // 2) == 0.0
    assert rate.per_second(SECOND) == 30.0
    rate.add(1000, SECOND)  # the second that is not over
    assert rate.per_second(SECOND + 1) == 30.0
    assert rate.per_second(4 * SECOND) == 1030 / 4
    assert rate.per_second(5 * SECOND) == 1000 / 4
    assert rate.per_second(6 * SECOND) == 0.0


@given(st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(0, 50)), max_size=60))
def test_a_rate_equals_the_count_of_the_last_seconds(moves: list[tuple[int, int]]) -> None:
    rate, now, events = RecentRate(window_seconds=4), 0, []
    for ahead, count in moves:
        now += ahead
        rate.add(count, now)
        events.append((now // SECOND, count))
        second = now // SECOND
        started = events[0][0]
        first = max(second - 4, started)
        expected = sum(n for at, n in events if first <= at < second) / max(second - first, 1)
        assert rate.per_second(now) == expected
