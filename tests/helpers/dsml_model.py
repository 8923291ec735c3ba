"""A tiny deepseek4 model that can be talked to: byte tokens and the marks of its chat format."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from golden import tiny
from golden.deepseek4.cases import CASES, COUNT, USED
from helpers.tiny_gguf import Vocabulary, byte_alphabet

BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT, DSML = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "\uff5cDSML\uff5c"
_CONTROL, _DEFINED = (BOS, EOS, USER, ASSISTANT), ("<think>", "</think>", DSML)
MARKS = (*_CONTROL, *_DEFINED)  # token 0, 1, ...
CONTEXT = 4096


def vocabulary(marks: tuple[str, ...] = MARKS) -> Vocabulary:
    """Marks, the bytes, and "th". Files of these models want BOS before a prompt."""
    tokens = [*marks, *byte_alphabet(), "th"]
    types = [3 if mark in _CONTROL else 4 for mark in marks] + [1] * 257
    return Vocabulary(
        "gpt2", "joyai-llm", tokens, types, merges=["t h"], bos=0, eos=1, add_bos=True
    )


def write_dsml_model(
    path: Path, *, chat_template: str | None = None, words: Vocabulary | None = None
) -> Path:
    """Layers of every kind, two of them hash-routed; random weights."""
    words = words or vocabulary()
    case = next(case for case in CASES if case.name == "short_ratios")
    n_tokens, rng = len(words.tokens), np.random.default_rng(5)
    tables = {
        name: np.array([rng.permutation(COUNT)[:USED] for _ in range(n_tokens)], np.int32)
        for name in case.tensors
        if "tid2eid" in name
    }
    rows = {
        name: (n_tokens, case.shapes[name][1]) for name in ("token_embd.weight", "output.weight")
    }
    case = dataclasses.replace(
        case, context=CONTEXT, metadata={**case.metadata, "vocab_size": n_tokens},
        shapes={**case.shapes, **rows}, tensors={**case.tensors, **tables},
    )  # fmt: skip
    return tiny.write_gguf(case, path, vocabulary=words, chat_template=chat_template)
