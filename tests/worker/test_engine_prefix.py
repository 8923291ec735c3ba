"""The prefix cache: what is reused, that this changes nothing, and windows."""

from __future__ import annotations

import pytest

from ds4_worker.engine.api import Failed, Output
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.pages import PagePool
from ds4_worker.engine.prefix import PrefixCache, common_length
from helpers.fake_executor import FakeExecutor
from helpers.prefixes import PAGE, item, make_core, run


def fake(core: EngineCore) -> FakeExecutor:
    assert isinstance(core._executor, FakeExecutor)
    return core._executor


def computed(core: EngineCore) -> list[tuple[int, int]]:
    """(start, tokens) of every slice so far."""
    return [(s.start, len(s.tokens)) for step in fake(core).steps for s in step]


# --- what is reused -------------------------------------------------------------------------


def test_a_prompt_computes_only_what_follows_the_longest_known_beginning() -> None:
    core = make_core()
    prompt = list(range(10, 20))  # pages of 4: 8 tokens whole, then 2 and what is generated
    (tokens, end), *_ = run(core, item(prompt))
    assert end.reused_prompt_tokens == 0
    again = [*prompt, *tokens, 7, 8]
    fake(core).steps.clear()
    ((_, end),) = run(core, item(again))
    assert end.reused_prompt_tokens == len(prompt) + 2  # the last token was never computed
    assert computed(core)[0] == (12, 3)
    assert fake(core).copies == []


def test_a_prompt_that_departs_inside_a_page_copies_its_beginning() -> None:
    core = make_core()
    run(core, item(list(range(10, 20))))
    ((_, end),) = run(core, item([10, 11, 12, 13, 14, 15, 99, 98, 97]))
    assert end.reused_prompt_tokens == 6
    assert [tokens for _, _, tokens in fake(core).copies] == [2]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    core = make_core()
    for length in (1, 4, 5, 8, 9):
        prompt = list(range(length))
        (first, _), *_ = run(core, item(prompt))
        ((second, end),) = run(core, item(prompt))
        assert end.reused_prompt_tokens == length - 1
        assert second == first


def test_prompts_that_run_together_share_what_one_of_them_computes() -> None:
    core = make_core()
    prompt = list(range(11))
    answers = run(core, *(item(prompt, seed=seed) for seed in range(3)))
    assert [end.reused_prompt_tokens for _, end in answers] == [0, 8, 8]
    assert core.stats.prompt_tokens == 11 + 3 + 3
    assert (core.stats.prefix_hits, core.stats.prefix_misses) == (2, 1)
    assert core.stats.prompt_tokens_reused == 16


def test_sequences_admitted_later_find_pages_of_one_that_still_runs() -> None:
    core = make_core(banks=2)
    long = core.sequence(item(list(range(9)), 20))
    core.submit(long)
    for _ in range(3):
        core.step()
    later = core.sequence(item([*range(9), 50]))
    core.submit(later)
    events = [event for sequence, event in core.step() or [] if sequence is later]
    assert isinstance(events[0], Output)
    assert events[0].reused_prompt_tokens == 8


@pytest.mark.parametrize(
    "fields", [{"reuse_prefix": False}, {}], ids=["asked by the request", "switched off"]
)
def test_reuse_can_be_declined(fields: dict[str, bool]) -> None:
    core = make_core(reuse=bool(fields))
    prompt = list(range(10))
    run(core, item(prompt))
    ((_, end),) = run(core, item(prompt, **fields))
    assert end.reused_prompt_tokens == 0


def test_what_a_stop_or_a_cancellation_cut_off_keeps_its_whole_pages_only() -> None:
    core = make_core()
    prompt = list(range(10, 20))
    ((tokens, end),) = run(core, item(prompt, 5))
    core = make_core()
    ((_, end),) = run(core, item(prompt, 5, stop_token_sequences=((tokens[0],),)))
    assert end.reason == "stop"
    ((_, end),) = run(core, item([*prompt, 1]))
    assert end.reused_prompt_tokens == 8
    core = make_core()
    sequence = core.sequence(item(prompt, 5))
    core.submit(sequence)
    core.step()
    core.cancel(sequence)
    ((_, end),) = run(core, item([*prompt, 1]))
    assert end.reused_prompt_tokens == 8


def test_a_failed_draw_publishes_nothing_of_its_step() -> None:
    core = make_core()
    sequence = core.sequence(item(list(range(9))))
    core.submit(sequence)
    fake(core).errors[0] = "logits are not finite"
    events = core.step()
    assert events is not None
    assert isinstance(events[0][1], Failed)
    fake(core).errors.clear()
    ((_, end),) = run(core, item(list(range(9))))
    assert end.reused_prompt_tokens == 0


def test_a_page_is_mapped_once_and_again_only_when_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core()
    mapped: list[tuple[int, int, int]] = []
    set_page = fake(core).set_page

    def note(bank: int, index: int, page: int, history: int) -> None:
        mapped.append((bank, index, page))
        set_page(bank, index, page, history)

    monkeypatch.setattr(fake(core), "set_page", note)
    run(core, item(list(range(9)), 8))
    assert [index for _, index, _ in mapped] == [0, 1, 2, 3]
    # Two that computed the same page, since neither could wait for the other: one gives its own up.
    mapped.clear()
    run(core, item(list(range(30, 34)), 4), item(list(range(30, 34)), 4))
    assert sorted(index for _, index, _ in mapped) == [0, 0, 0, 1, 1]
    assert core.scheduler.memory.cache.available == core.scheduler.memory.pool.total


