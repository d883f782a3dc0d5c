"""Models of transformers whose layers have a state: computed in torch alone; well conditioned where they are tiny."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # as where tiny models are made
    from transformers import PretrainedConfig, PreTrainedModel

STATES: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
STATES |= {"linear_value_head_dim": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
"""Layers of a tiny Qwen3.5."""
PARTLY_TURNED: dict[str, Any] = {"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
"""Rotary settings of one that sees images, with heads of 32."""
STATE_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STATE_EXPERTS |= {"shared_expert_intermediate_size": 64}
"""Experts of a tiny model with states."""
STATE_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"head_dim": 32} | STATES,
    # Of sizes that were tried these draw weights at which HuggingFace's own gradients round least.
    "qwen3_5_moe_text": {"head_dim": 32} | STATES | STATE_EXPERTS | {"num_experts": 12, "initializer_range": 0.06},
    "qwen3_next": {"head_dim": 32} | STATES | STATE_EXPERTS,
}
"""HuggingFace model_type of each family with a state -> settings of a tiny model that differ from other families'."""


@contextmanager
def hiding_kernels() -> Iterator[None]:
    """Hide FLA and causal-conv1d from transformers in this context, in which it imports a model.

    It would compute layers with a state by their kernels, which take neither a CPU's tensors nor float64.
    """
    names = ("fla", "causal_conv1d")
    there = {name: sys.modules[name] for name in names if name in sys.modules}
    hidden: Any = dict.fromkeys(names)  # None lets an import fail
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(there)


def build_model(auto: Any, config: PretrainedConfig) -> PreTrainedModel:
    """Build a model of random weights by one of transformers' Auto classes. In its layers with a state a token's query
    is like its key, as in trained models.

    What is read of a state is normed: where a query finds almost nothing, rounding would become an output. Some heads
    remember long, so that a state that is not reset shows.
    """
    import torch

    with hiding_kernels():
        model = auto.from_config(config)
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


def spell_spaces_as_bytes(folder: str | Path) -> None:
    """Spell the space as a byte in a saved tokenizer, as in GPT-2's.

    By the model's type transformers' AutoTokenizer, which vLLM takes, cuts texts by Qwen3.5's own rules, whatever the
    folder says. It finds the tokens of a video's time only where a space is spelled so. One without spaces stays.
    """
    path, byte = Path(folder, "tokenizer.json"), "\u0120"
    saved = json.loads(path.read_text())
    if " " not in saved["model"]["vocab"]:
        return
    saved["model"]["vocab"][byte] = saved["model"]["vocab"].pop(" ")
    saved["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": byte}
    if saved["decoder"]:
        back = {"type": "Replace", "pattern": {"String": byte}, "content": " "}
        saved["decoder"] = {"type": "Sequence", "decoders": [saved["decoder"], back]}
    path.write_text(json.dumps(saved))
