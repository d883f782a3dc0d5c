"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, and a shared one that every token goes through (arXiv:2407.10671)."""

from dataclasses import replace

from engines.models.families.experts._mixture import NEEDED_OF_EXPERTS
from engines.models.families.experts.qwen3_moe import read_layers
from engines.models.families.text.qwen2 import FAMILY as QWEN2

FAMILY = replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    needed=(*QWEN2.needed, *NEEDED_OF_EXPERTS, "shared_expert_intermediate_size"),
    # transformers has windows on every second layer of this model, vLLM has none.
    refused=(*QWEN2.refused, "use_sliding_window"),
    read_layers=read_layers,
)
