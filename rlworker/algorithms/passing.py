"""Functions that a user's code passes to a run, and the settings that they get as keyword arguments."""

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

from engines.validation import option

_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class PassedFunction:
    """A function from the user's code that gets settings as keyword arguments.

    Args:
        what: role of the function, for messages: "loss", "advantage".

    Attributes:
        bound: keyword arguments that the code has bound by ``functools.partial``.
        given: keyword arguments that settings have set.
    """

    def __init__(self, function: Callable, what: str):
        self.function, self.what = function, what
        self.bound, self.given, inner = {}, {}, function
        while isinstance(inner, partial):
            self.bound, inner = inner.keywords | self.bound, inner.func
        self.inner = inner
        self._parameters = signature(inner).parameters

    def takes(self, name: str) -> bool:
        """Tell whether the function has a keyword parameter of this name."""
        takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in self._parameters.values())
        return takes_any or (name in self._parameters and self._parameters[name].kind in _BY_KEYWORD)

    def give(self, name: str, value: Any, key: str, is_set: bool) -> None:
        """Give the function a setting as its parameter ``name``, if the user set it or the parameter has no default.

        Args:
            key: dotted name of the setting.
            is_set: whether the user set it.

        Raises:
            ValueError: the user set it, and the function has no such parameter, or the code binds it to another value.
        """
        spelled = option(*key.rsplit(".", 1))
        if name in self.bound:
            if is_set and self.bound[name] != value:
                raise ValueError(
                    f"{self.what}: your code binds {name}={self.bound[name]!r} by functools.partial, and the setting "
                    f"{key}, which goes to that parameter, is {value!r}; leave {name} out in the code, or leave "
                    f"{spelled} out"
                )
        elif not self.takes(name):
            if is_set:
                raise ValueError(
                    f"{self.what}: {key} is {value!r}, and {self.inner!r:.80} from your code has no parameter for it; "
                    f"give the function a keyword parameter {name}, or leave {spelled} out"
                )
        elif is_set or (name in self._parameters and self._parameters[name].default is Parameter.empty):
            self.given[name] = value

    def give_settings(self, section: str, default: Any, **settings: Any) -> None:
        """Give the function settings of a section as parameters of the same names, as ``give`` does.

        Args:
            section: name of the section.
            default: the section with its defaults; a setting that differs from it counts as set by the user.
        """
        for name, value in settings.items():
            self.give(name, value, f"{section}.{name}", value != getattr(default, name))

    def build(self) -> Callable:
        """Return the function with its settings bound."""
        return partial(self.function, **self.given) if self.given else self.function
