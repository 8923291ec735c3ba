"""Regenerates the golden logits of families, with implementations independent of ours.

In a throw-away environment: pip install torch transformers gguf numpy llama-cpp-python, then, from
`tests/`, python -m golden.make [FAMILY ...]. Each case runs through `transformers` in float64, and,
where its `peer` says so, as a GGUF file through llama.cpp in float32.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

from golden import tiny

Rows = list[list[float]]


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


def main() -> None:
    llama_cpp.llama_backend_init()
    for family in sys.argv[1:] or tiny.FAMILIES:
        cases = tiny.cases_of(family)
        made = {
            "transformers": f"{transformers.__version__}, torch {torch.__version__}, float64",
            "llama.cpp": f"llama-cpp-python {llama_cpp.__version__}, float32",
            "logits": {
                case.name: {"transformers": by_transformers(case)}
                | ({"llama.cpp": by_llama_cpp(case)} if case.peer else {})
                for case in cases
            },
        }
        text = json.dumps(made).replace("]]", "]]\n").replace("], [", "],\n[")
        tiny.logits_path(family).write_text(text + "\n")


if __name__ == "__main__":
    main()
