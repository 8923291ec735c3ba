"""The CPU executor computes what the op definitions say, whatever the machine does about it.

Bit equality is asserted over threads, instruction sets, batches, chunks, pages and restarts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ds4_common.contract import prepared_model_pb2 as pb
from ds4_common.contract.lower import lower_cpu
from ds4_common.errors import ExecutorFailure, StepRefused
from ds4_common.gguf import GgmlType
from ds4_common.quants.native import Isa, best_isa, library
from ds4_worker.executor.api import KV_DTYPES, ExecutorConfig, Sampled, Sampling, Slice
from ds4_worker.executor.cpu import CpuExecutor
from golden.llama import cases
from helpers.executors import GREEDY, cpu_executor, generate, logits, packed
from helpers.prepared import Prepared, prepare_file
from helpers.sampling import mask_words
from helpers.tiny_gguf import TinyLlama, write_llama

GOLDEN = json.loads((Path(cases.__file__).with_name("logits.json")).read_text())["logits"]
CONTEXT = 640  # more than two attention parts
BASE = ExecutorConfig(threads=1, banks=3, context_tokens=CONTEXT, batch_tokens=CONTEXT)
Rows = npt.NDArray[np.float32]
RUNNING = [isa.name.lower() for isa in Isa if isa <= best_isa() and library().ds4_isa_runs(isa)]


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 320, n)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Three heads to a group, biases, rope factors, block and float types, packed and raw."""
    spec = TinyLlama(
        head_dim=32,
        n_heads=6,
        n_kv_heads=2,
        width=192,
        ffn=160,
        biases=True,
        rope_freqs=True,
        context=CONTEXT,
        weights=(GgmlType.Q8_0, GgmlType.F16, GgmlType.Q4_1, GgmlType.F32),
    )
    return packed(prepare_file(write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", spec)))


@pytest.fixture(scope="module")
def expected(tiny: Prepared) -> Rows:
    """Logits of one long sequence, prefilled at once."""
    return whole(tiny, BASE)


def whole(prepared: Prepared, config: ExecutorConfig, n: int = CONTEXT) -> Rows:
    executor = cpu_executor(prepared, replace(config, batch_outputs=n))
    try:
        return logits(executor, tokens(n))
    finally:
        executor.close()


@pytest.fixture(scope="module")
def shared(tiny: Prepared) -> Iterator[CpuExecutor]:
    executor = cpu_executor(tiny, replace(BASE, threads=2, batch_outputs=CONTEXT))
    yield executor
    executor.close()


# --- the same bits, whatever happens around ---


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_no_bit(tiny: Prepared, expected: Rows, threads: int) -> None:
    assert (whole(tiny, replace(BASE, threads=threads)) == expected).all()


@pytest.mark.parametrize("isa", RUNNING)
def test_instruction_sets_change_no_bit(tiny: Prepared, expected: Rows, isa: str) -> None:
    n = 300  # into the second attention part; the scalar kernels are slow
    rows = whole(tiny, replace(BASE, threads=2, isa=isa), n)
    assert (rows == expected[:n]).all()


@pytest.mark.parametrize("isa", RUNNING)
def test_an_executor_names_the_instruction_set_that_it_runs(tiny: Prepared, isa: str) -> None:
    executor = cpu_executor(tiny, replace(BASE, isa=isa))
    assert executor.isa == isa
    executor.close()


@pytest.mark.parametrize("isa", [name for i in Isa if (name := i.name.lower()) not in RUNNING])
def test_instruction_sets_of_other_cpus_are_known_and_refused(tiny: Prepared, isa: str) -> None:
    with pytest.raises(ExecutorFailure, match=rf"isa: got {Isa[isa.upper()]:d}, this CPU"):
        cpu_executor(tiny, replace(BASE, isa=isa))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_cache_type_gives_one_result_whatever_happens_around(
    tiny: Prepared, kv_dtype: str
) -> None:
    """Instruction sets, threads, chunks, neighbours, decoding token by token."""
    n, config = 280, replace(BASE, threads=2, kv_dtype=kv_dtype, batch_outputs=280)
    rows = whole(tiny, config, n)
    for isa in RUNNING:
        assert (rows == whole(tiny, replace(config, isa=isa, threads=3), n)).all()
    executor, ids = cpu_executor(tiny, config), tokens(n)
    executor.logits([Slice(0, 0, ids[:33]), Slice(1, 0, ids[:100])])
    parts = executor.logits([Slice(1, 100, ids[100:260]), Slice(0, 33, ids[33:90])])
    singly = [executor.logits([Slice(1, at, [ids[at]])])[0][0] for at in range(260, n)]
    executor.close()
    assert (np.array(parts[0] + singly, np.float32) == rows[100:]).all()
    assert (np.array(parts[1], np.float32) == rows[33:90]).all()


def test_a_page_takes_the_bytes_of_its_type(tiny: Prepared) -> None:
    taken = {}
    for kv_dtype in KV_DTYPES:
        executor = cpu_executor(tiny, replace(BASE, kv_dtype=kv_dtype))
        taken[kv_dtype] = executor.page_bytes
        executor.close()
    assert taken["f32"] == 2 * taken["f16"] == 2 * taken["bf16"]
    assert taken["q8_0"] == taken["f16"] * 17 // 32


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Columns of floats take 4 KB: of 400 there are five tiles, and three of the wide ones."""
    spec = TinyLlama(
        n_layers=1,
        width=1024,
        n_heads=16,
        n_kv_heads=4,
        ffn=1024,
        context=CONTEXT,
        weights=(GgmlType.F32, GgmlType.Q8_0),
    )
    return packed(prepare_file(write_llama(tmp_path_factory.mktemp("wide") / "wide.gguf", spec)))


@pytest.fixture(scope="module")
def wide_expected(wide: Prepared) -> Rows:
    """Slices of 50 tokens: every product has one tile of columns."""
    executor = cpu_executor(wide, replace(BASE, threads=2, batch_outputs=50))
    ids, rows = tokens(400), []
    for start in range(0, 400, 50):
        rows += executor.logits([Slice(0, start, ids[start : start + 50])])[0]
    executor.close()
    return np.array(rows, np.float32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", RUNNING)
def test_tiles_of_columns_change_no_bit(
    wide: Prepared, wide_expected: Rows, isa: str, threads: int
) -> None:
    """One step in which products have several tiles, each after all rows of the one before."""
    rows = whole(wide, replace(BASE, threads=threads, isa=isa), 400)
    assert (rows == wide_expected).all()


def test_a_restart_changes_no_bit(tiny: Prepared, expected: Rows) -> None:
    assert (whole(tiny, BASE) == expected).all()


def test_packing_changes_no_bit(tmp_path: Path) -> None:
    prepared = prepare_file(write_llama(tmp_path / "tiny.gguf", TinyLlama()))
    config = replace(BASE, context_tokens=256)
    assert (whole(prepared, config, 60) == whole(packed(prepared), config, 60)).all()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, CONTEXT - 1), max_size=6))
def test_prefill_chunks_change_no_bit(
    shared: CpuExecutor, expected: Rows, cuts: Sequence[int]
) -> None:
    edges = [0, *sorted(set(cuts)), CONTEXT]
    sequence = tokens(CONTEXT)
    for start, end in itertools.pairwise(edges):
        rows = shared.logits([Slice(0, start, sequence[start:end])])[0]
        assert (np.array(rows, np.float32) == expected[start:end]).all()


def test_decoding_gives_the_bits_of_prefill(shared: CpuExecutor, expected: Rows) -> None:
    """Token by token from 500 on, through the attention that is split into parts."""
    sequence = tokens(CONTEXT)
    shared.step([Slice(1, 0, sequence[:500])])
    for position in range(500, 560):
        rows = shared.logits([Slice(1, position, sequence[position : position + 1])])[0]
        assert (np.array(rows[0], np.float32) == expected[position]).all()


@settings(deadline=None, max_examples=10)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), max_size=3), max_size=8))
def test_neighbours_in_the_batch_change_no_bit(
    shared: CpuExecutor, plan: list[list[tuple[int, int]]]
) -> None:
    """Three sequences advance by slices in any order; each ends with its own log-probabilities."""
    sequences = [tokens(200), tokens(90, 7), tokens(120, 8)]
    how = Sampling(temperature=0.7, seed=3, logprobs=20)
    alone = [generate(shared, sequence, 1, how)[0] for sequence in sequences]
    done: list[int] = [0, 0, 0]
    last: dict[int, Sampled] = {}
    for wanted in [*plan, [(0, 200), (1, 90), (2, 120)]]:
        slices = []
        for bank, count in dict(wanted).items():
            ids = sequences[bank][done[bank] : done[bank] + count]
            if ids:
                ends = done[bank] + len(ids) == len(sequences[bank])
                slices.append(Slice(bank, done[bank], ids, how if ends else None))
                done[bank] += len(ids)
        for piece, result in zip(slices, shared.step(slices) if slices else [], strict=True):
            if result is not None:
                last[piece.bank] = result
    assert [last[bank] for bank in range(3)] == alone


def test_physical_pages_may_lie_anywhere(tiny: Prepared, expected: Rows) -> None:
    executor = cpu_executor(tiny, replace(BASE, banks=1, pages=12, batch_outputs=CONTEXT))
    scattered = (9, 2, 7, 0, 11, 4)
    for index, page in enumerate(scattered):
        executor.set_page(0, index, page)
    n = len(scattered) * executor.page_tokens
    assert (logits(executor, tokens(CONTEXT)[:n]) == expected[:n]).all()
    executor.close()


def test_pages_of_a_prefix_serve_another_bank(tiny: Prepared, expected: Rows) -> None:
    executor = cpu_executor(tiny, replace(BASE, batch_outputs=CONTEXT))
    shared_tokens = 3 * executor.page_tokens
    sequence = tokens(CONTEXT)
    executor.step([Slice(0, 0, sequence[:shared_tokens])])
    for index in range(3):
        executor.set_page(2, index, index)  # bank 0's pages, by the order of cpu_executor
    rows = executor.logits([Slice(2, shared_tokens, sequence[shared_tokens:400])])[0]
    assert (np.array(rows, np.float32) == expected[shared_tokens:400]).all()
    executor.close()


def test_other_sampling_rows_change_no_draw(shared: CpuExecutor) -> None:
    how = Sampling(temperature=0.8, top_k=30, top_p=0.95, min_p=0.02, seed=11, logprobs=4)
    alone = generate(shared, tokens(30), 1, how)[0]
    other = Sampling(temperature=1.3, seed=5)
    together = shared.step(
        [Slice(1, 0, tokens(9, 3), other), Slice(0, 0, tokens(30), how), Slice(2, 0, tokens(5, 4))]
    )
    assert together[1] == alone
    assert together[2] is None


# --- results of one step ---


def test_scores_are_the_log_probabilities_of_a_generation_to_the_bit(shared: CpuExecutor) -> None:
    prompt = tokens(9)
    drawn = generate(shared, prompt, 8, Sampling(temperature=1.0, seed=3, logprobs=5))
    answer = [sampled.token for sampled in drawn]
    whole = [*prompt, *answer]
    scores = shared.score(Slice(0, 0, whole[:-1]), whole[1:], 5)
    assert scores[len(prompt) - 1 :] == drawn
    assert [score.token for score in scores] == whole[1:]
    with pytest.raises(StepRefused):
        shared.score(Slice(0, 0, prompt), prompt[1:], 5)


@settings(deadline=None, max_examples=30)
@given(
    drafts=st.lists(st.integers(0, 3), max_size=6),
    good=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.9]),
)
def test_draws_of_drafts_are_those_of_one_token_after_the_other(
    shared: CpuExecutor, drafts: list[int], good: int, temperature: float
) -> None:
    """Right drafts, then wrong ones: every draw up to the first wrong one has the bits of plain
    decoding, and so has what is computed afterwards over the wrong ones."""
    how = Sampling(temperature=temperature, seed=5, logprobs=4)
    prompt, other = tokens(60), tokens(40, 7)
    plain = generate(shared, prompt, 12, how, bank=1)
    drawn = [sampled.token for sampled in plain]
    guesses = [*drawn[1 : good + 1], *drafts]
    shared.step([Slice(0, 0, prompt)])
    samples = [replace(how, index=1 + i) for i in range(len(guesses) + 1)]
    piece = Slice(0, 60, [drawn[0], *guesses], samples[-1], samples[:-1])
    assert list(piece.drafts) == guesses
    mixed = shared.step([Slice(2, 0, other, replace(how, index=0)), piece])
    assert mixed[1 : good + 2] == plain[1 : good + 2]
    again = Slice(0, 61 + good, drawn[good + 1 : good + 2], replace(how, index=good + 2))
    assert shared.step([again]) == [plain[good + 2]]


@pytest.mark.parametrize("kind", [pb.PAGED_KV, pb.PAGED_LATENT, pb.RECURRENT, pb.CONTINUATION])
def test_an_executor_tells_whether_positions_can_be_computed_again(
    tiny: Prepared, kind: pb.HistoryKind
) -> None:
    bundle = pb.Bundle()
    bundle.CopyFrom(tiny.bundle)
    bundle.serving.model.cache.histories.add(kind=kind)
    executor = CpuExecutor(lower_cpu(bundle), tiny.allocations, BASE)
    assert executor.rewinds == executor.divisible == (kind in (pb.PAGED_KV, pb.PAGED_LATENT))
    executor.close()


def test_step_and_logits_agree(shared: CpuExecutor) -> None:
    rows = logits(shared, tokens(20))
    (drawn,) = shared.step([Slice(0, 0, tokens(20), Sampling(temperature=0, logprobs=3))])
    assert drawn is not None
    assert drawn.top is not None
    assert drawn.token == int(rows[-1].argmax()) == drawn.top[0][0]
    exact = rows[-1].astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    assert drawn.logprob == pytest.approx(exact[drawn.token], abs=1e-5)


def test_a_mask_rules_out_tokens(shared: CpuExecutor) -> None:
    best = int(logits(shared, tokens(20))[-1].argmax())
    allowed = np.ones(shared.vocabulary, np.uint8)
    allowed[best] = 0
    words = mask_words(allowed)
    how = Sampling(temperature=0, mask=words.ctypes.data)
    (drawn,) = shared.step([Slice(0, 0, tokens(20), how)])
    assert drawn is not None
    assert drawn.token not in (best, -1)


def test_a_mask_that_allows_nothing_fails_this_sequence_only(shared: CpuExecutor) -> None:
    words = np.zeros(-(-shared.vocabulary // 32), np.uint32)
    how = Sampling(temperature=0, mask=words.ctypes.data)
    failed, fine = shared.step([Slice(0, 0, tokens(5), how), Slice(1, 0, tokens(5), GREEDY)])
    assert failed is not None
    assert failed.token == -1
    assert "allow no token" in (failed.error or "")
    assert fine is not None
    assert fine.error is None


def test_weights_that_are_not_finite_end_in_an_error_not_a_token(tmp_path: Path) -> None:
    case = cases.CASES[0]
    prepared = prepare_file(cases.write_gguf(case, tmp_path / "case.gguf"))
    norm = next(b for b in prepared.bundle.execution.buffers if b.name == "output_norm.weight")
    data = bytearray(prepared.allocations[0])
    data[norm.offset : norm.offset + 4] = np.float32(np.nan).tobytes()
    broken = Prepared(prepared.bundle, prepared.frontend, {0: memoryview(data)})
    executor = cpu_executor(broken, ExecutorConfig(threads=1, banks=1, context_tokens=64))
    (drawn,) = executor.step([Slice(0, 0, [1, 2], Sampling())])
    executor.close()
    assert drawn is not None
    assert (drawn.token, drawn.error) == (-1, "the model's logits are not finite")


def test_a_step_takes_no_memory(shared: CpuExecutor) -> None:
    before = shared.native_allocations()
    generate(shared, tokens(300), 20, Sampling(logprobs=20))
    assert shared.native_allocations() == before


def test_the_profile_counts_every_section_while_it_is_on(shared: CpuExecutor) -> None:
    shared.profile(True)
    generate(shared, tokens(50), 2, GREEDY)
    spent = shared.profile(False)
    assert {section.kind for section in spent} == {"rows", "matmul", "attend", "sample", "around"}
    assert all(0 < section.busy_seconds <= section.seconds for section in spent)
    assert all(
        section.busy_seconds <= section.work_seconds <= 2 * section.busy_seconds
        for section in spent
    )
    generate(shared, tokens(50), 1, GREEDY)
    assert not any(section.seconds for section in shared.profile(False))


def test_the_model_of_these_tests_has_all_kinds_of_weights(tiny: Prepared) -> None:
    weights: list[Any] = [b for b in tiny.bundle.execution.buffers if b.space == pb.WEIGHT]
    assert {b.layout for b in weights} == {0, 1}
    assert len({b.ggml_type for b in weights}) >= 4


def test_more_tiles_than_the_pool_counts_are_all_computed(tmp_path: Path) -> None:
    banks, heads = 1024, 16  # 16384 pieces of attention; the pool counts to 4000
    spec = TinyLlama(n_layers=1, n_heads=heads, n_kv_heads=heads, head_dim=4)
    prepared = prepare_file(write_llama(tmp_path / "heads.gguf", spec))
    config = ExecutorConfig(
        threads=2, banks=banks, context_tokens=64, batch_tokens=banks, batch_outputs=banks
    )
    how = Sampling(temperature=0.0, logprobs=3)
    executor = cpu_executor(prepared, config)
    together = executor.step([Slice(bank, 0, [bank % 320], how) for bank in range(banks)])
    executor.close()
    alone = cpu_executor(prepared, replace(config, banks=1))
    for bank in (0, 1, 511, 512, banks - 2, banks - 1):
        assert alone.step([Slice(0, 0, [bank % 320], how)]) == [together[bank]]
    alone.close()


# --- pages that others computed ---


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_shared_and_copied_pages_give_the_bits_of_computed_ones(
    tiny: Prepared, expected: Rows, kv_dtype: str
) -> None:
    """Bank 1 maps two whole pages of bank 0, and a copy of the first 37 tokens of its third."""
    executor = cpu_executor(tiny, replace(BASE, kv_dtype=kv_dtype, batch_outputs=CONTEXT))
    ids, page = tokens(CONTEXT), executor.page_tokens
    alone = logits(executor, ids)
    own = executor.pages_per_bank
    for index in range(2):
        executor.set_page(1, index, index)
    executor.copy_page(2, own + 2, 37)
    start = 2 * page + 37
    rows = np.stack([np.array(row) for row in executor.logit_rows(Slice(1, start, ids[start:]))])
    executor.close()
    assert rows.tobytes() == alone[start:].tobytes()
    if kv_dtype == "f16":
        assert alone.tobytes() == expected.tobytes()
