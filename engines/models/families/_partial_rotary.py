"""Rotary settings of families that turn a share of a head's entries."""

from pathlib import Path

from engines.models.hf_config import read_rope
from engines.validation import fits

PARTIAL_ROTARY = "partial_rotary_factor"
"""Key of the share of a head's entries that turn."""


def read_partial_rope(config: dict, path: Path) -> dict:
    """Read the rotary settings with the share of a head's entries that turn; ValueError as ``read_rope``.

    What divides frequencies among the axes of images is left out: positions of text have one.
    """
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    share = given.pop(PARTIAL_ROTARY, config[PARTIAL_ROTARY])
    turned = share * config["head_dim"] if fits(float, share) and share > 0 else 0
    if not 2 <= turned <= config["head_dim"] or int(turned) % 2:
        raise ValueError(
            f"model: {path} has {PARTIAL_ROTARY} {share!r}, expected a number from 0 to 1 that gives an even number of "
            f"the {config['head_dim']} entries of a head: rotary embeddings turn pairs"
        )
    given = {key: value for key, value in given.items() if not key.startswith("mrope_")}
    whole = {key: value for key, value in config.items() if key not in ("rope_scaling", PARTIAL_ROTARY)}
    return read_rope(whole | {"rope_parameters": given}, path) | {PARTIAL_ROTARY: share}
