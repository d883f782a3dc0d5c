"""Losses in a capsule, by the names of their functions and the arguments that are bound."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


def describe_function(function: Callable) -> dict[str, Any]:
    """Describe a function, or a ``functools.partial`` of one, as plain data: name, and bound arguments by keyword.

    Raises:
        ValueError: it is an object with a state of its own, has positional arguments bound or a value that JSON cannot
            hold, or is defined where no module can be imported from.
    """
    bound: dict[str, Any] = {}
    while isinstance(function, partial):
        if function.args:
            raise ValueError(f"capsule: {function!r:.80} binds arguments by their place; bind them by keyword")
        bound, function = function.keywords | bound, function.func
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if not module or "<" in name:  # a lambda, or a function within another
        raise ValueError(f"capsule: {function!r:.80} has no name in a module; define it in one")
    if module == "__main__":
        main = sys.modules["__main__"]
        module = main.__spec__.name if main.__spec__ else Path(getattr(main, "__file__", None) or "").stem
        if not module:
            raise ValueError(f"capsule: {function!r:.80} is defined in an interactive session; define it in a module")
    for key, value in bound.items():
        if not callable(value) and not _is_plain(value):
            raise ValueError(
                f"capsule: {name} binds {key}={value!r:.80}, expected what JSON holds: numbers, texts, lists, dicts "
                "by texts; make other values within the function"
            )
    described = {key: describe_function(value) if callable(value) else value for key, value in bound.items()}
    return {"function": f"{module}:{name}", "bound": described}


def _is_plain(value: Any) -> bool:
    """Tell whether JSON gives a value back; a tuple comes back as a list."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | None)


def find_function(described: dict[str, Any]) -> Callable:
    """Find the function that ``describe_function`` described.

    Raises:
        ValueError: its module cannot be imported here, or has no such function.
    """
    try:
        function: Any = resolve_name(described["function"])
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"capsule: its loss {described['function']!r} cannot be found: {error}; start the command in the folder of "
            "the recipe that has it"
        ) from None
    bound = {
        key: find_function(value) if isinstance(value, dict) and "function" in value else value
        for key, value in described["bound"].items()
    }
    return partial(function, **bound) if bound else function
