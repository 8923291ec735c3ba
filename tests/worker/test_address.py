"""The forms of --host and --port."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.errors import UsageError
from ds4_worker.address import Address, parse, url_of


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        (None, None, Address("127.0.0.1", 8000)),
        (None, 0, Address("127.0.0.1", 0)),
        ("localhost", 9, Address("127.0.0.1", 9)),
        ("localhost:9", None, Address("127.0.0.1", 9)),
        ("0.0.0.0", None, Address("0.0.0.0", 8000)),
        ("127.0.0.1:80", None, Address("127.0.0.1", 80)),
        ("127.0.0.1:80", 80, Address("127.0.0.1", 80)),
        ("::", None, Address("::", 8000)),
        ("::1", 9, Address("::1", 9)),
        ("[::1]", 9, Address("::1", 9)),
        ("[::1]:9", None, Address("::1", 9)),
        ("fe80::1%lo", 9, Address("fe80::1%lo", 9)),
        ("some.host", None, Address("some.host", 8000)),
        ("some.host:0", None, Address("some.host", 0)),
        ("unix:/run/a b.sock", None, Address(path="/run/a b.sock")),
        ("unix:x.sock", None, Address(path="x.sock")),
        ("/run/x.sock", None, Address(path="/run/x.sock")),
        ("./x", None, Address(path="./x")),
    ],
)
def test_every_form_of_an_address_is_understood(
    host: str | None, port: int | None, address: Address
) -> None:
    assert parse(host, port) == address


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("", None, "expected an address"),
        (":80", None, "expected an address"),
        ("unix:", None, "expected a path"),
        ("unix:/a\0b", None, "expected a path"),
        ("/run/x", 80, "has no port"),
        ("[::1", None, "in brackets"),
        ("[::1]80", None, "in brackets"),
        ("[x]:80", None, "in brackets"),
        ("[::1]:", None, "got port ''"),
        ("127.0.0.1:70000", None, "got port '70000'"),
        ("a:b:c", None, "got port 'b:c'"),
        ("127.0.0.1:80", 81, "another port"),
    ],
)
def test_what_is_no_address_is_refused_with_a_reason(
    host: str, port: int | None, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(host, port)
    assert message in str(caught.value)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_any_ip_address_is_itself_with_and_without_its_port(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    text = str(ip)
    joined = f"[{text}]:{port}" if ip.version == 6 else f"{text}:{port}"
    assert parse(text, port) == parse(joined, None) == Address(text, port)


@given(st.text(max_size=30), st.none() | st.integers(0, 65535))
def test_any_text_is_an_address_or_a_usage_error(host: str, port: int | None) -> None:
    try:
        address = parse(host, port)
    except UsageError:
        return
    assert bool(address.host) != bool(address.path)


def test_an_address_is_told_as_clients_write_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert url_of(listener) == f"unix:{tmp_path / 's'}"
