"""Vision towers of transformers as the engine runs them: pixels of some images in, features of their tokens out."""

from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from engines.models.vision.vision_spec import VisionSpec


class TowerRunner(Protocol):
    """The code of a kind of tower; a family names it (``engines.models.family.Tower.runner``)."""

    def build(self, vision: VisionSpec, dtype: torch.dtype) -> torch.nn.Module:
        """Build the tower, its weights not yet loaded; its parameters are named as the family states."""
        ...

    def list_blocks(self, tower: Any) -> list[torch.nn.Module]:
        """List the blocks that may be computed again for their backward pass."""
        ...

    def see(self, tower: Any, pixels: Tensor, grid: Tensor) -> Tensor:
        """Compute features ``[rows, levels, h]`` of images, level 0 being the last.

        Args:
            pixels: as ``ImageProcessor.patches`` gives them. grid: ``[images, 3]``, patches of each.
        """
        ...


def _build_module(vision: VisionSpec, dtype: torch.dtype) -> torch.nn.Module:
    """Build the module of transformers that the family names."""
    module, settings = (resolve_name(name) for name in (vision.tower.module, vision.tower.config))
    with no_init_weights():  # every one is read from the folder
        return module._from_config(settings(**vision.config), attn_implementation="sdpa", dtype=dtype)


class QwenTower:
    """Transformers' own module for Qwen's towers, which takes the patches of all images end to end."""

    build = staticmethod(_build_module)

    @staticmethod
    def list_blocks(tower: Any) -> list[torch.nn.Module]:
        return list(tower.blocks)

    @staticmethod
    def see(tower: Any, pixels: Tensor, grid: Tensor) -> Tensor:
        output = tower(pixels, grid_thw=grid)
        return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], 1)


class SiglipTower:
    """SigLIP, of images all of one size, and a projector that averages patches to tokens (Gemma 3)."""

    @staticmethod
    def build(vision: VisionSpec, dtype: torch.dtype) -> torch.nn.Module:
        tower, model = torch.nn.Module(), _build_module(vision, dtype)
        tower.encoder = getattr(model, "vision_model", model)  # a wrapper before transformers 5.6
        tower.projector = _Projector(vision, dtype)
        return tower

    @staticmethod
    def list_blocks(tower: Any) -> list[torch.nn.Module]:
        return list(tower.encoder.encoder.layers)

    @staticmethod
    def see(tower: Any, pixels: Tensor, grid: Tensor) -> Tensor:
        hidden = tower.encoder(pixel_values=pixels).last_hidden_state  # [images, patches, width]
        return tower.projector(hidden).flatten(0, 1)[:, None]


class InternTower:
    """InternViT, of tiles all of one size, and a projector of neighbouring patches laid side by side (InternVL)."""

    @staticmethod
    def build(vision: VisionSpec, dtype: torch.dtype) -> torch.nn.Module:
        tower = torch.nn.Module()
        tower.encoder, tower.projector = _build_module(vision, dtype), _ShuffleProjector(vision, dtype)
        return tower

    @staticmethod
    def list_blocks(tower: Any) -> list[torch.nn.Module]:
        return list(tower.encoder.encoder.layer)

    @staticmethod
    def see(tower: Any, pixels: Tensor, grid: Tensor) -> Tensor:
        hidden = tower.encoder(pixel_values=pixels).last_hidden_state  # [tiles, 1 + patches, width], class token first
        return tower.projector(hidden[:, 1:]).flatten(0, 1)[:, None]


class _ShuffleProjector(torch.nn.Module):
    """Lays ``merge x merge`` patches side by side as one token (pixel shuffle), norms it and projects it twice."""

    def __init__(self, vision: VisionSpec, dtype: torch.dtype):
        super().__init__()
        self.rows, self.merge = (vision.side or 0) // vision.merge, vision.merge
        merged = vision.width * vision.merge**2
        self.layer_norm = torch.nn.LayerNorm(merged, vision.norm_eps, dtype=dtype)
        self.linear_1 = torch.nn.Linear(merged, vision.out, dtype=dtype)
        self.linear_2 = torch.nn.Linear(vision.out, vision.out, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project patches to tokens: ``[tiles, side * side, width] -> [tiles, tokens, out]``, row by row."""
        cells = hidden.unflatten(1, (self.rows, self.merge, self.rows, self.merge))
        tokens = cells.transpose(2, 3).flatten(3).flatten(1, 2)  # [tiles, rows * rows, merge * merge * width]
        return self.linear_2(torch.nn.functional.gelu(self.linear_1(self.layer_norm(tokens))))


class _Projector(torch.nn.Module):
    """Averages ``merge x merge`` patches, norms in fp32 with a weight that is added to 1, projects without a bias."""

    def __init__(self, vision: VisionSpec, dtype: torch.dtype):
        super().__init__()
        self.mm_input_projection_weight = torch.nn.Parameter(torch.zeros(vision.width, vision.out, dtype=dtype))
        self.mm_soft_emb_norm = _Weight(vision.width, dtype)
        self.side, self.merge, self.eps = vision.side or 0, vision.merge, vision.norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Project patches to tokens: ``[images, side * side, width] -> [images, tokens, out]``, row by row."""
        grid = hidden.transpose(1, 2).unflatten(2, (self.side, self.side))
        pooled = torch.nn.functional.avg_pool2d(grid, self.merge).flatten(2).transpose(1, 2)
        normed = torch.nn.functional.rms_norm(pooled.float(), pooled.shape[-1:], None, self.eps)
        scaled = (normed * (1 + self.mm_soft_emb_norm.weight.float())).to(hidden.dtype)
        return scaled @ self.mm_input_projection_weight


class _Weight(torch.nn.Module):
    """A weight by the name that it has in saved folders."""

    def __init__(self, size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
