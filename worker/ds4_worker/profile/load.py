"""A scripted load: a number of completions of given lengths, streamed, with a line of figures each.

Owns: prompts of about the wanted length that differ from the first token on (so no cache of
prefixes shortens them), and the sums. The server says how many tokens it really read.
"""

from __future__ import annotations

import http.client
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ds4_common.errors import Ds4Error
from ds4_worker.address import Address, url
from ds4_worker.bench import processes
from ds4_worker.profile.target import Target, connected

HEALTHY_SECONDS = 3600.0  # a large model may take that long to load
_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.2
_WORD = " the"  # one token in most vocabularies


@dataclass(frozen=True, slots=True)
class Done:
    """One answered request: times in seconds."""

    prompt_tokens: int
    tokens: int
    first_token: float
    total: float

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first one; 0 when there is nothing to measure."""
        seconds = self.total - self.first_token
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0


def run(
    worker: Target, *, requests: int, prompt_tokens: int, max_tokens: int, concurrency: int = 1
) -> list[Done]:
    """Waits for a healthy worker, then sends everything. Raises Ds4Error when one is refused."""
    address = wait_until_healthy(worker)
    with ThreadPoolExecutor(concurrency) as clients:
        asked = [
            clients.submit(_ask, address, f"{number}{_WORD * prompt_tokens}", max_tokens)
            for number in range(requests)
        ]
        return [_report(number, item.result()) for number, item in enumerate(asked)]


def wait_until_healthy(worker: Target, seconds: float = HEALTHY_SECONDS) -> Address:
    """Returns at the first 200 of /health, with where it came from. Raises Ds4Error when none
    comes: a worker that has no owner yet does not listen, one whose owner loads answers 503."""
    give_up = time.monotonic() + seconds
    while True:
        found = worker()
        if isinstance(found, Address):
            seen = _health(found)
            if not seen:
                return found
            seen = f"{url(found)}: {seen}"
        else:
            seen = found
        if time.monotonic() > give_up:
            raise Ds4Error(f"no healthy worker in {seconds:g} s: {seen}")
        time.sleep(_POLL_SECONDS)


def _health(address: Address) -> str:
    """Why a worker is not healthy; empty when it is."""
    connection = http.client.HTTPConnection("localhost")
    try:
        connection.sock = connected(address, _ANSWER_SECONDS)
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return "" if status == 200 else f"/health says {status}"


def _report(number: int, done: Done) -> Done:
    print(
        f"{number + 1:4}  prompt {done.prompt_tokens:6}  tokens {done.tokens:5}  "
        f"first {done.first_token * 1e3:8.1f} ms  decode {done.decode_rate:7.1f} tokens/s",
        flush=True,
    )
    return done


def _ask(address: Address, prompt: str, max_tokens: int) -> Done:
    body: dict[str, object] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first: float | None = None
    usage: object = None
    start = time.perf_counter()
    with connected(address, _ANSWER_SECONDS) as connection:
        processes.send_post(connection, "/v1/completions", body)
        for moment, event in processes.stream_events(connection):
            if "error" in event:
                raise Ds4Error(f"the server refused a request: {event['error']}")
            first = moment if first is None else first
            usage = event.get("usage") or usage
    total = time.perf_counter() - start
    if first is None or not isinstance(usage, dict):
        raise Ds4Error("the server ended a stream without tokens or usage; see the worker's window")
    return Done(usage["prompt_tokens"], usage["completion_tokens"], first - start, total)


def print_summary(done: list[Done]) -> None:
    rates = [item.decode_rate for item in done if item.decode_rate]
    first = statistics.median(item.first_token for item in done) * 1e3
    decode = f", decode {statistics.median(rates):.1f} tokens/s" if rates else ""
    print(f"{len(done)} requests, medians: first token {first:.1f} ms{decode}", flush=True)
