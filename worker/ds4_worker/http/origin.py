"""Which web pages may post to a server that asks for no key.

Owns: the decision, from what a browser says of the page that caused a request. A browser lets any
page post to a server on its user's own machine, and a name of a page's own choosing may lead there
(DNS rebinding). Refuses pages of other origins; programs that are no browsers say nothing and pass.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from ds4_common.errors import RequestError

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/@]+)(?::[0-9]*)?")  # host, port


def refuse_foreign_page(headers: Mapping[str, str]) -> None:
    """Raises RequestError (403) for a request that a page of another origin caused.

    Browsers say it outright (Fetch Metadata, `Sec-Fetch-Site`), but only to servers that they
    trust: by https, or by a loopback address. Elsewhere there is the page's `Origin` (RFC 6454).
    """
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if site == "cross-site" or (site is None and origin is not None and not _is_local(origin)):
        raise RequestError(
            "a page of another origin asks, and this server wants no key; start it with --cors to "
            "allow pages of any origin, or with --api-key",
            status=403,
            code="foreign_page",
        )


def _is_local(origin: str) -> bool:
    """Whether nobody outside can serve pages of this origin: an address, which no name can be
    rebound to, a name of this machine, or an origin that is no web page's (tauri://localhost)."""
    scheme, separator, authority = origin.lower().partition("://")
    if not separator or scheme not in ("http", "https"):
        return bool(separator)  # "null" is anybody's
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        return False
    host = parts[1].rstrip(".")
    return (
        host == "localhost"
        or host.endswith(".localhost")
        or host == socket.gethostname().lower()
        or _is_address(host)
    )


def _is_address(host: str) -> bool:
    family, text = (socket.AF_INET6, host[1:-1]) if host[:1] == "[" else (socket.AF_INET, host)
    try:
        socket.inet_pton(family, text)
    except (OSError, ValueError):  # ValueError: a null character
        return False
    return True
