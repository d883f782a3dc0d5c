"""Images: the places of their tokens, their patches, and their split over ranks.

What text needs of them is nothing, and these functions say so: for a model without vision they import no module of this
package.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from engines.batch.samples import Image
    from engines.models.spec import ModelSpec
    from engines.models.vision.vision_spec import VisionSpec


class ImageModules(NamedTuple):
    """The modules that read images: where their tokens are, and their pixels."""

    columns: ModuleType
    decoding: ModuleType
    placeholders: ModuleType
    processor: ModuleType


def make_columns(
    sequences: Sequence[Sequence[int] | np.ndarray], images: Sequence[tuple[Image, ...]], vision: VisionSpec | None
) -> dict:
    """Make the columns of a ``TrainBatch`` that say where its images are, as ``make_image_columns``; none of text."""
    if vision is None:
        return {}
    return import_modules().columns.make_image_columns(sequences, images, vision)


def list_margins(model: ModelSpec) -> tuple[int, ...]:
    """Return the tokens that may be part of an image's margin, as ``list_margin_tokens``; none of a model of text."""
    if model.vision is None:
        return ()
    return import_modules().placeholders.list_margin_tokens(model)


def import_modules() -> ImageModules:
    """Import what only images need, and return it."""
    from engines.images import columns, decoding, placeholders, processor

    return ImageModules(columns, decoding, placeholders, processor)
