"""What every program that runs a model is told: which model, and how to compute it.

Owns: the flags that `ds4-server` and `ds4` have in common, the `EngineConfig` that they make, and
the owner that they name. Whatever does not fit --help is a UsageError.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from ds4_common.errors import UsageError
from ds4_common.paths import MANIFEST_VARIABLE
from ds4_worker.config import CudaConfig, EngineConfig, cubin_folder
from ds4_worker.engine.api import MOST_DRAFTS, Speculate
from ds4_worker.executor.api import KV_DTYPES
from ds4_worker.flags import Flag, Group, Options

MODEL_FLAGS = Group(
    "model",
    (
        Flag(
            ("--model", "-m"),
            "FILE",
            "GGUF file: served through a private owner, or checked against the manifest's",
        ),
        Flag(("--manifest",), "FILE", f"an owner's manifest (default: ${MANIFEST_VARIABLE})"),
        Flag(
            ("--owner",),
            "auto|none|PATH",
            "private owner of -m: reuse or start one (auto), never (none), or the one with this"
            " manifest",
        ),
        Flag(
            ("--wait-owner",),
            "SECONDS",
            "keep trying this long while no owner listens (default: 0)",
        ),
        Flag(("--chdir",), "DIR", "change to this folder first"),
    ),
)
ENGINE_FLAGS = Group(
    "engine",
    (
        Flag(
            ("--ctx", "-c"),
            "N",
            "context per sequence, in tokens (default: the model's, at most 8192)",
        ),
        Flag(("--max-seqs", "--batched-session"), "N", "sequences that run at once, 1 to 64"),
        Flag(("--threads", "-t"), "N", "compute threads (default: one per core)"),
        Flag(
            ("--prefill-chunk",), "N", "prompt tokens per step while nobody decodes (default: 512)"
        ),
        Flag(("--mixed-prefill-quantum",), "N", "the same while somebody decodes (default: 128)"),
        Flag(
            ("--prefix-reuse",),
            "auto|partial|off",
            "keep the KV pages of prompts and answers for prompts that begin alike (default: auto)",
        ),
        Flag(
            ("--speculate",),
            "auto|off|N",
            "draft next tokens from the sequence's own past: as many as pay, none, or up to N of"
            " them whenever there are any (default: auto)",
        ),
        Flag(("--kv-dtype",), "f16|bf16|f32|q8_0", "type of the KV cache (default: f16)"),
        Flag(("--cuda",), "", "compute on the CUDA device that the owner (backend vmm) has filled"),
        Flag(
            ("--cuda-copy",),
            "",
            "with --cuda: copy the weights of an owner in host memory to the device",
        ),
        Flag(
            ("--cuda-cache",),
            "DIR",
            "folder of compiled kernels (default: ds4/cubins in $XDG_CACHE_HOME or ~/.cache)",
        ),
        Flag(
            ("--kv-pages",), "N", "KV pages in all (default: enough for every sequence to be full)"
        ),
    ),
)


def refuse_other_backends(argv: Sequence[str]) -> None:
    """Published flags that ask for what this build cannot do."""
    if "--metal" in argv:
        raise UsageError("this build runs on CPUs and CUDA devices; leave out --metal")


def engine_config(
    options: Options,
    default_banks: int,
    environment: Mapping[str, str],
    *,
    nvtx: bool = False,
) -> EngineConfig:
    return EngineConfig(
        context_tokens=options.integer("--ctx", 0, 2, 1 << 24) or None,
        banks=options.integer("--max-seqs", default_banks, 1, 64),
        threads=options.integer("--threads", 0, 1, 1024),
        kv_dtype=options.choice("--kv-dtype", KV_DTYPES),
        pages=options.integer("--kv-pages", 0, 1, 1 << 24),
        prefill_chunk=options.integer("--prefill-chunk", 512, 1, 8192),
        live_chunk=options.integer("--mixed-prefill-quantum", 128, 1, 8192),
        reuse_prefixes=options.choice("--prefix-reuse", ("auto", "partial", "off")) != "off",
        speculate=speculate(options),
        nvtx=nvtx,
        cuda=cuda_config(options, environment),
    )


def cuda_config(options: Options, environment: Mapping[str, str]) -> CudaConfig | None:
    """None without --cuda. Raises UsageError for flags that need it."""
    if not options.given("--cuda"):
        for flag in ("--cuda-copy", "--cuda-cache"):
            if options.given(flag):
                raise UsageError(f"{flag} needs --cuda")
        return None
    return CudaConfig(
        cache=cubin_folder(options.text("--cuda-cache") or "", environment),
        copy=options.given("--cuda-copy"),
        kernels=environment.get("DS4_CUDA_KERNELS", ""),
    )


def speculate(options: Options) -> Speculate:
    text = options.text("--speculate") or "auto"
    if text == "auto":
        return "auto"
    if text == "off":
        return "off"
    if not text.isdecimal() or not 1 <= int(text) <= MOST_DRAFTS:
        raise UsageError(f"--speculate: got {text!r}, expected auto, off or 1 to {MOST_DRAFTS}")
    return int(text)


def change_folder(folder: str | None) -> None:
    try:
        if folder is not None:
            os.chdir(folder)
    except OSError as error:
        raise UsageError(f"--chdir {folder}: {error.strerror}") from error


def find_owner(
    manifest: str | None, model: str | None, owner: str, cuda: CudaConfig | None = None
) -> tuple[str, AbstractContextManager[None]]:
    """The manifest to attach to, after starting a private owner where one is needed: of device
    memory for a worker that does not copy. Whoever attaches does so within the context."""
    if manifest is not None:
        return os.path.abspath(manifest), nullcontext()
    if model is None:
        raise UsageError(
            f"no model: give -m FILE, or --manifest FILE (or ${MANIFEST_VARIABLE}) of a running "
            "owner"
        )
    from ds4_worker.private_owner import ensure_owner

    return ensure_owner(model, owner, "memfd" if cuda is None or cuda.copy else "vmm")
