"""Programs run in the process of their test, where what they say and how they end is all that is looked at.

A process of its own would spend a second or more on imports that the tests have made already.
"""

import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch


def run_program(main: Callable[[], object], *arguments: object) -> CompletedProcess[str]:
    """Run a program's ``main`` with arguments; return its output and exit status.

    What would be a traceback in a process of its own is raised.
    """
    output, errors, status = StringIO(), StringIO(), 0
    argv = ["program", *map(str, arguments)]
    with patch.object(sys, "argv", argv), redirect_stdout(output), redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
            if not isinstance(status, int):  # as Python ends a program that gives a message for a status
                print(status, file=sys.stderr)
                status = 1
    return CompletedProcess(argv, int(status), output.getvalue(), errors.getvalue())


def parse_arguments(default, *arguments: str) -> tuple[str, Any]:
    """Parse arguments over default settings: what is said on a terminal, and the settings, or ``[]`` where it ended."""
    from rlworker.config.command_line import parse_config

    found: list = []
    done = run_program(lambda: found.append(parse_config(default)), *arguments)
    return done.stdout + done.stderr, found and found[0]


def run_recipe(name: str, *arguments: object) -> CompletedProcess[str]:
    module = f"recipes.{name}"
    imported = sys.modules.pop(module, None)  # or runpy warns of it
    try:
        return run_program(partial(runpy.run_module, module, run_name="__main__"), *arguments)
    finally:
        if imported:
            sys.modules[module] = imported
