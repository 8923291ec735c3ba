"""Tool calls of every syntax, as models write them."""

from __future__ import annotations

import pytest

from helpers.syntaxes import CASES
from helpers.transcript import Transcript
from helpers.transcripts import TRANSCRIPTS


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda t: f"{t.case}-{t.what}")
def test_a_transcript_is_read_as_its_model_means_it(transcript: Transcript) -> None:
    got = CASES[transcript.case].parse(transcript.answer, transcript.in_reasoning)
    assert got.calls == transcript.calls
    assert got.content == transcript.content
    assert got.reasoning == transcript.reasoning
    assert got.block == (transcript.answer if transcript.whole else transcript.block)


@pytest.mark.parametrize(
    ("name", "envelope", "answer", "reasoning", "content"),
    [
        ("recipient", " to=self<|message|>I", " see.<|eom|>", " see.", ""),
        ("recipient", " to=user<|message|>It is ", "sunny.", "", "sunny."),
        ("recipient", "<|start|>assistant to=self<|message|>", "I see.<|eom|>", "I see.", ""),
        ("recipient", " to=", "user<|message|>Sunny.", "", "Sunny."),
        ("harmony", "<|channel|>analysis<|message|>I", " see.<|end|>", " see.", ""),
        ("harmony", "<|channel|>final<|message|>It is ", "sunny.", "", "sunny."),
        ("xtml", "<|open|>think<|sep|>I", " see.<|close|>think<|sep|>", " see.", ""),
        ("xtml", "<|open|>response<|sep|>It is ", "sunny.", "", "sunny."),
        ("hermes", "<think>\nI", " see.\n</think>\n\nSunny.", " see.", "Sunny."),
    ],
)
def test_an_answer_continues_where_its_prompt_leaves_it(
    name: str, envelope: str, answer: str, reasoning: str, content: str
) -> None:
    got = CASES[name].parse(answer, bool(reasoning), envelope)
    assert (got.reasoning, got.content) == (reasoning, content)


def test_a_call_that_the_prompt_began_is_completed() -> None:
    call = "<|channel|>commentary to=functions.get_weather<|message|>"
    got = CASES["harmony"].parse(' "Paris"}', envelope=call + '{"city":')
    assert got.calls == [("get_weather", '{"city":"Paris"}', True)]
