"""Tools that tests call, in a module of their own: the process that runs a tool imports the module where it stands."""

import random
import time


def draw_slowly(most: int) -> int:
    """Return a number after a time at random: the same of the same ``most``, one at random where that is negative."""
    time.sleep(random.random() * 0.02)
    return random.randrange(10) if most < 0 else most % 7


def fail() -> None:
    raise OSError("no disk")
