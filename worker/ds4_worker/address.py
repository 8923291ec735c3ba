"""Where a server listens: the forms of `--host` and `--port`.

Owns: turning them into one address. An IPv6 address may stand in brackets, either address may bring
its port along, and a Unix socket is `unix:PATH`, or a value with a slash in it. Names are resolved
later, where the socket is asked for.
"""

from __future__ import annotations

import socket

import msgspec

from ds4_common.errors import UsageError

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
_UNIX = "unix:"


class Address(msgspec.Struct, frozen=True):
    """A host and a port (0: any free one), or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""


def parse(host: str | None, port: int | None) -> Address:
    """What the two flags say together; None: not given. Raises UsageError."""
    if host is None:
        return Address(DEFAULT_HOST, DEFAULT_PORT if port is None else port)
    if host.startswith(_UNIX) or "/" in host:
        if port is not None:
            raise UsageError(f"--host {host}: a Unix socket has no port; leave out --port")
        path = host.removeprefix(_UNIX)
        if not path or "\0" in path:
            raise UsageError(f"--host {host}: expected a path after {_UNIX}")
        return Address(path=path)
    name, own_port = _split(host)
    if own_port is not None and port not in (None, own_port):
        raise UsageError(f"--host {host}: names another port than --port {port}")
    chosen = own_port if port is None else port
    return Address(
        DEFAULT_HOST if name == "localhost" else name,
        DEFAULT_PORT if chosen is None else chosen,
    )


def _split(host: str) -> tuple[str, int | None]:
    """The host without brackets, and the port after it if there is one."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        if not bracket or not _is_ipv6(name) or (rest and not rest.startswith(":")):
            raise UsageError(f"--host {host}: expected an IPv6 address in brackets, [ADDRESS]:PORT")
        return name, _port(host, rest[1:]) if rest else None
    name, colon, rest = host.partition(":")
    if not colon or _is_ipv6(host):
        name, rest = host, ""
    if not name:
        raise UsageError(f"--host {host!r}: expected an address before the port")
    return name, _port(host, rest) if name != host else None


def _is_ipv6(text: str) -> bool:
    try:
        # A zone after the address names an interface: the kernel's business.
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except OSError:
        return False
    return True


def _port(host: str, text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= 65535:
        return int(text)
    raise UsageError(f"--host {host}: got port {text!r}, expected 0 to 65535")


def url(address: Address) -> str:
    """How a client names an address."""
    if address.path:
        return f"{_UNIX}{address.path}"
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"http://{host}:{address.port}"


def url_of(listener: socket.socket) -> str:
    """The same of a listening socket."""
    if listener.family == socket.AF_UNIX:
        return url(Address(path=listener.getsockname()))
    return url(Address(*listener.getsockname()[:2]))
