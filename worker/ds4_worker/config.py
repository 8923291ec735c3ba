"""The settings of a worker, parsed once by `cli` or `oneshot` and never changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from ds4_common.errors import UsageError
from ds4_worker.engine.api import Speculate

DEFAULT_CONTEXT_TOKENS = 8192
# What a worker does while another one serves: nothing (it takes over), wait loaded and warm, or
# wait loaded, without having touched the memory that a first token needs.
Standby: TypeAlias = Literal["off", "hot", "cold"]


class CudaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Compute on the CUDA device that has the weights."""

    cache: str  # folder of compiled kernels
    copy: bool = False  # the weights from the owner's host memory
    kernels: str = ""  # folder of kernels that were built for a simulated device (tests)


def cubin_folder(given: str, environment: Mapping[str, str]) -> str:
    """The folder of compiled kernels. Raises UsageError where `~` stands for nothing."""
    caches = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # which the XDG specification says to ignore
        caches = "~/.cache"
    named = given or os.path.join(caches, "ds4", "cubins")
    folder = os.path.expanduser(named)
    if folder.startswith("~"):
        raise UsageError(
            f"--cuda-cache: {named}: there is no such home folder; give a path without ~"
        )
    return folder


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Capacities and step shape, in tokens."""

    context_tokens: int | None = None  # per sequence; None: the model's, at most the default
    banks: int = 4
    threads: int = 0  # 0: one per core this process may use
    kv_dtype: str = "f16"
    pages: int = 0  # 0: enough for every bank to be full
    prefill_chunk: int = 512
    live_chunk: int = 128
    speculate: Speculate = "auto"
    reuse_prefixes: bool = True  # keep KV pages for later prompts that begin alike
    nvtx: bool = False  # name the steps for a profiler that listens
    cuda: CudaConfig | None = None  # None: on the CPU

    @property
    def batch_tokens(self) -> int:
        """Most tokens in one step: a chunk of prompt, or a smaller one and everybody else's next
        token."""
        return max(self.prefill_chunk, self.live_chunk + self.banks)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    manifest: str | None = None
    model: str | None = None  # a GGUF file: verified against the manifest, or served privately
    owner: str = "auto"  # auto, none, or the manifest of a private owner
    wait_owner_seconds: float = 0.0
    check_fingerprint: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    socket_path: str = ""  # of a Unix socket, instead of host and port
    api_key: str | None = None
    cors: bool = False
    names: tuple[str, ...] = ()  # further names the model answers to
    max_queue: int = 64
    max_tokens: int | None = None  # of a chat request that says nothing
    ignore_eos: bool = False
    ignore_eos_in_reasoning: bool = False
    tool_memory_ids: int = 100_000  # calls whose exact text is kept; 0: none
    drain_seconds: float = 5.0
    name: str = ""  # of this worker in the owner's books, and of its listening socket for port 0
    takeover: bool = True  # of the place of a worker that serves already
    standby: Standby = "off"
    zygote: bool = False
    reload: tuple[str, ...] | None = None  # further paths to watch
    park: bool = True  # client connections, where the next worker finds them
    engine: EngineConfig = EngineConfig()
    folder: str | None = None  # to change to before anything else
