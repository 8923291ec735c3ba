"""Request targets: from what stands in a request line to the path that routes see.

Owns: the forms of RFC 9112 section 3.2 and the one normalization that never changes a meaning. The
query is dropped: no route has one.
"""

from __future__ import annotations

import re

# scheme://authority: the form that proxies get, and that every server has to take.
_ABSOLUTE = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
# Percent-encoded letters, digits and -._~ are the same as these bare (RFC 3986 section 6.2.2.2).
_UNRESERVED = re.compile(r"%(2[DdEe]|3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa]|5[Ff]|7[Ee])")


def path_of(target: str) -> str:
    """The path of a request target, "*" or one that begins with a slash. Raises ValueError for
    anything else."""
    found = _ABSOLUTE.match(target)
    if found:
        target = target[found.end() :]
        if not target.startswith("/"):
            target = "/" + target
    path = target.partition("?")[0].partition("#")[0]
    if path != "*" and not path.startswith("/"):
        raise ValueError(f"request target {target[:100]!r}: expected a path or an http URL")
    if "%" in path:
        path = _UNRESERVED.sub(lambda match: chr(int(match[1], 16)), path)
    return path
