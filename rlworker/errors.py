"""Errors that are meant to be read by whoever started the run."""


class RunError(RuntimeError):
    """The run cannot go on, and the message says why and what to do: programs show it without a traceback."""


MONITOR = "was ended by Ray's memory monitor"
"""Fate of a process that was ended because its machine was short of memory, whoever held how much of it."""


class NothingScored(RunError):
    """No text of a step got a reward. What was learned before is whole, and is saved."""
