"""An owner whose real loader stops at a chosen step, so that a test can kill it right there.

Run as `python -m helpers.stuck_owner STEP <owner flags>`. Everything is the product's own code but
one call: at STEP the loader says `stuck at STEP pid N` through its log and waits; SIGUSR1 lets it
go on. In place of STEP, `--limit NAME=VALUE` runs the owner under that resource limit, and
`--deadlines SECONDS` gives clients that long to say or to take what is due.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable

from ds4_owner import child, cli, desks, loader, loading, transport

STEPS = ("start", "plan", "fill", "fingerprint", "blobs")
DEVICE_STEPS = ("map", "upload", "uploaded", "read back")  # of backend vmm only


def stuck(channel: loader.Channel, step: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    channel.log(f"stuck at {step} pid {os.getpid()}")
    signal.sigwait({signal.SIGUSR1})


def install(step: str) -> None:
    """Makes the loader of this process stop before the step's work begins."""
    serve: Callable[[loader.Channel], None] = loader.serve
    holder: list[loader.Channel] = []

    def keep(channel: loader.Channel) -> None:
        holder.append(channel)
        if step == "start":
            stuck(channel, step)
        serve(channel)

    def before(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def replacement(*arguments: object, **named: object) -> object:
            stuck(holder[0], step)
            return original(*arguments, **named)

        setattr(owner, name, replacement)

    loader.serve = keep
    places: dict[str, tuple[object, str]] = {
        "plan": (loader, "make_plan"),
        "fill": (loading.Loader, "fill"),
        "fingerprint": (loading.Loader, "fingerprints"),
        "blobs": (loading.Loader, "write_blobs"),
    }
    if step in DEVICE_STEPS:
        from ds4_owner import device_loader, upload

        places |= {
            "map": (device_loader.Session, "map"),
            "upload": (upload.Upload, "run"),
            "uploaded": (device_loader.DeviceLoader, "_check_samples"),
            "read back": (device_loader.DeviceLoader, "_say_artifacts"),
        }
    if step in places:
        before(*places[step])


def main() -> int:
    if sys.argv[1] == "--loader":
        install(sys.argv[2])
        return loader.main(sys.argv[3:])
    if sys.argv[1] == "--limit":
        name, _, value = sys.argv[2].partition("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
        return cli.main(sys.argv[3:])
    if sys.argv[1] == "--deadlines":
        desks.GREETING_SECONDS = transport.SENDING_SECONDS = float(sys.argv[2])
        return cli.main(sys.argv[3:])
    step = sys.argv[1]
    child.COMMAND = (sys.executable, "-m", "helpers.stuck_owner", "--loader", step)
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
