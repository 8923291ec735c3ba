"""The client of the serving benchmark, against a server that is not slow."""

from __future__ import annotations

import os

import pytest

from ds4_common.errors import Ds4Error
from ds4_worker.bench.serve import ask, chat, loop_seconds, streamed_seconds
from ds4_worker.executor.api import ExecutorConfig
from helpers.fake_executor import FakeExecutor, failing_after
from helpers.fake_model import VOCABULARY
from helpers.fake_server import fake_server


def test_all_streams_are_read_to_their_end() -> None:
    with fake_server() as server:
        assert streamed_seconds(server.port, [chat("a", 5) for _ in range(4)]) > 0
        assert server.executor.steps
        answer = ask(server.port, chat("b", 1, return_token_ids=True))
        assert answer["prompt_token_ids"]


def test_a_stream_that_ends_early_is_no_figure() -> None:
    config = ExecutorConfig(banks=1, context_tokens=64)
    broken = FakeExecutor(config, vocabulary=VOCABULARY, before_step=failing_after(2))
    with fake_server(broken) as server:
        with pytest.raises(Ds4Error, match="ended early"):
            streamed_seconds(server.port, [chat("a", 9)])
        with pytest.raises(Ds4Error, match="HTTP 500"):
            ask(server.port, chat("a", 1))


def test_the_cpu_time_of_a_loop_only_grows() -> None:
    before = loop_seconds(os.getpid())
    assert loop_seconds(os.getpid()) >= before
