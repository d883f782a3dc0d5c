"""Helpers for functions of the user: name and kind, and in the process that runs them, output, interrupt and errors."""

import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from types import FrameType
from typing import Any

INTERRUPT = signal.SIGRTMIN
"""Signal that ends a call that takes too long; not SIGALRM, which reward libraries use themselves."""
_MESSAGE_CHARACTERS = 300


class Interrupt(BaseException):
    """Raised in a call that takes too long. It is no ``Exception``, so that ``except Exception`` does not catch it."""


def strip_partials(function: Any) -> Any:
    """Return the function behind any ``functools.partial``."""
    while isinstance(function, partial):
        function = function.func
    return function


def is_async(function: Any) -> bool:
    """Tell whether a function is a coroutine function, a partial of one, or an object with an async ``__call__``."""
    function = strip_partials(function)
    return iscoroutinefunction(function) or iscoroutinefunction(_find_call(function))


def name_function(function: Any) -> str:
    """Return the name of a function, or of the class of a callable object, with file and line."""
    function = strip_partials(function)
    name, code = getattr(function, "__qualname__", ""), getattr(function, "__code__", None)
    if not name:  # an object, whose repr may differ from process to process
        name, code = type(function).__qualname__, getattr(_find_call(function), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _find_call(function: Any) -> Any:
    """Find the method by which objects of its class are called; None where they are not."""
    return getattr(type(function), "__call__", None)  # noqa: B004  asks for the method, not whether there is one


def write_output_to(path: Path) -> None:
    """Append to a file everything that this process, its C code and its children print, and what ``logging`` writes.

    Several processes share the file: each line is written at once, so that none is lost with a process that is killed.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(file, number)
        text = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, text)
    os.close(file)
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)  # 1 is by the line; C keeps a file's till the end
    # Used only where nobody has set up logging, so that whatever the function sets up, and whenever, takes its place.
    logging.lastResort = logging.StreamHandler()
    logging.lastResort.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().setLevel(logging.INFO)


def describe_error(error: BaseException, is_ours: Callable[[FrameType], bool] = lambda _: False) -> str:
    """Describe an error in one line: type, message and place.

    Args:
        is_ours: tells whether a frame is this project's and not the user's. The outermost frame is always left out.
    """
    frames = [place for place in list(traceback.walk_tb(error.__traceback__))[1:] if not is_ours(place[0])]
    try:
        message = str(error).encode("utf-8", "backslashreplace").decode()  # no terminal takes half a surrogate
    except Exception:
        message = "(its message cannot be made)"
    where = f", {locate(frames)}" if frames else ""
    return f"{type(error).__name__}: {message[:_MESSAGE_CHARACTERS]}{where}"


def locate(frames: list[tuple[FrameType, int]]) -> str:
    """Write the file and line of the outermost frame, and of the innermost one where it differs.

    Args:
        frames: frame and line of each call, outermost first.
    """
    if not frames:  # no Python code of its own
        return "in no Python code of its own"
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in (frames[0], frames[-1])]
    return "at " + " > ".join(dict.fromkeys(places))


def name_block_file(path: str) -> str:
    """Return the path of the file that says where an environment holds the process whose progress file is ``path``."""
    return f"{path}.block"
