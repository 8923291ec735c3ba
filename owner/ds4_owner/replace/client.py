"""The three HTTP requests that operator tools make of a worker: health, metrics, one completion.

Owns a small client for workers on this host, without retries: who calls decides how long to try.
Imports nothing heavy. Refuses nothing; what goes wrong is in the result or a `NoAnswer`.
"""

from __future__ import annotations

import http.client
import re
import socket
from dataclasses import dataclass

import msgspec

from ds4_common.errors import Ds4Error
from ds4_owner.replace.processes import Listening

UNIX = "unix:"
SECONDS = 5.0
PROMPT_SECONDS = 600.0  # the first answer of a large model may include warming up
PROMPT_TOKENS = 16
_SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? ([-+.\deE]+|NaN|[-+]?Inf)$", re.MULTILINE)


class NoAnswer(Ds4Error):
    """A worker refused, or did not answer as documented."""


@dataclass(frozen=True, slots=True)
class Health:
    """`pid` 0: unknown. `problem` "": it is ready to serve."""

    pid: int
    problem: str
    model: str = ""
    running: int = 0
    waiting: int = 0


class _HealthBody(msgspec.Struct):
    status: str = ""
    detail: str = ""
    model: str = ""
    pid: int = 0
    running: int = 0
    waiting: int = 0


class _Choice(msgspec.Struct):
    text: str


class _Completion(msgspec.Struct):
    model: str
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    text: str


class _UnixConnection(http.client.HTTPConnection):
    """The same over a Unix socket."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connect(address: str, seconds: float) -> http.client.HTTPConnection:
    """`address`: `host:port`, a wildcard host being reached at the loopback address; or
    `unix:PATH`."""
    if address.startswith(UNIX):
        return _UnixConnection(address.removeprefix(UNIX), seconds)
    host, _, port = address.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
    return http.client.HTTPConnection(host, int(port), timeout=seconds)


def _exchange(
    connection: http.client.HTTPConnection, method: str, path: str, key: str | None,
    body: bytes | None = None,
) -> tuple[int, bytes]:  # fmt: skip
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{path}: {error or type(error).__name__}") from error


def _decode_health(status: int, body: bytes) -> Health:
    try:
        told = msgspec.json.decode(body, type=_HealthBody)
    except msgspec.DecodeError as error:
        return Health(0, f"/health: status {status}, {error}")
    problem = "" if status == 200 else f"/health: status {status}, {told.status} {told.detail}"
    return Health(told.pid, problem, told.model, told.running, told.waiting)


def health(listening: Listening) -> Health:
    connection = _connect(str(listening), SECONDS)
    try:
        return _decode_health(*_exchange(connection, "GET", "/health", None))
    except NoAnswer as error:
        return Health(0, str(error))
    finally:
        connection.close()


def metrics(listening: Listening, key: str | None) -> tuple[Health, dict[str, float]]:
    """Health and unlabelled samples of one worker: both over one connection, so of one process.

    Raises NoAnswer."""
    connection = _connect(str(listening), SECONDS)
    try:
        found = _decode_health(*_exchange(connection, "GET", "/health", None))
        status, body = _exchange(connection, "GET", "/metrics", key)
    finally:
        connection.close()
    if status != 200:
        raise NoAnswer(f"/metrics: status {status}")
    return found, samples(body.decode(errors="replace"))


def samples(text: str) -> dict[str, float]:
    """name -> value of the samples without labels in Prometheus' text format."""
    return {name: float(value) for name, labels, value in _SAMPLE.findall(text) if not labels}


def complete(address: str, prompt: str, key: str | None) -> Answer:
    """One greedy completion. Raises NoAnswer."""
    body = {"prompt": prompt, "max_tokens": PROMPT_TOKENS, "temperature": 0}
    connection = _connect(address, PROMPT_SECONDS)
    try:
        status, data = _exchange(
            connection, "POST", "/v1/completions", key, msgspec.json.encode(body)
        )
    finally:
        connection.close()
    if status != 200:
        raise NoAnswer(f"/v1/completions: status {status}: {data[:300].decode(errors='replace')}")
    try:
        told = msgspec.json.decode(data, type=_Completion)
    except msgspec.DecodeError as error:
        raise NoAnswer(f"/v1/completions: {error}: {data[:300]!r}") from error
    return Answer(told.model, told.choices[0].text if told.choices else "")
