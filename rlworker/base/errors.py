"""Errors with messages for the user of a run."""

import sys
import traceback
from types import TracebackType


class RunError(RuntimeError):
    """The run cannot go on. The message has the reason and a remedy; programs show it without a traceback."""


MONITOR = "was ended by Ray's memory monitor"
"""Fate of a process that Ray ended because its machine was short of memory; another process may hold the memory."""


class NothingScored(RunError):
    """No text of a step got a reward. The steps before it are whole, and are saved."""


_SETTINGS = ("rlworker.config.", "engines.config")
"""Beginnings of the modules of settings, whose classes check their values as they are made."""


def explain_settings(error: BaseException) -> str | None:
    """Explain an error that a class of settings raised as a file made it: the error, and the line of that file.

    None for any other error.
    """
    place, is_at_import = "", False
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "__post_init__" and module.startswith(_SETTINGS):
            break
        if frame.f_code.co_filename != "<string>" and module != "dataclasses":  # the __init__ of a dataclass, replace
            place, is_at_import = f"{frame.f_code.co_filename}:{line}", frame.f_code.co_name == "<module>"
    else:
        return None
    if not isinstance(error, ValueError) or not place:
        return None
    when = ", before any option is read" if is_at_import else ""
    return f"error: {error}. The settings are made at {place}{when}; change them there"


def show_settings_errors() -> None:
    """Have a program that ends by an error of its settings say so in a line, and not by a traceback."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explained = explain_settings(error)
        if explained is None:
            before(kind, error, trace)
        else:
            print(explained, file=sys.stderr)

    sys.excepthook = show
