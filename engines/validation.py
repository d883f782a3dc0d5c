"""Checks that all settings share: types, numbers, names that are passed on to a library, and files of settings."""

import ast
import difflib
import json
import operator
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval, Le, Lt

PassThrough = dict[str, int | float | bool | str]

LARGEST = sys.float_info.max
"""Largest finite number."""

FINITE = Le(LARGEST)
"""Bound of a number that may be anything but infinite: ``Annotated[float, Ge(0), FINITE]``."""

_BOUNDS = (Gt, Ge, Lt, Le, Interval)
_HOLDS = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}


def fits(kind: Any, value: Any) -> bool:
    """Tell whether a value is what an annotation says. True and False are no numbers here, and NaN is none either."""
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
    """Spell an annotation in words, for messages; its bounds are ``spell_bounds``'s."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return spell(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(spell(alternative) for alternative in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (list, tuple):
        return f"a list ({spell(arguments[0])})"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return words.get(kind, getattr(origin or kind, "__name__", str(kind)))


def collect_bounds(kind: Any) -> dict[str, float]:
    """Collect the bounds that an annotation sets to a number: ``{"ge": 1}`` for ``Annotated[int, Ge(1)] | None``."""
    if get_origin(kind) in (Union, UnionType):
        return {name: limit for alternative in get_args(kind) for name, limit in collect_bounds(alternative).items()}
    rules = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    limits = [(name, getattr(rule, name, None)) for rule in rules if isinstance(rule, _BOUNDS) for name in _HOLDS]
    return {name: limit for name, limit in limits if limit is not None}


def is_within(bounds: dict[str, float], value: float) -> bool:
    """Tell whether a number keeps all bounds."""
    return all(_HOLDS[name](value, limit) for name, limit in bounds.items())


def spell_bounds(bounds: dict[str, float]) -> str:
    """Spell bounds in words, for messages and help: ``{"ge": 0, "lt": 1}`` is "at least 0 and below 1"."""
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
    """Spell a setting as the command line does: ``--actor.micro-batch-tokens``."""
    return f"--{'' if section in ('config', 'check') else section + '.'}{name.replace('_', '-')}"


def check_types(section: str, config: Any) -> None:
    """Raise ValueError unless every field has the type and bounds of its annotation.

    A recipe in Python may pass any value. Bounds are those of annotated_types: ``Annotated[int, Ge(1)]``.

    Args:
        section: dotted name of the section, for instance ``actor.optimizer``; ``config`` for fields of no section.
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
    """Raise ValueError unless ``holds(value)`` of every named field, where it is set; ``rule`` says it in words."""
    for name in names:
        if (value := getattr(config, name)) is not None and not holds(value):
            raise ValueError(f"{section}: {name} must be {rule}, got {value}; change {option(section, name)}")


@cache
def read_installed_fields(package: str, *sources: tuple[str, str]) -> dict[str, Any] | None:
    """Read the fields of dataclasses, name -> type, from an installed package's source, which is not imported.

    Args:
        sources: file within the package and name of the class in it.

    Returns:
        None where the package or a class is not installed. Types other than int, float, bool, str, unions and literals
        become Any.
    """
    spec = find_spec(package)
    types: dict[str, Any] = {}
    for file, name in sources:
        paths = [Path(folder) / file for folder in (spec and spec.submodule_search_locations) or ()]
        texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
        classes = [n for text in texts for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name]
        if not classes:
            return None
        for line in classes[0].body:
            match line:
                case ast.AnnAssign(target=ast.Name(id=field), annotation=annotation) if not field.startswith("_"):
                    types[field] = _read_type(annotation)
    return types


def _read_type(annotation: ast.expr) -> Any:
    """Read the type that an annotation in a source names."""
    match annotation:
        case ast.Name(id=name):
            return {"int": int, "float": float, "bool": bool, "str": str}.get(name, Any)
        case ast.Constant(value=None):
            return NoneType
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read_type(left) | _read_type(right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _read_type(inner) | None
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return Literal[ast.literal_eval(inner)]
    return Any


def check_pass_through(
    where: str, given: PassThrough, own: frozenset[str], refused: frozenset[str], known: dict[str, Any] | None
) -> None:
    """Raise ValueError for an argument that the engine cannot pass on to the library, or a value of another type.

    Args:
        known: the fields that ``read_installed_fields`` found.
    """
    if clashes := sorted(given.keys() & own):
        raise ValueError(f"{where} may not set {clashes}: the engine depends on its own values; drop them")
    if clashes := sorted(given.keys() & refused):
        raise ValueError(f"{where} may not set {clashes}: the engine or its counterpart would not follow; drop them")
    if known is None:
        return
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else "drop it"
            raise ValueError(f"{where} has {name!r}, which is not there to be set; {hint}")
        if not fits(known[name], given[name]):
            raise ValueError(f"{where} has {name} {given[name]!r}, expected {spell(known[name])}")


def read_object(path: Path) -> dict:
    """Read the object in a JSON file of a model's folder; ValueError where it cannot be read or holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model: {path} cannot be read: {error}; save the model again") from None
    if not isinstance(content, dict):
        raise ValueError(f"model: {path} must hold a JSON object, got {type(content).__name__}; save the model again")
    return content
