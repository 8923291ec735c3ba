"""How the next program of a reexec is started: `python -m ds4_owner.resume <flags of the owner>`.

Owns what the program before tells it in the environment, and that a rehearsal ends with the owner
that rehearses: this is settled before anything is imported that could hang. What the program does
is in `successor`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

STATE_VARIABLE = "DS4_OWNER_STATE"  # the number of the descriptor that holds the owner's record
CHECK = "check:"  # before the number: a rehearsal
CHECKED = "ready to take over"  # the last line of a rehearsal that went well
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the owner, or of the rehearsal."""
    handed = os.environ.pop(STATE_VARIABLE, "")
    number = handed.removeprefix(CHECK)
    rehearses = handed != number
    if rehearses:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    from ds4_owner import successor

    if not number.isdigit():
        return successor.refuse(handed)
    return successor.run(int(number), arguments, rehearses=rehearses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
