"""The parser on one file: everything valid is read, everything else is a GgufError."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import gguf
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4_common.errors import GgufError
from ds4_common.gguf import ArrayInfo, GgmlType, LogicalModel, ValueType, parser
from ds4_common.gguf.types import FIXED_CODES, block_bytes, block_weights
from helpers.descriptors import open_fds
from helpers.tiny_gguf import RawTensor, gguf_bytes, pack_string, write_llama

U8, U32, F32 = ValueType.UINT8, ValueType.UINT32, ValueType.FLOAT32
BOOL, STRING, ARRAY = ValueType.BOOL, ValueType.STRING, ValueType.ARRAY
HUGE = (1 << 64) - 1
PEAK_BYTES = 4 << 20


@contextmanager
def memory_file(data: bytes) -> Iterator[str]:
    """A path that holds `data` and costs no disk access."""
    fd = os.memfd_create("gguf")
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def read_all(path: str) -> None:
    """Opens a model and asks for everything in it, by every getter."""
    with LogicalModel.open(path) as model:
        meta = model.metadata
        for key in meta:
            assert meta[key] is not None
            for getter in (
                meta.get_int, meta.get_float, meta.get_bool, meta.get_str,
                meta.get_strings, meta.get_ints, meta.get_floats,
            ):  # fmt: skip
                with suppress(GgufError):
                    getter(key)
        for tensor in model.tensors:
            model.read_into(tensor.offset, bytearray(min(tensor.n_bytes, 100)))


def refusal(data: bytes) -> str:
    """The message of the GgufError that these bytes must cause, without its path."""
    with memory_file(data) as path, pytest.raises(GgufError) as caught:
        LogicalModel.open(path)
    assert caught.value.path == path
    assert 0 <= caught.value.offset
    return str(caught.value).removeprefix(path)


SMALL = gguf_bytes(
    [
        ("general.architecture", STRING, "llama"),
        ("an.int", U32, 7),
        ("a.bool", BOOL, 1),
        ("tokens", ARRAY, (STRING, ["a", "", "\u00e9"])),
        ("scores", ARRAY, (F32, [1.0, 2.5])),
        ("nested", ARRAY, (ARRAY, [(U8, [1, 2]), (STRING, ["x"]), (ARRAY, [(BOOL, [1])])])),
        ("empty", ARRAY, (STRING, [])),
    ],
    [
        RawTensor("a", (32, 2), GgmlType.Q8_0, bytes(range(68))),
        RawTensor("b", (3,), data=b"twelve bytes"),
    ],
)


def test_type_table_is_that_of_the_gguf_package() -> None:
    ours = {int(t): (t.name, block_weights(t), block_bytes(t)) for t in GgmlType}
    theirs = {int(t): (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGML_QUANT_SIZES}
    assert ours == theirs


@pytest.mark.parametrize("version", [2, 3])
def test_valid_file_is_read_in_both_versions(version: int) -> None:
    data = SMALL[:4] + struct.pack("<I", version) + SMALL[8:]
    with memory_file(data) as path, LogicalModel.open(path) as model:
        assert model.n_bytes == len(data)
        assert [(t.name, t.ggml_type, t.dims, t.n_bytes) for t in model.tensors] == [
            ("a", GgmlType.Q8_0, (32, 2), 68),
            ("b", GgmlType.F32, (3,), 12),
        ]
        found = bytearray(12)
        tensor = model.tensor("b")
        assert tensor is not None
        model.read_into(tensor.offset, found)
        assert found == b"twelve bytes"
        assert model.tensor("c") is None


@pytest.mark.parametrize("value_type", FIXED_CODES)
def test_every_fixed_type_is_read_as_scalar_and_as_array(value_type: ValueType) -> None:
    code = FIXED_CODES[value_type]
    values = [0.0, 0.5, -2.0] if code in "fd" else [0, 1, 1]
    if code in "bhiq":
        values = [0, -1, -(1 << (8 * struct.calcsize(f"<{code}") - 1))]
    data = gguf_bytes(
        [("scalar", value_type, values[1]), ("array", ARRAY, (value_type, values))],
        [RawTensor("t", (1,))],
    )
    with memory_file(data) as path, LogicalModel.open(path) as model:
        meta = model.metadata
        array = meta.get_floats("array") if code in "fd" else meta.get_ints("array")
        assert array.tolist() == values
        assert meta["scalar"] == values[1]
        if value_type is BOOL:
            assert meta.get_bool("scalar") is True
        elif code in "fd":
            assert meta.get_float("scalar") == values[1]
        else:
            assert meta.get_int("scalar") == values[1]


def test_arrays_are_stepped_over_the_same_whatever_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parsed() -> parser.Header:
        with memory_file(SMALL) as path, open(path, "rb") as file:
            return parser.parse_header(file.fileno(), path, len(SMALL))

    whole = parsed()
    nested = whole.entries["nested"].value
    assert isinstance(nested, ArrayInfo)
    assert (nested.element_type, nested.count) == (ARRAY, 3)
    for window in (1, 7, 12, 64):
        monkeypatch.setattr(parser, "WINDOW_BYTES", window)
        assert parsed() == whole


def test_alignment_is_honoured() -> None:
    tensors = [RawTensor("a", (1,), data=b"aaaa"), RawTensor("b", (1,), data=b"bbbb")]
    data = gguf_bytes([("general.alignment", U32, 128)], tensors, alignment=128)
    with memory_file(data) as path, LogicalModel.open(path) as model:
        found = bytearray(4)
        model.read_into(model.tensors[1].offset, found)
        assert found == b"bbbb"
        assert model.tensors[1].offset % 128 == 0


def test_file_without_tensors_is_a_model() -> None:
    with memory_file(gguf_bytes([("a", U32, 1)])) as path, LogicalModel.open(path) as model:
        assert model.tensors == ()


# --- refusals ---


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "magic"),
        (b"GGU", "magic"),
        (b"GGML" + SMALL[4:], "got b'GGML'"),
        (SMALL[:4] + struct.pack("<I", 1) + SMALL[8:], "version: got 1,"),
        (SMALL[:4] + struct.pack("<I", 4) + SMALL[8:], "version: got 4,"),
        (SMALL[:4] + struct.pack(">I", 3) + SMALL[8:], "got 3 in big-endian byte order"),
        (gguf_bytes(n_entries=HUGE), "metadata count"),
        (gguf_bytes(n_tensors=HUGE), "tensor count"),
        (gguf_bytes(n_tensors=1), "end of file"),
        (gguf_bytes(n_entries=1), "end of file"),
        (gguf_bytes(n_entries=1) + pack_string("k") + struct.pack("<I", 13), "got 13"),
        (gguf_bytes(n_entries=1) + struct.pack("<Q", HUGE), "length of metadata key"),
        (gguf_bytes(n_entries=1) + pack_string(b"\xff") + bytes(8), "UTF-8"),
        (gguf_bytes([("k", U8, 1), ("k", U8, 2)]), "'k' twice"),
        (gguf_bytes([("k", U8, 2)]).replace(b"k\0\0\0\0", b"k\7\0\0\0"), "boolean byte 2"),
        (gguf_bytes([("k", STRING, "v")])[:-9] + struct.pack("<Q", HUGE), "length of metadata"),
        (gguf_bytes([("general.alignment", U32, 0)]), "power of two"),
        (gguf_bytes([("general.alignment", U32, 24)]), "power of two"),
        (gguf_bytes([("general.alignment", ValueType.UINT64, 32)]), "got UINT64"),
    ],
)
def test_malformed_head_is_refused(data: bytes, words: str) -> None:
    assert words in refusal(data)


def array_head(element_type: int, count: int) -> bytes:
    return gguf_bytes(n_entries=1) + pack_string("k") + struct.pack("<IIQ", 9, element_type, count)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (array_head(U32, HUGE), "beyond the end"),
        (array_head(U32, 2) + bytes(7), "beyond the end"),
        (array_head(STRING, HUGE) + bytes(64), "beyond the end"),
        (array_head(STRING, 1) + struct.pack("<Q", HUGE) + bytes(64), "beyond the end"),
        (array_head(STRING, 1) + bytes(7), "beyond the end"),
        (array_head(ARRAY, HUGE) + bytes(60), "beyond the end"),
        (array_head(13, 1) + bytes(64), "type of metadata 'k'"),
        (array_head(ARRAY, 1) + struct.pack("<IQ", 13, 1) + bytes(8), "outside the format"),
        (array_head(ARRAY, 1) + struct.pack("<IQ", 9, 1) * 5 + bytes(64), "nested deeper"),
    ],
)
def test_malformed_array_is_refused(data: bytes, words: str) -> None:
    assert words in refusal(data)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([RawTensor("", (1,))], "tensor name"),
        ([RawTensor("a b", (1,))], "no spaces"),
        ([RawTensor("a\nb", (1,))], "no spaces"),
        ([RawTensor(b"\xff\xfe", (1,))], "UTF-8"),
        ([RawTensor("n" * 256, (1,))], "at most 255"),
        ([RawTensor("a", (1,)), RawTensor("a", (1,))], "a twice"),
        ([RawTensor("a", (1,) * 9)], "got 9"),
        ([RawTensor("a", (4, 0))], "[4, 0]"),
        ([RawTensor("a", (1 << 32, 1 << 32, 1 << 32), data=b"")], "product"),
        ([RawTensor("a", (HUGE,), data=b"")], "product"),
        ([RawTensor("a", (31,), GgmlType.Q8_0)], "a multiple of 32"),
        ([RawTensor("a", (32,), 4)], "2 Q4_0"),
        ([RawTensor("a", (32,), HUGE & 0xFFFFFFFF)], "one of 0 F32"),
        ([RawTensor("a", (8,), offset=4)], "a multiple of 32"),
        ([RawTensor("a", (8,), offset=32)], "truncated"),
        ([RawTensor("a", (8,), offset=HUGE & ~31)], "truncated"),
        ([RawTensor("a", (1 << 40,), data=bytes(64))], "truncated"),
        ([RawTensor("a", (16,)), RawTensor("b", (16,), offset=32)], "overlap with a"),
        ([RawTensor("a", (16,)), RawTensor("b", (16,), offset=0)], "overlap"),
    ],
)
def test_malformed_tensor_table_is_refused(tensors: list[RawTensor], words: str) -> None:
    assert words in refusal(gguf_bytes([("a", U32, 1)], tensors))


def test_tensor_without_dimensions_is_one_element() -> None:
    data = gguf_bytes([], [RawTensor("a", (), data=b"abcd")])
    with memory_file(data) as path, LogicalModel.open(path) as model:
        assert model.tensors[0].dims == (1,)
        assert model.tensors[0].n_bytes == 4


def test_truncation_at_every_byte_is_refused() -> None:
    padding = 32 - 12
    for n in range(len(SMALL) - padding):
        assert refusal(SMALL[:n])
    with memory_file(SMALL[: len(SMALL) - padding]) as path:
        read_all(path)


def test_file_that_shrinks_between_stat_and_read_is_refused() -> None:
    with memory_file(SMALL[:100]) as path, open(path, "rb") as file:
        with pytest.raises(GgufError, match="shrank"):
            parser.parse_header(file.fileno(), path, len(SMALL))


@pytest.mark.parametrize("left", range(13))
def test_file_that_shrinks_inside_an_array_does_not_stall(left: int) -> None:
    data = array_head(STRING, 100) + bytes(800)
    with memory_file(data[: 41 + left]) as path, open(path, "rb") as file:
        with pytest.raises(GgufError, match="shrank"):
            parser.parse_header(file.fileno(), path, len(data))


def test_file_that_shrinks_after_opening_is_refused_not_fatal(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    with LogicalModel.open(path) as model:
        os.truncate(path, 1000)
        with pytest.raises(GgufError, match="shrank"):
            model.metadata.get_strings("tokenizer.ggml.tokens")
        with pytest.raises(GgufError, match="shrank"):
            model.read_into(model.tensors[-1].offset, bytearray(10))


def test_file_that_is_rewritten_after_opening_is_refused_not_fatal(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    with LogicalModel.open(path) as model:
        path.write_bytes(b"\xff" * path.stat().st_size)
        with pytest.raises(GgufError, match="unchanged file"):
            model.metadata.get_strings("tokenizer.ggml.tokens")


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "nul"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / kind)
    if kind == "directory":
        os.mkdir(path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "nul":
        path += "\0"
    before = open_fds()
    with pytest.raises(GgufError):
        LogicalModel.open(path)
    assert open_fds() <= before


def test_endless_header_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(array_head(STRING, 1 << 27))
    os.truncate(path, 2 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match="header size"):
            LogicalModel.open(path)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()


# --- arbitrary bytes ---

numbers = st.one_of(
    st.integers(0, 40), st.integers(0, HUGE), st.sampled_from([HUGE, 1 << 63, 1 << 32, 1 << 31])
)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """SMALL with a few fields overwritten, bytes removed or bytes put in."""
    data = bytearray(SMALL)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 3)):
            case 0:
                data[at : at + 8] = draw(numbers).to_bytes(8, "little")
            case 1:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 2:
                del data[at : at + draw(st.integers(1, 20))]
            case _:
                data[at:at] = draw(st.binary(max_size=20))
    return bytes(data)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.binary(), st.binary().map(lambda b: SMALL[:24] + b), mutations()))
@example(array_head(STRING, 1 << 60))
@example(gguf_bytes(n_entries=1 << 16, n_tensors=1 << 18))
@example(gguf_bytes([("k", STRING, "v")])[:-9] + struct.pack("<Q", parser.MAX_STRING_BYTES))
def test_any_bytes_give_a_model_or_a_gguf_error_in_bounded_memory(data: bytes) -> None:
    with memory_file(data) as path:
        tracemalloc.start()
        try:
            with suppress(GgufError):
                read_all(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < PEAK_BYTES
