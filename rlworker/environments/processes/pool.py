"""The pool of processes that run environments: it spreads them over Ray's nodes, and replaces one that died or hangs.

A process writes its progress to a file of its node. So the driver knows which episode a process runs: it ends a process
that makes no progress, and knows where a process died. ``rollouts/episode_state.py`` decides what becomes of the
episodes of a lost process.
"""

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.cloudpickle.cloudpickle_fast import dumps
from ray.exceptions import RayError, RayTaskError

from rlworker.base.errors import RunError
from rlworker.base.terminal import LOGGER
from rlworker.cluster.process_state import explain
from rlworker.environments.codec import Codec
from rlworker.environments.policy import EpisodeLimits
from rlworker.environments.processes.progress import NodeLost, WorkerNode, find_nodes
from rlworker.environments.processes.worker import EnvWorker
from rlworker.environments.record import HELD, IDLE, Answers, Job, LostWorker, Reply
from rlworker.environments.reward import Environment

ENVIRONMENT_LOG = "environment.log"
"""File in a run folder with everything that environments print and log. Every node but the driver's has a file of its
own, such as ``environment.10.0.0.2.log``: a network's file system loses lines that two nodes append to one file."""

START_S = 120.0
"""Seconds that a process may take to start; it may import much."""
STARTS = 3
"""Number of processes in a row that end before they begin, after which the run ends. A process may die between two
messages."""
GRACE_S = 2.0
"""Seconds after its time limit that an environment has to heed the interrupt, before its process is ended."""
_UNSEEN_GRACE_S = 4.0
"""Like ``GRACE_S``, where the process itself has not noticed that an environment holds it: it may lack processor
time."""
POLL_S = 0.1
_END_S = 10.0
"""Seconds to wait until a process that was killed has ended."""


@dataclass(eq=False)
class _Process:
    """The process of a slot.

    Attributes:
        node: where it runs. name: of its files there. reply: Ray's reference of the reply to come; None where it is
            idle.
        progress, changed, looked: what it had told when it was ``looked`` at, and since when; from its message on.
    """

    node: WorkerNode
    name: str = ""
    worker: Any = None
    reply: Any = None
    progress: list[int] = field(default_factory=list)
    changed: float = 0.0
    looked: float = 0.0


def pickle_environment(environment: Callable) -> bytes:
    """Pickle an environment.

    Raises:
        ValueError: the environment holds something that cannot be sent to another process.
    """
    try:
        return dumps(environment)
    except Exception as error:  # whatever an object of the user's raises when it is pickled
        raise ValueError(
            f"environment: {getattr(environment, '__qualname__', environment)!r} cannot be sent to another process "
            f"({type(error).__name__}: {error}); open files, locks and connections inside the function"
        ) from error


