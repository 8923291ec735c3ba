"""Regenerates the golden logits of families, with implementations independent of ours.

In an environment of its own, from `tests/` (torch needs no GPU; the packages of
`golden/requirements.txt` are those that made what is checked in):

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install -r golden/requirements.txt
    PYTHONPATH=.:../common /tmp/golden/bin/python -m golden.make --check [FAMILY ...]

Without `--check` it writes `<family>/logits.json`; with it, it compares, and ends with 1 when
anything differs by more than rounding. Each case runs through `transformers` in float64, and, where
its `peer` says so, as a GGUF file through llama.cpp in float32. `--no-peer` (with `--check`) leaves
llama.cpp out.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

from golden import tiny
from golden.llama import make as llama

Rows = list[list[float]]
Made = dict[str, Any]  # a logits.json

# Six digits are kept. float64 differs by the last one between builds of torch, float32 by more
# between instruction sets; the GELU of llama.cpp is a table of halves, whose entries are far apart.
_NEAR = {"transformers": 5e-6, "llama.cpp": 5e-5}
_NEAR_BY_TABLE = 2e-3


def by_transformers(case: tiny.Case) -> Rows:
    """Logits of the kept positions, computed in float64."""
    arguments = {"vocab_size": tiny.VOCABULARY, "rms_norm_eps": tiny.EPSILON, **case.config}
    config = getattr(transformers, f"{case.model}Config")(
        max_position_embeddings=case.context,
        pad_token_id=0, bos_token_id=0, eos_token_id=tiny.VOCABULARY - 1,
        attn_implementation="eager", experts_implementation="eager",
        **arguments,
    )  # fmt: skip
    name = case.model.removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    state = {k: torch.from_numpy(v) for k, v in case.state(case, tiny.tensors(case)).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    model = model.double().eval()
    with torch.no_grad():
        rows = model(torch.tensor([tiny.tokens(case)])).logits[0, list(case.rows)]
    return rounded(rows.tolist())


def by_llama_cpp(case: tiny.Case) -> Rows:
    """Logits of the kept positions of the case's file, with a cache of floats."""
    import llama_cpp  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write_gguf(case, Path(folder) / "case.gguf")
        model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert model, f"{case.id}: llama.cpp does not load the file"
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = case.context
        parameters.type_k = parameters.type_v = 0
        parameters.flash_attn_type = 0
        parameters.swa_full = True
        context = llama_cpp.llama_init_from_model(model, parameters)
        ids = tiny.tokens(case)
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        assert llama_cpp.llama_decode(context, batch) == 0
        rows = []
        for row in case.rows:
            logits = llama_cpp.llama_get_logits_ith(context, row)
            rows.append(
                list(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))[: tiny.VOCABULARY])
            )
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    return rounded(rows)


def rounded(rows: Sequence[Sequence[float]]) -> Rows:
    return [[round(value, 6) for value in row] for row in rows]


def make(family: str, *, peer: bool) -> Made:
    """The logits of all cases of a family, and what made them."""
    if family == "llama":
        return llama.make()
    made: Made = {"transformers": f"{transformers.__version__}, torch {torch.__version__}, float64"}
    if peer:
        import llama_cpp

        llama_cpp.llama_backend_init()
        made["llama.cpp"] = f"llama-cpp-python {llama_cpp.__version__}, float32"
    made["logits"] = {
        case.name: {"transformers": by_transformers(case)}
        | ({"llama.cpp": by_llama_cpp(case)} if peer and case.peer else {})
        for case in tiny.cases_of(family)
    }
    return made


def by_source(logits: Mapping[str, Any]) -> dict[tuple[str, str], Rows]:
    """Rows by case and by who computed them; llama's are all from `transformers`."""
    found: dict[tuple[str, str], Rows] = {}
    for case, made in logits.items():
        for source, rows in ({"transformers": made} if isinstance(made, list) else made).items():
            found[case, source] = rows
    return found


def compare(family: str, made: Made, *, peer: bool) -> bool:
    """Prints how far each case is from what is checked in; True where all is the same."""
    kept = by_source(json.loads(tiny.logits_path(family).read_text())["logits"])
    now = by_source(made["logits"])
    if not peer:
        kept = {key: rows for key, rows in kept.items() if key[1] == "transformers"}
    same = kept.keys() == now.keys()
    if not same:
        print(f"{family}: cases differ: {sorted(kept.keys() ^ now.keys())}")
    for (case, source), rows in now.items():
        old = kept.get((case, source), [])
        far = math.inf
        if [len(row) for row in rows] == [len(row) for row in old]:
            pairs = zip(rows, old, strict=True)
            far = max(abs(a - b) for row, was in pairs for a, b in zip(row, was, strict=True))
        gelu = source == "llama.cpp" and family.startswith("gemma")
        near = far <= (_NEAR_BY_TABLE if gelu else _NEAR[source])
        print(f"{family:9} {case:14} {source:12} {far:.1e} {'' if near else 'DIFFERS'}".rstrip())
        same &= near
    return same


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m golden.make")
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--no-peer", action="store_true", help="with --check: without llama.cpp")
    flags = parser.parse_args()
    families = flags.families or ["llama", *tiny.FAMILIES]
    if unknown := set(families) - {"llama", *tiny.FAMILIES}:
        parser.error(f"no family of tests/golden: {', '.join(sorted(unknown))}")
    if flags.no_peer and not flags.check:
        parser.error("--no-peer needs --check: the files hold the numbers of both")
    same = True
    for family in families:
        made = make(family, peer=not flags.no_peer)
        if flags.check:
            same &= compare(family, made, peer=not flags.no_peer)
            continue
        text = json.dumps(made).replace("]]", "]]\n").replace("], [", "],\n[")
        tiny.logits_path(family).write_text(text + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
