"""Qwen2.5-VL: Qwen2 with a tower with windowed attention on most layers (arXiv:2502.13923)."""

from dataclasses import replace

from engines.models.families._pieces import TOWER_KEYS, linear
from engines.models.families.text.qwen2 import FAMILY as QWEN2
from engines.models.vision.vision_config import extract_text, read_vision
from engines.models.vision.vision_spec import Tower, VisionSpec


def list_tower_weights(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    """List the shape of each of the tower's weights. MLPs have a gate; norms and patches have no bias."""
    width, ffn, merged = vision.width, vision.ffn, vision.width * vision.merge**2
    block = {"norm1.weight": (width,), "norm2.weight": (width,)}
    block |= linear("attn.qkv", 3 * width, width) | linear("attn.proj", width, width)
    block |= linear("mlp.gate_proj", ffn, width) | linear("mlp.up_proj", ffn, width)
    block |= linear("mlp.down_proj", width, ffn)
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (width, *vision.patch_shape)}
    for layer in range(vision.depth):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    shapes["merger.ln_q.weight"] = (width,)
    return shapes | linear("merger.mlp.0", merged, merged) | linear("merger.mlp.2", vision.out, merged)


_PACKAGE = "transformers.models.qwen2_5_vl"

FAMILY = replace(
    QWEN2,
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    defaults={"rope_theta": 1e6, "sliding_window": 4096, "max_window_layers": 80},  # Qwen2_5_VLTextConfig's
    renamed={"model.language_model.": "model.", "model.visual.": "visual."},
    extract_language=extract_text,
    tower=Tower(
        prefixes={"": "visual."},
        projector=("merger.",),
        module=f"{_PACKAGE}.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
        config=f"{_PACKAGE}.configuration_qwen2_5_vl:Qwen2_5_VLVisionConfig",
        needed=(*TOWER_KEYS, "window_size", "fullatt_block_indexes"),
        activation="silu",
        gated=True,
        weights=list_tower_weights,
        read=read_vision,
        no_videos="transformers and vLLM disagree where the text goes on after one that lasts longer than it is wide",
    ),
)
