"""A worker on IPv6 and on a Unix socket: real processes, real sockets."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from contextlib import closing
from pathlib import Path

import pytest

from helpers import stack
from helpers.stack import UnixConnection

GREEDY = {"prompt": "a", "max_tokens": 2, "temperature": 0}


def complete(connection: http.client.HTTPConnection, *, stream: bool = False) -> bytes:
    connection.request("POST", "/v1/completions", json.dumps({**GREEDY, "stream": stream}))
    response = connection.getresponse()
    assert response.status == 200
    return response.read()


def test_a_worker_serves_a_private_unix_socket_and_the_next_one_takes_it_over(
    manifest: Path, tmp_path: Path
) -> None:
    path = tmp_path / "http.sock"
    with stack.worker(manifest, f"unix:{path}") as old:
        assert old.wait_for("ready").split()[2] == f"unix:{path}"
        assert os.stat(path).st_mode & 0o777 == 0o600
        client = UnixConnection(path)
        assert b'"usage"' in complete(client)
        assert complete(client, stream=True).endswith(b"data: [DONE]\n\n")
        with stack.worker(manifest, str(path)) as new:
            assert old.wait() == 0
            kept = client.sock
            assert b'"usage"' in complete(client)
            assert client.sock is kept, "the client had to connect again"
            fresh = UnixConnection(path)
            assert b'"usage"' in complete(fresh)
            fresh.close()
            client.close()
            assert new.stop(signal.SIGTERM) == 0


def test_a_client_of_a_unix_socket_goes_on_after_its_worker_was_killed(
    manifest: Path, tmp_path: Path
) -> None:
    path = tmp_path / "http.sock"
    with (
        stack.worker(manifest, str(path)) as old,
        closing(UnixConnection(path)) as client,
        closing(UnixConnection(path)) as waiting,
        closing(UnixConnection(path)) as other,
    ):
        assert b'"usage"' in complete(client)
        assert b'"usage"' in complete(other)  # so that the first answer is booked as sent
        kept = client.sock
        os.kill(old.process.pid, signal.SIGSTOP)
        client.request("POST", "/v1/completions", json.dumps(GREEDY))
        waiting.request("POST", "/v1/completions", json.dumps(GREEDY))
        old.stop(signal.SIGKILL)
        with stack.worker(manifest, str(path)) as new:
            for connection in (client, waiting):
                assert connection.getresponse().status == 200
            assert client.sock is kept
            for connection in (client, waiting, other):
                connection.close()
            assert new.stop(signal.SIGTERM) == 0


def test_a_client_of_a_unix_socket_that_goes_away_is_noticed(
    manifest: Path, tmp_path: Path
) -> None:
    path = tmp_path / "http.sock"
    with stack.worker(manifest, path, "--max-seqs", "1", "--max-queue", "0") as worker:
        leaver = UnixConnection(path)
        body = {**GREEDY, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        leaver.request("POST", "/v1/completions", json.dumps(body))
        response = leaver.getresponse()
        assert response.readline().startswith(b"data: ")
        response.close()
        leaver.close()
        status = 429
        while status == 429:  # until the place is free again
            client = UnixConnection(path)
            client.request("POST", "/v1/completions", json.dumps(GREEDY))
            status = client.getresponse().status
            client.close()
        assert status == 200
        assert worker.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("form", ["::1", "[::1]:{port}"])
def test_a_worker_serves_ipv6(manifest: Path, form: str) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        port = probe.getsockname()[1]
    flags = () if "port" in form else ("--port", str(port))
    with stack.worker(manifest, form.format(port=port), *flags) as worker:
        assert worker.wait_for("ready").split()[2] == f"http://[::1]:{port}"
        client = http.client.HTTPConnection("::1", port, timeout=stack.DEADLINE_SECONDS)
        assert b'"usage"' in complete(client)
        client.close()
        assert worker.stop(signal.SIGTERM) == 0
