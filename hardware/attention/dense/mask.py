"""Build a rule as a dense mask over sequences of one length, for kernels that take a mask."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hardware.attention.mask_spec import MaskSpec
from hardware.attention.rules import CAUSAL, Rule


def build_dense_mask(spec: MaskSpec, rule: Rule, members: np.ndarray, query: np.ndarray, keys: int) -> Tensor | None:
    """Build the mask of queries at positions ``query`` over keys at positions ``0..keys-1``, for each sequence.

    Right padding needs no bit of its own if the rule is causal: it lies after every real token of its sequence. Every
    query sees a key.

    Args:
        members: numbers of the sequences.

    Returns:
        ``[members or 1, 1, queries, keys]`` bool, True where a query sees a key; None if the kernel's own causal mask
            is the same.
    """
    key = np.arange(keys)
    image, prefix = np.full((1, 1, 1, 1), -1), np.zeros((1, 1, 1, 1), np.int64)
    if rule.images:
        image = spec.find_images(members[:, None], key)[:, None, None, :]  # [rows, 1, 1, k]
    if rule.prefix:
        prefix = np.asarray(spec.prefixes)[members, None, None, None]
    # What changes nothing here is left out, so that sequences without images take the kernel's own causal rule.
    rule = replace(
        rule,
        window=None if rule.window is None or rule.window >= keys else rule.window,
        chunk=None if rule.chunk is None or rule.chunk >= keys else rule.chunk,
        images=bool((image >= 0).any()),
        prefix=bool((prefix > 1).any()),
    )
    if rule == CAUSAL and spec.cp == 1 and len(query) == keys:
        return None
    own = image[..., query].swapaxes(2, 3) if rule.images else image  # [rows, 1, q, 1]
    query = query[:, None]
    see = rule.allows(query - key, (own == image) & (own >= 0), (query < prefix) & (key < prefix), query, key)
    if not rule.causal:
        lengths = np.asarray(spec.lengths)[members, None, None, None]
        see = see & (key < np.maximum(lengths, 1))  # a row without any key would be 0 / 0
    return torch.from_numpy(see if see.ndim == 4 else see[None, None])
