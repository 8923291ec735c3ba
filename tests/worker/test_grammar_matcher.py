"""A matcher of a grammar, beside itself: looking ahead is what accepting gives."""

from __future__ import annotations

import ctypes

import pytest

from ds4_worker.grammar.compiler import Compiler
from ds4_worker.grammar.source import answer_grammar, whole_answer
from helpers.fake_model import EOS, VOCABULARY, ByteTokenizer

LARK = 'start: "<" word ">"\nword: /[a-c]{2,5}/'


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(ByteTokenizer(), VOCABULARY, [EOS])


def test_looking_ahead_in_a_grammar_is_what_accepting_gives(compiler: Compiler) -> None:
    grammar = compiler.compile(whole_answer("start: @answer", answer_grammar("lark", LARK)))
    ids = [*b"<abca>"]
    matcher, looking = grammar.matcher(), grammar.matcher()
    words = -(-VOCABULARY // 32)

    def allowed(address: int) -> bytes:
        return ctypes.string_at(address, 4 * words)

    for place, token in enumerate(ids):
        rest = ids[place:]
        assert looking.allows([*rest, 97, 97]) == len(rest)
        assert looking.allows([0, *rest]) == 0
        masks = [allowed(address) for address in looking.ahead([*rest, 97])]
        assert len(masks) == len(rest) - 1, "after the last one nothing may come"
        further = grammar.matcher()
        for earlier in ids[:place]:
            further.accept(earlier)
        for mask, ahead in zip(masks, rest, strict=False):
            further.accept(ahead)
            assert mask == allowed(further.mask())
        assert allowed(matcher.mask()) == allowed(looking.mask())
        assert matcher.accept(token) == looking.accept(token) == (place == len(ids) - 1)
