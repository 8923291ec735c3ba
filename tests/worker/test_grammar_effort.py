"""What a grammar may cost: to compile, to keep, and to whom."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds4_common.errors import GrammarError
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.grammar import kept as keeping
from ds4_worker.grammar import trial as trials
from ds4_worker.grammar.compiler import Compiler
from ds4_worker.grammar.kept import GrammarStats, Kept
from ds4_worker.grammar.source import answer_grammar, whole_answer
from ds4_worker.grammar.trial import Task, Trial, compile_task
from helpers.fake_executor import FakeExecutor
from helpers.fake_model import EOS, SPECIALS, VOCABULARY, ByteTokenizer
from helpers.fake_server import fake_server

PATH = "/v1/completions"
ENDLESS = (
    "start: T\nT: /((a{1,51}){50,50})*/ & ~/([a-z]{1,501}){50,51}/"  # hours, before it is used
)
QUICK = 'start: "<" /[a-c]{2,5}/ ">"'


def executor() -> FakeExecutor:
    config = ExecutorConfig(banks=1, context_tokens=4096)
    return FakeExecutor(config, vocabulary=VOCABULARY, page_tokens=64)


def asking(grammar: str) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 20, "guided_grammar": grammar}


def source(grammar: str) -> str:
    return whole_answer("start: @answer", answer_grammar("lark", grammar))


def test_a_grammar_that_compiles_for_hours_is_refused_and_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "CPU_SECONDS", 1)
    with fake_server(executor()) as server:
        status, body = server.request("POST", PATH, asking(ENDLESS))
        assert status == 400, body
        assert body["error"]["code"] == "invalid_grammar"
        assert body["error"]["param"] == "guided_grammar"
        assert "more than 1 s" in body["error"]["message"]
        assert server.request("POST", PATH, asking(QUICK))[0] == 200

        def unwanted(*arguments: object) -> None:
            raise AssertionError("tried although it is known to be too much")

        monkeypatch.setattr(trials.Trial, "run", unwanted)
        assert server.request("POST", PATH, asking(ENDLESS))[0] == 400
        assert server.request("POST", PATH, asking(QUICK))[0] == 200, "compiled before"


def test_a_client_that_goes_away_ends_the_compilation_of_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "CPU_SECONDS", 3600)
    mine = psutil.Process()
    before = set(mine.children())
    body = json.dumps(asking(ENDLESS)).encode()
    with fake_server(executor()) as server:
        with server.connect() as client:
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            while not (begun := set(mine.children()) - before):
                os.sched_yield()
        psutil.wait_procs(begun, timeout=10)
        assert not any(process.is_running() for process in begun)
        assert server.request("POST", PATH, asking(QUICK))[0] == 200


@pytest.mark.parametrize(
    ("script", "told"),
    [("kill -KILL $$", "signal 9"), ("exit 1", "exit code 1"), ("exec sleep 3600", "in 0.2 s")],
    ids=["killed", "ended", "without end"],
)
def test_what_goes_wrong_with_the_process_is_not_the_grammar_s_fault(
    monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    before = psutil.Process().children()
    with fake_server(executor()) as server:
        with monkeypatch.context() as patch:
            patch.setattr(trials, "COMMAND", ("sh", "-c", script))
            patch.setattr(trials, "WAIT_SECONDS", 0.2)
            status, body = server.request("POST", PATH, asking(QUICK))
        assert (status, body["error"]["code"]) == (503, "grammar_untried")
        assert body["error"]["param"] == "guided_grammar"
        assert told in body["error"]["message"]
        assert psutil.Process().children() == before
        assert server.request("POST", PATH, asking(QUICK))[0] == 200, "it was not remembered"
        assert server.failures == []


@pytest.mark.parametrize("name", ["XCPU", "ABRT", "SEGV"])
def test_a_limit_is_the_grammar_s_fault(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(trials, "COMMAND", ("sh", "-c", f"ulimit -c 0; kill -{name} $$"))
    with pytest.raises(GrammarError, match="takes more than"):
        Trial().run(source(QUICK), VOCABULARY, [EOS], {})


def test_a_machine_that_starts_no_process_refuses_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with fake_server(executor()) as server:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", full)
            status, body = server.request("POST", PATH, asking(QUICK))
        assert (status, body["error"]["code"]) == (503, "grammar_untried")
        assert "Cannot allocate memory" in body["error"]["message"]
        assert server.request("POST", PATH, asking(QUICK))[0] == 200
        assert server.failures == []


def test_the_process_imports_nothing_from_where_the_worker_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    Trial().run(source(QUICK), VOCABULARY, [EOS], {})


def test_a_key_that_ends_the_worker_s_group_does_not_reach_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = "import os; raise SystemExit(os.getpgrp() != os.getpid())"
    monkeypatch.setattr(trials, "COMMAND", (sys.executable, "-c", own))
    Trial().run(source(QUICK), VOCABULARY, [EOS], {})


@pytest.mark.parametrize(
    "grammar", [QUICK, "start: <[258]> /x/ <think>", "start: <think> /[0-9]+/"]
)
def test_a_trial_knows_the_tokens_that_a_grammar_can_name(grammar: str) -> None:
    compiler = Compiler(ByteTokenizer(), VOCABULARY, [EOS], SPECIALS.values())
    compiler.compile(source(grammar))
    compile_task(Task(source(grammar), VOCABULARY, [EOS], compiler.special_tokens, 1))


def test_the_vocabulary_is_walked_once_for_all_grammars_that_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    compiler = Compiler(ByteTokenizer(), VOCABULARY, [EOS])

    def is_control(_: ByteTokenizer, token: int) -> bool:
        asked.append(token)
        return False

    monkeypatch.setattr(ByteTokenizer, "is_control", is_control)
    assert compiler.special_tokens is compiler.special_tokens
    for letter in "ab":
        compiler.compile(source(f'start: "{letter}"'))
    assert asked == list(range(VOCABULARY))


# What is kept


class Heap:
    """Stands for the C library's: what grammars hold, and what else there is."""

    def __init__(self) -> None:
        self.others = 1 << 30
        self.held: dict[str, int] = {}
        self.grammars: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()

    def __call__(self) -> int:
        return self.others + sum(self.held[text] for text in self.grammars)


