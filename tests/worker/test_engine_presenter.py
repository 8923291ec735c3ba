from hypothesis import given
from hypothesis import strategies as st

from ds4_worker.engine.api import Generation, Output
from ds4_worker.engine.presenter import Presenter
from ds4_worker.executor.api import Sampled
from helpers.fake_model import EOS, ByteDetokenizer


def present(tokens: list[int], generation: Generation) -> tuple[Presenter, list[Output]]:
    """Pushes tokens until the presenter says that the sequence is finished."""
    presenter = Presenter(generation, ByteDetokenizer())
    outputs = []
    for stamp, token in enumerate(tokens):
        outputs.append(presenter.push(Sampled(token, -1.0, [(token, -1.0)]), stamp))
        if presenter.finished:
            break
    return presenter, outputs


def text_of(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def generation(max_tokens: int = 100, **fields: object) -> Generation:
    fields.setdefault("eos_ids", frozenset({EOS}))
    return Generation(prompt=[1], max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def test_every_raw_id_is_reported_including_the_end() -> None:
    presenter, outputs = present([*b"hi", EOS, 65], generation())
    assert [output.tokens for output in outputs] == [[104], [105], [EOS]]
    assert (text_of(outputs), presenter.finished, presenter.stop) == ("hi", "stop", EOS)


def test_the_limit_ends_a_sequence_with_length() -> None:
    presenter, outputs = present(list(b"hello"), generation(max_tokens=3))
    assert (text_of(outputs), presenter.finished) == ("hel", "length")


def test_end_of_sequence_at_the_limit_is_a_stop() -> None:
    presenter, _ = present([104, EOS], generation(max_tokens=2))
    assert presenter.finished == "stop"


def test_no_output_holds_half_a_character() -> None:
    _, outputs = present(list("é€😀".encode()), generation(max_tokens=9))
    assert [output.text for output in outputs] == ["", "é", "", "", "€", "", "", "", "😀"]


def test_a_character_that_never_completes_is_shown_as_a_replacement() -> None:
    _, outputs = present([0xE2, 0x82, EOS], generation())
    assert text_of(outputs) == "\ufffd"


def test_a_string_stop_cuts_inside_a_token_and_counts_it() -> None:
    presenter, outputs = present(list(b"one\n\ntwo"), generation(stop_strings=("e\n",)))
    assert (text_of(outputs), presenter.finished, presenter.stop) == ("on", "stop", "e\n")
    assert presenter.count == 4


def test_a_held_prefix_is_flushed_at_the_end() -> None:
    presenter, outputs = present([*b"on", EOS], generation(stop_strings=("one",)))
    assert [output.text for output in outputs] == ["", "", "on"]
    assert presenter.finished == "stop"
    presenter, outputs = present(list(b"on"), generation(max_tokens=2, stop_strings=("one",)))
    assert (text_of(outputs), presenter.finished) == ("on", "length")


def test_a_stop_that_completes_with_the_last_allowed_token_is_a_stop() -> None:
    presenter, outputs = present(list(b"ab"), generation(max_tokens=2, stop_strings=("b",)))
    assert (text_of(outputs), presenter.finished) == ("a", "stop")


def test_token_stops_are_hidden_and_their_prefixes_released_on_a_mismatch() -> None:
    stops = ((97, 98, 99), (120,))
    presenter, outputs = present(list(b"abdabcz"), generation(stop_token_sequences=stops))
    assert [output.text for output in outputs] == ["", "", "abd", "", "", ""]
    assert (presenter.finished, presenter.stop, presenter.count) == ("stop", 99, 6)


def test_logprobs_belong_to_presented_tokens_only() -> None:
    _, outputs = present([104, EOS], generation(logprobs=1))
    assert [[item.token for item in output.logprobs or []] for output in outputs] == [[104], []]
    _, outputs = present([104], generation())
    assert outputs[0].logprobs is None


def test_ignoring_the_end_means_having_no_end_ids() -> None:
    presenter, outputs = present([104, EOS, 105], generation(3, eos_ids=frozenset[int]()))
    assert (text_of(outputs), presenter.finished) == ("hi", "length")


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_the_text_is_the_decoded_bytes_cut_at_the_first_stop(text: str, stops: list[str]) -> None:
    tokens = list(text.encode())
    presenter, outputs = present([*tokens, EOS], generation(stop_strings=tuple(stops)))
    shown = text_of(outputs)
    assert text.startswith(shown)
    if presenter.stop == EOS:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert isinstance(presenter.stop, str)
        assert text[len(shown) :].startswith(presenter.stop)
        assert not any(stop in shown for stop in stops)


# --- pieces for a parser


def pieces_of(outputs: list[Output]) -> list[tuple[int, str]]:
    return [piece for output in outputs for piece in output.pieces or []]


def test_pieces_name_the_token_that_completed_each_text() -> None:
    _, outputs = present([0xC3, 0xA9, 258, 33, EOS], generation(pieces=True))
    assert pieces_of(outputs) == [(0xC3, ""), (0xA9, "é"), (258, ""), (33, "!")]
    assert present([33, EOS], generation())[1][0].pieces is None


def test_text_that_only_the_end_settles_belongs_to_no_token() -> None:
    _, outputs = present([0xE2, 0x82, EOS], generation(pieces=True))
    assert pieces_of(outputs) == [(0xE2, ""), (0x82, ""), (-1, "\ufffd")]


def test_a_string_stop_shortens_the_piece_it_begins_in_and_drops_the_rest() -> None:
    tokens = [97, 258, 0xC3, 0xA9, 258, 98, 99]
    _, outputs = present(tokens, generation(pieces=True, stop_strings=("éb",)))
    assert pieces_of(outputs) == [(97, "a"), (258, ""), (0xC3, "")]
    _, outputs = present(tokens, generation(pieces=True, stop_strings=("éx",)))
    assert pieces_of(outputs)[-3:] == [(258, ""), (98, "b"), (99, "c")]


@given(
    st.lists(st.sampled_from([*b"abc", 0xC3, 0xA9, 258, EOS]), max_size=12),
    st.lists(st.text("abcé", min_size=1, max_size=3), max_size=3),
)
def test_pieces_joined_are_the_text(tokens: list[int], stops: list[str]) -> None:
    how = generation(max_tokens=10, pieces=True, stop_strings=tuple(stops))
    _, outputs = present([*tokens, EOS], how)
    assert "".join(text for _, text in pieces_of(outputs)) == text_of(outputs)
    shown = [token for token, _ in pieces_of(outputs) if token >= 0]
    assert shown == [*tokens, EOS][: len(shown)]
