"""Command lines: which flags the next owner takes over, and how a worker is started again.

Pure. Flags that speak of the old model - its files, names of its tensors, the name it is served
under - are never taken over; everything else is, unless the operator gives it again. Refuses to
guess at command lines that are not those of our programs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ds4_common import paths
from ds4_common.errors import UsageError

# Flags of the old model, and one that ties it to a process; each with one value.
OF_THE_MODEL = frozenset({
    "--base", "--mtp", "--drafter", "--served-id", "--derive-q8-f16", "--derive-q8-f32",
    "--manifest", "--exit-on-parent-pid",
})  # fmt: skip
SWITCHES = frozenset({
    "--no-lock", "--dry-run", "--derive-output-certifier", "--repack-hash",
    *(f"--{no}repack-{kind}-aligned" for no in ("", "no-") for kind in ("iq2", "q2k", "q8")),
})  # fmt: skip
FILES = frozenset({"--mtp", "--drafter", "--lock-file", "--broker-socket"})
OWNER_PROGRAMS = ("ds4_owner.cli", "ds4_owner.resume", "ds4-weight-server", "ds4_weight_server")
WORKER_PROGRAMS = ("ds4_worker.cli", "ds4-server", "ds4_server")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as it stands on a command line; `value` None: a switch."""

    name: str
    value: str | None

    @property
    def words(self) -> list[str]:
        return [self.name] if self.value is None else [self.name, self.value]


def split_program(argv: Sequence[str], programs: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the program, its arguments), e.g. (`python -m ds4_owner.cli`, `--base F ...`).

    The first part is empty when the command line is none of `programs`."""
    for index, word in enumerate(argv[:8]):  # an interpreter has few flags of its own
        module = index > 0 and argv[index - 1] == "-m" and word in programs
        if module or os.path.basename(word) in programs:
            return list(argv[: index + 1]), list(argv[index + 1 :])
    return [], list(argv)


def owner_flags(words: Sequence[str]) -> list[Flag]:
    """Arguments of an owner as flags. Raises UsageError for words that are no flags."""
    found: list[Flag] = []
    rest = list(words)
    while rest:
        name, joined, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise UsageError(f"got {name!r} among the flags of an owner, expected --flag [value]")
        if joined:
            found.append(Flag(name, value))
        elif name in SWITCHES:
            found.append(Flag(name, None))
        elif rest:
            found.append(Flag(name, rest.pop(0)))
        else:
            raise UsageError(f"owner flag {name} has no value")
    return found


@dataclass(frozen=True, slots=True)
class NextOwner:
    """Flags after `--base` and `--manifest`, and what was not taken over from the old owner."""

    options: tuple[str, ...]
    left_out: tuple[str, ...]


def next_owner(
    running: Sequence[str], old_folder: str, given: Sequence[str], given_folder: str,
    old_manifest: str, manifest: str,
) -> NextOwner:  # fmt: skip
    """What the next owner is started with.

    `running`: arguments of the old owner (empty: there is none), relative to `old_folder`; `given`:
    those of the operator, which win. Raises UsageError for flags that replacing cannot mean."""
    mine = [_absolute(flag, given_folder) for flag in owner_flags(given)]
    forbidden = {"--base", "--manifest", "--dry-run", "--exit-on-parent-pid"}
    for flag in mine:
        if flag.name in forbidden:
            raise UsageError(f"{flag.name} is not for the next owner of a replacement")
    kept: list[Flag] = []
    left_out: list[str] = []
    names = {flag.name for flag in mine}
    for flag in owner_flags(running):
        if flag.name in OF_THE_MODEL:
            if flag.name not in ("--base", "--manifest"):
                left_out += [" ".join(flag.words)]
        elif not names & _same(flag.name):
            kept.append(_absolute(_moved(flag, old_manifest, manifest), old_folder))
    options = [word for flag in (*kept, *mine) for word in flag.words]
    scopes = [flag.value for flag in (*kept, *mine) if flag.name == "--scope"]
    if not scopes:
        options += ["--scope", "both" if "--mtp" in names else "base"]
    elif scopes[-1] == "mtp":
        raise UsageError("--scope mtp leaves out the base model, which is what is replaced")
    return NextOwner(tuple(options), tuple(left_out))


def _same(name: str) -> set[str]:
    """Flags that a given one replaces: itself and its opposite."""
    lock = {"--no-lock", "--lock-file"}
    if name in lock:
        return lock
    positive = name.replace("--no-", "--", 1)
    return {positive, positive.replace("--", "--no-", 1)}


def _absolute(flag: Flag, folder: str) -> Flag:
    if flag.name in FILES and flag.value:
        return Flag(flag.name, os.path.join(folder, flag.value))
    return flag


def _moved(flag: Flag, old_manifest: str, manifest: str) -> Flag:
    """A private owner's files are named after its manifest, which is named after its model."""
    if flag.value and old_manifest and flag.value.startswith(f"{old_manifest}."):
        return Flag(flag.name, manifest + flag.value[len(old_manifest) :])
    return flag


