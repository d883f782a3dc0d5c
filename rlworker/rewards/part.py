"""A part of a batch of texts, which one reward worker is at."""

import time
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rlworker.cluster.process_state import explain
from rlworker.rewards.progress import WorkerNode

_END_S = 10.0
"""Seconds to wait for the end of a process that was ended."""


@dataclass
class Part:
    """Texts that a worker is at.

    Attributes:
        number: by which its files are known. slot: which worker. node, worker: that worker, and where it runs.
        start, end: which texts. reference: Ray's, to the end of its call. begin_s: seconds in which the worker begins.
        progress, changed, asked: texts that were scored when last seen (-1 before the worker begins), since when, and
            when the node was asked last.
    """

    number: int
    slot: int
    node: WorkerNode
    worker: ActorHandle
    start: int
    end: int
    reference: ray.ObjectRef
    begin_s: float
    progress: int = -1
    changed: float = field(default_factory=time.monotonic)
    asked: float = field(default_factory=time.monotonic)

    def note(self, progress: int) -> None:
        """Take note of how many texts are scored."""
        self.asked = time.monotonic()
        if progress != self.progress:
            self.progress, self.changed = progress, self.asked

    def is_stalled(self, limit_s: float) -> bool:
        """Tell whether no text was scored for ``limit_s``."""
        return time.monotonic() - self.changed > (limit_s if self.progress >= 0 else self.begin_s)


def end_worker(part: Part) -> None:
    """End a worker and wait until it can write no more."""
    ray.kill(part.worker)
    ray.wait([part.reference], timeout=_END_S)


def explain_death(reference: ray.ObjectRef) -> str | None:
    """Return what became of the worker that died in a call, in a line; None where it did not."""
    try:
        ray.get(reference)
    except RayTaskError:
        raise
    except RayError as error:
        return explain(error) or str(error)
    return None
