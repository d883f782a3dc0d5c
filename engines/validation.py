"""Checks that all settings share: types, numbers, and files of settings."""

import json
import operator
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval, Le, Lt

PassThrough = dict[str, int | float | bool | str]
"""Settings that are passed on to a library (``engines/pass_through.py``)."""

LARGEST = sys.float_info.max
"""Largest finite number."""

FINITE = Le(LARGEST)
"""Bound of a number that may be anything but infinite: ``Annotated[float, Ge(0), FINITE]``."""

_BOUNDS = (Gt, Ge, Lt, Le, Interval)
_HOLDS = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}


def fits(kind: Any, value: Any) -> bool:
    """Tell whether a value has the type of an annotation. True and False do not count as numbers, nor does NaN."""
    if kind is Any:
        return True
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return fits(arguments[0], value)
    if origin in (Union, UnionType):
        return any(fits(alternative, value) for alternative in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, tuple):
        return isinstance(value, origin) and all(fits(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(arguments[0], k) and fits(arguments[1], v) for k, v in value.items()
        )
    if kind in (int, float):
        types = int if kind is int else (int, float)
        return isinstance(value, types) and not isinstance(value, bool) and value == value
    return isinstance(value, origin or kind)


def spell(kind: Any) -> str:
    """Describe the type of an annotation in words, for messages; ``spell_bounds`` describes its bounds."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return spell(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(spell(alternative) for alternative in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (list, tuple):
        return f"a list ({spell(arguments[0])})"
    if origin is dict:
        return "names with values" if arguments[0] is str else f"pairs ({', '.join(map(spell, arguments))})"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return words.get(kind, getattr(origin or kind, "__name__", str(kind)))


def collect_bounds(kind: Any) -> dict[str, float]:
    """Return the bounds of an annotation of a number: ``{"ge": 1}`` for ``Annotated[int, Ge(1)] | None``."""
    if get_origin(kind) in (Union, UnionType):
        return {name: limit for alternative in get_args(kind) for name, limit in collect_bounds(alternative).items()}
    rules = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    limits = [(name, getattr(rule, name, None)) for rule in rules if isinstance(rule, _BOUNDS) for name in _HOLDS]
    return {name: limit for name, limit in limits if limit is not None}


def is_within(bounds: dict[str, float], value: float) -> bool:
    """Tell whether a number keeps all bounds."""
    return all(_HOLDS[name](value, limit) for name, limit in bounds.items())


def spell_bounds(bounds: dict[str, float]) -> str:
    """Describe bounds in words, for messages and help: ``{"ge": 0, "lt": 1}`` is "at least 0 and below 1"."""
    low, high = bounds.get("ge"), bounds.get("le")
    if None not in (low, high) and high != LARGEST:
        return f"from {low} to {high}"
    if low == 0 and high == LARGEST:
        return "finite and not negative"
    if low == 0 and len(bounds) == 1:
        return "0 or more"
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    spelled = [f"{words[name]} {limit}" for name, limit in bounds.items() if abs(limit) != LARGEST]
    return " and ".join(spelled + ["finite"] * (high == LARGEST))


def option(section: str, name: str) -> str:
    """Return the option of a setting on the command line: ``--actor.micro-batch-tokens``."""
    return f"--{'' if section in ('config', 'check') else section + '.'}{name.replace('_', '-')}"


def check_types(section: str, config: Any) -> None:
    """Raise ValueError unless every field of a config has the type and bounds of its annotation.

    A recipe in Python may pass any value. Bounds are from annotated_types: ``Annotated[int, Ge(1)]``.

    Args:
        section: dotted name of the section, for instance ``actor.optimizer``; ``config`` for fields without a section.
    """
    kinds = get_type_hints(type(config), include_extras=True)
    for name in (f.name for f in fields(config)):
        if not fits(kinds[name], value := getattr(config, name)):
            raise ValueError(
                f"{section}: {name} must be {spell(kinds[name])}, got {value!r}; change {option(section, name)}"
            )
        if bounds := collect_bounds(kinds[name]):
            check_numbers(section, config, spell_bounds(bounds), partial(is_within, bounds), name)


def check_numbers(section: str, config: Any, rule: str, holds: Callable[[float], bool], *names: str) -> None:
    """Raise ValueError unless ``holds(value)`` for every named field that is set; ``rule`` describes it in words."""
    for name in names:
        if (value := getattr(config, name)) is not None and not holds(value):
            raise ValueError(f"{section}: {name} must be {rule}, got {value}; change {option(section, name)}")


def read_object(path: Path) -> dict:
    """Read the object in a JSON file of a model's folder; ValueError if it cannot be read or is no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model: {path} cannot be read: {error}; save the model again") from None
    if not isinstance(content, dict):
        raise ValueError(f"model: {path} must hold a JSON object, got {type(content).__name__}; save the model again")
    return content


def parse_steps(name: str, text: str, steps: int) -> range:
    """Parse ``A:B`` of the setting ``name`` to the range of steps from A to B; an empty text gives an empty range.

    Raises:
        ValueError: the text is not two whole numbers with 1 <= A <= B <= ``steps``.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= steps:
        raise ValueError(
            f"config: {name}={text!r} must name a first and a last step A:B, from 1 to steps={steps} and A at most B; "
            f"set {option('config', name)}, such as 2:3"
        )
    return range(first, last + 1)
