"""How much memory an owner process takes, beside the weights that it shares."""

from __future__ import annotations

_FIELDS = {"VmRSS": "resident", "RssAnon": "private", "RssShmem": "shared"}


def resident(pid: int | str = "self") -> dict[str, int]:
    """Resident bytes of a process by part: `resident` in all, `private` to it, and `shared` memory,
    which is the weights. Empty where /proc does not say."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = [line.split(":", 1) for line in file]
    except OSError:
        return {}
    found = {name: value for name, value in lines if name in _FIELDS}
    return {_FIELDS[name]: int(value.split()[0]) * 1024 for name, value in found.items()}
