"""Lines on stderr that harm neither each other nor whoever writes them.

Owns the one way in which owners and workers write to their log: a line is one write, so that lines
of several threads and processes do not mix (print() makes two), and it never waits: when the reader
is gone or reads too slowly, what does not fit is dropped. Weights and clients are worth more than
log lines.
"""

from __future__ import annotations

import contextlib
import os
import select

_STDERR = 2
_PIECE_BYTES = select.PIPE_BUF  # what a writable pipe takes without blocking


def write_line(text: str) -> None:
    """One line, or several when `text` has line ends; longer ones than 4096 bytes may be mixed."""
    data = f"{text}\n".encode("utf-8", "backslashreplace")
    poll = select.poll()
    poll.register(_STDERR, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and any(event & select.POLLOUT for _, event in poll.poll(0)):
            data = data[os.write(_STDERR, data[:_PIECE_BYTES]) :]
