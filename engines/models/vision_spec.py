"""The vision tower of a vision-language model, read from its config.json alone."""

import math
from dataclasses import dataclass
from pathlib import Path

from engines.models.family import Tower, Weight
from engines.validation import fits, spell

_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_LISTS = ("fullatt_block_indexes", "deepstack_visual_indexes")
"""Keys of a ``vision_config`` that hold layers' numbers; every other that a family needs holds a number."""


@dataclass(frozen=True)
class VisionSpec:
    """The shape of a vision tower, and how its features enter the language model.

    Attributes:
        tower: the family's description of it. config: the model's ``vision_config`` as it was saved.
        width, ffn, out: sizes of the tower's hidden states, of its MLPs and of its output features.
        patch, temporal_patch: pixels of a patch's side and frames in it; channels: colours of a pixel.
        merge: an image token stands for ``merge x merge`` patches.
        positions: places of a learned grid of positions; 0 without one.
        deepstack: levels of features that are added to the hidden states after as many first layers (arXiv:2406.04334).
        image_token, video_token, start_token, end_token: ids. pad_token: one more that some configs have.
        axes: for each rotary frequency the axis that turns it: 0 time, 1 height, 2 width (arXiv:2409.12191). None where
            images have positions as text has.
        side: patches of the side of every image or tile; None where each image has its own size. norm_eps: of the
            projector's norm.
    """

    tower: Tower
    config: dict
    depth: int
    width: int
    ffn: int
    out: int
    patch: int
    temporal_patch: int
    channels: int
    merge: int
    positions: int
    deepstack: int
    image_token: int
    video_token: int | None
    start_token: int
    end_token: int
    pad_token: int | None
    axes: tuple[int, ...]
    side: int | None = None
    norm_eps: float = 1e-6

    @classmethod
    def from_config(cls, config: dict, tower: Tower, path: Path) -> "VisionSpec":
        """Read a whole ``config.json``.

        Raises:
            ValueError: a key is missing, has a wrong type, or asks for something that is not built.
        """
        if tower.read:
            return tower.read(config, tower, path)
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
                raise ValueError(
                    f"model: {path} has vision_config.{key} {vision[key]!r}, expected {spell(kind)} above 0"
                )
        for key in _TOKENS:
            if not fits(int, config[key]) or config[key] < 0:
                raise ValueError(f"model: {path} has {key} {config[key]!r}, expected the number of a token")
        if config.get("vision_token_id") is not None and not fits(int, config["vision_token_id"]):
            raise ValueError(
                f"model: {path} has vision_token_id {config['vision_token_id']!r}, expected a token's number"
            )
        rope = _read_rope(_flat(config))
        if {rope.get(key, "default") for key in ("type", "rope_type")} - {"default", "mrope"}:
            raise ValueError(
                f"model: {path} has scaled rotary embeddings ({rope}), which are not built for a model that sees "
                "images; take rope_type 'default'"
            )
        if (activation := vision.get("hidden_act", tower.activation)) != tower.activation:
            raise ValueError(
                f"model: {path} has vision_config.hidden_act {activation!r}, expected {tower.activation!r}"
            )
        return cls(
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
            axes=_axes(rope, path),
        )

    def check_language(self, hidden: int, head_dim: int, vocab: int, path: Path) -> None:
        """Raise ValueError where the tower does not fit a language model of these sizes."""
        if self.out != hidden:
            raise ValueError(
                f"model: {path} has vision_config.out_hidden_size {self.out}, expected hidden_size {hidden}"
            )
        if self.axes and len(self.axes) != head_dim // 2:
            raise ValueError(
                f"model: {path} has an mrope_section of {len(self.axes)} frequencies in all, expected {head_dim // 2}, "
                "half of a head"
            )
        if self.banned_tokens[-1] >= vocab:
            raise ValueError(
                f"model: {path} has an image token {self.banned_tokens[-1]}, expected one below vocab_size {vocab}"
            )

    @property
    def heads(self) -> int:
        """Attention heads of the tower."""
        return self.config.get("num_heads") or self.config["num_attention_heads"]

    @property
    def levels(self) -> int:
        """Number of feature vectors of each image token: its embedding, and one for each of the first layers that adds
        features."""
        return 1 + self.deepstack

    @property
    def patch_size(self) -> int:
        """Length of a patch's vector of pixel values."""
        return math.prod(self.patch_shape)

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Colours, frames, rows and columns of a patch."""
        return self.channels, self.temporal_patch, self.patch, self.patch

    @property
    def feature_tokens(self) -> list[int]:
        """Ids that features replace: the image token, and the video token where the model takes videos."""
        return [self.image_token, *([] if self.video_token is None else [self.video_token])]

    @property
    def banned_tokens(self) -> tuple[int, ...]:
        """Ids that stand for images and mark where they are: never sampled, and never learned."""
        ids = {self.image_token, self.video_token, self.start_token, self.end_token, self.pad_token}
        return tuple(sorted(ids - {None}))

    def list_weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """List every weight in the order of the tower's modules: name within the tower -> shape."""
        return self.tower.weights(self)

    def weights(self) -> list[Weight]:
        """List the tower's parameters by names of the model; ranks of the first pipeline stage hold them whole."""
        tower, parameters = self.tower, []
        for name, shape in self.list_weight_shapes().items():
            part = "projector" if name.startswith(tower.projector) else "vision"
            parameters.append(Weight(f"vision.{name}", {tower.find_folder_name(name): shape}, part=part))
        return parameters


def extract_language_config(config: dict) -> dict:
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
    """Find the language model's keys: in ``text_config``, or in older folders at the top level."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _read_rope(text: dict) -> dict:
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    return rope if isinstance(rope, dict) else {}


def _axes(rope: dict, path: Path) -> tuple[int, ...]:
    """Read the axis that turns each of the ``head_dim / 2`` frequencies: 0 time, 1 height, 2 width.

    They come in sections, or interleaved: time, height, width, time, ... as far as each section reaches.
    """
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or not fits(list[int], sections) or len(sections) != 3 or min(sections) < 0:
        raise ValueError(f"model: {path} has mrope_section {sections!r}, expected three whole numbers")
    if not rope.get("mrope_interleaved"):
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    axes = [0] * sum(sections)  # time has the remaining frequencies
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[place] = axis
    return tuple(axes)
