"""The `ds4-guard` command: flags to Settings, errors to exit codes.

Exit codes: that of the command (128 + n when signal n ended it); 75 when the guard refused to start
it or ended it; 127 and 126 when there is no such command or it cannot be executed; 2 usage. Flag
names and defaults are those of the published guard; --profile, --limit-by and --root are ours.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from ds4_common.errors import Ds4Error, GuardRefusal
from ds4_common.version import version_line
from ds4_owner.guard.policy import GIB, Limits
from ds4_owner.guard.scope import KINDS
from ds4_owner.guard.watch import Settings, guard, say

DESCRIPTION = (
    "Runs COMMAND under a memory limit and ends it, and nothing else, before the host runs out of"
    " memory."
)
# name -> (floor in GiB, timeout). The worker's floor is the higher one: it goes first, and the
# weights stay. Servers have no deadline.
PROFILES = {"owner": (8.0, 0.0), "worker": (12.0, 0.0)}
DEFAULT_TIMEOUT = 1800.0


def _number(text: str) -> float:
    """A finite number, zero or more."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise ValueError
    return value


_number.__name__ = "number"  # how argparse names the type in its message
_positive.__name__ = "positive number"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds4-guard", description=DESCRIPTION, allow_abbrev=False,
        usage="ds4-guard [options] -- COMMAND [ARGUMENT ...]",
    )  # fmt: skip
    add = parser.add_argument
    add("--version", action="version", version=version_line(parser.prog))
    add(
        "--max-gib",
        type=_positive,
        default=24.0,
        metavar="N",
        help="most memory of the job, less if the machine has less to give (default: 24)",
    )
    add(
        "--high-gib",
        type=_positive,
        default=21.0,
        metavar="N",
        help="above this the kernel slows the job down and reclaims (default: 21)",
    )
    add(
        "--reserve-gib",
        type=_number,
        default=12.0,
        metavar="N",
        help="memory that the job's limit leaves to everybody else (default: 12)",
    )
    add(
        "--trip-gib",
        type=_number,
        metavar="N",
        help="the job goes when less memory than this is available (default: the reserve)",
    )
    add(
        "--profile",
        choices=sorted(PROFILES),
        help="owner: --trip-gib 8 --timeout 0; worker: --trip-gib 12 --timeout 0,"
        " so that a worker goes before its owner",
    )
    add(
        "--poll-seconds",
        type=_positive,
        default=0.1,
        metavar="N",
        help="between two looks at the memory (default: 0.1)",
    )
    add(
        "--grace-seconds",
        type=_number,
        default=1.0,
        metavar="N",
        help="between SIGTERM and SIGKILL (default: 1)",
    )
    add(
        "--timeout",
        type=_number,
        metavar="N",
        help=f"seconds the job may run; 0: no end (default: {DEFAULT_TIMEOUT:.0f})",
    )
    add("--log", metavar="FILE", help="append JSON lines to FILE, each of them synced")
    add("--limit-by", choices=KINDS, help="use this way or refuse (default: the first that works)")
    add(
        "--root",
        default="/",
        metavar="FOLDER",
        help="read /proc, /sys and /run below FOLDER; for tests (default: /)",
    )
    add("command", nargs="*", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser  # fmt: skip


def parse(argv: Sequence[str]) -> Settings:
    """Exits with 2 on flags that make no sense."""
    parser = build_parser()
    if "--" in argv:
        split = list(argv).index("--")
        flags, command = argv[:split], argv[split + 1 :]
    else:
        flags, command = argv, ()
    options = parser.parse_args(list(flags))
    if options.command or not command:
        parser.error("the command comes after --, e.g.: ds4-guard --max-gib 24 -- ds4-server")
    profile = PROFILES.get(options.profile)
    trip, timeout = profile or (options.reserve_gib, DEFAULT_TIMEOUT)
    return Settings(
        command=tuple(command),
        requested=Limits(int(options.max_gib * GIB), int(options.high_gib * GIB)),
        reserve_bytes=int(options.reserve_gib * GIB),
        trip_bytes=int((trip if options.trip_gib is None else options.trip_gib) * GIB),
        poll_seconds=options.poll_seconds,
        grace_seconds=options.grace_seconds,
        timeout_seconds=timeout if options.timeout is None else options.timeout,
        log_path=options.log,
        limit_by=options.limit_by,
        root=options.root,
    )


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(sys.argv[1:] if argv is None else argv)
    try:
        return guard(settings)
    except Ds4Error as error:
        say(f"refused: {error}" if isinstance(error, GuardRefusal) else str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
