"""Why no owner answers at a manifest: what its files and its process say.

Read only when somebody has to be told: a start that works never imports this.
"""

from __future__ import annotations

import os

from ds4_common import paths
from ds4_common.errors import ManifestError
from ds4_common.manifest import read_manifest


def process_state(pid: int) -> str:
    """ "running", "zombie" or "gone". A zombie still answers kill(pid, 0)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return "zombie" if fields[:1] == [b"Z"] else "running"


def explain_silence(path: str, error: OSError) -> str:
    """Why no owner answers at this manifest: what was checked, and what to do."""
    facts = [f"control socket {paths.control_socket_path(path)}: {error.strerror or error}"]
    if not os.path.exists(path):
        facts.append("there is no manifest either")
    else:
        try:
            manifest = read_manifest(path)
        except ManifestError as problem:
            facts.append(str(problem))
        else:
            pid = manifest.owner.pid
            facts.append(f"the manifest names owner pid {pid}, which is {process_state(pid)}")
            if manifest.backend is None:
                facts.append("it was written by another program, without a control socket")
    return f"no owner answers at {path}: {'; '.join(facts)}; start ds4-weight-server there"
