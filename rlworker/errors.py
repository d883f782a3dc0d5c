"""Errors for the user to read."""


class RunError(RuntimeError):
    """The run cannot go on, and the message names cause and repair: programs show it without a traceback."""


MONITOR = "was ended by Ray's memory monitor"
"""Fate of a process that was ended because its machine was short of memory, whoever held how much of it."""


class NothingScored(RunError):
    """No text of a step got a reward. The steps before it are saved."""
