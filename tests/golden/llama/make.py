"""The golden logits of llama by `transformers`, an implementation independent of ours.

Run by `python -m golden.make llama`.
"""

from __future__ import annotations

from typing import Any

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


def make() -> dict[str, Any]:
    """What logits.json holds."""
    return {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float64",
        "logits": {case.name: logits(case) for case in cases.CASES},
    }
