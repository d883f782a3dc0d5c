"""Mistral: Llama with an optional attention window on all layers (arXiv:2310.06825)."""

from dataclasses import replace
from pathlib import Path

from engines.models.families.text.llama import FAMILY as LLAMA
from engines.models.hf_config import NEEDED, read_rope
from engines.models.layer import LayerKind
from hardware.attention.rules import CAUSAL, Rule

SWITCHES = (*(key for key in LLAMA.refused if key != "sliding_window"), "layer_types")
"""Keys that must be off. Kinds of layers are among them: vLLM heeds them, transformers has one window for all."""


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the one kind of all layers: causal, within the window where there is one."""
    window = config.get("sliding_window")
    kind = replace(layer, rule=Rule(window=window) if window else CAUSAL, rope=read_rope(config, path))
    return (kind,) * config["num_hidden_layers"]


FAMILY = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    # transformers would fill in its own defaults for missing keys.
    needed=(*NEEDED, "num_key_value_heads", "sliding_window"),
    refused=(*SWITCHES, "llama_4_scaling", "ada_rms_norm_t_cond"),
    read_layers=read_layers,
)
