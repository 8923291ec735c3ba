"""The pool of threads: every task once, in its section, after all that came before."""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ds4_common.native.build import CFLAGS, NATIVE

CHECK = Path(__file__).parents[1] / "native" / "pool_check.c"
THREADS = (1, 2, 3, 16)  # the last: more than cores, and more than an idle thread visits


def built(folder: Path, *flags: str) -> Path | None:
    """The check beside the pool; None when the compiler lacks what the flags ask for."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    program = folder / "pool_check"
    command = [*compiler, *CFLAGS, *flags, f"-I{NATIVE}", str(CHECK), str(NATIVE / "pool.c")]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, check=False)
    return None if done.returncode else program


def said(program: Path, threads: int, jobs: int) -> str:
    command = [str(program), str(threads), str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = built(tmp_path_factory.mktemp("pool"))
    assert made is not None
    return made


@pytest.mark.parametrize("threads", THREADS)
def test_every_task_runs_once_and_after_the_sections_before(program: Path, threads: int) -> None:
    assert said(program, threads, 50) == "sections 20000\n"


@pytest.mark.parametrize("threads", THREADS)
def test_no_two_threads_touch_the_same_memory_unordered(tmp_path: Path, threads: int) -> None:
    program = built(tmp_path, "-fsanitize=thread", "-Wno-tsan")
    if program is None:
        pytest.skip("needs a compiler with the thread sanitizer")
    assert said(program, threads, 5) == "sections 2000\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no barrier of the system is used")
def test_threads_that_no_barrier_covers_find_news_without_being_woken(tmp_path: Path) -> None:
    program = built(tmp_path, "-DNO_BARRIER", "-Wl,--wrap=syscall")
    assert program is not None
    assert said(program, 2, 1) == "sections 400\n"
