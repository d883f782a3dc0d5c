"""The traces of a run: RUN/profile/step_N/PHASE.PROCESS.json.gz, of every process that worked in a phase."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ray.actor import ActorHandle

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
