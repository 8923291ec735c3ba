"""Metadata that change what a model computes, and that its recipe did not read.

Owns: the list of such keys, below the architecture's prefix, with the values that change nothing.
A file with another value is refused: to leave it out would be a silent wrong answer. Keys that are
not listed here describe a file or its training and change no result. Nor does what a converter
writes whatever the model is: once that was `use_parallel_residual`, true, in llama and qwen2 files.
"""

from __future__ import annotations

from ds4_common.gguf import ArrayInfo
from ds4_owner.recipes.parameters import Parameters, refuse

_OFF, _ONE = (0.0,), (0.0, 1.0)  # of the latter 0 means "not given"
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (1.0,),
    "attention.clamp_kqv": _OFF,
    "attention.max_alibi_bias": _OFF,
    "attention.output_scale": _ONE,
    "attention.scale": _OFF,
    "attention.shared_kv_layers": _OFF,
    "attention.temperature_scale": _OFF,
    "attention.value_scale": _ONE,
    "attn_logit_softcapping": _OFF,
    "embedding_length_per_layer_input": _OFF,
    "embedding_scale": _ONE,
    "expert_chunk_feed_forward_length": _OFF,
    "expert_group_scale": _ONE,
    "expert_latent_length": _OFF,
    "final_logit_softcapping": _OFF,
    "full_attention_interval": _ONE,
    "interleave_moe_layer_step": _ONE,
    "logit_scale": _ONE,
    "moe_every_n_layers": _ONE,
    "moe_latent_size": _OFF,
    "num_loops": _ONE,
    "residual_scale": _ONE,
    "rope.scaling.alpha": _ONE,
    "router_logit_softcapping": _OFF,
}
# Sizes of layers that slide, which here are those of all layers.
_SAME = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
}


def refuse_unread(parameters: Parameters) -> None:
    """Raises UnsupportedModel for the first key whose value the program leaves out."""
    for name, neutral in _NEUTRAL.items():
        if name in parameters.read or not parameters.has(name):
            continue
        key = parameters.key(name)
        value = parameters.metadata.get(key)
        listed = isinstance(value, ArrayInfo)
        if listed or not isinstance(value, int | float) or float(value) not in neutral:
            got = "a list" if listed else value
            expected = " or ".join(f"{n:g}" for n in neutral)
            raise refuse(key, got, f"{expected}: this architecture's recipe does not apply it")
    for name, own in _SAME.items():
        if parameters.has(name) and parameters.count(name) != parameters.count(own, 0, low=0):
            key = parameters.key(name)
            raise refuse(key, parameters.count(name), f"the value of {parameters.key(own)}")
