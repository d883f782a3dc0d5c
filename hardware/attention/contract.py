"""Requirements of an attention kernel on its calls, as data: one form for every kernel that is emulated.

An emulated kernel checks each call. It is strict: a call that a device would silently compute wrongly raises.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Call = TypeVar("Call")


class RefusedError(RuntimeError):
    """The emulator got a call that the device refuses, or that its documentation does not allow."""


class SilentError(RuntimeError):
    """The emulator got a call that the device accepts and computes wrongly, or not as documented."""


class NotEmulatedError(NotImplementedError):
    """The emulator got a call that the device computes and the emulator does not."""


@dataclass(frozen=True)
class Source:
    """A place where a requirement is written.

    Attributes:
        name: name of the place.
        refuses: whether code at that place raises at a call that breaks the requirement; a page of documentation does
            not.
    """

    name: str
    refuses: bool = True


@dataclass(frozen=True)
class Requirement(Generic[Call]):
    """One requirement of a kernel on its calls.

    Attributes:
        name: name of the requirement. source: where it is written.
        holds: tells whether a call keeps the requirement. It may assume the requirements before it.
        text: describes the mistake of a call that breaks it.
        silent: whether a device computes a call that breaks it wrongly, without an error.
    """

    name: str
    source: Source
    holds: Callable[[Call], bool]
    text: Callable[[Call], str]
    silent: bool = False

    @property
    def consequence(self) -> str:
        """Describes what a device does with a call that breaks the requirement."""
        if self.silent:
            return "computed as something else, without an error"
        return "refused" if self.source.refuses else "not allowed; what happens is not known"


@dataclass(frozen=True)
class KernelContract:
    """A kernel on a device, and the calls to test it with.

    Attributes:
        requirements: the requirements, in order.
        examples: name of a requirement -> arguments of a call that breaks it, and of one that keeps it.
        attend: makes a call and returns the output.
    """

    requirements: tuple[Requirement, ...]
    examples: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    attend: Callable[..., Any]


def check_call(operator: str, requirements: Iterable[Requirement[Call]], call: Call) -> None:
    """Raise RefusedError or SilentError for the first requirement that a call breaks.

    Args:
        operator: name of the kernel, for the message.
    """
    for requirement in requirements:
        if not requirement.holds(call):
            kind = SilentError if requirement.silent else RefusedError
            raise kind(
                f"{operator}, emulated: {requirement.name} ({requirement.source.name}; on a device: "
                f"{requirement.consequence}): {requirement.text(call)}"
            )
