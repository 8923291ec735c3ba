"""Steps that another executor refuses are those that the CPU executor refuses."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ds4_common.contract import image as im
from ds4_common.contract.lower import lower_image
from ds4_common.errors import StepRefused
from ds4_worker.executor.api import ExecutorConfig, Sampling, Slice
from ds4_worker.executor.cpu import CpuExecutor
from ds4_worker.executor.cuda_cache import cache_layout
from ds4_worker.executor.cuda_places import kept_places
from ds4_worker.executor.step_checks import StepChecks, StepLimits
from golden import tiny as golden
from helpers.prepared import Prepared, prepare_file
from helpers.tiny_gguf import TinyLlama, write_llama

CONFIG = ExecutorConfig(
    threads=1, banks=2, context_tokens=256, batch_tokens=80, batch_outputs=2, pages=6
)
PAGE, VOCABULARY = 64, 320
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", params=["all kept", "windows", "states"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    if request.param == "all kept":
        return prepare_file(write_llama(path, TinyLlama(n_layers=1)))
    if request.param == "states":
        case = next(case for case in golden.cases_of("deepseek4") if case.name == "long")
        return prepare_file(golden.write_gguf(case, path))
    case = next(case for case in golden.cases_of("gemma3") if case.name == "plain")
    metadata = {**case.metadata, "context_length": 256, "attention.sliding_window": 70}
    prepared = prepare_file(golden.write_gguf(dataclasses.replace(case, metadata=metadata), path))
    assert {plane.window for plane in lower_image(prepared.bundle).planes} == {0, 70}
    return prepared


def checks(image: im.Image | None = None) -> StepChecks:
    limits = StepLimits(
        banks=2, histories=((0, 6),), pages_per_bank=4, page_tokens=PAGE, context_tokens=256,
        batch_tokens=80, batch_outputs=2, vocabulary=VOCABULARY,
    )  # fmt: skip
    if image is not None:
        layout = cache_layout(image, CONFIG, 0)
        limits = replace(
            limits, histories=tuple((h.tokens, h.pages) for h in layout.histories),
            vocabulary=image.vocabulary, forward_only=image.forward_only,
            page_tokens=image.page_tokens, pages_per_bank=256 // image.page_tokens,
            rewinds=bool(kept_places(image).planes),
        )  # fmt: skip
    entries = len(limits.histories) * 2 * limits.pages_per_bank
    return StepChecks(limits, memoryview(bytearray(4 * entries)).cast("i"))


Action = tuple[str, tuple[int, ...]] | list[Slice]
POSITIONS = st.sampled_from([0, 1, 63, 64, 65, 127, 128, 192, 255])
SLICES = st.builds(
    lambda bank, start, count, token, sample, checks: Slice(
        bank, start, [token] * count, GREEDY if sample else None, [GREEDY] * (checks * sample)
    ),
    st.integers(-1, 2), POSITIONS, st.sampled_from([0, 1, 2, 63, 64, 65, 81]),
    st.sampled_from([0, 63, 319, 320]), st.booleans(), st.integers(0, 2),
)  # fmt: skip
HISTORIES = st.integers(-1, 2)
MAPPINGS = st.tuples(st.integers(-1, 2), st.integers(-1, 4), st.integers(-2, 6), HISTORIES)
COPIES = st.tuples(st.integers(-1, 6), st.integers(-1, 6), POSITIONS, HISTORIES)
ACTIONS = st.one_of(
    st.tuples(st.just("map"), MAPPINGS),
    st.tuples(st.just("copy"), COPIES),
    st.lists(SLICES, max_size=3),
)


def refused(subject: CpuExecutor | StepChecks, action: Action) -> bool:
    try:
        if isinstance(action, list):
            if isinstance(subject, CpuExecutor):
                subject.step(action)
            else:
                subject.check(action)
                subject.book(action)
        elif action[0] == "map":
            subject.set_page(*action[1])
        else:
            subject.copy_page(*action[1])
    except StepRefused:
        return True
    return False


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 5)), max_size=8),
    st.lists(ACTIONS, max_size=12),
)
@settings(max_examples=150)
def test_the_same_steps_are_refused_as_by_the_cpu_executor(
    tiny: Prepared,
    forward_only: bool,
    mapped: list[tuple[int, int, int]],
    actions: list[Action],
) -> None:
    image = lower_image(tiny.bundle)
    image = replace(image, forward_only=forward_only or image.forward_only)
    executor = CpuExecutor(im.write_image(image), tiny.allocations, CONFIG)
    own = checks(image)
    try:
        for bank, index, page in (m for m in mapped if m[1] < executor.pages_per_bank):
            for history in range(1 + len(executor.windows)):
                executor.set_page(bank, index, page, history)
                own.set_page(bank, index, page, history)
        for action in actions:
            assert refused(own, action) == refused(executor, action), action
    finally:
        executor.close()


def test_a_slice_may_begin_inside_the_last_one_of_its_bank_only() -> None:
    """Where state runs along: while the pages are as that slice left them."""
    limits = StepLimits(
        banks=2, histories=((0, 6),), pages_per_bank=4, page_tokens=PAGE, context_tokens=256,
        batch_tokens=80, batch_outputs=2, vocabulary=VOCABULARY, forward_only=True, rewinds=True,
    )  # fmt: skip

    def ready() -> StepChecks:
        own = StepChecks(limits, memoryview(bytearray(4 * 8)).cast("i"))
        for bank in range(2):
            for index in range(2):
                own.set_page(bank, index, 2 * bank + index)
        assert own.book([Slice(0, 0, [1] * PAGE)]) == [(0, True)]
        assert own.book([Slice(0, 64, [1])]) == [(0, True)]
        assert own.book([Slice(0, 65, [1] * 5), Slice(1, 0, [1] * 80)]) == [(0, True), (0, False)]
        return own

    own = ready()
    own.check([Slice(0, 68, [1])])
    assert own.book([Slice(0, 68, [1])]) == [(3, True)]
    ready().check([Slice(0, 64, [1])])  # goes on from the page before
    with pytest.raises(StepRefused, match="tokens, expected"):
        ready().check([Slice(0, 65, [1])])  # as it was before that slice is nowhere
    with pytest.raises(StepRefused, match="tokens, expected"):
        ready().check([Slice(1, 70, [1])])  # of a longer one nothing is kept
    own = ready()
    own.copy_page(0, 1, 64)  # over a page of bank 0
    with pytest.raises(StepRefused, match="tokens, expected"):
        own.check([Slice(0, 68, [1])])
    own = ready()
    own.set_page(1, 1, 1)
    own.book([Slice(1, 64, [1] * 6)])
    with pytest.raises(StepRefused, match="tokens, expected"):
        own.check([Slice(0, 68, [1])])


def test_growing_sequences_are_looked_at_from_where_they_grew() -> None:
    """The rule that makes decode cheap forgets nothing: a page that loses its tokens is noticed."""
    own = checks()
    for index in range(4):
        own.set_page(0, index, index)
        own.book([Slice(0, PAGE * index, [1] * PAGE)])
    own.check([Slice(0, 192, [1])])
    own.set_page(1, 0, 1)  # a page of bank 0
    own.check([Slice(1, 0, [1])])
    with pytest.raises(StepRefused, match="read and written"):
        own.check([Slice(0, 192, [1]), Slice(1, 0, [1])])
    own.book([Slice(1, 0, [1])])
    with pytest.raises(StepRefused, match=r"logical page 1 \(physical 1\) holds 1 tokens"):
        own.check([Slice(0, 192, [1])])


def test_changed_entries_are_told_once() -> None:
    own = checks()
    assert own.take_changed() == (0, 8)  # all of them are unmapped at first
    assert own.take_changed() == (0, 0)
    own.set_page(0, 3, 1)
    own.set_page(1, 2, 2)
    assert own.take_changed() == (3, 7)
    own.set_page(1, 0, 2)
    assert own.take_changed() == (4, 5)
