"""Many clients at once, most of them rude: streams, disconnects, slow readers, bad requests.

A swarm is a list of visits, drawn from a seed. What the polite ones get must be what each of them
gets alone; `normalised` takes out of an answer what differs between any two.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["reads", "reads slowly", "leaves", "resets", "talks nonsense"]

_CHANGING = re.compile(
    rb'"(?:id|item_id|response_id|signature)":"[^"]*"'
    rb'|"(?:created|created_at|completed_at)":\d+'
    rb'|"(?:cached_tokens|cache_write_tokens|cache_read_input_tokens|cache_creation_input_tokens'
    rb'|input_tokens)":\d+'
)
_SIGNS_OF_LIFE = re.compile(rb": keepalive\n\n|event: ping\ndata: [^\n]*\n\n")
_NONSENSE: tuple[bytes, ...] = (
    b"nonsense\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n{"a":',
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 500,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\n\r\n",
)


@dataclass(frozen=True)
class Visit:
    """One client. `patience`: bytes that it reads before it leaves."""

    kind: Kind
    request: bytes
    patience: int = 0


@dataclass(frozen=True)
class Outcome:
    visit: Visit
    status: int
    body: bytes


def stream_request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def requests_of_all_apis(count: int, tokens: int) -> list[bytes]:
    """Different requests, in turn to each API, with answers of up to `tokens` tokens that are the
    same every time."""
    made = []
    for number in range(count):
        text = f"Visit {number}:"
        turns = [{"role": "user", "content": text}]
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": text, "max_tokens": tokens, "seed": number}),
            ("/v1/chat/completions", {"messages": turns, "max_tokens": tokens, "seed": number}),
            ("/v1/messages", {"messages": turns, "max_tokens": tokens, "temperature": 0}),
            ("/v1/responses", {"input": text, "max_output_tokens": tokens, "temperature": 0}),
        ]
        path, body = bodies[number % len(bodies)]
        made.append(stream_request(path, body))
    return made


def swarm(requests: Sequence[bytes], count: int, seed: int) -> list[Visit]:
    """`count` visits with the given requests, about half of them polite."""
    draw = random.Random(seed)
    kinds: tuple[Kind, ...] = (
        *("reads", "reads", "reads", "reads slowly"),
        *("leaves", "leaves", "resets", "talks nonsense"),
    )
    visits = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        request = draw.choice(requests)
        if kind == "talks nonsense":
            request = draw.choice(_NONSENSE)
        visits.append(Visit(kind, request, draw.randrange(2000)))
    draw.shuffle(visits)
    return visits


async def visit(connect: Callable[[], socket.socket], one: Visit) -> Outcome:
    """Makes one visit; again for as long as the server is full."""
    while True:
        outcome = await _once(connect, one)
        if outcome.status != 429 or one.kind == "talks nonsense":
            return outcome
        await asyncio.sleep(0.01)


async def _once(connect: Callable[[], socket.socket], one: Visit) -> Outcome:
    loop = asyncio.get_running_loop()
    sock = connect()
    slowly = one.kind == "reads slowly"
    if slowly:  # so that the server feels it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    data = b""
    try:
        await loop.sock_sendall(sock, one.request)
        if one.kind == "talks nonsense":
            sock.shutdown(socket.SHUT_WR)
        size = 256 if slowly else 1 << 16
        while piece := await loop.sock_recv(sock, size):
            data += piece
            if one.kind in ("leaves", "resets") and len(data) > one.patience:
                break
            if slowly:
                await asyncio.sleep(0)
        if one.kind == "resets":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except ConnectionError:
        if one.kind != "talks nonsense":
            raise
    finally:
        sock.close()
    status = int(data.split(b" ", 2)[1]) if data else 0
    return Outcome(one, status, _unchunked(data))


def _unchunked(data: bytes) -> bytes:
    head, _, body = data.partition(b"\r\n\r\n")
    if b"Transfer-Encoding: chunked" not in head:
        return body
    joined = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        joined += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :] if int(size, 16) else b""
    return joined


def normalised(body: bytes) -> bytes:
    return _CHANGING.sub(b"_", _SIGNS_OF_LIFE.sub(b"", body))


async def run_swarm(
    connect: Callable[[], socket.socket], visits: Sequence[Visit], at_once: int
) -> list[Outcome]:
    """All visits, `at_once` of them at any moment."""
    room = asyncio.Semaphore(at_once)

    async def one(plan: Visit) -> Outcome:
        async with room:
            return await visit(connect, plan)

    return await asyncio.gather(*(one(plan) for plan in visits))


def check(outcomes: Sequence[Outcome], alone: dict[bytes, bytes]) -> dict[Kind, int]:
    """Asserts what each kind of client must have got; how many there were of each.

    `alone`: for each request the body of its answer when nothing else happened."""
    seen: dict[Kind, int] = {}
    for outcome in outcomes:
        kind = outcome.visit.kind
        seen[kind] = seen.get(kind, 0) + 1
        if kind in ("reads", "reads slowly"):
            assert outcome.status == 200, outcome
            got, expected = normalised(outcome.body), normalised(alone[outcome.visit.request])
            assert got == expected, f"{outcome.visit}: got {got!r}, alone {expected!r}"
        elif kind == "talks nonsense":
            assert outcome.status in (0, 400, 404, 413, 415, 431), outcome
        else:
            assert outcome.status == 200, outcome
    return seen
