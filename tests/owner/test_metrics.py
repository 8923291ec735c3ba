"""The owner's metrics: figures that are true, told to this host only, whatever a client does."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ds4_common import client, line_client
from ds4_common.errors import AddressInUse, IdentityError, UsageError
from ds4_owner import cli, metrics
from ds4_owner.broker import Broker
from helpers import stack
from helpers.descriptors import open_fds
from helpers.tiny_gguf import write_llama

Samples = dict[tuple[str, str], float]  # (name, label values joined) -> value


def scrape(port: int) -> Samples:
    status, text = stack.request(port, "GET", "/metrics")
    assert status == 200
    return {
        (sample.name.removeprefix("ds4_owner_"), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def port_of(line: str) -> int:
    return int(line.rpartition(":")[2].removesuffix("/metrics"))


@contextmanager
def running(folder: Path) -> Iterator[tuple[Path, Path, int]]:
    """An owner with metrics: its model, its manifest, the port."""
    model = write_llama(folder / "tiny.gguf")
    with stack.owner(model, folder, "--metrics-port", "0") as program:
        yield model, folder / "w", port_of(program.wait_for("metrics http://127.0.0.1:"))


@pytest.fixture(scope="module")
def owner() -> Iterator[tuple[Path, Path, int]]:
    with tempfile.TemporaryDirectory(prefix="ds4-m-") as folder, running(Path(folder)) as found:
        yield found


@contextmanager
def loading_broker(folder: Path) -> Iterator[tuple[Broker, int]]:
    """A broker whose owner still loads, in this process."""
    log: list[str] = []
    made = Broker(
        str(folder / "w"), "memfd", "0" * 16,
        log=log.append, on_stop=lambda: None, metrics_port=0,
    )  # fmt: skip
    made.start()
    try:
        yield made, port_of(log[0])
    finally:
        made.stop()


# What is told


def test_the_figures_are_those_of_status(owner: tuple[Path, Path, int]) -> None:
    _, manifest, port = owner
    with client.connect(str(manifest), "inspect") as connection:
        records, welcome = connection.describe_allocations(), connection.welcome
        found = scrape(port)
    raw = [a for a in records if a.artifact is None]
    groups = [a for a in records if a.artifact is not None]
    assert found["state", "ready"] == 1
    assert found["state", "loading"] == found["state", "failed"] == 0
    assert found["info", "memfd"] == 1
    assert found["bytes", "raw"] == sum(a.alloc_bytes for a in raw)
    assert found["bytes", "cpu_group"] == sum(a.alloc_bytes for a in groups)
    assert found["bytes", "blob"] == sum(b.n_bytes for b in welcome.blobs)
    assert (found["allocations", "raw"], found["allocations", "cpu_group"]) == (
        len(raw), len(groups),
    )  # fmt: skip
    assert (found["loads_total", "ok"], found["loads_total", "failed"]) == (1, 0)
    assert found["load_done_bytes", ""] == found["load_bytes", ""] > 0
    assert found["uptime_seconds", ""] > 0
    assert found["memory_bytes", "resident"] > found["memory_bytes", "private"] > 0


def test_leases_and_requests_are_counted_by_role_and_protocol(
    owner: tuple[Path, Path, int],
) -> None:
    _, manifest, port = owner
    before = scrape(port)
    with ExitStack() as leases:
        for role in ("worker", "reader", "reader"):
            leases.enter_context(client.connect(str(manifest), role))
        held = scrape(port)
        assert [held["leases", role] for role in ("worker", "reader", "standby")] == [1, 2, 0]
        assert held["connections", ""] == 3
    _, fd = line_client.fetch_allocation(f"{manifest}.sock", 0)
    with open(fd, "rb"):
        after = scrape(port)
    assert after["broker_requests_total", "native"] == before["broker_requests_total", "native"] + 3
    assert after["broker_requests_total", "line"] == before["broker_requests_total", "line"] + 1


def test_refused_identities_are_counted() -> None:
    with tempfile.TemporaryDirectory(prefix="ds4-m-") as folder, running(Path(folder)) as found:
        model, manifest, port = found
        assert scrape(port)["identity_refusals_total", ""] == 0
        with model.open("ab") as file:
            file.write(b"more")
        with pytest.raises(IdentityError):
            client.connect(str(manifest))
        assert scrape(port)["identity_refusals_total", ""] == 1


def test_loading_and_failing_can_be_watched(tmp_path: Path) -> None:
    with loading_broker(tmp_path) as (made, port):
        made.set_progress("loading", 10, 40)
        found = scrape(port)
        assert (found["state", "loading"], found["load_done_bytes", ""]) == (1, 10)
        assert found["load_bytes", ""] == 40
        made.failed("no room")
        found = scrape(port)
        assert (found["state", "failed"], found["loads_total", "failed"]) == (1, 1)


def test_no_path_command_or_model_is_told(owner: tuple[Path, Path, int]) -> None:
    model, manifest, port = owner
    with client.connect(str(manifest), name="secret-name"):
        _, text = stack.request(port, "GET", "/metrics")
    for word in (str(manifest.parent), model.name, "secret-name", "python"):
        assert word not in text


# Who may ask, and how


def test_the_port_is_bound_to_the_loopback_interface_only() -> None:
    with metrics.listen(0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_a_taken_port_ends_the_start_and_leaves_no_socket(tmp_path: Path) -> None:
    with metrics.listen(0) as taken:
        port = taken.getsockname()[1]
        made = Broker(
            str(tmp_path / "w"), "memfd", "0" * 16,
            log=lambda line: None, on_stop=lambda: None, metrics_port=port,
        )  # fmt: skip
        with pytest.raises(AddressInUse, match=f"--metrics-port {port}.*choose another"):
            made.start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["-1", "65536", "http", "", "\u0663"])
def test_a_port_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--metrics-port"):
        cli.parse(["--base", "m", "--scope", "base", "--manifest", "w", "--metrics-port", text], {})


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", 200),
        (b"GET /metrics?x=1 HTTP/1.0\r\nHost: a\r\n\r\n", 200),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 200),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (b"A" * (metrics.MAX_HEAD_BYTES + 1), 431),
    ],
)
def test_each_request_gets_its_status(
    owner: tuple[Path, Path, int], head: bytes, status: int
) -> None:
    with stack.connected(owner[2]) as client:
        client.sendall(head)
        first, rest = read_all(client).split(b"\r\n", 1)
    assert first.startswith(b"HTTP/1.1 %d " % status)
    assert head.startswith(b"HEAD") == rest.endswith(b"\r\n\r\n")


def read_all(client: socket.socket) -> bytes:
    data = b""
    while part := client.recv(65536):
        data += part
    return data


@given(st.binary(max_size=200))
def test_any_head_gets_one_whole_reply(head: bytes) -> None:
    def observe() -> metrics.Observed:
        raise AssertionError("a scrape of arbitrary bytes")

    reply = metrics.answer(head, observe)
    fields, body = reply.split(b"\r\n\r\n", 1)
    assert b"Content-Length: %d" % len(body) in fields


def test_a_request_in_pieces_is_answered(owner: tuple[Path, Path, int]) -> None:
    with stack.connected(owner[2]) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /metrics HTTP/1.1\r\n\r\n":
            client.sendall(bytes([byte]))
        assert read_all(client).startswith(b"HTTP/1.1 200 OK\r\n")


def test_silent_clients_give_way_to_new_ones_and_leave_nothing(tmp_path: Path) -> None:
    with loading_broker(tmp_path) as (_, port):
        before = open_fds()
        with ExitStack() as silent:
            for _ in range(3 * metrics.MAX_CONNECTIONS):
                silent.enter_context(stack.connected(port))
            assert scrape(port)["state", "loading"] == 1
        for _ in range(2):  # the ends of the silent ones are handled before the second is accepted
            scrape(port)
        assert len(open_fds() - before) <= 1


def test_the_loop_waits_without_a_deadline_once_scrapes_are_answered(tmp_path: Path) -> None:
    with loading_broker(tmp_path) as (made, port):
        scrape(port)
        turned = threading.Event()
        made._transport.call(turned.set)  # a turn after the one that answered
        assert turned.wait(stack.DEADLINE_SECONDS)
        assert made._transport._timeout() is None
