"""Qwen2 and Qwen2.5: queries, keys and values have biases; upper layers may see through a window."""

from engines.models.families._pieces import attention, embedding, final_norm, mlp, qkv_bias
from engines.models.family import Family
from engines.models.hf_config import NEEDED, read_layers
from engines.models.layer import LayerKind

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    before=(embedding,),
    layer=LayerKind((attention, qkv_bias), (mlp,)),
    after=(final_norm,),
    # transformers would put a number of its own for a count of key-value heads that is left out.
    needed=(*NEEDED, "num_key_value_heads"),
    refused=("attention_bias", "mlp_bias", "qk_norm", "dual_chunk_attention_config", "quantization_config"),
    read_layers=read_layers,
    defaults={"sliding_window": 4096},  # Qwen2Config's
    own_head_dim=False,
)
