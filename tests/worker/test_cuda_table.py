"""Every op, type and layout of the contract meets a kernel, and products of many columns the tensor
cores: what a program would launch, and what the compiled code holds."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from ds4_common.contract import image as im
from ds4_common.contract.lower import lower_image
from ds4_common.contract.ops import OPS
from ds4_common.errors import UnsupportedModel
from ds4_common.gguf import GgmlType
from ds4_common.quants import QuantType
from ds4_worker.cuda import kernels as ks
from ds4_worker.executor.api import ExecutorConfig
from ds4_worker.executor.cuda_program import MANY_TOKENS
from ds4_worker.executor.cuda_rows import Planned
from golden import tiny
from helpers.cuda_executors import planned
from helpers.prepared import prepare_file

CONFIG = ExecutorConfig(threads=1, banks=1, context_tokens=32, batch_tokens=32, batch_outputs=32)
PRODUCTS = {im.OP_MATMUL: "matvec", im.OP_MATMUL_EXPERTS: "matvec_experts"}
# What an owner may hand out to a device: blocks as published, and the artifacts.
HELD = [(kind, 0) for kind in QuantType] + [
    (t, layout) for layout, t in ks.ARTIFACT_LAYOUTS.items()
]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> im.Image:
    """A program with dense products and with experts."""
    case = tiny.cases_of("mixtral")[0]
    path = tiny.write_gguf(case, tmp_path_factory.mktemp("t") / "t.gguf", [GgmlType.F16])
    return lower_image(prepare_file(path).bundle, any_layout=True)


def held_as(image: im.Image, quant: int, layout: int) -> im.Image:
    """The same program over matrices of another type: only a plan, nothing of it exists."""
    matrices = {
        op.weight for section in image.sections for op in section.ops
        if op.kind in (*PRODUCTS, im.OP_EMBED)
    }  # fmt: skip
    weights = [
        msgspec.structs.replace(w, ggml_type=quant, layout=layout) if i in matrices else w
        for i, w in enumerate(image.weights)
    ]
    return msgspec.structs.replace(image, weights=weights)


def p_of(launch: Planned) -> ks.Matvec:
    assert isinstance(launch.parameters, ks.Matvec)
    return launch.parameters


@pytest.mark.parametrize(("quant", "layout"), HELD, ids=lambda v: str(v))
def test_products_of_every_type_and_layout_go_the_way_of_few_columns_and_of_many(
    experts: im.Image, quant: int, layout: int
) -> None:
    program = planned(held_as(experts, quant, layout), CONFIG)
    unit = ks.weight_unit(quant, layout)
    ops = Counter(op.kind for section in experts.sections for op in section.ops)
    assert ops[im.OP_MATMUL] > 3
    assert ops[im.OP_MATMUL_EXPERTS] > 2
    few: Counter[str] = Counter()
    for each in program.launches(MANY_TOKENS - 1):
        if each.unit == unit:
            few[each.kernel] += 1 + (
                each.kernel == "matvec" and sum(map(bool, p_of(each).more_rows))
            )
    assert few == {
        "matvec": ops[im.OP_MATMUL], "matvec_experts": ops[im.OP_MATMUL_EXPERTS],
        "embed": ops[im.OP_EMBED],
    }  # fmt: skip
    many = Counter(each.kernel for each in program.launches(MANY_TOKENS) if each.unit == unit)
    assert many == {
        "matmul": ops[im.OP_MATMUL] + ops[im.OP_MATMUL_EXPERTS], "embed": ops[im.OP_EMBED],
    }  # fmt: skip


def test_a_layout_without_kernels_is_refused_by_name(experts: im.Image) -> None:
    with pytest.raises(UnsupportedModel, match="Q8_0 in layout 2"):
        planned(held_as(experts, QuantType.Q8_0, 2), CONFIG)


def test_each_op_of_the_registry_names_the_kernels_that_compute_it() -> None:
    """Prefill and decode have their own ways where it matters."""
    tables = {**ks.KERNELS, **ks.CACHE_KERNELS}
    found = {op: {name for name, kernel in tables.items() if op in kernel.ops} for op in OPS}
    for name, (_, ops) in (*ks.WEIGHT_KERNELS.items(), *ks.MANY_KERNELS.items()):
        for op in ops:
            found[op].add(name)
    assert all(found.values())
    assert found["matmul"] == {"matvec", "matmul"}
    assert found["matmul_experts"] == {"matvec_experts", "matmul", "sort_experts"}
    for op in ("attend_paged", "attend_latent"):
        assert found[op] == {"attend_whole", "attend_parts", "attend_fold"}
    assert found["attend_rows"] == {"attend_rows", "attend_rows_parts", "attend_rows_fold"}


# --- tensor cores ---


_IMMA = (
    0x237  # of an instruction's low twelve bits, since sm_75: integers multiplied by tensor cores
)
TWO_INTEGERS = """extern "C" __global__ void kernel(int *o, const int *i) {
    int d[4] = {0, 0, 0, 0};
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(i[0]), "r"(i[1]), "r"(i[2]), "r"(i[3]), "r"(i[4]), "r"(i[5]));
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(i[0]), "r"(i[1]), "r"(i[4]));
    o[0] = d[0] + d[1] + d[2] + d[3];
}"""


def code_of(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Kernels of an ELF file and their instructions."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    for name, _, _, _, at, length in rows:
        start = rows[names][4] + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            yield text.removeprefix(".text."), cubin[at : at + length]


def integer_products(code: bytes) -> int:
    words = (struct.unpack_from("<Q", code, at)[0] for at in range(0, len(code), 16))
    return sum(word & 0xFFF == _IMMA for word in words)


@pytest.mark.parametrize("target", ["sm_90", "sm_121a"])
def test_products_of_many_columns_are_made_on_tensor_cores_but_for_floats(target: str) -> None:
    """In the instructions of the compiled code. Where sixteens have their own scale, twice as
    many."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra `cuda`")
    from ds4_worker.cuda import nvrtc
    from ds4_worker.cuda.compiler import Compiler, in_parallel
    from helpers.cuda_kernels import CACHE

    made = nvrtc.compile_source("k.cu", TWO_INTEGERS, {}, (f"--gpu-architecture={target}",))
    assert [integer_products(code) for _, code in code_of(made.cubin)] == [2]
    units = [unit for unit in ks.UNITS if unit.ggml_type >= 0 and unit.layout != ks.VALUE_HEADS]
    compiler = Compiler(target, CACHE / "cubins", print)
    for unit, kernel in zip(units, in_parallel(compiler.kernel, units), strict=True):
        found = {name: integer_products(code) for name, code in code_of(kernel.cubin)}
        sixteens = unit.ggml_type in (10, 11, 14, 17, 22, 29, 40)
        products = 0 if unit.ggml_type in ks.FLOAT_TYPES else 16 if sixteens else 8
        assert found.pop("matmul") == products, unit.label
        assert set(found) == {"embed", "matvec", "matvec_experts"}, unit.label
        assert not any(found.values()), unit.label
