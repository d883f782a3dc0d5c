"""Qwen2-VL: Qwen2 with a tower of layer norms, MLPs without a gate, and attention over the whole image
(arXiv:2409.12191)."""

from dataclasses import replace
from pathlib import Path

from engines.models.families._pieces import linear
from engines.models.families.images.qwen2_5_vl import FAMILY as QWEN2_5_VL
from engines.models.vision import vision_config
from engines.models.vision.vision_spec import Tower, VisionSpec
from engines.validation import fits


def read_vision(config: dict, tower: Tower, path: Path) -> VisionSpec:
    """Read the vision tower. Its config names sizes differently: ``hidden_size`` is the language model's.

    Raises:
        ValueError: a key is missing, has a wrong type, or asks for something that is not built.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise ValueError(f"model: {path} lacks vision_config; save the model again with transformers")
    for key in ("embed_dim", "hidden_size", "mlp_ratio"):
        if not fits(int, vision.get(key)) or vision[key] < 1:
            raise ValueError(
                f"model: {path} has vision_config.{key} {vision.get(key)!r}, expected a whole number above 0"
            )
    sizes = {"hidden_size": vision["embed_dim"], "out_hidden_size": vision["hidden_size"]}
    sizes["intermediate_size"] = vision["embed_dim"] * vision["mlp_ratio"]
    named = config | {"vision_config": vision | sizes}
    return replace(vision_config.read_vision(named, tower, path), config=vision)


def list_tower_weights(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    """List the shape of each of the tower's weights. Patches have no bias."""
    width, ffn, merged = vision.width, vision.ffn, vision.width * vision.merge**2
    block = {f"{norm}.{part}": (width,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
    block |= linear("attn.qkv", 3 * width, width) | linear("attn.proj", width, width)
    block |= linear("mlp.fc1", ffn, width) | linear("mlp.fc2", width, ffn)
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (width, *vision.patch_shape)}
    for layer in range(vision.depth):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {f"merger.ln_q.{part}": (width,) for part in ("weight", "bias")}
    return shapes | linear("merger.mlp.0", merged, merged) | linear("merger.mlp.2", vision.out, merged)


_PACKAGE = "transformers.models.qwen2_vl"

FAMILY = replace(
    QWEN2_5_VL,
    model_type="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    tower=Tower(
        prefixes={"": "visual."},
        projector=("merger.",),
        module=f"{_PACKAGE}.modeling_qwen2_vl:Qwen2VisionTransformerPretrainedModel",
        config=f"{_PACKAGE}.configuration_qwen2_vl:Qwen2VLVisionConfig",
        needed=("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size"),
        activation="quick_gelu",
        gated=False,
        weights=list_tower_weights,
        read=read_vision,
        no_videos=QWEN2_5_VL.tower.no_videos if QWEN2_5_VL.tower else "",
    ),
)
