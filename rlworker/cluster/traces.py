"""The traces of a run, for Perfetto or chrome://tracing: RUN/profile/step_N/PHASE.PROCESS.json.gz, of every process
that worked in a phase."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ray.actor import ActorHandle

from hardware.platform import Profiler
from rlworker.cluster.watch import wait_for


@contextmanager
def tracing(folder: Path, step: int, phase: str, workers: Mapping[str, ActorHandle]) -> Iterator[None]:
    """Take a trace of a phase in each worker. One that fails leaves none.

    Args:
        folder: of the run. workers: by the names that messages give them.
    """
    wait_for([worker.begin_trace.remote(phase) for worker in workers.values()])
    yield
    place = folder / "profile" / f"step_{step}"
    names = {name: place / f"{phase}.{name.replace(' ', '_')}.json.gz" for name in workers}
    wait_for([worker.end_trace.remote(str(names[name])) for name, worker in workers.items()])


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
        import torch  # a worker without a trace does not wait for it here

        self.worked = False
        self.profiler = self.build_profiler()
        self.profiler.start()
        self.span = torch.profiler.record_function(f"phase {phase}")
        self.span.__enter__()

    def end(self, path: str) -> None:
        """End the trace, and write it to ``path``, a .json.gz; one in which nothing was done is left out."""
        self.span.__exit__(None, None, None)
        self.profiler.stop()
        if self.worked:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(path)
        del self.profiler, self.span
