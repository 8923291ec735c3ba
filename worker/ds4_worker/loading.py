"""From an owner's manifest to a model that can run: connect, map, open.

Owns: the order of attaching and the times it takes. Parses no GGUF and copies no weights: every
byte of the model stays the owner's memory, mapped read-only. Whatever is wrong becomes one
`Ds4Error`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ds4_common import client
from ds4_common.client import OwnerConnection
from ds4_common.contract.frontend import Frontend, parse_frontend
from ds4_common.errors import BackendError, OwnerUnavailable, UnsupportedModel, UsageError
from ds4_common.mapping import Mapping
from ds4_common.protocol import Role, Welcome
from ds4_common.tokenizer.encoder import StreamDetokenizer, Tokenizer
from ds4_worker.config import DEFAULT_CONTEXT_TOKENS, EngineConfig
from ds4_worker.engine.core import EngineCore
from ds4_worker.engine.ranges import nvtx_annotate
from ds4_worker.executor.api import Executor, ExecutorConfig
from ds4_worker.http.model import ServedModel
from ds4_worker.http.template import ChatTemplate

SCORED_ROWS = 32  # tokens of a prompt whose log-probabilities are computed at once
BLOBS = ("frontend", "tokenizer", "image.cpu", "contract")
DEVICE_BLOBS = ("frontend", "tokenizer", "contract")
_POLL_SECONDS = 1.0  # between two progress reports of an owner that is loading


class Phases:
    """Milliseconds per phase of the start-up, for one log line."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._parts: list[tuple[str, float]] = []

    def add(self, name: str, milliseconds: float) -> None:
        self._parts.append((name, milliseconds))

    def end(self, name: str) -> None:
        """The phase `name` lasted from the end of the previous one until now."""
        now = time.perf_counter()
        self._parts.append((name, (now - self._last) * 1e3))
        self._last = now

    def __str__(self) -> str:
        total = sum(value for _, value in self._parts)
        return ", ".join(f"{n} {v:.0f}" for n, v in self._parts) + f", total {total:.0f} ms"


