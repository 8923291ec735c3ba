"""`ds4-weight-server replace` that dies by SIGKILL inside a chosen step.

Run as `python -m helpers.killed_replacement STEP replace NEW.gguf ...`. Everything is the product's
own code but one call: the journal kills the process right after the record of STEP that comes
last before its verification - `begin`, or where a step records what it started, that.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from ds4_owner import cli
from ds4_owner.replace.log import Journal, Kind

# Steps that start processes: at which of their records ("saw") to die, counted from 1.
AT_RECORD = {"stop-owner": 1, "start-owner": 2, "start-workers": 1}


def main() -> int:
    step = sys.argv[1]
    original = Journal.write
    seen = 0

    def write(self: Journal, kind: Kind, name: str = "", /, **facts: Any) -> None:
        nonlocal seen
        original(self, kind, name, **facts)
        if name != step:
            return
        seen += kind == "saw"
        if (kind == "begin" and step not in AT_RECORD) or seen == AT_RECORD.get(step):
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.write = write  # type: ignore[method-assign]
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
