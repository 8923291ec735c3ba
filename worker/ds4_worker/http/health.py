"""What `GET /health` answers."""

from __future__ import annotations

import msgspec


class Health(msgspec.Struct, omit_defaults=True):
    """`status`: ok, loading or failed. `owner`: alive, gone or replaced."""

    status: str
    model: str = ""
    detail: str = ""
    pid: int = 0
    banks: int = 0
    context_tokens: int = 0
    running: int = 0
    waiting: int = 0
    owner: str = ""
