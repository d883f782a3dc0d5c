"""Traces of a process's operators, for Perfetto or chrome://tracing."""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import record_function

from hardware.platform import Profiler


class Tracer:
    """Takes one trace at a time, of the process that has it.

    Args:
        build_profiler: the platform's.
    """

    def __init__(self, build_profiler: Callable[[], Profiler]):
        self.build_profiler = build_profiler
        self.worked = False
        """Something was done since the trace began."""

    def begin(self, phase: str) -> None:
        """Record from now on, within a span named ``phase NAME``."""
        self.worked = False
        self.profiler = self.build_profiler()
        self.profiler.start()
        self.span = record_function(f"phase {phase}")
        self.span.__enter__()

    def end(self, path: str) -> None:
        """End the trace, and write it to ``path``, a .json.gz; one in which nothing was done is left out."""
        self.span.__exit__(None, None, None)
        self.profiler.stop()
        if self.worked:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(path)
        del self.profiler, self.span
