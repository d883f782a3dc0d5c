"""Qwen3-VL: Qwen3 with a vision tower; features of its inner layers are added after the decoder's first layers
(arXiv:2406.04334)."""

from dataclasses import replace

from engines.models.families._pieces import TOWER_KEYS, linear
from engines.models.families.text.qwen3 import FAMILY as QWEN3
from engines.models.vision.vision_config import extract_text, read_vision
from engines.models.vision.vision_spec import Tower, VisionSpec


def list_tower_weights(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    """List the shape of each of the tower's weights. There is a merger for each level; MLPs have no gate."""
    width, ffn, merged = vision.width, vision.ffn, vision.width * vision.merge**2
    block = {f"{norm}.{part}": (width,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
    block |= linear("attn.qkv", 3 * width, width) | linear("attn.proj", width, width)
    block |= linear("mlp.linear_fc1", ffn, width) | linear("mlp.linear_fc2", width, ffn)
    shapes = {"patch_embed.proj.weight": (width, *vision.patch_shape), "patch_embed.proj.bias": (width,)}
    shapes["pos_embed.weight"] = (vision.positions, width)
    for layer in range(vision.depth):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    levels = [(f"deepstack_merger_list.{i}", merged) for i in range(vision.deepstack)]
    for name, normed in [("merger", width), *levels]:
        shapes |= {f"{name}.norm.weight": (normed,), f"{name}.norm.bias": (normed,)}
        shapes |= linear(f"{name}.linear_fc1", merged, merged) | linear(f"{name}.linear_fc2", vision.out, merged)
    return shapes


_PACKAGE = "transformers.models.qwen3_vl"

TOWER = Tower(
    prefixes={"": "model.visual."},
    projector=("merger.", "deepstack_merger_list."),
    module=f"{_PACKAGE}.modeling_qwen3_vl:Qwen3VLVisionModel",
    config=f"{_PACKAGE}.configuration_qwen3_vl:Qwen3VLVisionConfig",
    needed=(*TOWER_KEYS, "num_position_embeddings", "deepstack_visual_indexes"),
    activation="gelu_pytorch_tanh",
    gated=False,
    interleaves=True,
    weights=list_tower_weights,
    read=read_vision,
    video_processor="Qwen3VLVideoProcessor",
    no_videos="",
)

FAMILY = replace(
    QWEN3,
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    refused=(*QWEN3.refused, "use_sliding_window"),  # transformers has no window in this model
    defaults={"rope_theta": 5e5},  # Qwen3VLTextConfig's
    prefix="model.language_model.",
    extract_language=extract_text,
    tower=TOWER,
)
