"""Without a driver: imports work, and every call answers with the same clear line, promptly."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from helpers.driver import programs


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


TWICE = """
    from ds4_common.cuda.device import probe
    from ds4_common.errors import NoCudaDriver
    for _ in range(3):
        try:
            probe()
        except NoCudaDriver as error:
            print(error)
    probe()
"""


def lines_of_probing(body: str = TWICE, **environment: str) -> list[str]:
    done = programs.attempt(body, {**programs.plain_environment(), **environment})
    assert done.returncode == 41, done.stderr
    lines = done.stdout.strip().splitlines()
    assert done.stderr == f"NoCudaDriver: {lines[0]}\n"
    assert set(lines) == {lines[0]}
    return lines


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
def test_a_machine_without_a_driver_says_so_every_time() -> None:
    pytest.importorskip("cuda.bindings")
    lines = lines_of_probing()
    assert len(lines) == 3
    assert lines[0].startswith("no CUDA driver: ")
    assert "--backend memfd" in lines[0]


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
def test_a_library_that_is_no_driver_is_none(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    (tmp_path / "libcuda.so.1").write_text("not a library")
    assert "no CUDA driver" in lines_of_probing(LD_LIBRARY_PATH=str(tmp_path))[0]


def test_missing_bindings_are_named_with_the_way_to_install_them() -> None:
    blocked = "    import sys; sys.modules['cuda'] = None" + TWICE
    assert "pip install 'ds4[cuda]'" in lines_of_probing(blocked)[0]


def test_importing_the_driver_layer_imports_no_bindings() -> None:
    done = programs.attempt(
        """
        import ds4_common.cuda.device, ds4_common.cuda.memory
        import ds4_common.cuda.module, ds4_common.cuda.stream
        print([name for name in sys.modules if name.split(".")[0] == "cuda"])
        """,
        programs.plain_environment(),
    )
    assert done.stdout.strip() == "[]", done.stderr
