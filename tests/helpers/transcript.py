"""An answer that a model may write, and what it means."""

from __future__ import annotations

import msgspec


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """One answer and its meaning. `calls`: name, arguments as JSON text, complete."""

    case: str
    what: str
    answer: str
    calls: list[tuple[str, str, bool]] = []
    content: str = ""
    reasoning: str = ""
    block: str = ""
    whole: bool = False  # the answer is nothing but its block
    in_reasoning: bool = False


# Calls that many answers hold.
PARIS = ("get_weather", '{"city":"Paris"}', True)
NOW = ("now", "{}", True)
