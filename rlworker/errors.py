"""Errors that are meant to be read by whoever started the run."""


class RunError(RuntimeError):
    """The run cannot go on, and the message says why and what to do: programs show it without a traceback."""
