"""The kernel compiler: every kernel for every target, and a cache that survives damage."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds4_common.contract.ops import OPS
from ds4_common.errors import CubinCacheError, CudaUnsupported, KernelCompileError
from ds4_worker.cuda import compiler as module
from ds4_worker.cuda.compiler import TARGETS, Compiler, Kernel, Resources, in_parallel
from ds4_worker.cuda.kernels import (
    CACHE_KERNELS,
    KERNELS,
    MANY_KERNELS,
    UNITS,
    WEIGHT_KERNELS,
    Unit,
)
from helpers.cuda_kernels import CACHE, host_module

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra `cuda`")
CUBINS = CACHE / "cubins"
SMALL = Unit("rowwise.cu")
# Most registers of a kernel; the block sizes allow more. What is not named here: MOST.
MOST = 64
CEILINGS = {
    "matvec": 128, "matvec_experts": 128, "matmul": 208,
    "attend_whole": 176, "attend_parts": 128,
    "attend_rows": 128, "attend_rows_parts": 128, "sample": 128, "hyper_write": 128,
}  # fmt: skip


# Most bytes of arrays that are in no register: the C library's reduction of large angles.
STACKS = {"rope_angles": 40}


# One of each file: every kernel, but not for every type. sm_120a has the instructions of sm_121a.
SOME = tuple(
    unit for unit in UNITS if unit.kv_type in (-1, 0) and unit.ggml_type in (-1, 1, 12)
)  # fmt: skip


@pytest.mark.parametrize(
    ("target", "units"),
    [
        pytest.param("sm_90", UNITS, id="sm_90"),
        pytest.param("sm_120a", SOME, id="sm_120a"),
        pytest.param("sm_121a", UNITS, id="sm_121a"),
        pytest.param("sm_120a", UNITS, id="sm_120a, all types", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles_without_spills_or_stacks_and_within_its_registers(
    target: str, units: tuple[Unit, ...]
) -> None:
    compiler = Compiler(target, CUBINS, print)
    seen: set[str] = set()
    faults = []
    for unit, kernel in zip(units, in_parallel(compiler.kernel, units), strict=True):
        seen |= kernel.resources.keys()
        for name, used in kernel.resources.items():
            fits = used.registers <= CEILINGS.get(name, MOST)
            if not fits or used.spill_bytes or used.stack_bytes > STACKS.get(name, 0):
                faults.append((unit.label, name, used))
    assert faults == []
    tables = (KERNELS, CACHE_KERNELS, WEIGHT_KERNELS, MANY_KERNELS)
    assert seen == {name for table in tables for name in table}


def test_the_targets_are_those_of_the_table() -> None:
    assert sorted(TARGETS.values()) == ["sm_120a", "sm_121a", "sm_90"]


def test_every_op_of_the_registry_has_a_kernel() -> None:
    entries = [kernel.ops for kernel in (*KERNELS.values(), *CACHE_KERNELS.values())]
    entries += [ops for _, ops in (*WEIGHT_KERNELS.values(), *MANY_KERNELS.values())]
    assert {op for ops in entries for op in ops} == OPS.keys()


def test_the_table_repeats_the_parameters_and_blocks_of_the_files() -> None:
    for name, kernel in KERNELS.items():
        host = host_module(Unit(kernel.file))
        assert host.parameter_bytes(name) == ctypes.sizeof(kernel.parameters), name
        assert ctypes.sizeof(kernel.parameters) % 8 == 0, name
    cache = host_module(Unit("cache.cu", kv_type=0))
    for name, kernel in CACHE_KERNELS.items():
        assert cache.parameter_bytes(name) == ctypes.sizeof(kernel.parameters), name
    for unit, more in ((Unit("weights.cu", 8), MANY_KERNELS), (Unit("floats.cu", 0), MANY_KERNELS)):
        host = host_module(unit)
        for name, (parameters, _) in (WEIGHT_KERNELS | more).items():
            assert host.parameter_bytes(name) == ctypes.sizeof(parameters), name


# --- the cache ---


class Lines(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


@pytest.fixture
def lines() -> Lines:
    return Lines()


def entry(folder: Path) -> Path:
    (path,) = folder.glob("*.cubin")
    return path


def test_a_second_start_compiles_nothing(tmp_path: Path, lines: Lines) -> None:
    first, second = (Compiler("sm_90", tmp_path, lines) for _ in range(2))
    assert first.kernel(SMALL) == second.kernel(SMALL)
    assert (first.compiled, second.compiled, lines) == (1, 0, [])
    assert os.listdir(tmp_path) == [entry(tmp_path).name]


def _other_machine(data: bytes) -> bytes:
    kernel = module.unpack(data)
    cubin = bytearray(kernel.cubin)
    cubin[18] = 62  # x86-64
    return module.pack(Kernel(bytes(cubin), kernel.resources))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
        lambda data: data[:8] + b"\xff" + data[9:],
        _other_machine,
    ],
    ids=["empty", "header", "half", "short", "long", "flipped", "schema", "machine"],
)
def test_a_damaged_file_is_compiled_again_with_one_line(
    tmp_path: Path, lines: Lines, damage: object
) -> None:
    expected = Compiler("sm_90", tmp_path, lines).kernel(SMALL)
    path = entry(tmp_path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    compiler = Compiler("sm_90", tmp_path, lines)
    assert compiler.kernel(SMALL) == expected
    assert compiler.compiled == 1
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert module.unpack(path.read_bytes()) == expected


def test_units_asked_for_at_once_are_compiled_once_each_and_come_in_their_order(
    tmp_path: Path, lines: Lines
) -> None:
    units = [SMALL, Unit("rope.cu"), Unit("quantize.cu"), Unit("value_heads.cu", 8, 7)]
    compiler = Compiler("sm_90", tmp_path, lines)
    made = in_parallel(compiler.kernel, units)
    assert (compiler.compiled, len(os.listdir(tmp_path))) == (4, 4)
    again = Compiler("sm_90", tmp_path, lines)
    assert made == [again.kernel(unit) for unit in units]
    assert (again.compiled, lines) == (0, [])


def test_a_unit_that_fails_fails_all_of_them_with_its_own_words() -> None:
    def make(unit: Unit) -> str:
        if unit.file == "b":
            raise KernelCompileError("b is broken")
        return unit.file

    with pytest.raises(KernelCompileError, match="b is broken"):
        in_parallel(make, [Unit("a"), Unit("b"), Unit("c")])
    assert in_parallel(make, []) == []


def test_what_a_killed_start_left_behind_disturbs_nobody(tmp_path: Path, lines: Lines) -> None:
    """And is gone, unless somebody may still be at it."""
    for name, age in (("killed", 7200), ("writing", 60)):
        left = tmp_path / f".new-{name}"
        left.write_bytes(b"half of a cubin")
        os.utime(left, (time.time() - age,) * 2)
    compiler = Compiler("sm_90", tmp_path, lines)
    compiler.kernel(SMALL)
    assert (compiler.compiled, lines) == (1, [])
    assert {path.name for path in tmp_path.glob(".new-*")} == {".new-writing"}


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_fifo, "nobody else can write to"),
        (_folder, "got mode 40"),
        (lambda path: path.chmod(0o666), "got mode 100666"),
        (lambda path: path.chmod(0o620), "got mode 100620"),
    ],
    ids=["fifo", "folder", "everybody", "group"],
)
def test_what_others_could_have_written_is_refused_at_once(
    tmp_path: Path, lines: Lines, change: Callable[[Path], None], says: str
) -> None:
    """The hash in a file says that it is whole, not who made it."""
    Compiler("sm_90", tmp_path, lines).kernel(SMALL)
    change(entry(tmp_path))
    with pytest.raises(CubinCacheError, match=says):
        Compiler("sm_90", tmp_path, lines).kernel(SMALL)


def test_a_file_of_another_user_is_refused(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiler("sm_90", tmp_path, lines).kernel(SMALL)
    monkeypatch.setattr(module, "_TRUSTED", (os.geteuid() + 1,))
    with pytest.raises(CubinCacheError, match=f"of uid {os.geteuid()}"):
        Compiler("sm_90", tmp_path, lines).kernel(SMALL)


def test_the_name_of_a_file_follows_everything_that_decides_its_contents() -> None:
    source, headers = module.read_sources("rowwise.cu")
    base = module.cache_key(source, headers, ("-a",), "sm_90")
    others = [
        module.cache_key(source + " ", headers, ("-a",), "sm_90"),
        module.cache_key(source, headers | {"op_math.h": ""}, ("-a",), "sm_90"),
        module.cache_key(source, headers, ("-b",), "sm_90"),
        module.cache_key(source, headers, ("-a",), "sm_121a"),
    ]
    assert len({base, *others}) == 5
    assert module.cache_key(source, headers, ("-a",), "sm_90") == base


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, lines: Lines) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CubinCacheError, match="file"):
        Compiler("sm_90", tmp_path / "file" / "cubins", lines).kernel(SMALL)


# --- refusals ---


def test_code_that_does_not_compile_is_shown_with_the_words_of_the_compiler() -> None:
    from ds4_worker.cuda import nvrtc

    with pytest.raises(KernelCompileError, match="expected") as caught:
        nvrtc.compile_source("broken.cu", "__global__ void f( {", {}, ("--gpu-architecture=sm_90",))
    assert caught.value.exit_code == 51


def test_a_virtual_architecture_is_refused_because_its_cubin_is_empty() -> None:
    from ds4_worker.cuda import nvrtc

    with pytest.raises(KernelCompileError, match="empty cubin"):
        nvrtc.compile_source(
            "f.cu", "__global__ void f() {}", {}, ("--gpu-architecture=compute_90",)
        )


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 2)])
def test_a_capability_without_kernels_is_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(CudaUnsupported, match=rf"{capability[0]}\.{capability[1]}"):
        module.target_of(capability)
    with pytest.raises(CudaUnsupported):
        Compiler("compute_90", None, print)


def test_without_the_compiler_one_line_says_how_to_get_it() -> None:
    program = (
        "import sys\n"
        "sys.modules['cuda.bindings.nvrtc'] = None\n"
        "from ds4_common.errors import Ds4Error\n"
        "from ds4_worker.cuda.compiler import Compiler\n"
        "from ds4_worker.cuda.kernels import Unit\n"
        "try:\n"
        "    Compiler('sm_90', None, print).kernel(Unit('rowwise.cu'))\n"
        "except Ds4Error as error:\n"
        "    print(error)\n"
        "    sys.exit(error.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 50
    assert done.stdout.count("\n") == 1
    assert "pip install 'ds4[cuda]'" in done.stdout


def test_resources_are_read_from_the_assembler_s_log() -> None:
    log = (
        "ptxas info    : Compiling entry function 'one' for 'sm_90'\n"
        "ptxas info    : Function properties for one\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 72 registers, used 1 barriers, 4 bytes smem\n"
    )
    assert module.read_resources(log) == {"one": Resources(72, 8, 16)}
