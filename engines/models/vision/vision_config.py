"""A vision-language model's config.json in Qwen's form: its tower, and the settings of its language model."""

from pathlib import Path

from engines.models.vision.vision_spec import Tower, VisionSpec
from engines.validation import fits, spell

_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_LISTS = ("fullatt_block_indexes", "deepstack_visual_indexes")
"""Keys of a ``vision_config`` that hold layers' numbers; every other that a family needs holds a number."""


def read_vision(config: dict, tower: Tower, path: Path) -> VisionSpec:
    """Read the tower of a whole ``config.json``.

    Raises:
        ValueError: a key is missing, has a wrong type, or asks for something that is not built.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise ValueError(f"model: {path} lacks vision_config; save the model again with transformers")
    missing = [f"vision_config.{key}" for key in tower.needed if key not in vision]
    missing += [key for key in _TOKENS if key not in config]
    if missing:
        raise ValueError(f"model: {path} lacks the keys {missing}; save the model again with transformers")
    for key in tower.needed:
        kind = list[int] if key in _LISTS else int
        if not fits(kind, vision[key]) or (kind is int and vision[key] < 1):
            raise ValueError(f"model: {path} has vision_config.{key} {vision[key]!r}, expected {spell(kind)} above 0")
    for key in _TOKENS:
        if not fits(int, config[key]) or config[key] < 0:
            raise ValueError(f"model: {path} has {key} {config[key]!r}, expected the number of a token")
    if config.get("vision_token_id") is not None and not fits(int, config["vision_token_id"]):
        raise ValueError(f"model: {path} has vision_token_id {config['vision_token_id']!r}, expected a token's number")
    rope = _read_rope(_flat(config))
    if {rope.get(key, "default") for key in ("type", "rope_type")} - {"default", "mrope"}:
        raise ValueError(
            f"model: {path} has scaled rotary embeddings ({rope}), which are not built for a model that sees "
            "images; take rope_type 'default'"
        )
    if (activation := vision.get("hidden_act", tower.activation)) != tower.activation:
        raise ValueError(f"model: {path} has vision_config.hidden_act {activation!r}, expected {tower.activation!r}")
    return VisionSpec(
        tower=tower,
        config=vision,
        depth=vision["depth"],
        width=vision["hidden_size"],
        ffn=vision["intermediate_size"],
        out=vision["out_hidden_size"],
        patch=vision["patch_size"],
        temporal_patch=vision["temporal_patch_size"],
        channels=vision.get("in_channels", vision.get("in_chans", 3)),
        merge=vision["spatial_merge_size"],
        positions=vision.get("num_position_embeddings", 0),
        deepstack=len(vision.get("deepstack_visual_indexes", ())),
        image_token=config["image_token_id"],
        video_token=config["video_token_id"],
        start_token=config["vision_start_token_id"],
        end_token=config["vision_end_token_id"],
        pad_token=config.get("vision_token_id"),
        axes=_axes(rope, tower, path),
    )


def extract_text(config: dict) -> dict:
    """Extract the settings of the language model alone, as a text model's config.json has them."""
    flat = _flat(config)
    rope = {key: value for key, value in _read_rope(flat).items() if not key.startswith("mrope")}
    for key in ("type", "rope_type"):
        if rope.get(key) == "mrope":
            rope[key] = "default"
    settings = {key: value for key, value in flat.items() if key not in ("rope_scaling", "rope_parameters")}
    shared = ("model_type", "architectures", "tie_word_embeddings", "quantization_config")
    return settings | {"rope_parameters": rope} | {key: config[key] for key in shared if key in config}


def _flat(config: dict) -> dict:
    """Find the language model's keys: in ``text_config``, or in older folders among the others."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _read_rope(text: dict) -> dict:
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    return rope if isinstance(rope, dict) else {}


def _axes(rope: dict, tower: Tower, path: Path) -> tuple[int, ...]:
    """Read the axis that turns each of the ``head_dim / 2`` frequencies: 0 time, 1 height, 2 width.

    They come in sections, or interleaved: time, height, width, time, ... as far as each section reaches.
    """
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or not fits(list[int], sections) or len(sections) != 3 or min(sections) < 0:
        raise ValueError(f"model: {path} has mrope_section {sections!r}, expected three whole numbers")
    if bool(interleaved := rope.get("mrope_interleaved", False)) != tower.interleaves:
        raise ValueError(
            f"model: {path} has mrope_interleaved {interleaved!r}, expected {tower.interleaves}: transformers computes "
            "so in any event"
        )
    if not tower.interleaves:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    axes = [0] * sum(sections)  # time has what height and width leave
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[place] = axis
    return tuple(axes)
