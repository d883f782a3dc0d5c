"""The vision tower of a vision-language model: its family's description, and its shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.models.weight import Weight
from hardware.megatron.mixers import FP32

_MLP_TENSORS = {"silu": 4, "gelu": 2, "gelu_pytorch_tanh": 2, "quick_gelu": 3}
"""Activation of a tower -> tensors that its MLP keeps: its input and output, the sigmoid of quick-gelu, a separate
operator in torch, and for a gated MLP the gated half and the product."""


@dataclass(frozen=True)
class Tower:
    """The vision tower of a family, as transformers builds it.

    Attributes:
        prefixes: how names begin in the tower's module -> in a saved folder.
        projector: how those names begin in the module of weights that map features to tokens.
        runner: the code that runs it (``engines.megatron.vision.towers``), as ``pkgutil.resolve_name`` takes it.
        module, config: transformers' classes of the tower and of its settings, as ``pkgutil.resolve_name`` takes them.
        needed: keys that ``vision_config`` must have.
        activation: the only ``hidden_act`` that it may have.
        gated: its MLPs have a gate and its norms are RMS norms; else neither.
        interleaves: rotary frequencies of the three axes are interleaved; else they lie in sections.
        weights: gives each weight's name in the module and its shape, in the order of the modules.
        read: reads the tower from a whole ``config.json``; raises ValueError for a key that is missing, has a wrong
            type or asks for something that is not built.
        margin: newlines before the start token of an image and after its end token.
        video_processor: transformers' class that makes patches of videos.
        no_videos: why the model is shown no videos; empty where it is.
        tiles: an image is cut into tiles of one size, one of them or more, and vLLM adds its marks.
    """

    prefixes: dict[str, str]
    projector: tuple[str, ...]
    module: str
    config: str
    needed: tuple[str, ...]
    activation: str
    gated: bool
    weights: Callable[[VisionSpec], dict[str, tuple[int, ...]]]
    read: Callable[[dict, Tower, Path], VisionSpec]
    interleaves: bool = False
    runner: str = "engines.megatron.vision.towers:QwenTower"
    margin: str = ""
    video_processor: str = ""
    no_videos: str = "they are not built for this family"
    tiles: bool = False

    def find_folder_name(self, name: str) -> str:
        """Find the name in a saved folder of a weight of the tower's module."""
        begin = next(begin for begin in self.prefixes if name.startswith(begin))
        return self.prefixes[begin] + name.removeprefix(begin)


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

    def check_language(self, hidden: int, rotary_dim: int, vocab: int, path: Path) -> None:
        """Raise ValueError where the tower does not fit a language model of these sizes."""
        if self.out != hidden:
            raise ValueError(
                f"model: {path} has vision_config.out_hidden_size {self.out}, expected hidden_size {hidden}"
            )
        if self.axes and len(self.axes) != rotary_dim // 2:
            raise ValueError(
                f"model: {path} has an mrope_section of {len(self.axes)} frequencies in all, expected "
                f"{rotary_dim // 2}, half of what turns of a head"
            )
        if self.banned_tokens[-1] >= vocab:
            raise ValueError(
                f"model: {path} has an image token {self.banned_tokens[-1]}, expected one below vocab_size {vocab}"
            )

    def estimate_activations(self, tokens: float, *, size: int, tp: int, cp: int, recompute: str) -> float:
        """Estimate the bytes that the tower keeps for a number of image tokens of each context-parallel rank.

        Per patch and layer: inputs and outputs of both norms and the residual, queries, keys and values before and
        after rotation, attention's output (11 widths in all), the tensors of the MLP, and RMS norms' inputs in fp32.
        Features are held for all of a replica's tokens by each rank: as they are made, gathered, and as they are
        merged.

        Args:
            size: bytes of a number. recompute: as in the engine's settings; empty where the tower does not learn.
        """
        mlp, norms = _MLP_TENSORS[self.tower.activation] * self.ffn, 2 * self.width * self.tower.gated
        whole = (11 * self.width + mlp) * size + norms * FP32
        kept = whole  # of a layer at a time
        if recompute == "full":
            kept += self.depth * self.width * size
        elif recompute:
            kept = self.depth * whole
        features = 3 * tokens * cp * self.levels * self.out * size
        return tokens * self.merge**2 / tp * kept + features

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

    def weights(self) -> list[Weight]:
        """List the tower's parameters by names of the model; ranks of the first pipeline stage hold them whole."""
        tower, parameters = self.tower, []
        for name, shape in tower.weights(self).items():
            part = "projector" if name.startswith(tower.projector) else "vision"
            parameters.append(Weight(f"vision.{name}", {tower.find_folder_name(name): shape}, part=part))
        return parameters
