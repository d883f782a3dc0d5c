"""Errors with messages for the user of a run."""


class RunError(RuntimeError):
    """The run cannot go on. The message has the reason and a remedy; programs show it without a traceback."""


MONITOR = "was ended by Ray's memory monitor"
"""Fate of a process that Ray ended because its machine was short of memory; another process may hold the memory."""


class NothingScored(RunError):
    """No text of a step got a reward. The steps before it are whole, and are saved."""
