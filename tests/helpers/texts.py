# ruff: noqa: RUF001 - texts in many scripts are the point
"""Hypothesis strategies for texts that are hard on tokenizers."""

from __future__ import annotations

from hypothesis import strategies as st

# Each stands for a class or an edge that some pre-tokenizer tests: case folds of contractions,
# digits of several scripts, marks, every kind of white space, newlines, symbols, emoji, format
# characters, unassigned and private code points, the last plane.
TRICKY = (
    "abzABZsStTdDmMlLvVeErR'’ſßǅΣ"
    "0123456789٣๓Ⅷ½²①"
    "  \t\n\r\v\f\x85\xa0\u1680\u2028\u3000"
    "\u0301\u0338\u093f\u20dd"
    '.,!?-_/\\()[]{}<>|$+=^~`#@*&%"…。，「」€£∑→'
    "日本語漢字カナひら한국中\u4dbf\u9fa6"
    "😀👩\u200d🔬🇩🇪\u200b\ufeff\u00ad\x00\x1b\x7f"
    "\u0378\ue000\U000e0041\U0010ffff\ufffd"
)

words = st.text(st.sampled_from(TRICKY), max_size=12)
snippets = st.sampled_from(
    ["'s", "'RE", "'ll", "'Ve", " '", "  ", "\n\n", " \n ", "\r\n", "123", "1234567", "...",
     "foo", " bar", "Ärger", "हिन्दी", "한국어", "<|im_end|>", "<think>", "<|im_", "|>", "▁",
     " ▁▁", "<0x0A>"]
)  # fmt: skip
texts = st.one_of(
    st.lists(st.one_of(words, snippets), max_size=12).map("".join),
    st.text(max_size=40),
)