class ProcessPool:
    """Processes that run environments, each in a numbered slot. The constructor starts them and does not wait for them.

    Leaving it as a context manager ends them.

    Args:
        environment: the function that runs an episode. codec: encodes and decodes its text.
        limits: limits of each episode.
        workers: number of processes.
        output: file to which everything that environments print and log is appended; None leaves it to Ray.

    Raises:
        ValueError: the environment cannot be sent to another process.

    Attributes:
        nodes: the nodes that run the processes, without lost ones.
    """

    def __init__(
        self,
        environment: Environment,
        codec: Codec,
        limits: EpisodeLimits,
        workers: int = 1,
        output: Path | None = None,
    ):
        pickle_environment(environment)
        self._arguments = ray.put(dumps((environment, codec))), limits
        self._limits, self._output, self._numbers = limits, output, count()
        self._failed_starts, self._idle_s = 0, START_S
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
        self._remote_class: Any = ray.remote(EnvWorker)
        self.nodes = find_nodes(workers)
        self._processes = [_Process(self.nodes[slot % len(self.nodes)]) for slot in range(workers)]
        for slot in range(workers):
            self._start(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def workers(self) -> list[ActorHandle]:
        """Ray's handle of each process, by slot."""
        return [process.worker for process in self._processes]

    def name_workers(self) -> dict[str, ActorHandle]:
        """Return Ray's handles of all processes by the names that messages use."""
        return {_name_worker(slot): worker for slot, worker in enumerate(self.workers)}

    def limit_stalls(self, timeout_s: float) -> None:
        """Set the seconds after which a process that does not begin counts as hung; it is at most ``START_S``."""
        self._idle_s = min(START_S, timeout_s)

    def restart(self) -> None:
        """Kill and start every process; their episodes are forgotten."""
        for slot, worker in enumerate(self.workers):
            ray.kill(worker)
            self._start(slot)

    def stop(self) -> None:
        """End the processes and everything that they started."""
        for worker in self.workers:
            ray.kill(worker)
        for node in self.nodes:
            node.close()

    def begin(self, slot: int, jobs: Sequence[Job], answers: Mapping[int, Answers], longest_s: float | None) -> None:
        """Send jobs and answers to the process of a slot, as arguments of ``EnvRunner.advance``.

        The process must have replied to the message before.
        """
        process = self._processes[slot]
        process.reply = process.worker.advance.remote(pickle.dumps((jobs, answers, longest_s), protocol=5))
        process.progress, process.changed, process.looked = [], time.monotonic(), time.monotonic()

    @property
    def references(self) -> list[Any]:
        """Ray's references of the replies that have not come."""
        return [process.reply for process in self._processes if process.reply is not None]

    def poll(self) -> dict[int, Reply | LostWorker]:
        """Return the replies that have come, by slot, without waiting. A lost process is replaced, and reported as
        ``LostWorker``.

        Raises:
            RunError: processes end before they begin, several times in a row.
        """
        slots = {process.reply: slot for slot, process in enumerate(self._processes) if process.reply is not None}
        ready, late = ray.wait(list(slots), num_returns=len(slots), timeout=0) if slots else ([], [])
        replies: dict[int, Reply | LostWorker] = {}
        for reference in ready:
            slot = slots[reference]
            if fate := explain_death(reference):
                replies[slot] = self._replace(slot, fate)
            else:
                replies[slot] = pickle.loads(ray.get(reference))
                self._processes[slot].reply, self._failed_starts = None, 0
        for reference in late:
            process = self._processes[slots[reference]]
            if self._is_stalled(process):
                ray.kill(process.worker)
                ray.wait([reference], timeout=_END_S)
                replies[slots[reference]] = self._replace(slots[reference], HELD)
        return replies

    def _start(self, slot: int) -> None:
        """Start a process in a slot, which has had no message."""
        process, output = self._processes[slot], self._output
        node, process.name = process.node, f"{slot}_{next(self._numbers)}"
        if output and not node.is_here:
            output = output.with_name(f"{output.stem}.{node.address}{output.suffix}")
        options = self._remote_class.options(num_cpus=0, scheduling_strategy=node.strategy)
        process.worker, process.reply = options.remote(*self._arguments, output, node.folder, process.name), None

    def _is_stalled(self, process: _Process) -> bool:
        if time.monotonic() - process.looked < POLL_S:
            return False
        process.looked = time.monotonic()
        try:
            progress, block = process.node.ask("read_progress", process.name)
        except NodeLost:
            return True
        if progress != process.progress:
            process.progress, process.changed = progress, time.monotonic()
        grace = GRACE_S if block[:1] == progress[1:2] else _UNSEEN_GRACE_S
        limit = self._limits.time_limit_s + grace if progress else self._idle_s
        return time.monotonic() - process.changed > limit

    def _replace(self, slot: int, fate: str) -> LostWorker:
        """Start another process in the place of one that has ended, and tell which episode it was at."""
        process, progress, block = self._processes[slot], [], []
        try:
            progress, block = process.node.ask("read_progress", process.name)
        except NodeLost as error:
            self._leave_node(process.node, error)
        self._failed_starts = 0 if progress else self._failed_starts + 1
        if self._failed_starts == STARTS:
            raise RunError(
                f"environment: worker processes ended before they began, {STARTS} times in a row; the last one {fate}; "
                f"{ENVIRONMENT_LOG} in the run folder shows the cause"
            )
        self._start(slot)
        _, number = progress or (0, IDLE)
        where = block[1] if fate == HELD and block[:1] == [number] else ""
        return LostWorker(_name_worker(slot), fate, number, where, has_begun=bool(progress))

    def _leave_node(self, lost: WorkerNode, error: NodeLost) -> None:
        """Place the slots of a lost node on those that are left; processes start there as they are replaced."""
        if lost not in self.nodes:
            return
        self.nodes.remove(lost)
        lost.abandon()
        LOGGER.warning(f"environment workers of a lost node start on others, and their episodes run again: {error}")
        for slot, process in enumerate(self._processes):
            if process.node is lost:
                process.node = self.nodes[slot % len(self.nodes)]


def _name_worker(slot: int) -> str:
    return f"environment worker {slot}"


def explain_death(reference: ray.ObjectRef) -> str | None:
    """Wait for a call, and return one line about how its worker died; None if the call returned.

    Raises:
        RayTaskError: the call itself raised an error.
    """
    try:
        ray.get(reference)
    except RayTaskError:
        raise
    except RayError as error:
        return explain(error) or str(error)
    return None
