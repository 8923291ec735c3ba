"""What an independent engine says about the real model, and the rules to compare by.

Owns: reading `golden/oracles/` (see its README) and the two comparisons every executor must pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parents[1] / "golden" / "oracles"
GREEDY_VARIANTS = ("q_fa0", "q_fa0_norepack", "q_fa0_kvf32", "q_fa1", "f32_fa0_kvf32")
# That engine's own variants move logits by up to 1.1, so smaller margins prove nothing.
DECISIVE_MARGIN = 1.2

Rows = npt.NDArray[np.floating[Any]]
# Logits [tokens, vocabulary] of every token of a fresh sequence.
Forward = Callable[[Sequence[int]], Rows]


def oracle(kind: str) -> dict[str, Any]:
    """One file: kind is "greedy", "nll", "tokenize" or "chat"."""
    text = (FOLDER / f"{kind}-smollm2-135m-instruct-q4_1.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def token_logprobs(forward: Forward) -> Rows:
    """Log-probability of each token of the oracle's text but the first, given those before it."""
    tokens = oracle("nll")["tokens"]
    rows = np.asarray(forward(tokens), np.float64)[:-1]
    rows -= rows.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    picked: Rows = rows[np.arange(len(rows)), tokens[1:]]
    return picked


def expected_logprobs(variant: str) -> Rows:
    """The oracle's answer: variant "q_fa0" (quantized) or "f32_fa0_kvf32"."""
    return np.array(oracle("nll")["results"][variant]["logprobs"])


def greedy_disagreements(
    forward: Forward, variant: str, margin: float = DECISIVE_MARGIN
) -> list[str]:
    """Feeds each prompt and the oracle's own continuation; lists the steps whose recorded margin
    exceeds `margin` and whose best token differs."""
    found = []
    for name, case in oracle("greedy")["results"][variant].items():
        prompt, continuation = case["prompt_tokens"], case["greedy_tokens"]
        rows = forward([*prompt, *continuation[:-1]])[len(prompt) - 1 :]
        for step, (best, score, _, second) in enumerate(case["steps_top1_top2"]):
            got = int(rows[step].argmax())
            if score - second > margin and got != best:
                found.append(f"{variant}/{name} step {step}: got {got}, expected {best}")
    return found
