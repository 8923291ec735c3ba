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
from ds4_worker.bench import processes

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
    port: int, *, requests: int, prompt_tokens: int, max_tokens: int, concurrency: int = 1
) -> list[Done]:
    """Waits for a healthy worker, then sends everything. Raises Ds4Error when one is refused."""
    wait_until_healthy(port)
    with ThreadPoolExecutor(concurrency) as clients:
        asked = [
            clients.submit(_ask, port, f"{number}{_WORD * prompt_tokens}", max_tokens)
            for number in range(requests)
        ]
        return [_report(number, item.result()) for number, item in enumerate(asked)]


def wait_until_healthy(port: int, seconds: float = HEALTHY_SECONDS) -> None:
    """Returns at the first 200 of /health. Raises Ds4Error when none comes: a worker that has no
    owner yet does not listen, one whose owner loads answers 503."""
    give_up = time.monotonic() + seconds
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
        try:
            connection.request("GET", "/health")
            seen = f"/health says {connection.getresponse().status}"
        except (OSError, http.client.HTTPException) as error:
            seen = str(error) or type(error).__name__
        finally:
            connection.close()
        if seen == "/health says 200":
            return
        if time.monotonic() > give_up:
            raise Ds4Error(f"no healthy worker at port {port} in {seconds:g} s: {seen}")
        time.sleep(_POLL_SECONDS)


def _report(number: int, done: Done) -> Done:
    print(
        f"{number + 1:4}  prompt {done.prompt_tokens:6}  tokens {done.tokens:5}  "
        f"first {done.first_token * 1e3:8.1f} ms  decode {done.decode_rate:7.1f} tokens/s",
        flush=True,
    )
    return done


def _ask(port: int, prompt: str, max_tokens: int) -> Done:
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
    with processes.connect(port) as connection:
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
