"""Every kernel's grid, block and shared memory, at the largest sizes that a step can ask for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.contract.lower import lower_image
from ds4_common.errors import UnsupportedModel
from ds4_common.gguf import GgmlType
from ds4_worker.cuda import kernels as ks
from ds4_worker.cuda.limits import BLOCK_LIMITS, GRID_LIMITS, excess, folded
from ds4_worker.executor.api import ExecutorConfig
from golden import tiny
from helpers.cuda_executors import planned
from helpers.prepared import prepare_file

MOST = GRID_LIMITS[1]  # tokens of a step: cuda_places
LEAST_SHARED = 99 << 10  # of a block, on the target that has least: sm_120a, sm_121a

# Beyond any model that was published: rows of a step, widths, heads, experts.
BEYOND = {
    "tokens": MOST, "rows": MOST, "width": 1 << 20, "cols": 1 << 20, "columns": 256, "heads": 4096,
    "half": 1024, "dim": 1024, "experts": 4096, "used": 256, "groups": 256, "format": 1,
    "most_rows": 1 << 22, "kv_heads": 4096, "value_dim": 1024, "part_tokens": 256, "streams": 4,
    "most_parts": 1 << 20, "tile_tokens": 1, "tile_heads": 1, "page_tokens": 256,
}  # fmt: skip


def filled(kind: type[ctypes.Structure], sizes: dict[str, int]) -> ctypes.Structure:
    """Parameters with these sizes wherever they have such a field, in structures inside too."""
    made = kind()
    for name, field in ((f[0], f[1]) for f in kind._fields_):
        if issubclass(field, ctypes.Structure):
            setattr(made, name, filled(field, sizes))
        elif name in sizes:
            setattr(made, name, sizes[name])
    return made


@pytest.mark.parametrize("kernel", [*ks.KERNELS.values(), *ks.CACHE_KERNELS.values()],
                         ids=lambda kernel: kernel.name)  # fmt: skip
def test_the_largest_step_of_any_model_is_a_grid_that_devices_launch(kernel: ks.Kernel) -> None:
    launch = kernel.launch(filled(kernel.parameters, BEYOND))
    assert excess(launch) == ""


@pytest.mark.parametrize("unit", [u for u in ks.UNITS if u.ggml_type >= 0], ids=lambda u: u.label)
def test_the_largest_product_of_any_type_is_a_grid_that_devices_launch(unit: ks.Unit) -> None:
    p = filled(ks.Matvec, BEYOND | {"rows": 1 << 20, "columns": MOST})
    assert isinstance(p, ks.Matvec)
    grouped = ks.Matmul(product=p)
    for launch in (
        ks.matvec_launch(p, unit.ggml_type, unit.layout), ks.matmul_launch(grouped, unit.ggml_type),
        ks.matvec_experts_launch(p, unit.ggml_type, unit.layout),
        ks.matmul_experts_launch(grouped, unit.ggml_type),
        ks.embed_launch(ks.Embed(rows=MOST, cols=1 << 20)),
    ):  # fmt: skip
        assert excess(launch) == ""
        assert launch.shared_bytes <= LEAST_SHARED
    p.used = 128  # value heads of a published model, and the default chunk of 512 tokens
    p.columns = 512
    assert p.used * p.columns > MOST
    assert ks.matvec_experts_launch(p, unit.ggml_type, unit.layout).grid[2] == 2


# The largest that models in files have, of what shared memory grows with.
PUBLISHED = {
    "rms_norm": {"width": 16384}, "route": {"experts": 512, "groups": 8},
    "sort_experts": {"experts": 512}, "hadamard": {"dim": 512},
    "index_scores": {"dim": 128, "heads": 64}, "attend_rows": {"dim": 512},
    "attend_rows_parts": {"dim": 512},
    "attend_whole": {"dim": 576, "value_dim": 512, "part_tokens": 256},
    "attend_parts": {"dim": 576, "value_dim": 512, "part_tokens": 256},
}  # fmt: skip


@pytest.mark.parametrize("kernel", [*ks.KERNELS.values(), *ks.CACHE_KERNELS.values()],
                         ids=lambda kernel: kernel.name)  # fmt: skip
def test_no_published_model_asks_a_device_for_more_shared_memory_than_it_has(
    kernel: ks.Kernel,
) -> None:
    sizes = BEYOND | PUBLISHED.get(kernel.name, {})
    assert kernel.launch(filled(kernel.parameters, sizes)).shared_bytes <= LEAST_SHARED


@given(st.integers(1, MOST * MOST))
def test_folded_blocks_are_enough_and_hardly_more(n: int) -> None:
    y, z = folded(n)
    assert n <= y * z < n + z
    assert excess(ks.Launch((1, y, z), (1, 1, 1))) == ""
    assert z == 1 or n > MOST


def test_what_is_beyond_a_limit_is_named() -> None:
    assert excess(ks.Launch((1, MOST + 1, 1), (1, 1, 1))).startswith("a grid of (1, 65536, 1)")
    assert excess(ks.Launch((1, 1, 1), (0, 1, 1))).startswith("a block of (0, 1, 1)")
    assert "2048 threads" in excess(ks.Launch((1, 1, 1), (1024, 2, 1)))
    assert excess(ks.Launch(GRID_LIMITS, (1, 1, BLOCK_LIMITS[2]))) == ""


def test_a_program_with_a_launch_that_no_device_takes_is_refused_with_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = tiny.cases_of("mixtral")[0]
    path = tiny.write_gguf(case, tmp_path / "experts.gguf", [GgmlType.F16])
    image = lower_image(prepare_file(path).bundle, any_layout=True)
    config = ExecutorConfig(threads=1, banks=1, context_tokens=32, batch_tokens=MOST)
    planned(image, config)
    monkeypatch.setattr(ks, "folded", lambda n: (100 * n, 1))
    with pytest.raises(UnsupportedModel, match=r"matmul of 65535 tokens \(a grid of"):
        planned(image, config)
