"""How long to think, in the words that the APIs share."""

from __future__ import annotations

from ds4_common.errors import RequestError
from ds4_worker.http.conversation import Effort

EFFORTS: dict[str, Effort | None] = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "max",
}


def effort_of(word: str | None, path: str) -> tuple[bool | None, Effort | None]:
    """Whether to think, and how much; (None, None) when nothing was said. `none` is not to think.
    Raises RequestError for another word."""
    if word is None:
        return None, None
    if word not in EFFORTS:
        raise RequestError(
            f"{path}: got {word[:100]!r}, expected one of {', '.join(EFFORTS)}", param=path
        )
    effort = EFFORTS[word]
    return effort is not None, effort
