"""`GET /v1/stats`: what this worker does at this moment, for people and for the page at `/`.

Owns: the shape of the answer and reading it together. Imported by the first request. Numbers only:
no text, no ids, nothing of any client. Counters that only grow are for `/metrics`.
"""

from __future__ import annotations

import msgspec

from ds4_worker.engine.api import now_ns
from ds4_worker.engine.stats import RATE_SECONDS
from ds4_worker.http.service import Service, Weights

_MEMORY_FIELDS = {"VmRSS": "resident_bytes", "RssAnon": "private_bytes", "RssShmem": "shared_bytes"}


class SequenceCounts(msgspec.Struct):
    running: int
    waiting: int
    submitted: int
    finished: dict[str, int]  # by reason


class Capacity(msgspec.Struct):
    used: int
    total: int


class Pages(msgspec.Struct):
    """`used` by sequences; `cached` for prompts to come, and given up when they are needed."""

    used: int
    cached: int
    total: int


class KvCache(msgspec.Struct):
    """Type of its values, and what its pages take: those that sequences hold, and all of them."""

    dtype: str
    bytes_used: int
    bytes_total: int


class TokenCounts(msgspec.Struct):
    """Since the start, and per second over the last `window_seconds` whole seconds. `prompt`: those
    that needed work; `prompt_reused`: those that an earlier prompt had left behind; `draft_offered`
    and `draft_accepted`: guesses of next tokens, and those that came true."""

    prompt: int
    prompt_reused: int
    generated: int
    prompt_per_second: float
    generated_per_second: float
    draft_offered: int
    draft_accepted: int
    window_seconds: int = RATE_SECONDS


class Memory(msgspec.Struct):
    """Resident memory of the process. Shared: the owner's weights as far as they were touched."""

    resident_bytes: int = 0
    private_bytes: int = 0
    shared_bytes: int = 0


class Owner(msgspec.Struct):
    """`state`: alive, gone or replaced, "" when nobody watches; `detail` why."""

    state: str = ""
    detail: str = ""


class Stats(msgspec.Struct, kw_only=True):
    model: str
    state: str  # of the engine: ok or failed
    pid: int
    uptime_seconds: float
    context_tokens: int  # per sequence
    sequences: SequenceCounts
    banks: Capacity
    kv_pages: Pages
    kv_cache: KvCache
    places: Capacity  # sequences admitted, running and waiting
    tokens: TokenCounts
    memory: Memory
    weights: Weights
    owner: Owner


def collect(service: Service, owner: Owner, pid: int) -> Stats:
    """The figures of this moment. A step may be half counted in them."""
    stats, admission, now = service.engine.stats, service.admission, now_ns()
    return Stats(
        model=service.model.names[0],
        state=service.engine.state,
        pid=pid,
        uptime_seconds=round(now / 1e9, 3),
        context_tokens=service.model.context_tokens,
        sequences=SequenceCounts(
            stats.running, stats.waiting, stats.submitted, dict(stats.finished)
        ),
        banks=Capacity(stats.running, stats.banks),
        kv_pages=Pages(stats.pages_used, stats.pages_cached, stats.pages),
        kv_cache=KvCache(stats.kv_dtype, stats.kv_bytes_used, stats.kv_bytes),
        places=Capacity(admission.total - admission.free, admission.total),
        tokens=TokenCounts(
            stats.prompt_tokens,
            stats.prompt_tokens_reused,
            stats.generated_tokens,
            round(stats.prompt_rate.per_second(now), 2),
            round(stats.generated_rate.per_second(now), 2),
            stats.draft_tokens_offered,
            stats.draft_tokens_accepted,
        ),
        memory=process_memory(),
        weights=service.weights,
        owner=owner,
    )


def process_memory() -> Memory:
    """Of this process; zeros where /proc does not say."""
    memory = Memory()
    try:
        with open("/proc/self/status") as file:
            for line in file:
                name, _, value = line.partition(":")
                if field := _MEMORY_FIELDS.get(name):
                    setattr(memory, field, int(value.split()[0]) * 1024)
    except OSError:
        return Memory()
    return memory
