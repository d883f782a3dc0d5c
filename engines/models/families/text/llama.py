"""Llama 1 to 3: the plain decoder; other families are variations of it."""

from engines.models.families._pieces import attention, embedding, final_norm, mlp
from engines.models.family import Family
from engines.models.hf_config import NEEDED, read_layers
from engines.models.layer import LayerKind

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    before=(embedding,),
    layer=LayerKind((attention,), (mlp,)),
    after=(final_norm,),
    needed=NEEDED,
    refused=("attention_bias", "mlp_bias", "bias", "qkv_bias", "sliding_window", "quantization_config"),
    read_layers=read_layers,
)
