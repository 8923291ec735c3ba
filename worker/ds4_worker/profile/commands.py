"""What runs in each pane of a profiling session: plain commands that anybody could type.

Owns: the settings of a session, kept in the session itself as JSON, and the command of each role.
Pure. The programs are those beside this interpreter, so a window needs no activated environment.
"""

from __future__ import annotations

import os
import shlex
import sys

import msgspec

from ds4_worker.address import DEFAULT_HOST, DEFAULT_PORT, Address
from ds4_worker.profile import tools

ROLES = ("owner", "worker", "status", "load")
STATUS_SECONDS = 5  # each refresh takes time from what is measured
WAIT_OWNER_SECONDS = 3600  # a large model may take that long to load


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `restart` needs to know of an open session."""

    manifest: str
    model: str | None = None  # what an owner window loads; None: over an existing owner
    address: Address = Address(DEFAULT_HOST, DEFAULT_PORT)  # port 0: any, found by the name
    name: str = ""  # of the worker
    tool: str = tools.NO_TOOL
    folder: str = "."
    worker_flags: tuple[str, ...] = ()
    requests: int = 8  # of the scripted load; 0: none
    prompt_tokens: int = 512
    max_tokens: int = 64
    concurrency: int = 1


def program(name: str, module: str) -> list[str]:
    """One of our commands: its script, or the module where no script is installed."""
    script = os.path.join(os.path.dirname(sys.executable), name)
    return [script] if os.access(script, os.X_OK) else [sys.executable, "-P", "-m", module]


def owner(settings: Settings) -> list[str]:
    """For a session that has a model to load."""
    assert settings.model is not None
    command = program("ds4-weight-server", "ds4_owner.cli")
    command += ["--base", settings.model, "--scope", "base", "--manifest", settings.manifest]
    return [*command, "--no-lock"]


def worker(settings: Settings, report: str) -> list[str]:
    """Under the session's tool, which writes to `report`."""
    command = program("ds4-server", "ds4_worker.cli")
    command += ["--manifest", settings.manifest, *_at(settings.address)]
    command += ["--name", settings.name] if settings.name else []
    command += ["--wait-owner", str(WAIT_OWNER_SECONDS), *settings.worker_flags]
    return tools.wrapped(settings.tool, report, command)


def status(settings: Settings) -> list[str]:
    command = [*program("ds4-weight-server", "ds4_owner.cli"), "top"]
    return [*command, "--manifest", settings.manifest, "--interval", str(STATUS_SECONDS)]


def load(settings: Settings) -> list[str]:
    command = [*program("ds4-profile", "ds4_worker.profile.cli"), "load"]
    if settings.address.path or settings.address.port:
        command += _at(settings.address)
    else:
        command += ["--name", settings.name, "--manifest", settings.manifest]
    command += ["--requests", str(settings.requests)]
    command += ["--prompt-tokens", str(settings.prompt_tokens)]
    command += ["--max-tokens", str(settings.max_tokens)]
    return [*command, "--concurrency", str(settings.concurrency)]


def _at(address: Address) -> list[str]:
    if address.path:
        return ["--host", f"unix:{address.path}"]
    host = [] if address.host == DEFAULT_HOST else ["--host", address.host]
    return [*host, "--port", str(address.port)]


def report_path(settings: Settings) -> str:
    """Where the next worker's tool writes; "" without a tool."""
    if settings.tool == tools.NO_TOOL:
        return ""
    taken = os.listdir(settings.folder) if os.path.isdir(settings.folder) else []
    return tools.next_report(settings.folder, settings.tool, taken)


def shown(command: list[str]) -> str:
    """The command as somebody would type it."""
    return shlex.join(command)


def shell_line(command: list[str]) -> str:
    """The command as a pane runs it: shown first, then in place of the shell."""
    line = shown(command)
    return f"printf '$ %s\\n\\n' {shlex.quote(line)}; exec {line}"