# Workers


@dataclass(frozen=True, slots=True)
class WorkerStart:
    argv: tuple[str, ...]
    environment: dict[str, str]


def next_worker(
    argv: Sequence[str], environment: dict[str, str], folder: str,
    old_manifest: str, manifest: str, model: str,
) -> WorkerStart | None:  # fmt: skip
    """How to start a worker again for another model; None when it is none of our programs.

    Its model argument becomes `model`; where it names the old manifest, that becomes `manifest`; a
    worker that found its owner by itself is told."""
    program, words = split_program(argv, WORKER_PROGRAMS)
    if not program:
        return None
    rewritten: list[str] = []
    named = False
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        name, joined, value = word.partition("=")
        if before in ("-m", "--model"):
            word = model
        elif name == "--model" and joined:
            word = f"--model={model}"
        elif word.startswith("-m") and len(word) > 2:
            word = f"-m{model}"
        elif before in ("--manifest", "--owner") and _path(folder, word) == old_manifest:
            word = manifest
        elif name in ("--manifest", "--owner") and _path(folder, value) == old_manifest:
            word = f"{name}={manifest}"
        named |= name == "--manifest"
        rewritten.append(word)
    started = dict(environment)
    if named:
        started.pop(paths.MANIFEST_VARIABLE, None)
    else:
        started[paths.MANIFEST_VARIABLE] = manifest
    return WorkerStart((*program, *rewritten), started)


def _path(folder: str, value: str) -> str:
    return os.path.normpath(os.path.join(folder, value))


def kept_environment(environment: dict[str, str]) -> dict[str, str]:
    """What a worker's start may depend on. The rest comes from whoever replaces: a log is no place
    for every secret of a login session."""
    prefixes = ("DS4_", "CUDA_", "NVIDIA_", "PYTHON", "LD_", "OMP_", "XDG_")
    names = ("PATH", "VIRTUAL_ENV", "HOME", "LANG", "TMPDIR")
    return {k: v for k, v in environment.items() if k.startswith(prefixes) or k in names}


def api_key(argv: Sequence[str], environment: dict[str, str], folder: str) -> str | None:
    """The key that a worker demands; read as the worker reads it. Raises UsageError."""
    value = _last(argv, "--api-key")
    key_file = _last(argv, "--api-key-file")
    if not value and not key_file:
        value, key_file = environment.get("DS4_API_KEY"), environment.get("DS4_API_KEY_FILE")
    if key_file and not value:
        value = f"@{key_file}"
    if not value or not value.startswith("@"):
        return value or None
    path = _path(folder, value[1:])
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"API key file {path} of the worker: {error}") from error


def _last(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag that was given last, as `--flag value` or `--flag=value`."""
    found = None
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            found = argv[index + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
