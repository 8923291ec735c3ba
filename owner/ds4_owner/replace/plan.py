"""What would be replaced: the owner, its workers, and how each is started again.

Owns the survey (read-only) and its record, which a resumed replacement works from after everything
surveyed is gone. Processes come from the owner's control socket, whose peers the kernel vouches
for. Refuses owners that it cannot ask, that another user runs, or that a service manager would
start again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from ds4_common import manifest as manifests
from ds4_common import paths
from ds4_common.errors import ManifestError, OwnerUnavailable, UsageError
from ds4_common.silence import process_state
from ds4_owner import cli, report
from ds4_owner.config import OwnerConfig
from ds4_owner.replace import commands, processes
from ds4_owner.replace.processes import Identity, Listening


class Settings(msgspec.Struct, frozen=True):
    """How to go about it. Deadlines in seconds."""

    worker_seconds: float = 30.0
    owner_seconds: float = 60.0
    memory_seconds: float = 60.0
    ready_seconds: float = 3600.0
    clear_cache: list[str] = []
    worker_command: list[str] | None = None  # None: start again what ran
    with_worker: bool = True
    kill: bool = False
    prompt: str = "The capital of France is"


class Worker(msgspec.Struct, frozen=True):
    """A process that leases the old owner's memory. `unreadable`: why it cannot be looked into."""

    identity: Identity
    role: str
    argv: list[str]
    environment: dict[str, str]
    folder: str
    listening: list[Listening]
    unreadable: str = ""


class Owner(msgspec.Struct, frozen=True):
    """The old owner. `memory`: (device, inode) of each piece of host memory that it shares."""

    identity: Identity
    owner_id: str
    backend: str
    argv: list[str]
    folder: str
    models: list[str]
    memory: list[tuple[int, int]]
    host_bytes: int
    device_bytes: int
    device_uuid: str
    integrated: bool
    unit: str | None
    same_cgroups: bool

    @property
    def allocated_bytes(self) -> int:
        return self.host_bytes + self.device_bytes

    @property
    def expected_bytes(self) -> int:
        """What comes back to the machine's memory: that of a discrete device does not."""
        return self.host_bytes + (self.device_bytes if self.integrated else 0)


class Plan(msgspec.Struct, frozen=True):
    """One replacement. `options`: flags of the next owner beside `--base` and `--manifest`."""

    model: str
    old_manifest: str
    manifest: str
    owner: Owner | None
    workers: list[Worker]
    options: list[str]
    left_out: list[str]
    notes: list[str]
    settings: Settings

    @property
    def next_flags(self) -> list[str]:
        return ["--base", self.model, "--manifest", self.manifest, *self.options]

    def config(self, environ: Mapping[str, str]) -> OwnerConfig:
        """Raises UsageError, before anything is stopped, for flags that the owner would refuse."""
        return cli.parse(self.next_flags, environ)

    def changed(self, model: str | None, given: Sequence[str], settings: Settings) -> Plan:
        """The same with another model, more flags for its owner (over those it has), and other
        settings. Raises UsageError."""
        model = self.model if model is None else os.path.abspath(model)
        manifest = self.manifest
        if model != self.model or any(word.startswith("--backend") for word in given):
            flags, manifest = _next_flags(
                self.options, "/", given, manifest, self.old_manifest, model
            )
        else:  # its owner may be there already
            flags = commands.next_owner(self.options, "/", given, os.getcwd(), manifest, manifest)
        return msgspec.structs.replace(
            self, model=model, manifest=manifest, options=list(flags.options), settings=settings
        )

    def problems(self) -> list[str]:
        """Why a replacement must not begin."""
        found = [
            f"worker pid {worker.identity.pid} cannot be looked into: {worker.unreadable}"
            for worker in self.workers
            if worker.unreadable
        ]
        if self.owner is not None and self.owner.unit:
            found.append(
                f"owner pid {self.owner.identity.pid} is run by {self.owner.unit}, which would"
                f" start it again: change the model there and systemctl restart {self.owner.unit}"
            )
        return found


def survey(manifest: str, model: str, given: Sequence[str], settings: Settings) -> Plan:
    """Looks, touches nothing. Raises UsageError, OwnerUnavailable."""
    model, old_manifest = os.path.abspath(model), os.path.abspath(manifest)
    if not os.path.isfile(model):
        raise UsageError(f"{model}: there is no such model file")
    notes: list[str] = []
    found = _ask(old_manifest, notes)
    owner = None if found is None else _owner(found)
    _, running = ([], []) if owner is None else _program(owner, notes)
    folder = "/" if owner is None else owner.folder
    flags, manifest = _next_flags(running, folder, given, old_manifest, old_manifest, model)
    return Plan(
        model=model, old_manifest=old_manifest, manifest=manifest, owner=owner,
        workers=[] if found is None else [_worker(lease.pid, lease.role) for lease in found.leases],
        options=list(flags.options), left_out=list(flags.left_out), notes=notes, settings=settings,
    )  # fmt: skip


