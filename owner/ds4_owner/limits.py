"""How many files an owner may hold open: as many as it can, and enough for its plan."""

from __future__ import annotations

import resource

from ds4_common.errors import BackendError

SPARE_FDS = 24  # standard streams, sockets, pipes, pidfd and a few connections


def raise_descriptor_limit() -> int:
    """Lifts the soft limit of open files to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def check_descriptors(memories: int, fds_per_memory: int, limit: int) -> None:
    """Raises BackendError when the plan needs more descriptors than the process may have."""
    needed = memories * fds_per_memory + SPARE_FDS
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise BackendError(
            f"the plan needs {needed} file descriptors ({memories} pieces of memory), the limit"
            f" is {limit}; raise it (ulimit -n), or plan fewer ranges with a larger --span-mb"
        )
