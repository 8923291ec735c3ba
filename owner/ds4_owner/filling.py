"""From a plan to sealed memory that is handed out.

Owns: the memory itself, following the child while it fills it, and believing nothing that is
incomplete. Everything is sealed before anybody gets it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from ds4_common.errors import LoaderError
from ds4_common.protocol import ModelRecord
from ds4_owner import answers, job
from ds4_owner.answers import Blob, file_record
from ds4_owner.backends import Backend, Memory
from ds4_owner.broker import Broker
from ds4_owner.child import LoaderChild
from ds4_owner.notify import LoadNews
from ds4_owner.planning import Fitted, Plan
from ds4_owner.progress import LoadView, gib, log, size
from ds4_owner.stop import StopWatch


@dataclass(slots=True)
class Loaded:
    """What loading produced beside the bytes."""

    hashes: dict[int, str] = field(default_factory=dict)
    samples: dict[int, str] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, job.Blob] = field(default_factory=dict)


def allocate(fitted: Fitted, cleanup: ExitStack) -> dict[int | str, Memory]:
    """Memory of every allocation by id, then of every blob by name."""
    memory: dict[int | str, Memory] = {}
    for a in fitted.plan.allocations:
        memory[a.id] = fitted.create(f"{a.model}-{a.id}", a.alloc_bytes)
        cleanup.callback(memory[a.id].close)
    for name in job.BLOB_NAMES:
        memory[name] = fitted.backend.create(name, 0)
        cleanup.callback(memory[name].close)
    return memory


def receive_load(child: LoaderChild, watch: StopWatch, plan: Plan, broker: Broker) -> Loaded:
    """Follows the child until all is written; every allocation has a hash afterwards."""
    loaded = Loaded()
    view, news = LoadView(plan.n_bytes), LoadNews()
    child.step = "loading"
    try:
        while True:
            watch.wait([child.sock.fileno()])
            match child.receive():
                case job.Progress() as progress:
                    broker.set_progress(progress.phase, progress.done_bytes, progress.total_bytes)
                    view.update(progress.done_bytes)
                    news.update(progress.phase, progress.done_bytes, progress.total_bytes)
                case job.Log(line=line):
                    view.close()
                    log(line)
                case job.Hashed(allocation=allocation, hash128=digest, sample=sample):
                    loaded.hashes[allocation] = digest
                    loaded.samples[allocation] = sample
                case job.Fingerprint() as fingerprint:
                    loaded.fingerprints[fingerprint.model] = fingerprint.value
                case job.Blob() as blob:
                    loaded.blobs[blob.name] = blob
                case job.Done(seconds=seconds):
                    break
                case other:
                    raise LoaderError(f"the loader sent {type(other).__name__} while loading")
    finally:
        view.close()
    _check_complete(plan, loaded)
    for model in plan.models:
        ranges = [a for a in plan.allocations if a.model == model.id]
        log(
            f"{model.id} uploaded {gib(sum(a.n_bytes for a in ranges))} across {len(ranges)} ranges"
        )
    rate = plan.n_bytes / seconds / 1e9 if seconds else 0.0
    log(f"loaded {size(plan.n_bytes)} in {seconds:.2f} s, {rate:.2f} GB/s, hashed")
    return loaded


def _check_complete(plan: Plan, loaded: Loaded) -> None:
    """Raises LoaderError when the child left anything out, whatever it said."""
    missing = {a.id for a in plan.allocations} - loaded.hashes.keys()
    strangers = loaded.blobs.keys() - set(job.BLOB_NAMES)
    unnamed = {m.id for m in plan.models} - loaded.fingerprints.keys()
    if missing or strangers or unnamed:
        raise LoaderError(
            f"the loader is done, but allocations {sorted(missing)} have no hash, models"
            f" {sorted(unnamed)} no fingerprint, and blobs {sorted(strangers)} are unknown"
        )


def hand_out(
    plan: Plan,
    loaded: Loaded,
    memory: dict[int | str, Memory],
    backend: Backend,
    broker: Broker,
) -> None:
    """Seals everything and opens the broker."""
    for key, piece in memory.items():
        if isinstance(key, str) and key not in loaded.blobs:
            piece.close()
        else:
            backend.seal(piece)
    models = [
        ModelRecord(
            id=m.id, n_bytes=m.n_bytes, fingerprint=loaded.fingerprints[m.id],
            files=[file_record(path, stat) for path, stat in m.files],
        )
        for m in plan.models
    ]  # fmt: skip
    blobs = {
        name: Blob(memory[name].export_fd, blob.n_bytes, blob.hash128)
        for name, blob in loaded.blobs.items()
    }
    for a in plan.allocations:
        memory[a.id].sample = loaded.samples[a.id]
    descriptors = {a.id: memory[a.id].descriptor for a in plan.allocations}
    offer = answers.make_offer(
        plan.allocations, descriptors, loaded.hashes, blobs, models, backend.record, loaded.samples
    )
    broker.ready(offer)
