"""Attention rules: the mask of a layer within a sequence, as data that is read and checked without torch."""

import math
from dataclasses import dataclass

import numpy as np

RULES = ("full", "causal", "window", "chunk", "images", "prefix")
"""Names of the parts of a rule in the capability table: one of the first two, and any of the rest."""


@dataclass(frozen=True)
class Rule:
    """The mask of one attention layer: always within one sequence, and never with a padding slot.

    A query at position q sees the key at position k where::

        (k <= q, or not causal, or both in one image, or both in the prefix)
        and q - k < window and q // chunk == k // chunk

    as transformers computes Gemma 3 (images, and windows on local layers), PaliGemma (prefix) and Llama 4 (chunk).
    Images and prefix make future tokens visible; a window hides past tokens alone.

    Attributes:
        causal: a token sees itself and earlier tokens; False sees the whole sequence.
        window: sliding window, counting the tokens seen *including oneself*; None sees the whole past.
        chunk: positions are split into chunks of this size, and a token sees its own chunk alone; None does not split.
        images: tokens of one image see each other in both directions; ``MaskSpec.image_block`` numbers the images.
        prefix: tokens of a sequence's prefix see each other in both directions; ``MaskSpec.prefixes`` has its lengths.

    Raises:
        ValueError: a window or chunk below 1, or a rule that needs to be causal and is not.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    images: bool = False
    prefix: bool = False

    def __post_init__(self):
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Rule: {name} counts the token itself and so is at least 1, got {value}")
        if not self.causal and self.extras:
            raise ValueError(f"Rule: {' and '.join(self.extras)} can only be asked of a causal rule")

    @property
    def extras(self) -> tuple[str, ...]:
        """The demands of the rule beyond causal or full, by the names of ``RULES``."""
        asked = {
            "window": self.window is not None,
            "chunk": self.chunk is not None,
            "images": self.images,
            "prefix": self.prefix,
        }
        return tuple(name for name, yes in asked.items() if yes)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of ``RULES`` that a backend must honour for this rule."""
        return self.extras or (("causal" if self.causal else "full"),)

    def __str__(self) -> str:
        sizes = {"window": self.window, "chunk": self.chunk}
        return "+".join(f"{part}({sizes[part]})" if part in sizes else part for part in self.parts)

    def allows(self, distance: np.ndarray, same_image, both_prefix, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Compute the formula above, over arrays that broadcast against each other.

        Args:
            distance: ``query - key``. same_image, both_prefix: bool arrays, or False where there are none.
            query, key: positions in their sequence.
        """
        see = (distance >= 0) | (not self.causal)
        if self.images:
            see = see | same_image
        if self.prefix:
            see = see | both_prefix
        if self.window is not None:
            see = see & (distance < self.window)
        if self.chunk is not None:
            see = see & (query // self.chunk == key // self.chunk)
        return see


CAUSAL = Rule()


def compute_slot_unit(tp: int, cp: int, multiple: int = 1) -> int:
    """Compute the number of slots that a padded sequence is a multiple of.

    Context parallelism cuts it into ``2 * cp`` chunks and tensor parallelism each of them into ``tp`` parts; a
    context-parallel rank's share of it is a multiple of ``multiple``.
    """
    return math.lcm(tp * 2 * cp if cp > 1 else tp, multiple * cp)


def count_tokens_before(window: int | None) -> int:
    """Convert a window that counts the token itself to a kernel's window, which counts earlier tokens alone.

    This is the one place of the conversion: flash-attention, torch's ``varlen_attn``, TransformerEngine and
    Megatron's ``window_size`` take ``(count_tokens_before(w), 0)``, and ``npu_fusion_attention`` takes it as
    ``pre_tockens``. An unlimited window is -1.
    """
    return -1 if window is None else window - 1
