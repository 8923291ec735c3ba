"""The constant load counts what a server loses, and never hides it by asking again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ds4_worker.bench import death
from ds4_worker.bench.steady import steady_load

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


@contextmanager
def server(reply: Callable[[bytes], bytes]) -> Iterator[int]:
    """Answers each request by some bytes, then closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(reply(connection.recv(65536)))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("reply", "where"),
    [
        (WHOLE, "answered"),
        (STREAM + b"0\r\n\r\n", "answered"),
        (b"", "lost"),
        (STREAM, "cut"),
        (WHOLE[:-1], "cut"),
        (b"H", "cut"),
        (WHOLE.replace(b"200 OK", b"503 No"), "refused"),
    ],
)
def test_what_became_of_a_request_is_counted(reply: bytes, where: str) -> None:
    with server(lambda request: reply) as port, steady_load(port, 200) as tally:
        while len(tally.outcomes) < 8:
            threading.Event().wait(0.001)
    # On a connection that the server closed unasked the next request is lost, and counted.
    assert len(getattr(tally, where)) >= len(tally.outcomes) // 2
    for other in {"answered", "lost", "cut", "refused"} - {where, "lost"}:
        assert getattr(tally, other) == []


def test_a_death_is_seen_by_the_lock_and_by_the_socket() -> None:
    by_lock, by_socket = death.measure(0.01, 1)
    assert 0 <= by_lock.median <= by_socket.median
