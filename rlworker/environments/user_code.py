"""Code of the user's: its name and kind; and in a process that runs it where its output goes, how it is interrupted,
and why it failed."""

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
"""Ends a call that takes too long. Not SIGALRM, which reward libraries take for time limits of their own."""
_MESSAGE_CHARACTERS = 300


class Interrupt(BaseException):
    """Raised in a call that takes too long; no Exception, so that ``except Exception`` lets it through."""


def strip_partials(function: Any) -> Any:
    """Return the function behind any ``functools.partial``."""
    while isinstance(function, partial):
        function = function.func
    return function


def is_async(function: Any) -> bool:
    """Tell a coroutine function, a partial of one, or an object with an async ``__call__``."""
    function = strip_partials(function)
    return iscoroutinefunction(function) or iscoroutinefunction(_find_call(function))


def name_function(function: Any) -> str:
    """Name a function, or the class of a callable object, and the line where it stands."""
    function = strip_partials(function)
    name, code = getattr(function, "__qualname__", ""), getattr(function, "__code__", None)
    if not name:  # an object, whose repr may differ from process to process
        name, code = type(function).__qualname__, getattr(_find_call(function), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _find_call(function: Any) -> Any:
    """Find the method by which objects of its class are called; None where they are not."""
    return getattr(type(function), "__call__", None)  # noqa: B004  asks for the method, not whether there is one


def write_output_to(path: Path) -> None:
    """Let everything that this process, C code in it and its children print go to the end of a file, and ``logging``.

    Several processes share the file: each line is written at once and where the file then ends, so that none is lost
    with a process that is killed.
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
    """Tell type, message and place of an error.

    Args:
        is_ours: tells which frames are none of the user's, beside the one that called.
    """
    frames = [place for place in list(traceback.walk_tb(error.__traceback__))[1:] if not is_ours(place[0])]
    try:
        message = str(error).encode("utf-8", "backslashreplace").decode()  # no terminal takes half a surrogate
    except Exception:
        message = "(its message cannot be made)"
    where = f", {locate(frames)}" if frames else ""
    return f"{type(error).__name__}: {message[:_MESSAGE_CHARACTERS]}{where}"


def locate(frames: list[tuple[FrameType, int]]) -> str:
    """Find the line of the user's function, and the innermost one where it is another."""
    if not frames:  # no Python code of its own
        return "in no Python code of its own"
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in (frames[0], frames[-1])]
    return "at " + " > ".join(dict.fromkeys(places))


def name_block_file(path: str) -> str:
    """Name the file that says where an environment holds the process whose progress is at ``path``."""
    return f"{path}.block"
