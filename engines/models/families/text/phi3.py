"""Phi-3: Llama with fused tensors, one for queries, keys and values, one for gate and up projection
(arXiv:2404.14219)."""

from dataclasses import replace
from pathlib import Path

from engines.models.families._pieces import fused_mlp, group_queries
from engines.models.families.text.llama import FAMILY as LLAMA
from engines.models.families.text.mistral import SWITCHES
from engines.models.families.text.mistral import read_layers as read_alike
from engines.models.layer import DecoderSizes, LayerKind
from engines.models.weight import Weight


def attention(model: DecoderSizes) -> tuple[Weight, ...]:
    """State attention over query groups, and the norm before it."""
    hidden, queries, keys = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    qkv = {"self_attn.qkv_proj.weight": (queries + 2 * keys, hidden)}
    return (
        Weight("input_layernorm.weight", {"input_layernorm.weight": (hidden,)}),
        Weight("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (hidden, queries)}, cut={1: "tp"}),
        Weight("self_attention.linear_qkv.weight", qkv, group_queries(model), cut={0: "tp"}),
    )


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the one kind of all layers, as Mistral's; ValueError for scaled rotary embeddings."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ValueError(
            f"model: {path} has rope_type {kind!r}, expected 'default': transformers knows 'longrope' alone beside it "
            "for phi3, which the engine does not build; take a model of the short context, such as the 4k ones"
        )
    return read_alike(config, path, layer)


FAMILY = replace(
    LLAMA,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    layer=LayerKind((attention,), (fused_mlp,)),
    refused=(*SWITCHES, "embd_pdrop", "resid_pdrop"),
    read_layers=read_layers,
)
