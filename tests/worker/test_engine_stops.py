from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_worker.engine.stops import StopAutomaton, StopState, TextStop

ALPHABET = "ab"
texts = st.text(alphabet=ALPHABET, max_size=40)
patterns = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=6), min_size=1, max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the earliest end of any stop; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


@given(texts, patterns, st.lists(st.integers(0, 40), max_size=8))
def test_any_split_of_the_text_gives_the_same_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    state = TextStop(StopAutomaton(stops))
    shown = "".join(state.push(piece) for piece in split(text, cuts))
    expected, matched = cut(text, stops)
    assert state.matched == matched
    assert shown + state.flush() == expected


@given(texts, patterns)
def test_nothing_shown_is_ever_part_of_a_stop(text: str, stops: list[str]) -> None:
    state = TextStop(StopAutomaton(stops))
    shown = ""
    for symbol in text:
        shown += state.push(symbol)
        assert cut(text, stops)[0].startswith(shown)


@given(texts, patterns)
def test_no_more_is_held_than_can_still_match(text: str, stops: list[str]) -> None:
    state = StopState(StopAutomaton(stops))
    for end, symbol in enumerate(text, start=1):
        if state.push(symbol):
            return
        held = text[end - state.held : end]
        assert any(stop.startswith(held) for stop in stops)
        longer = (text[start:end] for start in range(end - state.held))
        assert not any(stop.startswith(rest) for rest in longer for stop in stops)


def test_a_stop_is_found_behind_a_false_start() -> None:
    state = TextStop(StopAutomaton(["aab"]))
    assert state.push("aaab") == "a"
    assert state.matched == "aab"


def test_text_after_a_match_in_the_same_piece_is_dropped() -> None:
    state = TextStop(StopAutomaton(["\n\n"]))
    assert state.push("one\n\ntwo\n\n") == "one"
    assert state.push("three") == ""
    assert state.flush() == ""


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_token_sequences_match_like_strings(tokens: list[int], stops: list[list[int]]) -> None:
    letters = "".join("xyz"[token] for token in tokens)
    state = StopState(StopAutomaton(stops))
    found = None
    for end, token in enumerate(tokens, start=1):
        length = state.push(token)
        if length:
            found = letters[end - length : end]
            break
    assert found == cut(letters, ["".join("xyz"[t] for t in stop) for stop in stops])[1]


def test_an_empty_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopAutomaton([""])


def test_single_symbols_take_one_node_however_many_they_are() -> None:
    automaton = StopAutomaton([(i,) for i in range(50_000)] + [(7, 8)])
    assert len(automaton.next) <= 4
    state = StopState(automaton)
    assert [state.push(symbol) for symbol in (50_000, 6, 7, 8)] == [0, 1, 1, 2]
