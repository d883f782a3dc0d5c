"""Tools that tests call, in a module of their own: the process that runs a tool imports the module where it stands."""

import random
import time
from functools import wraps


def draw_slowly(most: int) -> int:
    """Return a number after a time at random: the same of the same ``most``, one at random where that is negative."""
    time.sleep(random.random() * 0.02)
    return random.randrange(10) if most < 0 else most % 7


def fail() -> None:
    raise OSError("no disk")


def lay_out(a, /, b=2, *rest, c=3, **more):
    """Return what came where."""
    return a, b, rest, c, more


def take_places(a, b=2, c=3, /):
    return a, b, c


def take_names(*, limit_s, memory_mb=5, keywords=6):
    """Has arguments of the names that ``Model.tool`` has."""
    return limit_s, memory_mb, keywords


async def dispatch(tool, query):
    return f"{tool}: {query}"


def tick():
    yield 1


def wrap_async(text):
    """Return what has to be awaited, and is no coroutine function."""
    return shout(text)


async def shout(text):
    return text.upper()


async def stumble(how):
    if how == "exit":
        raise SystemExit(3)
    raise {"key": KeyError, "half": ValueError}[how]("level \ud83d")


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


def raise_unspeakable():
    raise Unspeakable


class Scale:
    """Multiplies: as an object, by a method, and for a class."""

    unit = 10

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def take_from(self, x, *, start=0):
        return start - x * self.factor

    @classmethod
    def take_units(cls, x):
        return x * cls.unit


class SlowScale(Scale):
    """Is awaited where it is called."""

    async def __call__(self, x):
        return x * self.factor + sum(range(1))


def give_session(function):
    """Make a function that takes one argument less; ``inspect.signature`` looks through it."""

    @wraps(function)
    def call(**arguments):
        return function("a session", **arguments)

    return call


@give_session
def search(session, query):
    return f"{session}: {query}"
