"""The capability table: each backend computes a rule, in a stated way, or refuses it and names an alternative.

``build_attention_inputs`` of every platform reads only this table. So a rule that a kernel would ignore or misread
never reaches the kernel. docs/masks.md describes the table for users.
"""

from collections.abc import Iterable

from hardware.attention.backends import BACKENDS
from hardware.attention.cell import Cell
from hardware.attention.rules import Rule

Place = tuple[str, str, bool, str]
"""Backend, layout kind, whether context-parallel, and rule."""


TABLE: dict[Place, Cell] = {
    (backend, kind, cp, rule): cell
    for backend, rows in BACKENDS.items()
    for (kind, cp), cells in rows.items()
    for rule, cell in cells.items()
}
"""Every backend, layout and rule, with and without context parallelism."""


def name_place(place: Place) -> str:
    """Return the name of a cell in ``attention_override``: ``backend/kind/cp or no-cp/rule``."""
    backend, kind, cp, rule = place
    return f"{backend}/{kind}/{'cp' if cp else 'no-cp'}/{rule}"


PLACES: dict[str, Place] = {name_place(place): place for place in TABLE}


def find_backend(
    backends: Iterable[str], kind: str, cp: int, rule: Rule, override: Iterable[str] = ()
) -> tuple[str, tuple[Cell, ...]]:
    """Return the first of ``backends`` that computes every part of a rule, and its cells.

    Args:
        kind: the layout. cp: size of context parallelism.
        override: names of refused cells (``name_place``) that are used nevertheless.

    Raises:
        ValueError: no backend computes the rule; the message has the backend that comes nearest, its reason, and a
            layout in which one does.
    """
    backends, override = tuple(backends), tuple(override)
    refusals = {}  # backend -> why, and what comes nearest, for each part
    for backend in backends:
        refusals[backend] = _list_refusals(backend, kind, cp, rule, override)
        if not refusals[backend]:
            return backend, tuple(TABLE[backend, kind, cp > 1, part] for part in rule.parts)
    able, remedy = _find_remedy(backends, kind, cp, rule, override)
    shown = refusals[able or min(backends, key=lambda backend: len(refusals[backend]))]
    reasons = [reason if able else f"{reason}{nearest}" for reason, nearest in shown]
    raise ValueError(
        f"attention: no backend honours the rule {rule} in {kind} with cp={cp}; {remedy}. Of {len(backends)} backends "
        f"the nearest: {'. '.join(reasons)}"
    )


def _list_refusals(backend: str, kind: str, cp: int, rule: Rule, override: tuple[str, ...]) -> list[tuple[str, str]]:
    """List why a backend does not compute a rule, each reason with what comes nearest; empty where it does."""
    cells = {part: TABLE[backend, kind, cp > 1, part] for part in rule.parts}
    names = {part: name_place((backend, kind, cp > 1, part)) for part in rule.parts}
    refused = [part for part, cell in cells.items() if not cell.honoured and names[part] not in override]
    alone = [part for part, cell in cells.items() if cell.honoured and not cell.composes]
    if not refused and len(cells) > 1 and alone:
        return [(f"{backend} honours {' and '.join(alone)} each alone, and not together", "")]
    return [(f"{names[part]} is refused: {cells[part].text}", f"; nearest: {cells[part].nearest}") for part in refused]


def _find_remedy(
    backends: tuple[str, ...], kind: str, cp: int, rule: Rule, override: tuple[str, ...]
) -> tuple[str, str]:
    """Find the settings with the fewest changes by which a backend computes a rule that none computes now: the backend,
    empty without one, and what to change."""
    other = "bshd" if kind == "thd" else "thd"
    for new_kind, new_cp in ((other, cp), (kind, 1), (other, 1)):
        able = [each for each in backends if not _list_refusals(each, new_kind, new_cp, rule, override)]
        if able:
            changes = [f"--actor.layout {new_kind}"] if new_kind != kind else []
            changes += ["--actor.cp 1"] if new_cp != cp else []
            return able[0], f"set {' and '.join(changes)}, in which {able[0]} does"
    return "", "nor does one in another layout; take another platform or another model"


def list_override_warnings(override: Iterable[str]) -> list[str]:
    """Return the warnings of a run, one for each refused cell in ``override``."""
    return [
        f"attention: {name} is refused by the capability table ({TABLE[PLACES[name]].text}; nearest: "
        f"{TABLE[PLACES[name]].nearest}) and used all the same, as --actor.attention-override asks"
        for name in override
    ]


def check_override(override: Iterable[str]) -> None:
    """Raise ValueError if an override names no cell, or a cell that needs no override or that none helps."""
    for name in override:
        if name not in PLACES:
            raise ValueError(
                f"attention: {name!r} names no cell of the capability table; a name is like {next(iter(PLACES))!r}"
            )
        cell = TABLE[PLACES[name]]
        if cell.honoured:
            raise ValueError(f"attention: {name!r} works without an override; leave it out of attention_override")
        if not cell.has_stand_in:
            raise ValueError(
                f"attention: an override of {name!r} does nothing: {cell.text}; leave it out of attention_override, "
                f"nearest: {cell.nearest}"
            )
