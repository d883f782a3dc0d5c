"""Write what a tool returned, or why it failed, as content of a chat message."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PLACE = re.compile(r"(?:, at| \() ?\S+:\d+(?: > \S+:\d+)*\)?")
"""Where a function is, or where an error was raised, as ``name_function`` and ``describe_error`` write it."""
_PATH = re.compile(r"(?<![\w.~/:])~?(?:/[^\s/'\"`,;:()<>\[\]]+){2,}/?")
"""An absolute path of two parts or more; the address of a web page has a colon before its slashes."""


@dataclass(frozen=True)
class ToolContent:
    """A tool's result that has images. ``answer_calls`` hands it on as it is.

    Attributes:
        parts: parts of a chat message, ``{"type": "text", "text": ...}`` and ``{"type": "image", "image": ...}``, with
            a path, bytes or a Pillow image.
    """

    parts: tuple[dict[str, Any], ...]


def spell_result(result: Any) -> str | list[dict[str, Any]]:
    """Write a tool's result as content of a message: parts of one with images, else its text."""
    return list(result.parts) if isinstance(result, ToolContent) else str(result)


def tell_model(message: str, arguments: Mapping[str, Any]) -> str:
    """Write the message of a failed call for the model: without lines of code, and without paths of this machine.

    Args:
        arguments: those of the call; a path that the model named itself stays.
    """
    named = json.dumps(arguments, ensure_ascii=False, default=str)

    def shorten(path: re.Match) -> str:
        return path[0] if path[0].rstrip("/") in named else path[0].rstrip("/").rpartition("/")[2]

    return f"error: {_PATH.sub(shorten, _PLACE.sub('', message))}"
