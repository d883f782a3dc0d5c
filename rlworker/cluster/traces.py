"""Traces of a run, for Perfetto or chrome://tracing.

Each process that worked in a phase writes RUN/profile/step_N/PHASE.PROCESS.json.gz.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ray.actor import ActorHandle

from hardware.platform import Profiler
from rlworker.cluster.watch import wait_for


@contextmanager
def tracing(folder: Path, step: int, phase: str, workers: Mapping[str, ActorHandle]) -> Iterator[None]:
    """Take a trace of each worker in this context, which is a phase. A worker that fails leaves no trace.

    Args:
        folder: the run folder. step, phase: name the traces' files.
        workers: name in messages -> Ray's handle.
    """
    wait_for([worker.begin_trace.remote(phase) for worker in workers.values()])
    yield
    place = folder / "profile" / f"step_{step}"
    names = {name: place / f"{phase}.{name.replace(' ', '_')}.json.gz" for name in workers}
    wait_for([worker.end_trace.remote(str(names[name])) for name, worker in workers.items()])


class Tracer:
    """Takes traces of this process, one at a time.

    Args:
        build_profiler: makes the platform's profiler.
    """

    def __init__(self, build_profiler: Callable[[], Profiler]):
        self.build_profiler = build_profiler
        self.worked = False
        """Something was done since the trace began."""

    def begin(self, phase: str) -> None:
        """Start a trace, with a span named ``phase NAME``."""
        import torch  # a worker without a trace does not wait for it here

        self.worked = False
        self.profiler = self.build_profiler()
        self.profiler.start()
        self.span = torch.profiler.record_function(f"phase {phase}")
        self.span.__enter__()

    def end(self, path: str) -> None:
        """End the trace, and write it to ``path``, a .json.gz, unless nothing was done since it began."""
        self.span.__exit__(None, None, None)
        self.profiler.stop()
        if self.worked:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(path)
        del self.profiler, self.span
