"""An owner that uploads through stages of 64 KiB and waits one second for memory that returns late:
`python -m helpers.small_stages FLAGS`."""

from __future__ import annotations

import sys

from ds4_owner import child, cli, device_budget, loader, upload

STAGE_BYTES = 64 << 10


def main() -> int:
    if sys.argv[1] == "--loader":
        upload.STAGE_BYTES = STAGE_BYTES
        return loader.main(sys.argv[2:])
    device_budget.LATE_SECONDS = 1.0
    child.COMMAND = (sys.executable, "-m", "helpers.small_stages", "--loader")
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
