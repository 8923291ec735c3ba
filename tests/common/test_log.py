"""Log lines: whole, and harmless to whoever writes them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ds4_common import log

WRITERS = """
import sys, threading
from ds4_common.log import write_line
sys.setswitchinterval(1e-6)
def write(letter):
    for _ in range(200):
        write_line(letter * 40)
threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_lines_of_several_threads_do_not_mix() -> None:
    done = subprocess.run([sys.executable, "-c", WRITERS], stderr=subprocess.PIPE, check=True)
    lines = done.stderr.decode().splitlines()
    assert {len(set(line)) for line in lines} == {1}
    assert {len(line) for line in lines} == {40}


def test_a_full_pipe_drops_lines_and_a_closed_one_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(log, "_STDERR", writer)
    for _ in range(5000):  # far more than a pipe holds; a blocking write would hang here
        log.write_line("x" * 100)
    os.close(reader)
    log.write_line("nobody reads this")
    os.close(writer)


def test_a_long_text_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(log, "_STDERR", writer)
    log.write_line("x" * 10_000)
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == b"x" * 10_000 + b"\n"
