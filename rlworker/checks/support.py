"""Levels of proof, from the capability tables, that a family trains and rolls out on a platform.

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
"""Keys of a config with a window; a family's config has the keys that the family does not refuse."""


def list_rules(family: Family) -> list[Rule]:
    """List the rules that configs of a family may have: causal, and a window."""
    windowed = {key: value for key, value in _WINDOW.items() if key not in family.refused}
    rules = family.rules(family.defaults | windowed | {"num_hidden_layers": 1}, Path(family.model_type))
    return list(dict.fromkeys([CAUSAL, *rules]))


def find_layout_level(family: Family, platform: Platform, layout: str) -> Level:
    """Find the weakest level of proof among the backends of a family's rules in a layout, without context
    parallelism."""
    try:
        found = [find_backend(platform.attention_backends, layout, 1, rule) for rule in list_rules(family)]
    except ValueError:
        return "refused"
    return _find_weakest(cell for _, cells in found for cell in cells)


def find_rollout_level(family: Family, platform: Platform) -> Level:
    """Find the weakest level of proof among the rollout backends of a family's rules."""
    rules = list_rules(family)
    try:
        backend = find_rollout_backend(platform.rollout_backends, rules)
    except ValueError:
        return "refused"
    return _find_weakest(ROLLOUTS[backend][part] for part in list_parts(rules))


def list_inputs(family: Family) -> list[Input]:
    """List the kinds of inputs of a family: text, or images, and videos where it takes them."""
    if not family.tower:
        return ["text"]
    return ["images"] if family.tower.no_videos else ["images", "videos"]


def name_part(part: str, sees: Input) -> str:
    """Name a layout, or rollouts, as results have it: that of videos apart from that of text and images."""
    return f"{part} of videos" if sees == "videos" else part


def find_levels(family: Family, platform: Platform, sees: Input, measured: Collection[str] | None) -> dict[str, Level]:
    """Find the level of each layout and of rollouts.

    Args:
        measured: parts with stored results, by ``name_part``; other parts are untested. None takes the levels of the
            capability tables, which do not cover videos.
    """
    levels: dict[str, Level] = {layout: find_layout_level(family, platform, layout) for layout in LAYOUTS}
    levels["rollout"] = find_rollout_level(family, platform)
    if measured is None and sees != "videos":
        return levels
    return {
        part: level if level == "refused" or name_part(part, sees) in (measured or ()) else "untested"
        for part, level in levels.items()
    }


def _find_weakest(cells: Iterable[Cell]) -> Level:
    evidence: list[Evidence] = [cell.evidence for cell in cells]
    return min(evidence, key=_ORDER.index)