def _ask(manifest: str, notes: list[str]) -> report.Report | None:
    """What the owner says; None when there is none. Raises OwnerUnavailable when it hangs."""
    try:
        return report.gather(manifest)
    except OwnerUnavailable as silence:
        try:
            pid = manifests.read_manifest(manifest).owner.pid
        except ManifestError:
            if os.path.exists(paths.control_socket_path(manifest)):
                notes.append(f"nobody answers at {manifest}, a socket is left of an owner")
            else:
                notes.append(f"no owner at {manifest}: nothing to stop")
            return None
        if process_state(pid) == "running":
            raise OwnerUnavailable(
                f"{silence}. Process {pid} lives and does not answer: if it is that owner, end it"
                f" (ds4-weight-server stop --manifest {manifest}); if not, remove {manifest}"
            ) from silence
        notes.append(f"the owner of {manifest}, pid {pid}, is gone already: nothing to stop")
        return None


def _owner(found: report.Report) -> Owner:
    """Raises OwnerUnavailable when its memory cannot be watched."""
    identity = processes.identify(found.pid)
    if identity is None:
        raise OwnerUnavailable(
            f"the owner of {found.manifest} cannot be seen from here (pid {found.pid}): it runs in"
            " another container; replace it there"
        )
    try:
        memory = processes.shared_memory(found.pid)
    except PermissionError as error:
        raise OwnerUnavailable(
            f"owner pid {found.pid} belongs to another user; replace it as that user"
        ) from error
    held, device = [*found.ranges, *found.artifacts], found.device
    return Owner(
        identity=identity, owner_id=found.owner_id, backend=found.backend,
        argv=processes.command_line(found.pid), folder=processes.working_folder(found.pid),
        models=[file.path for model in found.models for file in model.files],
        memory=[(piece.device, piece.inode) for piece in memory],
        host_bytes=sum(memory.values()),
        device_bytes=sum(a.alloc_bytes for a in held) if device else 0,
        device_uuid=device.uuid if device else "",
        integrated=device is not None and device.integrated,
        unit=processes.unit(found.pid),
        same_cgroups=processes.same_cgroups(found.pid),
    )  # fmt: skip


def _program(owner: Owner, notes: list[str]) -> tuple[list[str], list[str]]:
    program, flags = commands.split_program(owner.argv, commands.OWNER_PROGRAMS)
    if not program:
        notes.append(
            f"owner pid {owner.identity.pid} was not started as ds4-weight-server: none of its"
            " flags are taken over"
        )
        return [], []
    return program, flags


def _worker(pid: int, role: str) -> Worker:
    identity = processes.identify(pid)
    if identity is None:
        gone = Identity(pid, 0, "")
        return Worker(gone, role, [], {}, "/", [], "it is not a process of this container")
    try:
        listening = processes.listening_of(pid)
    except PermissionError:
        return Worker(identity, role, [], {}, "/", [], "it belongs to another user")
    return Worker(
        identity, role, processes.command_line(pid),
        commands.kept_environment(processes.environment(pid)), processes.working_folder(pid),
        listening,
    )  # fmt: skip


def _next_flags(
    running: Sequence[str], folder: str, given: Sequence[str], manifest: str, old: str, model: str
) -> tuple[commands.NextOwner, str]:
    """Flags of the next owner, and its manifest: the old owner's, unless that is a private one,
    which is named after its model and where its memory is. `manifest`: what `running` names."""

    def flags(new: str) -> commands.NextOwner:
        return commands.next_owner(running, folder, given, os.getcwd(), manifest, new)

    new = old
    if paths.is_private_manifest(old):
        words = ["--base", model, "--manifest", old, *flags(old).options]
        new = paths.private_manifest(model, cli.parse(words, os.environ).backend)
    return flags(new), new


def planned_starts(plan: Plan) -> list[tuple[Worker | None, commands.WorkerStart]]:
    """The workers to start, with the one each follows; those of the first role first."""
    settings = plan.settings
    if not settings.with_worker:
        return []
    if settings.worker_command is not None:
        environment = dict(os.environ) | {paths.MANIFEST_VARIABLE: plan.manifest}
        return [(None, commands.WorkerStart(tuple(settings.worker_command), environment))]
    starts: list[tuple[Worker | None, commands.WorkerStart]] = []
    for worker in sorted(plan.workers, key=lambda worker: worker.role != "worker"):
        start = commands.next_worker(
            worker.argv, worker.environment, worker.folder, plan.old_manifest, plan.manifest,
            plan.model,
        )  # fmt: skip
        if start is not None:
            starts.append((worker, start))
    return starts