def test_warming_up_leaves_no_page_behind() -> None:
    core = make_core()
    core.warm()
    assert core.scheduler.memory.pool.free == core.scheduler.memory.pool.total


# --- eviction -------------------------------------------------------------------------------


def test_cached_pages_count_as_free_and_the_least_recently_used_go_first() -> None:
    core = make_core(banks=1, pages=10)
    old, young, new = ([start + i for i in range(9)] for start in (10, 40, 70))
    run(core, item(old, 1))  # 3 pages each
    run(core, item(young, 1))
    run(core, item(old, 1))
    assert core.stats.pages_cached == 6
    assert core.stats.pages_used == 0
    run(core, item(new, 20))  # 7 pages: 4 are free, so 3 of the oldest go
    assert core.stats.pages_evicted == 3
    ((_, end),) = run(core, item(old, 1))
    assert end.reused_prompt_tokens == 8
    ((_, end),) = run(core, item(young, 1))
    assert end.reused_prompt_tokens == 0


def test_a_page_may_be_evicted_for_its_own_copy() -> None:
    """The pool has two pages: the source of the copy is the only one that can be given away."""
    core = make_core(banks=1, pages=2)
    ((tokens, _),) = run(core, item([1, 2, 3, 4, 5, 6], 1))
    ((_, end),) = run(core, item([1, 2, 3, 4, 5, 9], 1))
    assert end.reused_prompt_tokens == 5
    alone = make_core(banks=1, pages=2)
    assert run(core, item([1, 2, 3, 4, 5, 6], 1))[0][0] == tokens
    assert run(core, item([1, 2, 8], 1))[0][0] == run(alone, item([1, 2, 8], 1))[0][0]


def test_the_eviction_queue_does_not_grow_with_the_requests() -> None:
    core = make_core(banks=1)
    for _ in range(500):
        run(core, item(list(range(9)), 1))
    assert len(core.scheduler.memory.cache._queue) < 100


def test_the_nearest_page_is_the_one_that_shares_most() -> None:
    cache = PrefixCache(PagePool(9), PAGE)
    for tokens in ((5, 5, 5, 5), (1, 2, 3, 4), (1, 2, 9, 9), (1, 3, 3, 3), (0, 0, 0, 0)):
        cache.release(cache.publish(cache.root, tokens, cache.pool.take()))
    near = cache.nearest(cache.root, (1, 2, 8, 8))
    assert near is not None
    assert (near[0].tokens[:2], near[1]) == ((1, 2), 2)
    assert cache.nearest(cache.root, (7, 7)) is None
    assert common_length((1, 2, 3), (1, 2, 4, 5)) == 2


# --- windows --------------------------------------------------------------------------------


def test_a_sequence_holds_no_more_pages_of_a_window_than_it_sees() -> None:
    core = make_core(banks=1, chunk=4, windows=(6,))
    (history,) = core.scheduler.memory.windows
    sequence = core.sequence(item(list(range(20)), 20))
    core.submit(sequence)
    seen = set()
    while core.step() is not None:
        seen.add(history.held)
    assert max(seen) == 3  # what a chunk sees: 5 positions before its 4, over pages of 4
    assert core.scheduler.memory.cache.unheld == 10  # while all were kept elsewhere
    assert core.stats.kv_bytes_used == 0


def test_a_conversation_goes_on_behind_its_window() -> None:
    core = make_core(banks=1, chunk=4, windows=(6,), window_pages=4)
    prompt = list(range(16))
    ((tokens, _),) = run(core, item(prompt, 8))
    ((_, end),) = run(core, item([*prompt, *tokens, 7, 8], 4))
    assert end.reused_prompt_tokens == 23  # the last token was never computed
    # One that departs where no window was kept computes all of it.
    ((_, end),) = run(core, item([*prompt[:9], 50, 51], 4))
    assert end.reused_prompt_tokens == 0


def test_the_window_before_a_departure_is_kept_once_it_is_known() -> None:
    """Prompts that share 16 tokens: the second one finds a hole there, the third does not."""
    core = make_core(banks=1, chunk=4, windows=(6,), window_pages=6)
    system = list(range(16))
    reused = []
    for first in (30, 40, 50):
        ((_, end),) = run(core, item([*system, *range(first, first + 20)], 4))
        reused.append(end.reused_prompt_tokens)
    assert reused == [0, 0, 16]


def test_windows_bound_what_is_admitted() -> None:
    core = make_core(banks=3, chunk=4, windows=(6,), window_pages=5)  # 3 for each
    for first in (0, 30, 60):
        core.submit(core.sequence(item(list(range(first, first + 12)), 9)))
    core.step()
    assert (len(core.scheduler.running), len(core.scheduler.waiting)) == (1, 2)
    while core.step() is not None:
        assert len(core.scheduler.running) <= 1
    assert core.stats.finished["length"] == 3
