"""The capability tables say here how far it was shown that a family trains and rolls out on a platform.

``scripts/tables.py`` writes docs/models.md from it.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

from engines.models.family import Family
from hardware.attention.capabilities import find_backend
from hardware.attention.cell import Cell, Evidence
from hardware.attention.rollouts import ROLLOUTS, find_rollout_backend, list_parts
from hardware.attention.rules import CAUSAL, Rule
from hardware.platform import Platform

Level = Evidence | Literal["refused"]
Input = Literal["text", "images", "videos"]
LAYOUTS = ("bshd", "thd")
_ORDER: tuple[Evidence, ...] = ("untested", "emulated", "executed")
_WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
"""Keys of a config with a window, of which a family's has those that it does not refuse."""


def list_rules(family: Family) -> list[Rule]:
    """List the rules that configs of a family may ask for: causal, and those of a layer with a window."""
    windowed = {key: value for key, value in _WINDOW.items() if key not in family.refused}
    rules = family.rules(family.defaults | windowed | {"num_hidden_layers": 1}, Path(family.model_type))
    return list(dict.fromkeys([CAUSAL, *rules]))


def find_layout_level(family: Family, platform: Platform, layout: str) -> Level:
    """Find the weakest evidence of the code for a family's rules in a layout, without context parallelism."""
    try:
        found = [find_backend(platform.attention_backends, layout, 1, rule) for rule in list_rules(family)]
    except ValueError:
        return "refused"
    return _find_weakest(cell for _, cells in found for cell in cells)


def find_rollout_level(family: Family, platform: Platform) -> Level:
    """Find the weakest evidence of the code for a family's rules in rollouts."""
    rules = list_rules(family)
    try:
        backend = find_rollout_backend(platform.rollout_backends, rules)
    except ValueError:
        return "refused"
    return _find_weakest(ROLLOUTS[backend][part] for part in list_parts(rules))


def list_inputs(family: Family) -> list[Input]:
    """List the largest inputs that a family is shown: text, or images, and videos where it takes those too."""
    if not family.tower:
        return ["text"]
    return ["images"] if family.tower.no_videos else ["images", "videos"]


def find_levels(family: Family, platform: Platform, sees: Input, measured: Collection[str] | None) -> dict[str, Level]:
    """Find the level of each layout and of rollouts.

    Args:
        measured: the parts that results have, those of videos named "PART of videos"; the rest is untested. None takes
            the capability tables, which know nothing of videos.
    """
    levels: dict[str, Level] = {layout: find_layout_level(family, platform, layout) for layout in LAYOUTS}
    levels["rollout"] = find_rollout_level(family, platform)
    if measured is None and sees != "videos":
        return levels
    suffix = " of videos" if sees == "videos" else ""
    return {
        part: level if level == "refused" or f"{part}{suffix}" in (measured or ()) else "untested"
        for part, level in levels.items()
    }


def _find_weakest(cells: Iterable[Cell]) -> Level:
    evidence: list[Evidence] = [cell.evidence for cell in cells]
    return min(evidence, key=_ORDER.index)
