"""What a grammar may cost: to compile, to keep, and to whom."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds4_common.errors import GrammarError
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.grammar import compiler as compilers
from ds4_worker.grammar import trial as trials
from ds4_worker.grammar.compiler import Compiler
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
    compile_task(Task(source(grammar), VOCABULARY, [EOS], compiler.special_tokens(), 1))


def test_kept_grammars_are_bounded_by_their_size_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(ByteTokenizer(), VOCABULARY, [EOS])
    texts = [source(f'start: "{letter * 100}"') for letter in "abc"]
    monkeypatch.setattr(compilers, "_KEPT_CHARS", 2 * len(texts[0]))
    for text in texts:
        compiler.compile(text)
    assert [compiler.knows(text) for text in texts] == [False, True, True]
    compiler.compile(texts[1])
    compiler.compile(texts[0])
    assert [compiler.knows(text) for text in texts] == [True, True, False]
