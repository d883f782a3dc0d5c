"""Add a platform as a contributor does: a folder of its own and a line in hardware/platforms.py.

It is the CPU's under another name, so that its numbers are known.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

CPU = Path(__file__).parents[2] / "hardware" / "cpu"
NAME = "twin"


def write_platform(folder: Path) -> Path:
    """Write the platform's room into a folder that is to stand beside those of ``hardware``; returns that folder."""
    room = folder / NAME
    room.mkdir(parents=True)
    for path in CPU.glob("*.py"):
        text = path.read_text().replace("hardware.cpu", f"hardware.{NAME}")
        for key in ("name", "stand_in"):
            text = text.replace(f'    {key} = "cpu"', f'    {key} = "{NAME}"')
        (room / path.name).write_text(text)
    return folder


@contextmanager
def added_platform(folder: Path) -> Iterator[None]:
    """Have the platform of ``write_platform`` in this process, and no trace of it afterwards."""
    import hardware
    from hardware.platforms import PLATFORMS

    line = {NAME: f"hardware.{NAME}.platform:CpuPlatform"}
    try:
        with patch.object(hardware, "__path__", [*hardware.__path__, str(folder)]), patch.dict(PLATFORMS, line):
            yield
    finally:
        hardware.__dict__.pop(NAME, None)
        for name in [name for name in sys.modules if name.startswith(f"hardware.{NAME}")]:
            del sys.modules[name]


def run_on_added(folder: Path, function: Callable, rank: int, world: int, *args: Any):
    """Call ``function(rank, world, *args)`` in a rank's process, with the platform added for as long as it runs."""
    with added_platform(folder):
        result = function(rank, world, *args)
        assert f"hardware.{NAME}.attention" in sys.modules, "it ran on another platform"
        return result
