"""Sequences for tests of drafts."""

from __future__ import annotations

from ds4_worker.engine.api import Generation


def item(prompt: list[int], max_tokens: int = 8, **fields: object) -> Generation:
    return Generation(prompt=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
