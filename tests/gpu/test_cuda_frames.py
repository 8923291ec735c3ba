"""Two steps under way on a device: what everybody sees is what one at a time gives, on the CPU.

By default on the stand-in driver, whose lazy streams run nothing before somebody waits for it, and
then no more than that; with DS4_TEST_GPU=1 (`make gpu-test`) on this machine's device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ds4_worker.engine.api import Speculate
from ds4_worker.executor.api import Sampling
from helpers import cuda_stand_in
from helpers import frame_claims as claims
from helpers.driver import processes

ON_DEVICE = os.environ.get("DS4_TEST_GPU") == "1"
MISSING = "" if ON_DEVICE else cuda_stand_in.missing()
pytestmark = [pytest.mark.gpu] if ON_DEVICE else [pytest.mark.skipif(bool(MISSING), reason=MISSING)]
STAND_IN = pytest.mark.skipif(ON_DEVICE, reason="needs the stand-in driver")
MODES: dict[str, dict[str, str] | None] = (
    {"device": None}
    if ON_DEVICE
    else {"lazy": {"streams": "lazy", "host": "hidden"}, "eager": {"streams": "eager"}}
)
Run = Callable[..., Any]


def runner(pool: ProcessPoolExecutor) -> Run:
    return lambda claim, *arguments: pool.submit(claim, *arguments).result(timeout=600)


@pytest.fixture(scope="module", params=MODES)
def each(request: pytest.FixtureRequest) -> Iterator[Run]:
    with processes.process(MODES[request.param]) as pool:
        yield runner(pool)


@pytest.fixture(scope="module")
def first() -> Iterator[Run]:
    """In the first of the modes only."""
    with processes.process(next(iter(MODES.values()))) as pool:
        yield runner(pool)


# --- the engine ---


@pytest.mark.parametrize("speculate", ["off", 3])
def test_sequences_that_need_no_host_run_two_steps_at_once_with_the_answers_of_the_cpu(
    each: Run, speculate: Speculate
) -> None:
    found = each(claims.mixes, claims.PLAIN, speculate, 5, (3, 6, 8))
    assert all(found["equal"]), found
    assert found["ahead"][0] == 0
    assert found["ahead"][1] > found["steps"] / 4
    assert found["discarded"] > 2
    assert (found["allocated"], found["pages"]) == (0, 0)


@pytest.mark.parametrize("turns", [2, 9])
def test_what_the_host_decides_between_them_changes_nothing(each: Run, turns: int) -> None:
    kinds = [fields for pair in zip(claims.PLAIN[4:], claims.HOST, strict=False) for fields in pair]
    found = each(claims.mixes, kinds, "off", turns, (0, 9))
    assert all(found["equal"]), found
    assert 0 < found["ahead"][1] < found["steps"]
    assert (found["allocated"], found["pages"]) == (0, 0)


@pytest.mark.parametrize(
    "case", [("deepseek4", "long"), ("gemma3", "plain"), ("gpt_oss", "plain")], ids=lambda c: c[0]
)
def test_histories_that_run_along_and_windows_take_steps_ahead(
    first: Run, case: tuple[str, str]
) -> None:
    found = first(claims.mixes, claims.PLAIN[:3], "off", 7, (4,), case)
    assert all(found["equal"]), found
    assert found["ahead"][1] > found["steps"] / 4
    assert (found["allocated"], found["pages"]) == (0, 0)


def test_state_that_runs_along_is_taken_back_behind_wrong_drafts(each: Run) -> None:
    found = each(claims.mixes, claims.PLAIN, 4, 7, (4,), ("deepseek4", "long"))
    assert all(found["equal"]), found
    assert found["rewinds"] == (True, True)
    assert found["drafts"] > 10
    assert found["ahead"][1] > 10


# --- the boundary ---


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.9, top_p=0.9, seed=7),
        Sampling(temperature=0.9, seed=7, logprobs=3),
    ],
    ids=["greedy", "random", "log-probabilities"],
)
def test_tokens_that_nobody_has_seen_yet_are_the_next_step_s_input(
    each: Run, how: Sampling
) -> None:
    assert each(claims.pending_tokens, how, 30) == [True] * 3


def test_a_draw_that_fails_with_a_step_behind_it_harms_nobody_else(each: Run) -> None:
    error, others = each(claims.failed_draw)
    assert "outside the vocabulary" in error
    assert others


def test_what_cannot_be_under_way_together_is_refused(first: Run) -> None:
    found = first(claims.refusals)
    assert {name for name, why in found.items() if not why} == set()
    assert "position 10" in found["wrong position"]
    assert "token: got -1" in found["among others"]
    assert "collect one" in found["a third"]
    assert "got 2049 biases" in found["too many biases"]
    assert "collect the others" in found["scores beside"]


def test_a_token_that_no_table_has_is_never_pending(first: Run) -> None:
    frames, second, pending = first(claims.rows_fewer_than_the_vocabulary)
    assert frames == 1
    assert "collect one" in second
    assert "pending token" in pending


@STAND_IN
@pytest.mark.parametrize("fault", ["cuGraphLaunch:9:sticky", "cuEventSynchronize:5:sticky"])
def test_a_device_that_breaks_with_a_step_under_way_ends_every_sequence_once(fault: str) -> None:
    with processes.process({"fault": fault}) as pool:
        assert runner(pool)(claims.breaks_with) == ["ExecutorFailure", 49, True, 3]


@STAND_IN
def test_what_a_step_half_sent_off_may_still_do_is_waited_for_before_memory_goes(
    tmp_path: Path,
) -> None:
    how = {"fault": "cuEventRecord:1:801", "log": str(tmp_path / "calls")}
    with processes.process(how) as pool:
        why, *calls = runner(pool)(claims.breaks_while_sending)
    assert "cuEventRecord" in why
    given_back = next(n for n, call in enumerate(calls) if "Free" in call or "Destroy" in call)
    assert "cuStreamSynchronize" in calls[:given_back], calls
