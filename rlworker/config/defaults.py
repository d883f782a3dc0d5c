"""Defaults that follow from what the command line says."""

import argparse
from collections.abc import Sequence
from typing import TypeVar

from hardware.platforms import PLATFORMS
from rlworker.config.run import TrainingConfig

Config = TypeVar("Config", bound=TrainingConfig)


def on_given_platform(default: Config, arguments: Sequence[str] | None = None) -> Config:
    """Move a recipe's settings to the platform that a command line names, before the rest of it is read.

    A recipe may take sizes from the platform (``TrainingConfig.on_platform``). They are defaults like the others, so
    that a key that the user gives wins over them, and ``--help`` shows them.

    Args:
        arguments: of the command line; None takes this program's.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--platform", nargs="?")
    name = parser.parse_known_args(arguments)[0].platform
    is_another = name in PLATFORMS and name != default.platform  # what is wrong with a name is said where all is read
    return default.on_platform(name) if is_another else default
