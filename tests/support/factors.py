"""Factors that matrix tests have in common: how a run is spread, laid out and computed. Plain words, without torch."""

import math
import re

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3", "glm4")
STATE_FAMILIES = ("qwen3_5_text",)
"""Families of which most layers have a state in the place of attention."""
STATE_EXPERT_FAMILIES = ("qwen3_next", "qwen3_5_moe_text")
"""Families with states, and experts in the place of MLPs."""
EXPERT_SIZES = ("DP2-EP2", "TP2-EP2", "TP2-ETP2", "CP2-EP2", "PP2")
"""Parallel sizes of mixtures of experts on two ranks, which share out experts or hold each in parts."""
MORE_EXPERT_SIZES = (
    "TP2",
    "CP2",
    "DP2-ETP2",
    "TP2-DP2-EP2",
    "TP2-DP2-EP4",
    "TP2-DP2-EP2-ETP2",
    "PP2-DP2-EP2",
    "PP2-TP2-EP2",
)
MORE_EXPERT_SIZES += ("CP2-DP2-EP4", "CP2-TP2-EP2", "CP2-PP2-EP2", "CP2-TP2-EP2-ETP2", "DP4-EP2")
EXPERT_FAMILIES = ("qwen3_moe", "qwen3_moe-dense", "qwen2_moe", "mixtral", "glm4_moe")
IMAGE_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "qwen2_vl", "internvl")
IMAGE_EXPERT_FAMILIES = ("qwen3_vl_moe",)
"""Families with images and experts: those of the dense family, and experts beside."""
IMAGE_STATE_FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Families with images of which most layers have a state."""
VIDEO_FAMILIES = ("qwen3_vl",)
TIED = ("tied", "untied")
LAYOUTS = ("bshd", "thd")
PLATFORMS = ("cpu", "cuda-emulated", "npu-emulated")
RECOMPUTE = ("none", "full")
TWO_RANKS = ("DP2", "TP2", "PP2", "CP2")
FOUR_RANKS = ("TP2-PP2", "TP2-CP2", "PP2-CP2")
SIZES = ("one", *TWO_RANKS, *FOUR_RANKS)
"""Parallel sizes by name; what a name leaves out is 1. Those of few ranks come first: of equally good cases a cover
takes the earlier."""


def parse_size(size: str) -> dict[str, int]:
    """Read parallel sizes as settings of the engine: ``"TP2-CP2"`` is ``{"tp": 2, "cp": 2}``.

    Data parallelism is no setting: it takes the ranks that the others leave.
    """
    return {name.lower(): int(ways) for name, ways in re.findall(r"\b(TP|PP|CP|EP|ETP)(\d+)", size)}


def count_ranks(size: str) -> int:
    """Count the ranks that a size takes: ``"one"`` takes 1, ``"TP2-CP2"`` 4, and so does ``"TP2-DP2-EP2"``."""
    return math.prod(int(ways) for ways in re.findall(r"\b[TPCD]P(\d+)", size))
