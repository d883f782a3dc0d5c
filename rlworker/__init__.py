"""RL post-training: what to learn from, and the one controller that runs it."""

from pathlib import Path

import engines
import hardware

for _package in (engines, hardware):
    if Path(_package.__file__).resolve().parent.parent != Path(__file__).resolve().parent.parent:
        raise ImportError(
            f"rlworker: the package {_package.__name__!r} resolves to {_package.__file__}, which belongs to another "
            "project; uninstall that distribution or put this one first on the path"
        )
