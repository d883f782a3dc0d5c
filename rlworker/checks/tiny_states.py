"""Make tiny models of random weights well conditioned where their layers have a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # as where tiny models are made
    from transformers import PreTrainedModel

STATES: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
STATES |= {"linear_value_head_dim": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
"""Layers of a tiny Qwen3.5."""
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERTS |= {"shared_expert_intermediate_size": 64}
STATE_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"head_dim": 32} | STATES,
    # Of sizes that were tried these draw weights at which HuggingFace's own gradients round least.
    "qwen3_5_moe_text": {"head_dim": 32} | STATES | _EXPERTS | {"num_experts": 12, "initializer_range": 0.06},
    "qwen3_next": {"head_dim": 32} | STATES | _EXPERTS,
}
"""HuggingFace model_type of each family with a state -> settings of a tiny model that differ from other families'."""


def align_states(model: PreTrainedModel) -> PreTrainedModel:
    """Let a token's query be like its key in layers with a state, as in trained models, and return the model.

    What is read of a state is normed: where a query finds almost nothing, rounding would become an output. Some heads
    remember long, so that a state that is not reset shows.
    """
    import torch

    nets: list[Any] = [part for part in model.modules() if hasattr(part, "A_log")]
    with torch.no_grad():
        embedding: Any = model.get_input_embeddings().weight
        if nets:  # tokens have something in common
            embedding += 2 * embedding.std() * torch.randn(embedding.shape[1])
        for net in nets:
            if hasattr(net, "in_proj_qkv"):
                query, key, value = net.in_proj_qkv.weight.split((net.key_dim, net.key_dim, net.value_dim))
            else:  # by key heads
                heads = net.in_proj_qkvz.weight.unflatten(0, (net.num_k_heads, -1))
                width = net.value_dim // net.num_k_heads
                query, key, value, _ = heads.split((net.head_k_dim, net.head_k_dim, width, width), dim=1)
            query.mul_(2)
            value.mul_(2)
            key.add_(query)
            net.conv1d.weight.normal_(std=0.2)[..., -1] += 1.0
            net.A_log.uniform_(0.01, 0.5).log_()
    return model
