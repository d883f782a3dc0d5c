"""Rotary embedding from each token's own position, so that packing and context parallelism need no special case."""

import torch
from torch import Tensor

from engines.models.spec import ModelSpec


class Rotary:
    """Rotary frequencies of a model (arXiv:2104.09864), scaled by its config (linear, llama3, yarn)."""

    def __init__(self, model: ModelSpec, device: torch.device):
        self.axes = torch.tensor(model.vision.axes, device=device) if model.vision and model.vision.axes else None
        frequencies, scales = zip(*(_compute_frequencies(model, rope, device) for rope in model.ropes), strict=True)
        self.inverse_frequency = torch.stack(frequencies)[:, None, None]  # [kinds, 1, 1, rotary_dim / 2]
        self.scale = torch.tensor(scales, device=device)[:, None, None, None]

    def __call__(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute ``(cos, sin)``, each ``[kinds, b, s, rotary_dim]``, of positions ``[b, s]``; a kind of layer each.

        A model with vision has positions ``[b, s, 3]``: time, height, width. Each frequency is turned by one of them.

        Raises:
            ValueError: the positions have one axis, and the model has three.
        """
        if self.axes is not None and position.dim() != 3:
            raise ValueError(
                f"rotary: positions of shape {tuple(position.shape)}, expected [b, s, 3]; a batch of this model has "
                "the columns of make_image_columns, without images too"
            )
        # [b, s, 1] alike for all frequencies, or [b, s, rotary_dim / 2] with the axis of each.
        coordinate = position[..., None] if self.axes is None else position.index_select(-1, self.axes)
        # [kinds, b, s, rotary_dim / 2], fp32: bf16 skips integers past 256.
        angle = coordinate.float() * self.inverse_frequency
        # Entries i and i + rotary_dim / 2 are a pair that turns together (HuggingFace's order, not interleaved).
        angles = torch.cat([angle, angle], dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def _compute_frequencies(model: ModelSpec, rope: dict, device: torch.device) -> tuple[Tensor, float]:
    """Compute the inverse frequencies ``[rotary_dim / 2]`` of one kind of layer, and the scale of its cos and sin."""
    kind = rope["rope_type"]
    if kind in ("default", "linear"):
        steps = torch.arange(0, model.rotary_dim, 2, dtype=torch.int64).float() / model.rotary_dim
        factor = rope["factor"] if kind == "linear" else 1.0
        return (1.0 / rope["rope_theta"] ** steps).to(device) / factor, 1.0
    # Only where they are needed: importing transformers takes a second of every rank's start.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind](AutoConfig.from_pretrained(model.folder).get_text_config(), device)