class Grammar:
    """One that holds a number of MiB, or comes to hold them."""

    def __init__(self, heap: Heap, source: str, mib: int) -> None:
        heap.held[source] = mib << 20
        heap.grammars[source] = self


def kept_with(heap: Heap, *sizes: int) -> Kept[Grammar]:
    """Grammars "0", "1" and so on, asked for in this order."""
    kept = Kept[Grammar](GrammarStats(), heap)
    for number, mib in enumerate(sizes):
        kept.get(str(number), partial(Grammar, heap, mib=mib))
    return kept


def known(kept: Kept[Grammar], count: int) -> str:
    return "".join(str(number) for number in range(count) if str(number) in kept)


def unwanted(source: str) -> Grammar:
    raise AssertionError("compiled although it is kept")


def test_kept_grammars_are_bounded_by_what_they_hold_least_recently_used_first() -> None:
    heap = Heap()
    kept = kept_with(heap, 100, 100)
    kept.get("0", unwanted)
    kept.get("2", partial(Grammar, heap, mib=100))
    assert known(kept, 3) == "02"
    assert vars(kept.stats) == {
        "compiled": 3, "kept": 2, "evicted": 1, "heap_bytes": 200 << 20,
    }  # fmt: skip


def test_what_a_kept_grammar_comes_to_hold_counts_when_the_next_one_is_asked_for() -> None:
    heap = Heap()
    kept = kept_with(heap, 1, 1, 1)
    heap.held["1"] = 300 << 20  # masks were computed
    kept.get("2", unwanted)
    assert known(kept, 3) == "2"
    assert kept.stats.evicted == 2


def test_a_grammar_beyond_the_bound_is_kept_until_the_next_one_comes() -> None:
    heap = Heap()
    kept = kept_with(heap, 1, 500)
    assert known(kept, 2) == "1"
    kept.get("1", unwanted)
    for number, mib in ((2, 100), (3, 156)):
        kept.get(str(number), partial(Grammar, heap, mib=mib))
    assert known(kept, 4) == "23"
    kept.get("4", partial(Grammar, heap, mib=1))
    assert known(kept, 5) == "34"


def test_a_heap_that_grew_for_other_reasons_costs_the_grammars_once() -> None:
    heap = Heap()
    kept = kept_with(heap, 1, 1)
    heap.others += 1 << 30
    for number in range(2, 5):
        kept.get(str(number), partial(Grammar, heap, mib=1))
    assert known(kept, 5) == "234"
    assert kept.stats.heap_bytes == 3 << 20
    heap.others -= 1 << 30  # and when it shrinks, the bound is what it was
    kept.get("5", partial(Grammar, heap, mib=254))
    assert known(kept, 6) == "345"


@pytest.mark.parametrize(("most", "value"), [("MOST", 2), ("MOST_CHARS", 2)])
def test_number_and_texts_of_kept_grammars_are_bounded_on_any_heap(
    most: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, most, value)
    kept = Kept[str](GrammarStats(), lambda: 0)
    for text in "abac":
        kept.get(text, str.upper)
    assert [text in kept for text in "abc"] == [True, False, True]


def test_the_heap_is_measured_and_grows_by_a_large_grammar() -> None:
    compiler = Compiler(ByteTokenizer(), VOCABULARY, [EOS])
    compiler.compile(source(QUICK))
    stats = compiler.stats
    before = stats.heap_bytes
    schema = answer_grammar("json_schema", {"type": "integer", "multipleOf": 19997})
    compiler.compile(whole_answer("start: @answer", schema))
    if platform.libc_ver()[0] == "glibc":
        assert stats.heap_bytes - before > 4 << 20
    assert stats.kept == 2


def test_metrics_tell_what_became_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MOST", 1)
    with fake_server(executor()) as server:
        for grammar in (QUICK, 'start: "x"', 'start: "x"'):
            assert server.request("POST", PATH, asking(grammar))[0] == 200
        lines = server.request("GET", "/metrics")[1].splitlines()
    for line in ("compiled_total 2.0", "evicted_total 1.0", "kept 1.0"):
        assert f"ds4_grammars_{line}" in lines
