"""What threads ask for ahead is what they multiply next (exec_ahead.c)."""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest
from msgspec.structs import replace

from ds4_common.allocation import Layout
from ds4_common.gguf import GgmlType
from ds4_common.native.build import CFLAGS, LIBRARY, NATIVE
from ds4_worker.executor.api import ExecutorConfig
from helpers import executors
from helpers.expert_model import write_experts
from helpers.prepared import Prepared, prepare_file
from helpers.tiny_gguf import TinyLlama, write_llama

CHECK = Path(__file__).parents[1] / "native" / "ahead_check.c"
CONFIG = ExecutorConfig(banks=1, context_tokens=64)
LAYOUTS = {
    GgmlType.Q8_0: Layout.X8,
    GgmlType.IQ2_XXS: Layout.IQ2_PLANES,
    GgmlType.F16: Layout.RAW,
    GgmlType.Q4_1: Layout.X8,
}


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    program = tmp_path_factory.mktemp("ahead") / "ahead_check.so"
    sources = [CHECK, NATIVE / "exec_matmul.c", NATIVE / LIBRARY]
    command = [*compiler, *CFLAGS, "-shared", f"-I{NATIVE}", *map(str, sources)]
    subprocess.run([*command, "-o", str(program)], check=True)
    made = ctypes.CDLL(str(program))
    made.ahead_check.restype = ctypes.c_int64
    return made


def sections_of(check: ctypes.CDLL, prepared: Prepared, threads: int) -> tuple[int, int, int]:
    """Sections with a next product, those of them at the end of a step, and those with none."""
    executor = executors.cpu_executor(prepared, replace(CONFIG, threads=threads))
    around, none = ctypes.c_int64(), ctypes.c_int64()
    found = check.ahead_check(executor._engine, ctypes.byref(around), ctypes.byref(none))
    executor.close()
    assert found >= 0, f"section {(-1 - found) // threads}, thread {(-1 - found) % threads} differs"
    return found, around.value, none.value


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("pack", [False, True])
def test_every_thread_asks_for_the_rows_where_its_next_products_begin(
    check: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, pack: bool
) -> None:
    """Raw blocks, groups of rows and planes; several matrices to a section, and a next step."""
    spec = TinyLlama(width=512, n_heads=8, n_kv_heads=2, ffn=768, weights=tuple(LAYOUTS))
    prepared = prepare_file(write_llama(tmp_path / "dense.gguf", spec))
    if pack:  # the same on every machine, whatever it runs fastest
        monkeypatch.setattr(executors, "cpu_layout", lambda quant, *_: LAYOUTS[GgmlType(quant)])
        prepared = executors.packed(prepared)
        layouts = {Layout(b.layout) for b in prepared.bundle.execution.buffers}
        assert layouts == {Layout.RAW, Layout.X8, Layout.IQ2_PLANES}
    found, around, none = sections_of(check, prepared, threads)
    assert found > around > 0
    assert none == 0


def test_nobody_asks_for_experts(check: ctypes.CDLL, tmp_path: Path) -> None:
    prepared = prepare_file(write_experts(tmp_path / "experts.gguf"))
    found, around, none = sections_of(check, prepared, 3)
    assert found > around > 0
    assert none > 0
