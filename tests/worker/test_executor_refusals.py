"""What the CPU executor refuses, each with a message, and that a refusal touches nothing."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ds4_common.contract import image as im
from ds4_common.contract.lower import lower_cpu
from ds4_common.errors import ExecutorFailure, StepRefused
from ds4_worker.executor.api import ExecutorConfig, Sampling, Slice
from ds4_worker.executor.cpu import CpuExecutor
from helpers.executors import GREEDY, cpu_executor, generate
from helpers.prepared import Prepared, prepare_file
from helpers.tiny_gguf import TinyLlama, write_llama

CONFIG = ExecutorConfig(
    threads=1, banks=2, context_tokens=256, batch_tokens=100, batch_outputs=2, pages=6
)
PAGE = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return prepare_file(write_llama(path, TinyLlama(rope_freqs=True, biases=True)))


@pytest.fixture
def executor(tiny: Prepared) -> Iterator[CpuExecutor]:
    """Bank 0 has pages 0-3, bank 1 pages 4 and 5; bank 0 holds 70 tokens."""
    made = CpuExecutor(lower_cpu(tiny.bundle), tiny.allocations, CONFIG)
    for index in range(4):
        made.set_page(0, index, index)
    made.set_page(1, 0, 4)
    made.set_page(1, 1, 5)
    made.step([Slice(0, 0, list(range(70)))])
    yield made
    made.close()


REFUSED: dict[str, tuple[list[Slice], str]] = {
    "no slice": ([], "slices: got 0"),
    "more slices than banks": ([Slice(0, 70, [1])] * 3, "got 3 slices, expected at most 2"),
    "a bank out of range": ([Slice(2, 0, [1])], "bank: got 2, expected below 2"),
    "a negative bank": ([Slice(-1, 0, [1])], "bank: got -1"),
    "a bank twice": ([Slice(0, 70, [1]), Slice(0, 71, [1])], "bank 0 has a slice in this step"),
    "no tokens": ([Slice(0, 70, [])], "got 0 tokens at position 70"),
    "a negative position": ([Slice(0, -1, [1])], "position -1"),
    "beyond the context": ([Slice(0, 200, [1] * 57)], "within the context of 256"),
    "a huge position": ([Slice(0, 2**31 - 1, [1])], "within the context of 256"),
    "a position that is no int32": ([Slice(0, 2**31, [1])], "slice 0 of bank 0"),
    "more tokens than fit": ([Slice(0, 70, [1] * 101)], "more than 100 tokens"),
    "too many outputs": (
        [Slice(0, 70, [1], GREEDY), Slice(1, 0, [1], GREEDY)] * 2,
        "got 4 slices, expected at most 2",
    ),
    "drafts beyond the outputs": (
        [Slice(0, 70, [1, 2, 3], GREEDY, [GREEDY, GREEDY])],
        "more than 2 outputs",
    ),
    "more checks than drafts": ([Slice(0, 70, [1], GREEDY, [GREEDY])], "output rows: got 2"),
    "checks without a sample": ([Slice(0, 70, [1, 2], None, [GREEDY])], "checks without a sample"),
    "a token out of the vocabulary": ([Slice(0, 70, [320])], "token: got 320, expected below 320"),
    "a negative token": ([Slice(0, 70, [-1])], "token: got -1"),
    "a token that is no int32": ([Slice(0, 70, [2**40])], "slice 0 of bank 0"),
    "a token that is no number": ([Slice(0, 70, ["a"])], "slice 0 of bank 0"),  # type: ignore[list-item]
    "a gap after what is written": ([Slice(0, 72, [1])], "holds 7 tokens, expected 8"),
    "a start in an empty bank": ([Slice(1, 3, [1])], "holds 0 tokens, expected 3"),
}


@pytest.mark.parametrize(("slices", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_step_is_refused_and_touches_nothing(
    executor: CpuExecutor, slices: list[Slice], message: str
) -> None:
    before = executor.step([Slice(0, 70, [9], Sampling(logprobs=5))])
    with pytest.raises(StepRefused, match=message):
        executor.step(slices)
    assert executor.step([Slice(0, 70, [9], Sampling(logprobs=5))]) == before


def test_an_unmapped_page_is_refused(executor: CpuExecutor) -> None:
    executor.step([Slice(1, 0, [1] * 100)])
    with pytest.raises(StepRefused, match="bank 1: logical page 2 is mapped to -1"):
        executor.step([Slice(1, 100, [1] * 29)])
    executor.step([Slice(1, 100, [1] * 28)])


def test_two_slices_must_not_write_one_page(executor: CpuExecutor) -> None:
    executor.set_page(1, 0, 1)
    with pytest.raises(StepRefused, match="physical page 1 is written twice"):
        executor.step([Slice(0, 70, [1]), Slice(1, 0, [1])])


def test_a_page_must_not_be_read_and_written_in_one_step(executor: CpuExecutor) -> None:
    executor.set_page(1, 0, 0)
    with pytest.raises(StepRefused, match="physical page 0 is read and written"):
        executor.step([Slice(0, 70, [1]), Slice(1, 0, [1])])


def test_one_bank_must_not_use_a_page_twice(executor: CpuExecutor) -> None:
    executor.set_page(1, 1, 4)
    with pytest.raises(StepRefused, match="physical page 4 is written twice"):
        executor.step([Slice(1, 0, [1] * 65)])


def test_going_back_makes_what_followed_stale(executor: CpuExecutor) -> None:
    executor.step([Slice(0, 10, [1, 2, 3])])  # page 0 now ends at 13
    with pytest.raises(StepRefused, match=r"logical page 0 .* holds 13 tokens, expected 64"):
        executor.step([Slice(0, 70, [1])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 0, 0), "bank 2"), ((0, 4, 0), "index 4"), ((0, 0, 6), "page 6"), ((0, 0, -2), "page -2")],
)
def test_a_bad_mapping_is_refused(
    executor: CpuExecutor, arguments: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(StepRefused, match=message):
        executor.set_page(*arguments)


USES: dict[str, Callable[[CpuExecutor], object]] = {
    "step": lambda e: e.step([Slice(0, 70, [1])]),
    "logits": lambda e: e.logits([Slice(0, 70, [1])]),
    "set_page": lambda e: e.set_page(0, 0, 0),
    "profile": lambda e: e.profile(True),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_closed_executor_is_refused(
    executor: CpuExecutor, use: Callable[[CpuExecutor], object]
) -> None:
    executor.close()
    executor.close()
    with pytest.raises(ExecutorFailure, match="after close"):
        use(executor)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "context": ({"context_tokens": 257}, "context_tokens: got 257, expected 1 to the model's 256"),
    "no context": ({"context_tokens": 0}, "context_tokens: got 0"),
    "no banks": ({"banks": 0}, "banks: got 0"),
    "threads": ({"threads": 1000}, "threads: got 1000, expected at most 256"),
    "batch": ({"batch_tokens": 0}, "batch_tokens 0"),
    "outputs": ({"batch_outputs": 70000}, "batch_outputs 70000"),
    "cache type": ({"kv_dtype": "q8"}, "kv_dtype: got 'q8', expected"),
    "blocks in heads": (
        {"kv_dtype": "q8_0"},
        r"in q8_0: keys of cache plane 0 have 16 dims, expected a multiple of 32; use f16",
    ),
    "isa": ({"isa": "mmx"}, "isa: got 'mmx', expected"),
    "memory": ({"pages": 2**31 - 1, "kv_dtype": "f32"}, "no memory for the KV cache: 7"),
}


@pytest.mark.parametrize(("fields", "message"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_bad_capacity_is_refused(tiny: Prepared, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ExecutorFailure, match=message):
        CpuExecutor(lower_cpu(tiny.bundle), tiny.allocations, replace(CONFIG, **fields))


def test_a_missing_allocation_is_refused(tiny: Prepared) -> None:
    with pytest.raises(ExecutorFailure, match=r"allocation 0\): its allocation is not attached"):
        CpuExecutor(lower_cpu(tiny.bundle), {7: tiny.allocations[0]}, CONFIG)


def test_an_allocation_that_is_too_short_is_refused(tiny: Prepared) -> None:
    short = tiny.allocations[0][:-5000]
    with pytest.raises(ExecutorFailure, match="it ends beyond its allocation"):
        CpuExecutor(lower_cpu(tiny.bundle), {0: short}, CONFIG)


def test_an_allocation_may_be_an_address(tiny: Prepared) -> None:
    data = np.frombuffer(tiny.allocations[0], np.uint8)
    place = (int(data.ctypes.data), len(data))
    executor = CpuExecutor(lower_cpu(tiny.bundle), {0: place}, CONFIG)
    executor.set_page(0, 0, 3)
    assert generate(executor, [1, 2, 3], 2, GREEDY)
    executor.close()


def test_buffers_stay_exported_until_close(tiny: Prepared) -> None:
    data = bytearray(tiny.allocations[0])
    executor = CpuExecutor(lower_cpu(tiny.bundle), {0: memoryview(data)}, CONFIG)
    with pytest.raises(BufferError):
        data.append(0)
    executor.close()
    data.append(0)


def test_closing_ends_the_threads_and_opening_again_works(tiny: Prepared) -> None:
    def native_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    image, before = lower_cpu(tiny.bundle), native_threads()
    for _ in range(20):
        executor = CpuExecutor(image, tiny.allocations, replace(CONFIG, threads=4, pages=0))
        assert native_threads() == before + 3
        executor.close()
        assert native_threads() == before


def test_two_executors_live_side_by_side(tiny: Prepared) -> None:
    config = replace(CONFIG, threads=2, pages=0)
    results: dict[int, object] = {}

    def work(number: int) -> None:
        executor = cpu_executor(tiny, config)
        results[number] = generate(executor, [5, 6, 7], 30, Sampling(seed=1, logprobs=3))
        executor.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]


# --- hostile images ---


def run_image(prepared: Prepared, image: bytes) -> None:
    """Opens the image and decodes a little. Only ExecutorFailure may come out of it."""
    executor = CpuExecutor(
        image, prepared.allocations, replace(CONFIG, context_tokens=128, pages=0, batch_tokens=16)
    )
    try:
        for bank in range(2):
            for index in range(executor.pages_per_bank):
                executor.set_page(bank, index, bank * executor.pages_per_bank + index)
        executor.step([Slice(0, 0, [1, 2, 3], Sampling(seed=1)), Slice(1, 0, [4])])
        executor.step([Slice(0, 3, [5], GREEDY)])
    finally:
        executor.close()


INTERESTING = st.sampled_from(
    [0, 1, 2, 7, 8, 64, 127, 128, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFC0, 0x7F800000]
)


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_a_mutated_image_is_refused_or_runs(tiny: Prepared, data: st.DataObject) -> None:
    image = bytearray(lower_cpu(tiny.bundle))
    words = len(image) // 4
    abi = range(4, 6)  # the ABI number guards all else, so it is left alone
    for _ in range(data.draw(st.integers(1, 3))):
        word = data.draw(st.integers(0, words - 1))
        if word in abi:
            continue
        old = struct.unpack_from("<I", image, 4 * word)[0]
        new = data.draw(INTERESTING | st.integers(0, 512) | st.just(old + 1) | st.just(old ^ 1))
        struct.pack_into("<I", image, 4 * word, new & 0xFFFFFFFF)
    with contextlib.suppress(ExecutorFailure):
        run_image(tiny, bytes(image))


HEADERS: dict[str, tuple[int, int, str]] = {  # word of the header, value, message
    "no vocabulary": (8, 0, "vocabulary 0"),
    "a vast vocabulary": (8, 0xFFFFFFFF, "vocabulary 4294967295"),
    "no context": (9, 0, "context 0"),
    "a vast context": (9, 0xFFFFFFFF, "context 4294967295"),
    "no page": (10, 0, "page of 0 tokens"),
    "a page of 4": (10, 4, "page of 4 tokens"),
    "a vast page": (10, 0xFFFFFFF8, "page of 4294967288 tokens"),
    "no logits": (11, 0xFFFFFFFF, "slot 4294967295 does not hold the logits"),
    "vast scratch": (21, 1, "scratch of"),
    "crooked scratch": (20, 63, "scratch of 63"),
}


@pytest.mark.parametrize(("word", "value", "message"), HEADERS.values(), ids=HEADERS.keys())
def test_a_header_out_of_range_is_refused(
    tiny: Prepared, word: int, value: int, message: str
) -> None:
    image = bytearray(lower_cpu(tiny.bundle))
    struct.pack_into("<I", image, 4 * word, value)
    with pytest.raises(ExecutorFailure, match=message):
        run_image(tiny, bytes(image))


def test_a_truncated_image_is_refused(tiny: Prepared) -> None:
    image = lower_cpu(tiny.bundle)
    for cut in [*range(0, 120), *range(120, len(image), 97)]:
        with pytest.raises(ExecutorFailure, match="image"):
            run_image(tiny, image[:cut])
    with pytest.raises(ExecutorFailure, match="by its tables"):
        run_image(tiny, image + bytes(8))


def test_an_image_of_another_abi_is_refused(tiny: Prepared) -> None:
    image = bytearray(lower_cpu(tiny.bundle))
    struct.pack_into("<Q", image, 16, im.image_abi() ^ 1)
    with pytest.raises(ExecutorFailure, match="lower the contract again"):
        run_image(tiny, bytes(image))


def test_the_image_may_be_a_read_only_view(tiny: Prepared) -> None:
    run_image(tiny, memoryview(lower_cpu(tiny.bundle)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [(-1, 5, 1), (6, 5, 1), (0, -1, 1), (0, 6, 1), (0, 0, 1), (1, 5, 7), (0, 5, 0), (0, 5, -1)],
)
def test_a_copy_that_is_no_copy_of_held_tokens_is_refused(
    executor: CpuExecutor, source: int, target: int, count: int
) -> None:
    """Page 0 holds 64 tokens, page 1 six of them."""
    with pytest.raises(StepRefused, match=f"copy of page {source} to {target}"):
        executor.copy_page(source, target, count)
    executor.copy_page(1, 5, 6)
