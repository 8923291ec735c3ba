import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_worker.engine.pages import PagePool, pages_for


@given(st.integers(0, 40), st.lists(st.booleans(), max_size=60))
def test_no_page_has_two_holders_and_none_is_lost(total: int, actions: list[bool]) -> None:
    """True takes a page, False gives the oldest back."""
    pool = PagePool(total)
    held: list[int] = []
    for taking in actions:
        if taking and pool.free:
            held.append(pool.take())
        elif not taking and held:
            pool.give_back((held.pop(0),))
        assert len(held) == len(set(held))
        assert all(0 <= page < total for page in held)
        assert pool.free == total - len(held)


def test_an_empty_pool_gives_nothing() -> None:
    with pytest.raises(IndexError):
        PagePool(0).take()


def test_giving_back_twice_is_refused() -> None:
    pool = PagePool(4)
    page = pool.take()
    pool.give_back((page,))
    with pytest.raises(ValueError, match="was not taken"):
        pool.give_back((page,))


@given(st.integers(0, 10_000), st.integers(1, 512))
def test_pages_cover_exactly_the_tokens(tokens: int, page_tokens: int) -> None:
    pages = pages_for(tokens, page_tokens)
    assert (pages - 1) * page_tokens < tokens <= pages * page_tokens or tokens == pages == 0
