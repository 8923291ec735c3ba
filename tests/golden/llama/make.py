"""Regenerates logits.json with `transformers`, an implementation independent of ours.

In a throw-away environment: pip install torch transformers gguf numpy, then, from `tests/`,
python -m golden.llama.make
"""

from __future__ import annotations

import json
from pathlib import Path

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

from golden.llama import cases


def logits(case: cases.Case) -> list[list[float]]:
    """Logits of the kept positions, computed in float64."""
    config = transformers.LlamaConfig(
        vocab_size=cases.VOCABULARY,
        hidden_size=case.width,
        intermediate_size=case.feed_forward,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        max_position_embeddings=case.context,
        rms_norm_eps=cases.EPSILON,
        tie_word_embeddings=case.tied,
        attention_bias=case.attention_bias,
        mlp_bias=case.mlp_bias,
        rope_parameters=case.rope,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    state = {name: torch.from_numpy(value) for name, value in cases.weights(case).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    model = model.double().eval()
    with torch.no_grad():
        rows = model(torch.tensor([cases.tokens(case)])).logits[0, list(cases.ROWS)]
    return [[round(value, 6) for value in row] for row in rows.tolist()]


def main() -> None:
    made = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float64",
        "logits": {case.name: logits(case) for case in cases.CASES},
    }
    text = json.dumps(made).replace("]]", "]]\n").replace("], [", "],\n[")
    Path(__file__).with_name("logits.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
