"""Rows to learn from: their sources, their fields, their images."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.models.spec import ModelSpec
    from rlworker.data.images import ImageReader


def make_image_reader(model: ModelSpec, run_dir: str, limit_mb: int) -> ImageReader | None:
    """Make the image reader of a model, as ``build_image_reader``; None, and no import, for a model of text."""
    if model.vision is None:
        return None
    from rlworker.data.images import build_image_reader

    return build_image_reader(model, run_dir, limit_mb)
