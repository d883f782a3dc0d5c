"""Qwen3: queries and keys are normed head by head, heads have a size of their own."""

from engines.models.families._pieces import attention, embedding, final_norm, mlp, qk_norm
from engines.models.family import Family
from engines.models.hf_config import NEEDED, read_layers
from engines.models.layer import LayerKind

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    before=(embedding,),
    layer=LayerKind((attention, qk_norm), (mlp,)),
    after=(final_norm,),
    # transformers would fill in its own defaults for missing keys.
    needed=(*NEEDED, "num_key_value_heads", "head_dim"),
    refused=("attention_bias", "mlp_bias", "dual_chunk_attention_config", "quantization_config"),
    read_layers=read_layers,
    defaults={"sliding_window": 4096},  # Qwen3Config's
)
