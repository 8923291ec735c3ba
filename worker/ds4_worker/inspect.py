"""`ds4 inspect GGUF|MANIFEST`: contract and plan of a model, as text.

Owns: where the facts come from and how they are laid out. A manifest's owner hands out its
contract; for a GGUF file the owner program is asked what it would prepare, because a worker parses
no model files. Refuses targets that are neither, and passes on the owner's words when it refuses.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ds4_common import client
from ds4_common.allocation import ArtifactKind, Layout
from ds4_common.errors import ContractError, LoaderError, UsageError

if TYPE_CHECKING:
    from ds4_common.contract import prepared_model_pb2 as pb

_GGUF_MAGIC = b"GGUF"
_OWNER = (sys.executable, "-P", "-m", "ds4_owner.cli")
Row = tuple[str, object]


def inspect(target: str) -> str:
    """Text for people. Raises Ds4Error when the target cannot be read or its owner not reached."""
    try:
        with open(target, "rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise UsageError(f"inspect {target}: {error.strerror}") from error
    return _inspect_gguf(target) if magic == _GGUF_MAGIC else _inspect_manifest(target)


def _inspect_gguf(path: str) -> str:
    plan = msgspec.json.decode(_ask_owner("plan", path, "--json"))
    sections = [f"{path} (not loaded)"]
    try:
        sections += contract_sections(_ask_owner("plan", path, "--contract"))
    except LoaderError as error:  # its weights can be served all the same
        sections.append(f"contract: none\n  {error}")
    sections.append(_plan(plan["backend"], plan["allocations"]))
    sections.append(_table("memory needed", [(k, _size(v)) for k, v in plan["needs"].items()]))
    return "\n\n".join(sections) + "\n"


def _inspect_manifest(path: str) -> str:
    with client.connect(path, "inspect") as owner:
        sections = [f"{path} (owner pid {owner.owner_pid})"]
        if owner.blob_record("contract") is None:
            sections.append("contract: none; this owner serves weights only")
        else:
            blob = owner.blob("contract")
            sections += contract_sections(bytes(blob.view))
            blob.close()
        allocations = [msgspec.to_builtins(record) for record in owner.describe_allocations()]
        sections.append(_plan(owner.welcome.backend, allocations))
        blobs = [(blob.name, _size(blob.n_bytes)) for blob in owner.welcome.blobs]
        sections.append(_table("blobs", blobs))
    return "\n\n".join(sections) + "\n"


def _ask_owner(*arguments: str) -> bytes:
    """What the owner program writes to stdout; its complaint becomes a LoaderError."""
    done = subprocess.run([*_OWNER, *arguments], capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise LoaderError(said or f"{' '.join(arguments)}: exit code {done.returncode}")
    return done.stdout


def contract_sections(data: bytes) -> list[str]:
    """An encoded contract as paragraphs; one that says what is wrong when it is not valid."""
    from ds4_common.contract.validate import parse_bundle, validate

    try:
        bundle = parse_bundle(data)
        validate(bundle)
    except ContractError as error:
        return [f"contract: INVALID\n  {error}"]
    programs = [_program(program) for program in bundle.execution.programs]
    return [
        _serving(bundle),
        _frontend(bundle.serving.model.frontend),
        _cache(bundle),
        _buffers(bundle.execution.buffers),
        _weights(bundle.execution.buffers),
        *programs,
    ]


def _serving(bundle: pb.Bundle) -> str:
    serving, defaults = bundle.serving, bundle.serving.defaults
    rows: list[Row] = [
        ("contract", f"valid, format {bundle.format}, model version {serving.model.version}"),
        ("served id", ", ".join((serving.served_id, *serving.aliases))),
        ("cache identity", serving.cache_identity.decode(errors="backslashreplace")),
        ("context", f"{serving.context_tokens} tokens"),
        ("vocabulary", f"{serving.model.vocabulary} tokens"),
        ("ends of generation", " ".join(map(str, serving.eos_ids))),
        (
            "sampling",
            f"temperature {defaults.temperature:g}, top_k {defaults.top_k}, "
            f"top_p {defaults.top_p:g}, min_p {defaults.min_p:g}, "
            f"repeat_penalty {defaults.repeat_penalty:g}",
        ),
    ]
    return _table("serving", rows)


def _frontend(frontend: pb.Frontend) -> str:
    from ds4_common.contract import prepared_model_pb2 as pb

    tools = pb.ToolSyntax.Name(frontend.tools.syntax) if frontend.HasField("tools") else "none"
    reasoning = frontend.HasField("reasoning")
    rows: list[Row] = [
        ("tokenizer", frontend.tokenizer),
        ("chat template", frontend.chat_template or "none"),
        ("bos", _special(frontend, "bos")),
        ("eos", _special(frontend, "eos")),
        ("tool syntax", tools),
        (
            "reasoning syntax",
            pb.ReasoningSyntax.Name(frontend.reasoning.syntax) if reasoning else "none",
        ),
    ]
    return _table("frontend", rows)


def _special(frontend: pb.Frontend, name: str) -> str:
    if not frontend.HasField(f"{name}_id"):
        return "none"
    added = "added to prompts" if getattr(frontend, f"add_{name}") else "not added"
    return f"{getattr(frontend, f'{name}_id')}, {added}"


_TYPED_STORES = ("kv_store", "latent_store")  # what they write has the type of --kv-dtype


def _cache(bundle: pb.Bundle) -> str:
    from ds4_common.contract import prepared_model_pb2 as pb

    cache = bundle.serving.model.cache
    planes = {b.name: b for b in bundle.execution.buffers if b.space == pb.CACHE}
    rows: list[Row] = [("page", f"{cache.page_tokens} tokens")]
    ops = [op for program in bundle.execution.programs for op in program.ops.ops]
    typed = {name for op in ops if op.kernel in _TYPED_STORES for name in op.out}
    elements = fixed = 0  # of a page: of a type to be chosen, and bytes of the others
    context, whole = bundle.serving.context_tokens, 0
    for history in cache.histories:
        kept = min(context, history.window_tokens or context)
        for plane in (planes[name] for name in history.planes):
            size = math.prod(plane.shape[1:])
            n_bytes = size * (4 if plane.dtype == pb.F32 else 2)
            whole += n_bytes * kept
            if plane.name in typed:
                elements += size
            else:
                fixed += n_bytes
        shapes = Counter(str(list(planes[name].shape)) for name in history.planes)
        kinds = ", ".join(f"{count} of {shape}" for shape, count in shapes.items())
        what = pb.HistoryKind.Name(history.kind)
        if history.window_tokens:
            kinds += f"; the last {history.window_tokens} tokens only"
        rows.append((what, f"{len(history.planes)} planes: {kinds}"))
    halves, floats, blocks = (
        (n_bytes * elements // 32 + fixed) // cache.page_tokens for n_bytes in (64, 128, 34)
    )
    words = f"{_size(halves)} in f16 or bf16, {_size(floats)} in f32, {_size(blocks)} in q8_0"
    rows.append(("per token", words if elements else _size(halves)))
    all_of_it = _size(whole // cache.page_tokens)
    rows.append(("a full context", f"{all_of_it} in f16" if elements else all_of_it))
    return _table("cache", rows)


def _buffers(buffers: Iterable[pb.Buffer]) -> str:
    from ds4_common.contract import prepared_model_pb2 as pb

    shown: dict[str, list[str]] = {}
    for buffer in buffers:
        shown.setdefault(pb.Space.Name(buffer.space), []).append(buffer.name)
    rows = [
        (space, f"{len(names):4}  {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
        for space, names in shown.items()
    ]
    return _table("buffers", rows)


def _weights(buffers: Iterable[pb.Buffer]) -> str:
    from ds4_common.contract import prepared_model_pb2 as pb
    from ds4_common.gguf.types import GgmlType

    count: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for buffer in buffers:
        if buffer.space == pb.WEIGHT:
            kind = f"{GgmlType(buffer.ggml_type).name} {Layout(buffer.layout).name}"
            count[kind] += 1
            n_bytes[kind] += buffer.bytes
    rows = [(kind, f"{count[kind]:4}  {_size(total)}") for kind, total in n_bytes.most_common()]
    return _table("weights", [*rows, ("total", f"{count.total():4}  {_size(n_bytes.total())}")])


def _program(executable: pb.Executable) -> str:
    kernels = Counter(op.kernel for op in executable.ops.ops)
    rows: list[Row] = [(kernel, f"{count:4}") for kernel, count in kernels.items()]
    return _table(f"program {executable.name!r}: {kernels.total()} ops", rows)


def _plan(backend: str, allocations: Sequence[dict[str, Any]]) -> str:
    count: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for allocation in allocations:
        artifact = allocation["artifact"]
        kind = "raw range" if artifact is None else ArtifactKind(artifact["kind"]).name
        count[f"{allocation['model']} {kind}"] += 1
        n_bytes[f"{allocation['model']} {kind}"] += allocation["alloc_bytes"]
    rows = [(kind, f"{number:4}  {_size(n_bytes[kind])}") for kind, number in count.items()]
    title = f"plan: {len(allocations)} allocations, backend {backend}"
    return _table(title, rows)


def _table(title: str, rows: Sequence[Row]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows)])


def _size(n_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.2f} {name}"
    return f"{n_bytes} bytes"