class Held(Protocol):
    """Weights that are kept mapped."""

    n_bytes: int

    def close(self) -> None: ...


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is mapped and ready. `weights` and `blobs` are what the executor computes on."""

    frontend: Frontend
    tokenizer: Tokenizer
    core: EngineCore
    context_tokens: int
    weights: Sequence[Held]
    blobs: list[Mapping]
    relowered: bool  # the owner's image was of another build and was made again here
    undrafted: bool  # drafts were asked for, and the model's state does not allow them


def connect(
    manifest: str,
    model: str | None,
    *,
    appear_seconds: float,
    check_fingerprint: bool,
    role: Role = "worker",
    name: str = "",
) -> OwnerConnection:
    """Opens the lease, in whatever state the owner is, short of having failed.

    `model`: a GGUF file that must be the one the owner serves; checked now if the owner is ready,
    else by `wait_until_ready`."""
    connection = client.connect(
        manifest, role, name, wait_seconds=None, appear_seconds=appear_seconds
    )
    try:
        _check_welcome(connection, model, check_fingerprint)
    except BaseException:
        connection.close()
        raise
    return connection


def wait_until_ready(
    connection: OwnerConnection,
    model: str | None,
    *,
    check_fingerprint: bool,
    progress: Callable[[Welcome], None],
) -> None:
    """Returns when the owner has loaded; calls `progress` about once a second until then."""
    while connection.welcome.state == "loading":
        progress(connection.wait_ready(_POLL_SECONDS))
    _check_welcome(connection, model, check_fingerprint)


def _check_welcome(connection: OwnerConnection, model: str | None, check: bool) -> None:
    welcome = connection.welcome
    if welcome.state == "failed":
        raise OwnerUnavailable(
            f"owner of {connection.manifest_path} failed to load: {welcome.reason}"
        )
    if welcome.state == "ready" and model is not None:
        from ds4_common.verify import verify_model  # only for -m: it parses GGUF

        verify_model(welcome.models, model, check=check)


def load(connection: OwnerConnection, config: EngineConfig, phases: Phases) -> LoadedModel:
    """Maps everything and opens tokenizer and executor. Raises UnsupportedModel when the owner
    serves weights only."""
    if connection.blob_record("contract") is None:
        raise UnsupportedModel(
            f"owner of {connection.manifest_path} serves weights only: it could not prepare its "
            "model for a worker; `ds4 inspect` on the model file says why"
        )
    if config.cuda is None:
        _refuse_device(connection)
    blobs = connection.map_blobs(_wanted_blobs(connection, config))
    frontend = parse_frontend(blobs["frontend"].view)
    context_tokens = resolve_context(config, frontend)
    opened = (_open_cpu if config.cuda is None else _open_cuda)(
        connection, config, executor_config(config, context_tokens), blobs, phases
    )
    tokenizer = Tokenizer(blobs["tokenizer"].view)
    core = EngineCore(
        opened.executor,
        # A generation continues the prompt's text, so a first space belongs to it.
        lambda: StreamDetokenizer(tokenizer, text_start=False),
        prefill_chunk=config.prefill_chunk,
        live_chunk=config.live_chunk,
        reuse_prefixes=config.reuse_prefixes,
        speculate=config.speculate,
        annotate=nvtx_annotate() if config.nvtx else None,
    )
    phases.end("engine")
    executor = opened.executor
    return LoadedModel(
        frontend=frontend,
        tokenizer=tokenizer,
        core=core,
        context_tokens=min(context_tokens, executor.pages * executor.page_tokens),
        weights=opened.weights,
        blobs=list(blobs.values()),
        relowered=opened.relowered,
        undrafted=config.speculate != "off" and not executor.rewinds,
    )


def _wanted_blobs(connection: OwnerConnection, config: EngineConfig) -> tuple[str, ...]:
    if config.cuda is None:
        return BLOBS
    made = connection.blob_record("image.cuda") is not None
    return (*DEVICE_BLOBS, "image.cuda") if made else DEVICE_BLOBS


def executor_config(config: EngineConfig, context_tokens: int) -> ExecutorConfig:
    return ExecutorConfig(
        threads=config.threads,
        banks=config.banks,
        context_tokens=context_tokens,
        pages=config.pages,
        kv_dtype=config.kv_dtype,
        batch_tokens=config.batch_tokens,
        batch_outputs=max(config.banks, SCORED_ROWS),
    )


def _refuse_device(connection: OwnerConnection) -> None:
    device = connection.welcome.device
    if device is not None:
        raise BackendError(
            f"owner of {connection.manifest_path} holds its weights on {device.name}, where a CPU"
            " cannot read them; add --cuda, or start the owner with --backend memfd"
        )


class _Opened(msgspec.Struct, frozen=True):
    executor: Executor
    weights: Sequence[Held]
    relowered: bool


def _open_cpu(
    connection: OwnerConnection,
    config: EngineConfig,
    capacities: ExecutorConfig,
    blobs: dict[str, Mapping],
    phases: Phases,
) -> _Opened:
    from ds4_common.contract.image import load_image, read_header
    from ds4_worker.executor.cpu import CpuExecutor

    image, relowered = load_image(blobs["image.cpu"].view, blobs["contract"].view)
    # Only what the program reads: other ranges of the manifest must not cost a worker anything.
    weights = connection.map_allocations(read_header(image).allocations)
    phases.end("map")
    addresses = {id_: (mapping.address, mapping.n_bytes) for id_, mapping in weights.items()}
    executor = CpuExecutor(image, addresses, capacities)
    return _Opened(executor, list(weights.values()), relowered)


def _open_cuda(
    connection: OwnerConnection,
    config: EngineConfig,
    capacities: ExecutorConfig,
    blobs: dict[str, Mapping],
    phases: Phases,
) -> _Opened:
    from ds4_worker import cuda_loading

    assert config.cuda is not None
    made = blobs.get("image.cuda")  # an owner of host memory has none
    image, relowered = cuda_loading.program(made.view if made else b"", blobs["contract"].view)
    phases.end("image")
    executor, weights = cuda_loading.open_executor(connection, image, config.cuda, capacities)
    return _Opened(executor, weights, relowered=relowered and made is not None)


def served_model(
    loaded: LoadedModel,
    names: tuple[str, ...] = (),
    chat_max_tokens: int | None = None,
    *,
    ignore_eos: bool = False,
    ignore_eos_in_reasoning: bool = False,
) -> ServedModel:
    """The face of a loaded model towards requests. `names`: further ones that it answers to.
    Raises UsageError when end-of-sequence is to be ignored and the model has none."""
    _check_eos(loaded.frontend, ignore_eos, ignore_eos_in_reasoning)
    frontend = loaded.frontend
    template = None
    if frontend.chat_template is not None:
        template = ChatTemplate(
            frontend.chat_template, bos_token=frontend.bos_token, eos_token=frontend.eos_token
        )
    return ServedModel(
        frontend=frontend,
        tokenizer=loaded.tokenizer,
        template=template,
        names=tuple(dict.fromkeys((*names, frontend.served_id, *frontend.aliases))),
        context_tokens=loaded.context_tokens,
        banks=loaded.core.stats.banks,
        created=int(time.time()),
        chat_max_tokens=chat_max_tokens or frontend.defaults.max_tokens or None,
        ignore_eos=ignore_eos,
        ignore_eos_in_reasoning=ignore_eos_in_reasoning and not ignore_eos,
    )


def _check_eos(frontend: Frontend, everywhere: bool, in_reasoning: bool) -> None:
    flag = "--ignore-eos" if everywhere else "--ignore-eos-in-reasoning"
    if (everywhere or in_reasoning) and not frontend.eos_ids:
        raise UsageError(f"{flag}: {frontend.served_id} has no end-of-sequence token to ignore")
    if in_reasoning and not everywhere and frontend.reasoning is None:
        raise UsageError(f"{flag}: {frontend.served_id} has no known way to write reasoning")


def resolve_context(config: EngineConfig, frontend: Frontend) -> int:
    """Context per sequence, in tokens. Raises UsageError beyond what the model was made for."""
    wanted = config.context_tokens
    if wanted is None:
        return min(frontend.context_tokens, DEFAULT_CONTEXT_TOKENS)
    if wanted > frontend.context_tokens:
        raise UsageError(
            f"--ctx {wanted}: {frontend.served_id} has a context of "
            f"{frontend.context_tokens} tokens; ask for that or less"
        )
    return wanted
