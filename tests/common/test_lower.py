"""Lowering: the fusions, the scratch layout, re-lowering by ABI, and what it refuses."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds4_common.contract import image as im
from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.lower import lower_contract, lower_cpu
from ds4_common.errors import ContractError, UnsupportedModel
from ds4_common.gguf import GgmlType
from helpers.models import smollm2_path
from helpers.prepared import prepare_file
from helpers.tiny_gguf import TinyLlama, write_llama


@dataclass(frozen=True)
class Parsed:
    """An image read back by its record formats."""

    header: tuple[int, ...]
    slots: list[tuple[int, ...]]
    ops: list[tuple[int, ...]]
    sections: list[tuple[int, ...]]

    def kinds(self) -> list[tuple[int, list[int]]]:
        return [
            (kind, [op[0] for op in self.ops[first : first + count]])
            for kind, _, first, count in self.sections
        ]


def parse(image: bytes) -> Parsed:
    header = im.HEADER.unpack_from(image)
    counts, at = header[9:16], im.HEADER.size
    tables = []
    for record, count in zip(im.RECORDS[1:], counts, strict=True):
        end = at + record.size * count
        tables.append(list(record.iter_unpack(image[at:end])))
        at = end
    assert at == len(image) == header[4]
    return Parsed(header, tables[2], tables[5], tables[6])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> pb.Bundle:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return prepare_file(write_llama(path, TinyLlama(n_layers=2, biases=True))).bundle


def copy(bundle: pb.Bundle) -> pb.Bundle:
    made = pb.Bundle()
    made.CopyFrom(bundle)
    return made


def ops_of(bundle: pb.Bundle, kernel: str) -> list[pb.Op]:
    return [op for op in bundle.execution.programs[0].ops.ops if op.kernel == kernel]


def test_a_layer_is_ten_sections_and_shares_its_quantized_inputs(bundle: pb.Bundle) -> None:
    layer = [
        (im.SECTION_MATMUL, [im.OP_MATMUL] * 3),
        (im.SECTION_ROWS, [im.OP_ROPE, im.OP_ROPE, im.OP_KV_STORE]),
        (im.SECTION_ATTEND, [im.OP_ATTEND]),
        (im.SECTION_ROWS, [im.OP_QUANTIZE]),
        (im.SECTION_MATMUL, [im.OP_MATMUL]),
        (im.SECTION_ROWS, [im.OP_ADD, im.OP_RMS_NORM, im.OP_QUANTIZE]),
        (im.SECTION_MATMUL, [im.OP_MATMUL] * 2),
        (im.SECTION_ROWS, [im.OP_GLU, im.OP_QUANTIZE]),
        (im.SECTION_MATMUL, [im.OP_MATMUL]),
    ]
    between = (im.SECTION_ROWS, [im.OP_ADD, im.OP_RMS_NORM, im.OP_QUANTIZE])
    assert parse(lower_cpu(bundle)).kinds() == [
        (im.SECTION_ROWS, [im.OP_EMBED, im.OP_RMS_NORM, im.OP_QUANTIZE]),
        *layer,
        between,
        *layer,
        (im.SECTION_ROWS, [im.OP_ADD]),
        (im.SECTION_ROWS, [im.OP_GATHER, im.OP_RMS_NORM, im.OP_QUANTIZE]),
        (im.SECTION_MATMUL, [im.OP_MATMUL]),
    ]


def test_the_real_model_runs_in_some_300_sections() -> None:
    prepared = prepare_file(smollm2_path())
    image = lower_cpu(prepared.bundle)
    assert len(parse(image).sections) == 303
    assert len(image) < 80 * 1024


def test_an_input_wanted_in_two_formats_is_quantized_twice(tmp_path: Path) -> None:
    spec = TinyLlama(width=256, ffn=512, weights=(GgmlType.Q4_K, GgmlType.Q8_0))
    image = parse(lower_cpu(prepare_file(write_llama(tmp_path / "tiny.gguf", spec)).bundle))
    assert (im.SECTION_ROWS, [im.OP_EMBED, im.OP_RMS_NORM, im.OP_QUANTIZE, im.OP_QUANTIZE]) in (
        image.kinds()
    )


def test_values_that_live_together_never_overlap(bundle: pb.Bundle) -> None:
    """Replays the image: every byte read was last written by the op that the value came from."""
    image = parse(lower_cpu(bundle))
    owner: dict[tuple[int, int], int] = {}  # (space, 64-byte line) -> slot that wrote it last

    def lines(slot: int) -> list[tuple[int, int]]:
        space, _, _, _, offset, n_bytes = image.slots[slot]
        return [(space, line) for line in range(offset // 64, (offset + n_bytes) // 64)]

    for _, _, first, count in image.sections:
        ops = image.ops[first : first + count]
        written: list[int] = []
        for op in ops:
            for slot in op[1:4]:
                if slot != im.NONE:
                    assert all(owner[line] == slot for line in lines(slot))
            if op[4] != im.NONE:
                written.append(op[4])
                owner.update((line, op[4]) for line in lines(op[4]))
        touched = {slot for op in ops for slot in op[1:5] if slot != im.NONE}
        spans = [line for slot in touched for line in lines(slot)]
        assert len(spans) == len(set(spans)), "threads work on different tokens of one section"
        assert len(written) == len(set(written))
    logits = image.header[8]
    assert all(owner[line] == logits for line in lines(logits))


def test_scratch_is_reused(bundle: pb.Bundle) -> None:
    image = parse(lower_cpu(bundle))
    tokens = [slot for slot in image.slots if slot[0] == im.SPACE_TOKENS]
    assert image.header[-2] == max(slot[4] + slot[5] for slot in tokens)
    assert image.header[-2] < sum(slot[5] for slot in tokens)


def test_names_of_buffers_order_nothing(bundle: pb.Bundle) -> None:
    """A list that gives every written value a name of its own lowers to the same image."""
    renamed = copy(bundle)
    latest: dict[str, str] = {}
    scratch = {b.name: b for b in renamed.execution.buffers if b.space == pb.SCRATCH}
    for number, op in enumerate(renamed.execution.programs[0].ops.ops):
        inputs = getattr(op, "in")
        inputs[:] = [latest.get(name, name) for name in inputs]
        for i, name in enumerate(op.out):
            if name in scratch:
                latest[name] = op.out[i] = f"{name}.{number}"
                buffer = renamed.execution.buffers.add()
                buffer.CopyFrom(scratch[name])
                buffer.name = op.out[i]
    assert lower_cpu(renamed) == lower_cpu(bundle)


def test_lowering_is_deterministic(bundle: pb.Bundle) -> None:
    blob = bundle.SerializeToString()
    assert lower_contract(blob) == lower_contract(blob) == lower_cpu(bundle)


# --- loading ---


def test_an_image_of_this_abi_is_taken_as_it_is(bundle: pb.Bundle) -> None:
    image = lower_cpu(bundle)
    assert im.load_image(image, b"never parsed") == (image, False)
    header = im.read_header(image)
    assert (header.vocabulary, header.context_tokens, header.allocations) == (320, 256, (0,))


@pytest.mark.parametrize("change", [lambda x: x ^ 1, lambda x: x ^ 1 << 40])
def test_an_image_of_another_abi_is_lowered_again(
    bundle: pb.Bundle, change: Callable[[int], int]
) -> None:
    image = lower_cpu(bundle)
    stale = bytearray(image)
    struct.pack_into("<Q", stale, 16, change(im.image_abi()))
    assert im.load_image(bytes(stale), bundle.SerializeToString()) == (image, True)


def test_an_image_of_another_format_is_lowered_again(bundle: pb.Bundle) -> None:
    blob = bundle.SerializeToString()
    assert im.load_image(b"", blob) == (lower_cpu(bundle), True)
    assert im.load_image(b"x" * 500, blob) == (lower_cpu(bundle), True)


@pytest.mark.parametrize("blob", [b"", b"\xff" * 40])
def test_a_stale_image_with_a_broken_contract_is_refused(blob: bytes) -> None:
    with pytest.raises(ContractError):
        im.load_image(b"", blob)


@pytest.mark.parametrize("size", [0, 95, 96, 500])
def test_a_header_that_does_not_fit_is_refused(bundle: pb.Bundle, size: int) -> None:
    with pytest.raises(ContractError, match="CPU image"):
        im.read_header(lower_cpu(bundle)[:size])


# --- refusals ---


def _no_mixed_program(b: pb.Bundle) -> None:
    b.serving.model.programs[0].operation = pb.DECODE


def _unknown_kernel(b: pb.Bundle) -> None:
    ops_of(b, "glu")[0].kernel = "gelu"


def _missing_attribute(b: pb.Bundle) -> None:
    del ops_of(b, "rms_norm")[0].attr["eps"]


def _missing_input(b: pb.Bundle) -> None:
    del getattr(ops_of(b, "add")[0], "in")[1]


def _unwritten_input(b: pb.Bundle) -> None:
    getattr(ops_of(b, "add")[0], "in")[1] = "nowhere"


def _other_positions(b: pb.Bundle) -> None:
    getattr(ops_of(b, "rope")[0], "in")[1] = "banks"


def _not_a_weight(b: pb.Bundle) -> None:
    getattr(ops_of(b, "matmul")[0], "in")[1] = "x"


def _wrong_width(b: pb.Bundle) -> None:
    getattr(ops_of(b, "matmul")[0], "in")[0] = "x"
    getattr(ops_of(b, "matmul")[0], "in")[1] = "blk.0.ffn_down.weight"


def _no_kernel(b: pb.Bundle) -> None:
    next(x for x in b.execution.buffers if x.name == "blk.0.attn_q.weight").layout = 7


def _no_logits(b: pb.Bundle) -> None:
    ops_of(b, "matmul")[-1].out[0] = "x"


def _attends_elsewhere(b: pb.Bundle) -> None:
    getattr(ops_of(b, "attend_paged")[0], "in")[1] = "cache.1.k"


def _other_heads(b: pb.Bundle) -> None:
    ops_of(b, "attend_paged")[0].attr["kv_heads"] = 1


def _stored_twice(b: pb.Bundle) -> None:
    ops_of(b, "kv_store")[1].out[:] = ops_of(b, "kv_store")[0].out


def _beyond_float32(b: pb.Bundle) -> None:
    ops_of(b, "rms_norm")[0].attr["eps"] = 1e300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_no_mixed_program, "operation MIXED"),
        (_unknown_kernel, r"program op \d+ \(gelu\): kernel: got gelu"),
        (_missing_attribute, "attribute: got none, expected 'eps'"),
        (_missing_input, "inputs: got 1, expected 2 to 2"),
        (_unwritten_input, "got 'nowhere', expected a buffer that an op above has written"),
        (_other_positions, "input 1: got banks, expected 'positions'"),
        (_not_a_weight, "got 'x', expected a WEIGHT buffer"),
        (_wrong_width, "width of x: got 64, expected 128"),
        (_no_logits, "no op writes 'logits'"),
        (_attends_elsewhere, r"planes that an op above stores"),
        (_other_heads, r"expected the stored Plane\(kv_heads=2"),
        (_stored_twice, "a second store"),
        (_beyond_float32, "a value does not fit its field"),
    ],
)
def test_what_cannot_run_is_refused(
    bundle: pb.Bundle, change: Callable[[pb.Bundle], None], message: str
) -> None:
    broken = copy(bundle)
    change(broken)
    with pytest.raises(ContractError, match=message):
        lower_cpu(broken)


def test_a_weight_without_a_kernel_is_an_unsupported_model(bundle: pb.Bundle) -> None:
    broken = copy(bundle)
    _no_kernel(broken)
    with pytest.raises(UnsupportedModel, match="no matmul kernel for ggml type 8 in layout 7"):
        lower_cpu(broken)
