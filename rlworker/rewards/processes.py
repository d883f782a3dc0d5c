"""Processes that call code of the user's: how they are spread over nodes, named, started and ended."""

from pathlib import Path
from typing import Any, Self

import ray
from ray.actor import ActorHandle

from rlworker.rewards.progress import NodeLost, WorkerNode, find_nodes
from rlworker.tracking.terminal import LOGGER

START_S = 120.0
"""Seconds that a process may take to start; it may import much."""
STARTS = 3
"""Processes in a row that may end before they begin, such as one that died between two calls."""
GRACE_S = 2.0
"""After its time limit, how long a call may take to heed the interrupt before its process is ended."""
POLL_S = 0.1


class WorkerProcesses:
    """Processes of one class, each in its slot. They start when this is built, without being waited for.

    As a context manager it ends them.

    Args:
        kind: of worker, as messages name it. worker_class: takes ``arguments``, then ``output`` and the folder of its
            node's files.
        count: how many. output: the file at whose end goes what they print and log; None keeps none.

    Attributes:
        nodes: that Ray has and that have not been lost. places, workers: node and process of each slot.
    """

    def __init__(self, kind: str, worker_class: type, arguments: tuple, count: int, output: Path | None):
        self.kind, self._arguments, self._output = kind, arguments, output
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
        self._remote_class: Any = ray.remote(worker_class)
        self.nodes = find_nodes(count)
        self.places = [self.nodes[slot % len(self.nodes)] for slot in range(count)]
        self.workers = [self._start_worker(slot) for slot in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def name_worker(self, slot: int) -> str:
        """Name a process as messages do."""
        return f"{self.kind} worker {slot}"

    def name_workers(self) -> dict[str, ActorHandle]:
        """List every process by its name."""
        return {self.name_worker(slot): worker for slot, worker in enumerate(self.workers)}

    def stop(self) -> None:
        """End the processes, and with them what they started."""
        for worker in self.workers:
            ray.kill(worker)
        for node in self.nodes:
            node.close()

    def _start_worker(self, slot: int, *more: Any) -> ActorHandle:
        """Start a process on the slot's node; ``more`` are further arguments of it."""
        node, output = self.places[slot], self._output
        if output and not node.is_here:
            output = output.with_name(f"{output.stem}.{node.address}{output.suffix}")
        options = self._remote_class.options(num_cpus=0, scheduling_strategy=node.strategy)
        return options.remote(*self._arguments, output, node.folder, *more)

    def _leave_node(self, lost: WorkerNode, error: NodeLost) -> list[int]:
        """Place what ran on a lost node on those that are left: the slots that have moved."""
        if lost not in self.nodes:
            return []
        self.nodes.remove(lost)
        lost.abandon()
        LOGGER.warning(f"{self.kind} workers of a lost node begin anew on others, with what they were at: {error}")
        slots = [slot for slot, node in enumerate(self.places) if node is lost]
        for slot in slots:
            self.places[slot] = self.nodes[slot % len(self.nodes)]
        return slots
