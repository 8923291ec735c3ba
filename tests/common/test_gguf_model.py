"""Split models as one address space, and every way in which a set of shards can be wrong."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4_common.errors import GgufError
from ds4_common.gguf import LogicalModel, ValueType
from helpers.descriptors import open_fds
from helpers.models import smollm2_path
from helpers.split import split_gguf
from helpers.tiny_gguf import RawTensor, gguf_bytes, write_llama


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "whole.gguf")


@pytest.fixture
def shards(whole: Path) -> list[Path]:
    return split_gguf(whole, whole.with_name("m"), 3)


def refusal(path: Path) -> str:
    before = open_fds()
    with pytest.raises(GgufError) as caught:
        LogicalModel.open(path)
    assert open_fds() <= before
    return str(caught.value)


def rounded(n_bytes: int) -> int:
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def test_shards_follow_each_other_at_page_boundaries(shards: list[Path]) -> None:
    sizes = [path.stat().st_size for path in shards]
    assert any(size % mmap.PAGESIZE for size in sizes)
    with LogicalModel.open(shards[0]) as model:
        bases = [0, rounded(sizes[0]), rounded(sizes[0]) + rounded(sizes[1])]
        assert [s.base for s in model.shards] == bases
        assert model.n_bytes == bases[2] + rounded(sizes[2])
        assert [s.path for s in model.shards] == [str(p) for p in shards]
        for tensor in model.tensors:
            assert tensor.offset == bases[tensor.shard] + tensor.file_offset


def test_single_file_is_as_large_as_it_is(whole: Path) -> None:
    with LogicalModel.open(whole) as model:
        assert model.n_bytes == whole.stat().st_size


@pytest.mark.parametrize("n_shards", [2, 3, 7, 21])
def test_split_model_holds_what_the_single_file_holds(whole: Path, n_shards: int) -> None:
    paths = split_gguf(whole, whole.with_name("n"), n_shards)
    assert len(paths) == n_shards
    with LogicalModel.open(whole) as one, LogicalModel.open(paths[0]) as many:
        assert len(many.shards) == n_shards
        assert [(t.name, t.ggml_type, t.dims) for t in one.tensors] == [
            (t.name, t.ggml_type, t.dims) for t in many.tensors
        ]
        for a, b in zip(one.tensors, many.tensors, strict=True):
            left, right = bytearray(a.n_bytes), bytearray(b.n_bytes)
            one.read_into(a.offset, left)
            many.read_into(b.offset, right)
            assert left == right
        key = "tokenizer.ggml.tokens"
        assert one.metadata.get_strings(key) == many.metadata.get_strings(key)


def test_reads_by_logical_offset_see_the_files_and_zeros_between_them(shards: list[Path]) -> None:
    expected = b"".join(
        path.read_bytes() + bytes(-path.stat().st_size % mmap.PAGESIZE) for path in shards
    )
    with LogicalModel.open(shards[0]) as model:
        assert len(expected) == model.n_bytes

        @settings(max_examples=60, deadline=None)
        @given(st.data())
        def check(data: st.DataObject) -> None:
            near = [0, *(e for s in model.shards for e in (s.base, s.base + s.n_bytes))]
            start = data.draw(st.sampled_from(near)) + data.draw(st.integers(-100, 100))
            start = min(max(start, 0), model.n_bytes)
            n_bytes = data.draw(st.integers(0, model.n_bytes - start))
            found = bytearray(b"\xff" * n_bytes)
            model.read_into(start, found)
            assert found == expected[start : start + n_bytes]

        check()
        for offset, n_bytes in ((-1, 1), (model.n_bytes, 1), (0, model.n_bytes + 1)):
            with pytest.raises(GgufError, match="logical range"):
                model.read_into(offset, bytearray(n_bytes))


def test_only_the_first_shard_is_a_way_in(shards: list[Path]) -> None:
    assert "the first one, m-00001-of-00003.gguf" in refusal(shards[1])


def test_shard_under_another_name_is_refused(shards: list[Path]) -> None:
    blob = shards[0].rename(shards[0].with_name("sha256-0123"))
    assert "expected <prefix>-00001-of-00003.gguf" in refusal(blob)


def test_name_that_counts_otherwise_than_the_file_is_refused(shards: list[Path]) -> None:
    renamed = shards[0].rename(shards[0].with_name("m-00001-of-00004.gguf"))
    assert "split.count: got 3, expected 00004" in refusal(renamed)


def test_shards_joined_by_cat_are_refused(shards: list[Path]) -> None:
    joined = b"".join(shard.read_bytes() for shard in shards)
    whole = shards[0].with_name("joined.gguf")
    whole.write_bytes(joined)
    assert "expected <prefix>-00001-of-00003.gguf" in refusal(whole)
    for shard in shards[1:]:
        shard.unlink()
    shards[0].write_bytes(joined)  # even under the name of the first
    assert "00002-of-00003.gguf" in refusal(shards[0])


def test_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    message = refusal(shards[0])
    assert "shard 2 of 3: got no such file, expected m-00002-of-00003.gguf" in message


def test_shard_with_another_stem_is_named(shards: list[Path]) -> None:
    shards[1].rename(shards[1].with_name("other-00002-of-00003.gguf"))
    message = refusal(shards[0])
    assert "other-00002-of-00003.gguf" in message
    assert "expected m-00002-of-00003.gguf" in message


def test_swapped_shards_are_named(shards: list[Path], tmp_path: Path) -> None:
    kept = shards[1].rename(tmp_path / "kept")
    shards[2].rename(shards[1])
    kept.rename(shards[2])
    message = refusal(shards[0])
    assert message.startswith(f"{shards[1]}: ")
    assert "the content of m-00003-of-00003.gguf" in message


def test_duplicated_shard_is_named(shards: list[Path]) -> None:
    shutil.copy(shards[0], shards[2])
    message = refusal(shards[0])
    assert message.startswith(f"{shards[2]}: ")
    assert "the content of m-00001-of-00003.gguf" in message


def test_truncated_shard_is_named(shards: list[Path]) -> None:
    os.truncate(shards[2], shards[2].stat().st_size - 1000)
    message = refusal(shards[0])
    assert message.startswith(f"{shards[2]}: ")
    assert "truncated" in message


def test_shard_of_a_split_into_another_number_is_refused(whole: Path, shards: list[Path]) -> None:
    others = split_gguf(whole, whole.with_name("four"), 4)
    shutil.copy(others[1], shards[1])
    assert "split.count: got 4, expected 3" in refusal(shards[0])


def raw_shards(
    folder: Path, *, names: tuple[str, str] = ("a", "b"), totals: tuple[int, int] = (2, 2),
    numbers: tuple[object, object] = (0, 1), number_type: ValueType = ValueType.UINT16,
    count_type: ValueType = ValueType.UINT16,
) -> Path:  # fmt: skip
    paths = [folder / f"r-{i:05d}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(paths):
        entries: list[tuple[str, int, object]] = [
            ("split.count", count_type, 2),
            ("split.no", number_type, numbers[i]),
            ("split.tensors.count", ValueType.INT32, totals[i]),
        ]
        path.write_bytes(gguf_bytes(entries, [RawTensor(names[i], (1,))]))
    return paths[0]


@pytest.mark.parametrize("count_type", [ValueType.UINT16, ValueType.UINT32])
def test_split_count_may_be_of_either_width(tmp_path: Path, count_type: ValueType) -> None:
    with LogicalModel.open(raw_shards(tmp_path, count_type=count_type)) as model:
        assert [t.name for t in model.tensors] == ["a", "b"]


def test_wrong_tensor_total_is_refused(tmp_path: Path) -> None:
    assert "split.tensors.count: got 3" in refusal(raw_shards(tmp_path, totals=(2, 3)))


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    assert "tensor a: got one more" in refusal(raw_shards(tmp_path, names=("a", "a")))


def test_shard_number_of_another_type_is_refused(tmp_path: Path) -> None:
    path = raw_shards(tmp_path, numbers=("0", "1"), number_type=ValueType.STRING)
    assert "'split.no': got STRING" in refusal(path)


def test_shard_number_outside_the_split_is_refused(tmp_path: Path) -> None:
    path = raw_shards(tmp_path, numbers=(0, 9))
    assert "the content of another split" in refusal(path)


def test_shard_beyond_the_descriptor_limit_is_an_error_that_leaks_nothing(
    shards: list[Path],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    fillers: list[int] = []
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.open("/", os.O_RDONLY))
        os.close(fillers.pop())  # one is left: for the first shard only
        with pytest.raises(GgufError, match="Too many open files"):
            LogicalModel.open(shards[0])
        fillers.append(os.open("/", os.O_RDONLY))
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_damaged_shards_give_a_model_or_a_gguf_error(tmp_path: Path) -> None:
    first = raw_shards(tmp_path)
    second = tmp_path / "r-00002-of-00002.gguf"
    originals = {path: path.read_bytes() for path in (first, second)}

    @settings(max_examples=150, deadline=None)
    @given(st.sampled_from([first, second]), st.integers(0, 200), st.binary(max_size=12))
    def check(path: Path, at: int, patch: bytes) -> None:
        data = originals[path]
        path.write_bytes(data[:at] + patch + data[at + len(patch) :])
        with suppress(GgufError), LogicalModel.open(first) as model:
            model.read_into(0, bytearray(model.n_bytes))
        path.write_bytes(data)

    check()


def test_close_may_be_called_twice(whole: Path) -> None:
    model = LogicalModel.open(whole)
    model.close()
    model.close()


def test_real_model_is_one_with_its_split_form(tmp_path: Path) -> None:
    paths = split_gguf(smollm2_path(), tmp_path / "smol", 3)
    with LogicalModel.open(smollm2_path()) as one, LogicalModel.open(paths[0]) as many:
        assert len(one.tensors) == 272
        assert [t.name for t in one.tensors] == [t.name for t in many.tensors]
        assert len(many.metadata.get_strings("tokenizer.ggml.tokens")) == 49152
        assert one.metadata.get_int("llama.block_count") == 30
