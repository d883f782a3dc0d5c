"""The processes that run plays: started on the nodes that Ray has, asked round by round, ended where one is held.

What becomes of the episodes of a process that is lost is for whoever asked to decide (``rounds.py``).
"""

import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.cloudpickle.cloudpickle_fast import dumps

from rlworker.episodes.codec import Codec
from rlworker.episodes.model import Play, PlayLimits
from rlworker.episodes.processes.worker import PlayWorker
from rlworker.episodes.record import DIED, HELD, IDLE, LostWorker, Message, Reply
from rlworker.errors import RunError
from rlworker.rewards.part import explain_death
from rlworker.rewards.pool import pickle_reward
from rlworker.rewards.progress import NodeLost, WorkerNode, find_nodes
from rlworker.tracking.terminal import LOGGER

EPISODE_LOG = "episodes.log"
"""File of a run folder that has what plays print and log; other nodes than the driver's have one each, as rewards."""

_GRACE_S, _UNSEEN_GRACE_S = 2.0, 4.0
"""After its time limit, how long a play may take to heed the interrupt before its process is ended; and where nothing
in the process has seen that it holds it, which may then be short of processor time."""
_START_S = 120.0
"""Seconds that a process may take to start; it may import much."""
_STARTS = 3
"""Processes in a row that may end before a play begins."""
_POLL_S = 0.1
_END_S = 10.0


@dataclass
class _Call:
    """A round of one process. ``progress`` is what it had told when last seen, and ``changed`` since when."""

    slot: int
    progress: list[int] = field(default_factory=list)
    changed: float = field(default_factory=time.monotonic)

    def note(self, progress: list[int]) -> None:
        if progress != self.progress:
            self.progress, self.changed = progress, time.monotonic()


class PlayPool:
    """Processes that run plays. They start when this is built, without being waited for.

    As a context manager it ends them.

    Args:
        workers: how many. output: the file at whose end what plays print and log goes; None keeps none.

    Raises:
        ValueError: the play cannot be sent to another process.
    """

    def __init__(self, play: Play, codec: Codec, limits: PlayLimits, workers: int = 1, output: Path | None = None):
        pickle_reward(play, "play")
        self._limits, self._output = limits, output
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
        self._remote_class: Any = ray.remote(PlayWorker)
        self._shared = ray.put(dumps((play, codec)))
        self._numbers, self._failed_starts, self._idle_s = count(), 0, _START_S
        self.nodes = find_nodes(workers)
        self._places = [self.nodes[slot % len(self.nodes)] for slot in range(workers)]
        self._names = [""] * workers
        self._calls: dict[Any, _Call] = {}
        self.workers = [self._start_worker(slot) for slot in range(workers)]

    def __len__(self) -> int:
        return len(self.workers)

    def _start_worker(self, slot: int) -> ActorHandle:
        node, output = self._places[slot], self._output
        if output and not node.is_here:
            output = output.with_name(f"{output.stem}.{node.address}{output.suffix}")
        self._names[slot] = f"plays_{slot}_{next(self._numbers)}"
        options = self._remote_class.options(num_cpus=0, scheduling_strategy=node.strategy)
        return options.remote(self._shared, self._limits, output, node.folder, self._names[slot])

    def name_workers(self) -> dict[str, ActorHandle]:
        """List every process by the name that a message gives it."""
        return {_name_worker(slot): worker for slot, worker in enumerate(self.workers)}

    def limit_stalls(self, timeout_s: float) -> None:
        """Take a process for one that stands still when it does not begin for ``timeout_s``."""
        self._idle_s = min(_START_S, timeout_s)

    def __enter__(self) -> "PlayPool":
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """End the processes, and with them their tools."""
        for worker in self.workers:
            ray.kill(worker)
        for node in self.nodes:
            node.close()

    def restart(self) -> None:
        """Start every process anew; what was being played is forgotten."""
        self._calls.clear()
        for slot, worker in enumerate(self.workers):
            ray.kill(worker)
            self.workers[slot] = self._start_worker(slot)

    def advance(self, messages: Mapping[int, Message]) -> dict[int, Reply | LostWorker]:
        """Let processes play a round, each by its number; one that is lost meanwhile is replaced and told.

        Raises:
            RunError: processes do not start.
        """
        for slot, message in messages.items():
            self.begin(slot, message)
        replies: dict[int, Reply | LostWorker] = {}
        while self._calls:
            replies |= self.poll(_POLL_S)
        return replies

    def begin(self, slot: int, message: Message) -> None:
        """Let a process that has replied begin to play what a message says."""
        self._calls[self.workers[slot].advance.remote(pickle.dumps(message, protocol=5))] = _Call(slot)

    @property
    def references(self) -> list[Any]:
        """Ray's references of what processes are at."""
        return list(self._calls)

    def poll(self, timeout_s: float) -> dict[int, Reply | LostWorker]:
        """Wait for processes that have begun, for no longer than ``timeout_s``; returns and raises as ``advance``."""
        calls, replies = self._calls, {}
        ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
        for reference in ready:
            slot = calls.pop(reference).slot
            reason = explain_death(reference)
            replies[slot] = self._replace(slot, DIED, reason) if reason else self._read(reference)
        for reference in late:
            if self._is_stalled(calls[reference]):
                slot = calls.pop(reference).slot
                ray.kill(self.workers[slot])
                ray.wait([reference], timeout=_END_S)
                replies[slot] = self._replace(slot, HELD, "It got no further.")
        return replies

    def _read(self, reference: ray.ObjectRef) -> Reply:
        self._failed_starts = 0
        return pickle.loads(ray.get(reference))

    def _is_stalled(self, call: _Call) -> bool:
        try:
            progress, block = self._places[call.slot].ask("read_play", self._names[call.slot])
        except NodeLost:
            return True
        call.note(progress)
        grace = _GRACE_S if block[:1] == progress[1:2] else _UNSEEN_GRACE_S
        limit = self._limits.time_limit_s + grace if progress else self._idle_s
        return time.monotonic() - call.changed > limit

    def _replace(self, slot: int, fate: str, reason: str) -> LostWorker:
        """Start another process in the place of one that has ended, and tell what it was at."""
        node, progress, block = self._places[slot], [], []
        try:
            progress, block = node.ask("read_play", self._names[slot])
        except NodeLost as error:
            self._leave_node(node, error)
        self._failed_starts = 0 if progress else self._failed_starts + 1
        if self._failed_starts == _STARTS:
            raise RunError(f"episodes: the process of plays does not start, {_STARTS} times in a row. {reason}")
        self.workers[slot] = self._start_worker(slot)
        _, number, turn = progress or (0, IDLE, 0)
        if fate == HELD and block[:1] == [number]:
            return LostWorker(_name_worker(slot), fate, *block)
        return LostWorker(_name_worker(slot), fate, number, turn, "")

    def _leave_node(self, lost: WorkerNode, error: NodeLost) -> None:
        """Place what ran on a lost node on those that are left."""
        if lost in self.nodes:
            self.nodes.remove(lost)
            lost.abandon()
            LOGGER.warning(f"episodes: plays of a lost node begin anew on others: {error}")
        for slot, node in enumerate(self._places):
            if node is lost:
                self._places[slot] = self.nodes[slot % len(self.nodes)]


def _name_worker(slot: int) -> str:
    return f"play worker {slot}"
