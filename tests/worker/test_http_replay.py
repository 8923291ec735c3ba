"""The memory of sampled tool calls: bounds, sharing, ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds4_worker.http.replay import Block, CallMemory, sampled_block


def test_ids_of_one_answer_lead_to_one_block_and_others_do_not() -> None:
    memory = CallMemory()
    memory.remember(["a", "b"], Block("x"))
    memory.remember(["c"], Block("x"))
    assert memory.block_of(["a", "b"]) == memory.block_of(["b"])
    assert memory.block_of(["a"]) is not None
    assert memory.block_of(["a", "c"]) is None  # equal text, but not the same block
    assert memory.block_of(["a", "unknown"]) is None
    assert memory.block_of([]) is None


def test_the_least_recently_used_ids_are_forgotten_first() -> None:
    memory = CallMemory(max_ids=2)
    memory.remember(["a"], Block("1"))
    memory.remember(["b"], Block("2"))
    memory.block_of(["a"])
    memory.remember(["c"], Block("3"))
    assert [memory.block_of([id_]) is not None for id_ in "abc"] == [True, False, True]


def test_a_memory_of_no_ids_keeps_nothing() -> None:
    memory = CallMemory(max_ids=0)
    memory.remember(["a"], Block("1"))
    assert (len(memory), memory.n_bytes) == (0, 0)


def test_an_id_is_random_and_long() -> None:
    memory = CallMemory()
    ids = {memory.new_id("call_") for _ in range(100)}
    assert len(ids) == 100
    assert all(len(id_) == len("call_") + 32 for id_ in ids)
    assert memory.new_id("toolu_").startswith("toolu_")


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.text("é", max_size=20)), max_size=30
    )
)
def test_both_bounds_hold_and_bytes_are_those_of_the_blocks_held(
    answers: list[tuple[list[int], str]],
) -> None:
    memory = CallMemory(max_ids=5, max_bytes=60)
    for ids, text in answers:
        names = [str(id_) for id_ in ids]
        memory.remember(names, Block(text))
        assert len(memory) <= 5
        assert memory.n_bytes <= 60
        held = {id(b): b for i in range(10) if (b := memory.block_of([str(i)])) is not None}
        assert memory.n_bytes == sum(block.n_bytes for block in held.values())


def test_the_space_before_calls_is_kept_unless_reasoning_precedes() -> None:
    assert sampled_block("said \n\nCALL", "CALL", after_text=True).space == " \n\n"
    assert sampled_block("\nCALL", "CALL", after_text=False).space == "\n"
    assert sampled_block("x</think>\n\nCALL", "CALL", after_text=False).space == ""
