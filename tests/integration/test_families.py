"""Families beyond llama through the whole product: owner, contract, worker, HTTP."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ds4_common.gguf import GgmlType as T
from ds4_common.quants import ALIGNED_LAYOUTS, aligned_is_fastest
from ds4_worker.executor.api import ExecutorConfig
from golden import tiny
from golden.deepseek4.cases import REAL as DEEPSEEK4
from golden.deepseek4.cases import REAL_TYPES
from golden.gemma3.cases import CASES as GEMMA3
from golden.gpt_oss.cases import CASES as GPT_OSS
from golden.mixtral.cases import CASES as MIXTRAL
from golden.phi3.cases import CASES as PHI3
from helpers import stack
from helpers.executors import GREEDY, cpu_executor, generate
from helpers.prepared import prepare_file
from helpers.wide_experts import TWO_BIT, wide_experts

PROMPT, COUNT, END = [3, 14, 15, 9, 26], 40, tiny.VOCABULARY - 1


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# Matrices of a layer: q, k, v, o, router, gate, up, down.
MODELS: dict[str, tuple[tiny.Case, Sequence[T] | Mapping[str, T]]] = {
    "two-bit experts": (wide_experts(), TWO_BIT),
    "packed experts": (
        wide_experts(),
        (T.Q8_0, T.Q8_0, T.Q8_0, T.F16, T.F32, T.Q4_K, T.Q4_K, T.Q5_K),
    ),
    "sinks and biases": (GPT_OSS[1], ()),
    "rows of packed tensors": (PHI3[0], (T.Q8_0, T.Q8_0, T.Q8_0, T.F16)),
    "windows and norms": (GEMMA3[0], ()),
    "compressed rows": (DEEPSEEK4, REAL_TYPES),
}


@pytest.mark.parametrize("types", [(), (T.F16, T.F16, T.F16, T.F16, T.F32, T.Q8_0, T.Q8_0, T.F16)])
def test_a_file_with_experts_one_by_one_is_served_as_one_with_all_in_a_tensor(
    types: Sequence[T], folder: Path
) -> None:
    case = MIXTRAL[0]
    if types:  # experts whose rows blocks fill, packed and not
        shapes = {
            name: tuple(64 if n == 24 else n for n in shape) for name, shape in case.shapes.items()
        }
        sizes = dict(case.metadata) | {"feed_forward_length": 64}
        case = dataclasses.replace(case, shapes=shapes, metadata=sizes)
    served = tiny.write_gguf(case, folder / "old.gguf", types, experts_apart=True)
    serve_and_compare(case, tiny.write_gguf(case, folder / "new.gguf", types), served, folder)


@pytest.mark.parametrize("name", MODELS)
def test_a_family_is_served_as_its_file_is_computed(name: str, folder: Path) -> None:
    case, types = MODELS[name]
    path = tiny.write_gguf(case, folder / "model.gguf", types)
    said = serve_and_compare(case, path, path, folder)
    used = set(types.values() if isinstance(types, Mapping) else types)
    shared = any(aligned_is_fastest(t) for t in ALIGNED_LAYOUTS.keys() & used)
    assert ("aligned repack" in said) == shared


@pytest.mark.parametrize("layout", ["raw", "aligned"])
@pytest.mark.parametrize("name", ["two-bit experts", "compressed rows"])
def test_experts_in_aligned_artifacts_are_served_as_their_file_is_computed(
    name: str, layout: str, folder: Path
) -> None:
    case, types = MODELS[name]
    path = tiny.write_gguf(case, folder / "model.gguf", types)
    said = serve_and_compare(case, path, path, folder, "--cpu-layout", layout)
    assert "iq2_xxs aligned repack" in said
    assert "q2k aligned repack" in said


def serve_and_compare(case: tiny.Case, path: Path, served: Path, folder: Path, *flags: str) -> str:
    """Serves `served`, which must answer what `path` gives in an executor of this process. Returns
    what the owner said."""
    prompt = PROMPT * (case.context // 16)  # several pages where the context has them
    executor = cpu_executor(
        prepare_file(path), ExecutorConfig(threads=1, banks=1, context_tokens=case.context)
    )
    drawn = generate(executor, prompt, COUNT, GREEDY)
    executor.close()
    port = stack.free_port()
    body = {"prompt": prompt, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    with stack.owner(served, folder, *flags) as owner, stack.worker(folder / "w", port):
        status, answer = stack.request(port, "POST", "/v1/completions", body)
    assert status == 200, answer
    ids = [result.token for result in drawn]
    if END in ids:  # here the request rules it out
        ids = ids[: ids.index(END)]
    assert len(ids) > 10
    assert answer["choices"][0]["text"].startswith("".join(tiny.TEXTS[token] for token in ids))
    return owner.text
