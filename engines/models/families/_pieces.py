"""Pieces that several families are made of: of a decoder, in Megatron's order within each, and of a vision tower."""

from dataclasses import replace

from engines.models.joins import GATED, Grouped, Vocabulary
from engines.models.layer import DecoderSizes
from engines.models.weight import EMBEDDING, Weight


def embedding(model: DecoderSizes) -> tuple[Weight, ...]:
    """State the embedding ``[v, h]``, a row for each token; Megatron pads the rows."""
    return (Weight(EMBEDDING, {"embed_tokens.weight": (model.vocab, model.hidden)}, Vocabulary(), cut={0: "tp"}),)


def group_queries(model: DecoderSizes) -> Grouped:
    """Group the rows of queries, keys and values by heads of keys."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return Grouped(groups=model.kv_heads, runs=(queries, keys, keys))


def attention(model: DecoderSizes) -> tuple[Weight, ...]:
    """State attention over query groups, and the norm before it."""
    hidden, queries, keys = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    qkv = {f"self_attn.{name}.weight": (rows, hidden) for name, rows in parts.items()}
    return (
        Weight("input_layernorm.weight", {"input_layernorm.weight": (hidden,)}),
        Weight("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (hidden, queries)}, cut={1: "tp"}),
        Weight("self_attention.linear_qkv.weight", qkv, group_queries(model), cut={0: "tp"}),
    )


def qkv_bias(model: DecoderSizes) -> tuple[Weight, ...]:
    """State the biases of queries, keys and values; after ``attention``."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    tensors = {f"self_attn.{name}.bias": (rows,) for name, rows in parts.items()}
    return (Weight("self_attention.linear_qkv.bias", tensors, group_queries(model), cut={0: "tp"}),)


def qk_norm(model: DecoderSizes) -> tuple[Weight, ...]:
    """State the norms of each head's queries and keys; after ``attention``."""
    return (
        Weight("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": (model.head_dim,)}),
        Weight("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": (model.head_dim,)}),
    )


def mlp(model: DecoderSizes) -> tuple[Weight, ...]:
    """State an MLP with a gate, and the norm before it."""
    hidden, ffn = model.hidden, model.ffn
    gated = {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
    return (
        Weight("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": (hidden,)}),
        Weight("mlp.linear_fc1.weight", gated, GATED, cut={0: "tp"}),
        Weight("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (hidden, ffn)}, cut={1: "tp"}),
    )


def fused_mlp(model: DecoderSizes) -> tuple[Weight, ...]:
    """State an MLP of which folders have the gate above the up projection in one tensor, and the norm before it."""
    norm, gated, down = mlp(model)
    fused = {"mlp.gate_up_proj.weight": (2 * model.ffn, model.hidden)}
    return norm, replace(gated, tensors=fused), down


def final_norm(model: DecoderSizes) -> tuple[Weight, ...]:
    """State the norm after the last layer."""
    return (Weight("decoder.final_layernorm.weight", {"norm.weight": (model.hidden,)}),)


TOWER_KEYS = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size")
TOWER_KEYS += ("spatial_merge_size", "temporal_patch_size")
"""Keys that ``vision_config`` of each of Qwen's towers has."""


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """State a tower's linear layer: its weight ``[rows, columns]`` and bias ``[rows]``, by name."""
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
