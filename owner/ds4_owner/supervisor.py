"""The life of an owner: lock, plan, budget, allocate, load, seal, hand out, wait, clean up.

Owns the order of these steps and the rule that whatever a start created is gone when it ends: the
memory, the sockets, the manifest and the loader child hang on one ExitStack. Parsing and loading
happen in the child (loader.py), serving in the broker; this process imports neither GGUF parser nor
protobuf, and sleeps in one poll() once it is ready. An owner that adopts memory is in a hurry: what
only a load needs is imported by the load.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ds4_common import manifest as manifests
from ds4_common.errors import AddressError, Ds4Error, UsageError
from ds4_owner import answers, fdstore, limits, lock
from ds4_owner.backends import Memory
from ds4_owner.broker import Broker
from ds4_owner.config import OwnerConfig, load_key
from ds4_owner.notify import notify
from ds4_owner.progress import log, size
from ds4_owner.serving import Owner, remove_leavings, remove_manifest, serve, watch_dog
from ds4_owner.stop import Change, Stopped, StopWatch

if TYPE_CHECKING:
    from ds4_owner.child import LoaderChild


def run(config: OwnerConfig, arguments: Sequence[str] = ()) -> int:
    """Runs an owner, or a dry run, to its end; returns the exit code. Raises Ds4Error.

    `arguments`: the flags that `config` was made from, for the program of a reexec."""
    with ExitStack() as cleanup:
        watch = StopWatch()
        cleanup.callback(watch.close)
        watch.follow(config.exit_on_parent_pid)
        try:
            if config.dry_run:
                from ds4_owner import planning

                planning.dry_run(config, watch, cleanup)
                return 0
            owner, child = _become_ready(config, tuple(arguments), watch, cleanup)
        except Stopped:
            log("shutting down broker_requests=0: stopped before it was ready")
            if config.manifest is not None:
                remove_leavings(config.manifest)
            return 0
        serve(owner, watch, child)
    return 0


def _become_ready(
    config: OwnerConfig, arguments: tuple[str, ...], watch: StopWatch, cleanup: ExitStack
) -> tuple[Owner, LoaderChild | None]:
    """Adopts what a killed owner left at the service manager, or loads."""
    descriptor_limit = limits.raise_descriptor_limit()
    held = fdstore.take(os.environ)
    lock_fd = _lock(config, cleanup)
    start = time.monotonic()
    adopted = fdstore.adopt(held, load_key(config))
    seconds = time.monotonic() - start
    if adopted is not None:
        for piece in adopted.memory.values():
            cleanup.callback(piece.close)
    owner_id = os.urandom(16).hex() if adopted is None else adopted.record.owner_id
    change = Change()
    cleanup.callback(change.close)
    broker = _claim(config, owner_id, watch, change, cleanup)
    watch_dog(watch, broker)
    child: LoaderChild | None = None
    if adopted is not None:
        memory, store = adopted.memory, adopted.store
        _serve_adopted(adopted, broker)
        log(
            f"adopted {len(adopted.record.allocations)} allocations,"
            f" {size(sum(m.n_bytes for m in memory.values()))}, and {len(adopted.listeners)}"
            f" listening sockets of owner {owner_id} in {1000 * seconds:.1f} ms"
        )
    else:
        memory, child = _load(config, watch, broker, descriptor_limit, cleanup)
        store = fdstore.Store()
    owner = Owner(arguments, load_key(config), broker, memory, lock_fd, change, store)
    owner.prove([] if adopted is None else adopted.record.memory)
    cleanup.callback(broker.stop)  # again, first of all: before the memory it hands out is closed
    owner.keep()
    watch.can_reexec = True
    _announce(config, broker, cleanup)
    return owner, child


def _load(
    config: OwnerConfig, watch: StopWatch, broker: Broker, descriptor_limit: int,
    cleanup: ExitStack,
) -> tuple[dict[int | str, Memory], LoaderChild]:  # fmt: skip
    """Loads, seals and hands out. Whoever waits for the load learns how it failed."""
    from ds4_owner import filling, job, planning
    from ds4_owner.child import LoaderChild

    child = LoaderChild()
    cleanup.callback(child.close)
    try:
        fitted = planning.fit(config, child, watch, descriptor_limit)
        plan, backend = fitted.plan, fitted.backend
        memory = filling.allocate(fitted, cleanup)
        child.send(job.Load(backend.fill, fitted.reserve, planning.tmpfs_folder(config)))
        child.send_descriptors([piece.to_fill for piece in memory.values()])
        loaded = filling.receive_load(child, watch, plan, broker)
    except Ds4Error as error:
        broker.failed(str(error))
        raise
    filling.hand_out(plan, loaded, memory, backend, broker)
    return memory, child


def _serve_adopted(adopted: fdstore.Adopted, broker: Broker) -> None:
    broker.take_listeners(adopted.listeners)
    fds = {key: memory.export_fd for key, memory in adopted.memory.items()}
    broker.ready(answers.offer_of(adopted.record, fds))


def _lock(config: OwnerConfig, cleanup: ExitStack) -> int:
    """Takes the lock; -1: none is wanted. A second owner fails before it loads."""
    assert config.manifest is not None
    assert config.broker_socket is not None
    try:
        manifests.check_words(config.manifest, config.broker_socket, config.lock_file)
    except UsageError as error:  # as published: the flags are fine, the broker cannot start
        raise AddressError(str(error)) from error
    if config.lock_file is None:
        return -1
    fd = lock.acquire(config.lock_file)
    cleanup.callback(os.close, fd)
    log(f"acquired lock {config.lock_file}")
    return fd


def _claim(
    config: OwnerConfig, owner_id: str, watch: StopWatch, change: Change, cleanup: ExitStack
) -> Broker:
    """Takes the socket paths, likewise."""
    assert config.manifest is not None
    broker = Broker(
        config.manifest, config.backend, owner_id,
        log=log, on_stop=watch.request, on_reexec=watch.request_reexec,
        on_change=change.raise_it, line_socket=config.broker_socket,
        metrics_port=config.metrics_port,
    )  # fmt: skip
    broker.start()
    cleanup.callback(broker.stop)
    return broker


def _announce(config: OwnerConfig, broker: Broker, cleanup: ExitStack) -> None:
    """Writes the manifest and says `ready`."""
    assert config.manifest is not None
    offer = broker.facts.offer
    contents = tuple(
        manifests.ContentRecord(m.id, m.n_bytes, manifests.FINGERPRINT_ALGORITHM, m.fingerprint)
        for m in offer.models
    )
    owner = manifests.OwnerRecord(os.getpid(), config.device, config.scope, config.lock_file)
    cleanup.callback(remove_manifest, config.manifest)
    manifests.write_manifest(
        config.manifest,
        manifests.Manifest(
            owner, broker.line_path, contents,
            tuple(answers.to_allocation(a) for a in offer.allocations.values()),
            backend=config.backend, owner_id=broker.facts.owner_id,
        ),
    )  # fmt: skip
    log(
        f"ready manifest={config.manifest} ranges={len(offer.allocations)}."
        " Keep this process alive while workers run."
    )
    notify("READY=1\nSTATUS=serving")
