"""The merges of a vocabulary that has none: its ids are the ranks, as `tiktoken` reads them.

Owns: the one pair of each token that can meet. `tiktoken` joins the neighbours whose joined text
has the lowest rank. Inside a stretch of text that ends as one token nothing reached across its
ends, so it was joined as it would be alone: its last two parts are always the same ones. Hence a
list of these pairs, in order of rank, gives `tiktoken`'s ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds4_common.errors import TokenizerError
from ds4_common.tokenizer import layout

MAX_TOKEN_CHARACTERS = 512  # the time goes with the square


def merges_of_ranks(texts: Sequence[bytes], types: Sequence[int]) -> list[bytes]:
    """`texts` by id; those of another type than NORMAL take no part. Raises TokenizerError."""
    ranks: dict[str, int] = {}
    for token, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind != layout.NORMAL:
            continue
        characters = text.decode("utf-8", "replace")
        if len(characters) > MAX_TOKEN_CHARACTERS:
            raise TokenizerError(
                f"tokenizer.ggml.tokens: token {token}: got {len(characters)} characters, expected "
                f"at most {MAX_TOKEN_CHARACTERS} in a vocabulary without merges"
            )
        ranks.setdefault(characters, token)
    merges = []
    for characters in ranks:
        parts = _last_parts(characters, ranks)
        if len(parts) == 2 and all(part in ranks and " " not in part for part in parts):
            merges.append(" ".join(parts).encode())
    return merges


def _last_parts(text: str, ranks: Mapping[str, int]) -> list[str]:
    """The two parts that become this text last; more where nothing joins them, one of a single
    character."""
    parts = list(text)
    while len(parts) > 2:
        joined = [(ranks.get(parts[i] + parts[i + 1], -1), i) for i in range(len(parts) - 1)]
        _, i = min((pair for pair in joined if pair[0] >= 0), default=(-1, -1))
        if i < 0:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
