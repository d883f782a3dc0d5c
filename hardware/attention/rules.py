"""Attention rules: the mask of a layer within a sequence, as data that is read and checked without torch."""

import math
from dataclasses import dataclass

import numpy as np

RULES = ("full", "causal", "window", "chunk", "images", "prefix", "state")
"""Names of the parts of a rule in the capability table: "full" or "causal", and any of the others; "state" alone."""


MOST_TAPS = 4
"""Tokens that the convolution of a layer with a state reads at most, the own among them."""

CHUNK = 64
"""Tokens of a sequence that a layer with a state computes together; fewer where every sequence is shorter."""


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
        state: the layer has no attention. A state and a short convolution carry what a token hears of the past, as in
            Qwen3.5 (``hardware.attention.delta_rule``).

    Raises:
        ValueError: a window or chunk below 1, a rule that needs to be causal and is not, or a state with a mask beside.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    images: bool = False
    prefix: bool = False
    state: bool = False

    def __post_init__(self):
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Rule: {name} counts the token itself and so is at least 1, got {value}")
        if not self.causal and self.extras:
            raise ValueError(f"Rule: {' and '.join(self.extras)} need causal=True")
        if self.state and len(self.extras) > 1:
            raise ValueError(f"Rule: {' and '.join(self.extras)} do not go together: a state hears all of the past")

    @property
    def extras(self) -> tuple[str, ...]:
        """The parts of the rule in addition to "causal" or "full", by their names in ``RULES``."""
        asked = {
            "window": self.window is not None,
            "chunk": self.chunk is not None,
            "images": self.images,
            "prefix": self.prefix,
            "state": self.state,
        }
        return tuple(name for name, yes in asked.items() if yes)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names in ``RULES`` of all parts, which a backend must support for this rule."""
        return self.extras or (("causal" if self.causal else "full"),)

    def __str__(self) -> str:
        sizes = {"window": self.window, "chunk": self.chunk}
        return "+".join(f"{part}({sizes[part]})" if part in sizes else part for part in self.parts)

    def allows(self, distance: np.ndarray, same_image, both_prefix, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Compute the formula above for arrays that broadcast.

        Args:
            distance: ``query - key``.
            same_image, both_prefix: bool arrays, or False without images or prefixes.
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
    """Return the number of slots of which the length of a padded sequence must be a multiple.

    Context parallelism cuts a sequence into ``2 * cp`` chunks, and tensor parallelism cuts each chunk into ``tp``
    parts; a context-parallel rank's share is a multiple of ``multiple``.
    """
    return math.lcm(tp * 2 * cp if cp > 1 else tp, multiple * cp)


def count_tokens_before(window: int | None) -> int:
    """Convert a window that counts the token itself to one that counts only earlier tokens; -1 for no window.

    This is the only place of the conversion: flash-attention, torch's ``varlen_attn``, TransformerEngine and Megatron's
    ``window_size`` take ``(count_tokens_before(w), 0)``, and ``npu_fusion_attention`` takes it as ``pre_tockens``.
    """
    return -1 if window is None else window - 1
