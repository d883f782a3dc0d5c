"""Functions that code passes to a run, and the settings that they take by the names of their keyword parameters."""

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

from engines.validation import option

_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class PassedFunction:
    """A function that is given settings. One that the user set and nobody reads would be dropped in silence: refused.

    Args:
        what: the function's part in the run, for messages.

    Attributes:
        bound: keywords that the code has set by ``partial``. given: those that settings have set.
    """

    def __init__(self, function: Callable, what: str):
        self.function, self.what = function, what
        self.bound, self.given, inner = {}, {}, function
        while isinstance(inner, partial):
            self.bound, inner = inner.keywords | self.bound, inner.func
        self.inner = inner
        self._parameters = signature(inner).parameters

    def takes(self, name: str) -> bool:
        """Tell whether it has a keyword parameter of this name."""
        takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in self._parameters.values())
        return takes_any or (name in self._parameters and self._parameters[name].kind in _BY_KEYWORD)

    def give(self, name: str, value: Any, key: str, is_set: bool) -> None:
        """Give it a setting by its parameter ``name``, where the user set it or the parameter has no default.

        Args:
            key: dotted name of the setting.

        Raises:
            ValueError: the user set it, and the function has no parameter of its name, or the code sets another value.
        """
        spelled = option(*key.rsplit(".", 1))
        if name in self.bound:
            if is_set and self.bound[name] != value:
                raise ValueError(
                    f"{self.what}: the code sets {name}={self.bound[name]!r}, and {key} is {value!r}; leave out one of "
                    f"{name} and {spelled}"
                )
        elif not self.takes(name):
            if is_set:
                raise ValueError(
                    f"{self.what}: {key} is {value!r}, and the function that was passed does not take it; give it a "
                    f"keyword parameter {name}, or leave {spelled} out"
                )
        elif is_set or (name in self._parameters and self._parameters[name].default is Parameter.empty):
            self.given[name] = value

    def give_settings(self, section: str, default: Any, **settings: Any) -> None:
        """Give it settings of a section by their own names, as ``give``; one of another value than in the ``default``
        section counts as set by the user."""
        for name, value in settings.items():
            self.give(name, value, f"{section}.{name}", value != getattr(default, name))

    def build(self) -> Callable:
        """Return the function with its settings."""
        return partial(self.function, **self.given) if self.given else self.function
