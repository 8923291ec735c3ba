"""The fibers that run kernels on the CPU: they show the faults that they are there to show."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4_worker.cuda.compiler import SOURCES
from ds4_worker.cuda.kernels import Launch
from helpers.cuda_kernels import NATIVE, HostModule, KernelFault, Memory, address, build

CASES = NATIVE / "cuda_cases" / "cases.cu"
Ints = npt.NDArray[np.int32]


class Case(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_uint64), ("out", ctypes.c_uint64),
        ("n", ctypes.c_int32), ("flag", ctypes.c_int32),
    )  # fmt: skip


@cache
def cases() -> HostModule:
    return HostModule(build(CASES, key=(SOURCES / "intrinsics.h").read_text()))


def run(
    name: str, data: npt.NDArray[Any], outputs: int, flag: bool = True, n: int = 0,
    descending: bool = False, shared: int = 0, blocks: int = 1,
) -> Ints:  # fmt: skip
    memory = Memory()
    held, out = memory.array(data.shape, data.dtype, data), memory.array((outputs,), np.int32)
    p = Case(address(held), address(out), n, int(flag))
    launch = Launch((blocks, 1, 1), (cases().most_threads(name), 1, 1), shared)
    cases().run(name, p, launch, descending)
    return out.copy()


WORDS = np.arange(256, dtype=np.int32)


@pytest.mark.parametrize("descending", [False, True])
def test_a_barrier_makes_both_orders_agree(descending: bool) -> None:
    np.testing.assert_array_equal(
        run("neighbour", WORDS, 64, descending=descending), np.roll(WORDS[:64], 1)
    )


def test_a_missing_barrier_shows_in_one_of_the_orders() -> None:
    up, down = (run("neighbour", WORDS, 64, flag=False, descending=d) for d in (False, True))
    assert not np.array_equal(up, down)


def test_bytes_in_flight_are_not_there_before_they_are_waited_for() -> None:
    whole = WORDS[:128].reshape(32, 4)[::-1].reshape(-1)
    np.testing.assert_array_equal(run("background", WORDS, 128), whole)
    assert (run("background", WORDS, 128, flag=False) == -1).all()


def test_a_block_that_can_never_finish_is_reported_as_a_failed_launch() -> None:
    assert (run("divergent", WORDS, 64) == 1).all()
    with pytest.raises(KernelFault, match=r"719.*32 wait for the block and 32 for their warp"):
        run("divergent", WORDS, 64, flag=False)
    assert (run("divergent", WORDS, 64) == 1).all()  # and the next launch is another one


def test_threads_that_returned_hold_up_nobody() -> None:
    expected = np.arange(32) ^ 5
    np.testing.assert_array_equal(run("early", WORDS, 32), expected)
    np.testing.assert_array_equal(run("early", WORDS, 32, blocks=3), expected + 200)


@pytest.mark.parametrize("n", [1, 2])
def test_fragments_multiply_as_the_ptx_manual_lays_them_out(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-128, 128, (rows, 16 * n)).astype(np.int8) for rows in (16, 8))
    got = run("multiply", np.concatenate([a.reshape(-1), b.reshape(-1)]), 128, n=n)
    np.testing.assert_array_equal(got.reshape(16, 8), a.astype(int) @ b.astype(int).T)


def test_half_precision_is_that_of_the_vendor_s_header() -> None:
    spec = importlib.util.find_spec("nvidia.cu13")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if not roots or not (Path(roots[0]) / "include" / "cuda_fp16.h").exists():
        pytest.skip("needs the header wheels of the extra `gputest`")
    source = NATIVE / "cuda_cases" / "oracle.cc"
    include = Path(roots[0]) / "include"
    more = [f"-isystem{include}", f"-isystem{include / 'cccl'}"]
    oracle = ctypes.CDLL(str(build(source, more)))
    rng = np.random.default_rng(1)
    edges = [
        0, 1, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x33000000, 0x33000001,
        0x7F800000, 0x7FC00000, 0x7F800001,
    ]  # fmt: skip
    words = np.concatenate(
        [np.arange(65536), rng.integers(0, 2**32, 200_000), edges, np.array(edges) | 1 << 31]
    ).astype(np.uint32)
    got = run("convert", words, 2 * len(words), n=len(words)).view(np.uint32).reshape(-1, 2)
    floats, halves = np.empty(len(words), np.float32), np.empty(len(words), np.uint16)
    low = words.astype(np.uint16)
    oracle.halves_to_floats(
        ctypes.c_void_p(low.ctypes.data), ctypes.c_void_p(floats.ctypes.data), len(words)
    )
    oracle.floats_to_halves(
        ctypes.c_void_p(words.ctypes.data), ctypes.c_void_p(halves.ctypes.data), len(words)
    )
    number = ~np.isnan(floats)
    np.testing.assert_array_equal(got[number, 0], floats.view(np.uint32)[number])
    assert np.isnan(got[~number, 0].view(np.float32)).all()
    number = ~np.isnan(words.view(np.float32))
    np.testing.assert_array_equal(got[number, 1], halves[number])
    assert ((got[~number, 1] & 0x7FFF) > 0x7C00).all()


def test_a_launch_that_no_device_takes_is_refused_with_its_sizes() -> None:
    most = cases().most_threads("early")
    for grid, block, shared in (
        ((0, 1, 1), (32, 1, 1), 0),
        ((1 << 31, 1, 1), (32, 1, 1), 0),
        ((1, 65536, 1), (32, 1, 1), 0),
        ((1, 1, 65536), (32, 1, 1), 0),
        ((1, 1, 1), (most + 1, 1, 1), 0),
        ((1, 1, 1), (1, 1, 65), 0),
        ((1, 1, 1), (1 << 31, 2, 1), 0),  # more than 32 bits count
        ((1, 1, 1), (32, 1, 1), (227 << 10) + 1),
    ):
        with pytest.raises(KernelFault, match=r"early: 1: early: no device launches a grid of \("):
            cases().run("early", Case(), Launch(grid, block, shared))


def test_a_unit_may_have_any_number_of_kernels(tmp_path: Path) -> None:
    source = tmp_path / "many.cu"
    one = "DS4_KERNEL(k{0}, many_case, 32, 1) {{ if (!threadIdx.x) *(int *)p.out = {0}; }}\n"
    head = '#include "intrinsics.h"\nstruct many_case { uint64_t in, out; int n, flag; };\n'
    source.write_text(head + "".join(one.format(i) for i in range(150)))
    module = HostModule(build(source))
    assert module.names == [f"k{i}" for i in range(150)]
    out = np.zeros(1, np.int32)
    for i in (0, 63, 64, 149):
        assert module.parameter_bytes(f"k{i}") == ctypes.sizeof(Case)
        module.run(f"k{i}", Case(out=address(out)), Launch((1, 1, 1), (32, 1, 1)))
        assert out[0] == i


# --- under the sanitizers ---


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python in which libraries built with the sanitizers can be loaded."""
    compiler = os.environ.get("CXX", "g++").split()[-1]
    library = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if "/" not in library:
        pytest.skip("the compiler comes without its address sanitizer")
    env = {
        **os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0",
        "DS4_CUDA_SANITIZE": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)


@pytest.mark.parametrize(
    ("name", "words"), [("misaligned", "misaligned address"), ("beyond", "heap-buffer-overflow")]
)
def test_the_sanitizers_see_what_a_cpu_forgives(name: str, words: str) -> None:
    program = (
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('fibers', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        f"module.run({name!r}, module.WORDS, 64, flag=True, shared=128)\n"
        "print('sound', flush=True)\n"
        f"module.run({name!r}, module.WORDS, 64, flag=False, shared=128)\n"
    )
    done = sanitized("-c", program)
    assert done.stdout == "sound\n"
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(
    "chosen",
    [
        "(Q6_K and matvec_has) or norm_adds or (f16 and grouped and how0)",
        pytest.param(
            "Q6_K or IQ2_XXS or BF16 or norm or quantized or streams_are or attention or draws",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["some", "many"],
)
def test_kernels_touch_no_byte_that_is_not_theirs(chosen: str) -> None:
    rooms = ("rows", "weights", "cache", "sample", "streams")
    files = [str(Path(__file__).with_name(f"test_cuda_{room}.py")) for room in rooms]
    done = sanitized("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *files)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
