"""From a request's wishes to generations: which value wins, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ds4_common.contract.frontend import SamplingDefaults
from ds4_common.errors import RequestError
from ds4_worker.engine.api import Generation, TokenLogprob
from ds4_worker.http.answer import Choice, End
from ds4_worker.http.conversation import Decoding
from ds4_worker.http.generation import build_generations
from ds4_worker.http.model import ServedModel
from ds4_worker.http.text_renderer import likelihood
from helpers.fake_model import served_model


def model(**flags: Any) -> ServedModel:
    """A model whose file recommends how to sample it."""
    served = served_model()
    defaults = SamplingDefaults(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repeat_penalty=1.2, max_tokens=0
    )
    record = msgspec.structs.replace(served.frontend, defaults=defaults)
    return msgspec.structs.replace(served, frontend=record, **flags)


def one(decoding: Decoding, served: ServedModel | None = None) -> Generation:
    (generation,) = build_generations(decoding, [[1, 2]], served or model(), prompt_path="prompt")
    return generation


def test_what_the_model_recommends_is_used_where_the_request_says_nothing() -> None:
    found = one(Decoding())
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.5, 7, 0.9, 0.1)
    assert found.repetition_penalty == 1.2


def test_what_the_request_says_wins() -> None:
    found = one(Decoding(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0))
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.0, 0, 1.0, 0.0)
    assert found.repetition_penalty == 1.0


def test_the_limit_is_cut_to_what_the_context_holds() -> None:
    assert one(Decoding()).max_tokens == 62
    assert one(Decoding(max_tokens=1000)).max_tokens == 62
    assert one(Decoding(max_tokens=5)).max_tokens == 5


def test_a_stop_id_counts_once_however_often_it_is_named() -> None:
    found = one(Decoding(stop_token_ids=(9, 3, 9) * 1000, stop_token_sequences=((3, 9),)))
    assert found.stop_token_sequences == ((3,), (9,), (3, 9))


def test_end_of_sequence_is_ignored_for_a_request_or_for_all() -> None:
    assert one(Decoding(ignore_eos=True)).ignore_eos
    assert one(Decoding(), model(ignore_eos=True)).ignore_eos
    assert not one(Decoding(), model(ignore_eos_in_reasoning=True)).ignore_eos


def test_a_refusal_names_the_field_as_the_api_does() -> None:
    decoding = Decoding(temperature=-1.0, paths={"temperature": "sampling.heat"})
    with pytest.raises(RequestError, match="heat: got -1") as refused:
        one(decoding)
    assert refused.value.param == "sampling.heat"


def test_likelihood_is_the_mean_per_token() -> None:
    def choice(*values: float) -> Choice:
        logprobs = [TokenLogprob(0, value, []) for value in values]
        return Choice([], [], [], logprobs, None, End("stop"))

    assert likelihood(choice(-1.0, -3.0)) == -2.0
    assert likelihood(choice(-1.0)) > likelihood(choice(-0.5, -3.0))
    assert likelihood(choice()) == 0.0
