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
from rlworker.episodes.record import HELD, IDLE, LostWorker, Message, Reply
from rlworker.errors import RunError
from rlworker.rewards.part import explain_death
from rlworker.rewards.pool import pickle_reward
from rlworker.rewards.processes import GRACE_S, POLL_S, START_S, STARTS, WorkerProcesses
from rlworker.rewards.progress import NodeLost

EPISODE_LOG = "episodes.log"
"""File of a run folder that has what plays print and log; other nodes than the driver's have one each, as rewards."""

_UNSEEN_GRACE_S = 4.0
"""As ``GRACE_S``, where nothing in the process has seen that a play holds it, which may then be short of processor
time."""
_END_S = 10.0


@dataclass
class _Call:
    """A round of one process. ``progress`` is what it had told when last seen, and ``changed`` since when."""

    slot: int
    progress: list[int] = field(default_factory=list)
    changed: float = field(default_factory=time.monotonic)
    looked: float = field(default_factory=time.monotonic)

    def note(self, progress: list[int]) -> None:
        if progress != self.progress:
            self.progress, self.changed = progress, time.monotonic()


class PlayPool(WorkerProcesses):
    """Processes that run plays.

    Args:
        workers, output: as ``WorkerProcesses``.

    Raises:
        ValueError: the play cannot be sent to another process.
    """

    def __init__(self, play: Play, codec: Codec, limits: PlayLimits, workers: int = 1, output: Path | None = None):
        pickle_reward(play, "play")
        self._limits, self._numbers, self._names = limits, count(), [""] * workers
        self._failed_starts, self._idle_s = 0, START_S
        self._calls: dict[Any, _Call] = {}
        super().__init__("play", PlayWorker, (ray.put(dumps((play, codec))), limits), workers, output)

    def __len__(self) -> int:
        return len(self.workers)

    def _start_worker(self, slot: int) -> ActorHandle:
        self._names[slot] = f"plays_{slot}_{next(self._numbers)}"
        return super()._start_worker(slot, self._names[slot])

    def limit_stalls(self, timeout_s: float) -> None:
        """Take a process for one that stands still when it does not begin for ``timeout_s``."""
        self._idle_s = min(START_S, timeout_s)

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
            replies |= self.poll(POLL_S)
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
            fate = explain_death(reference)
            replies[slot] = self._replace(slot, fate) if fate else self._read(reference)
        for reference in late:
            if self._is_stalled(calls[reference]):
                slot = calls.pop(reference).slot
                ray.kill(self.workers[slot])
                ray.wait([reference], timeout=_END_S)
                replies[slot] = self._replace(slot, HELD)
        return replies

    def _read(self, reference: ray.ObjectRef) -> Reply:
        self._failed_starts = 0
        return pickle.loads(ray.get(reference))

    def _is_stalled(self, call: _Call) -> bool:
        if time.monotonic() - call.looked < POLL_S:
            return False
        call.looked = time.monotonic()
        try:
            progress, block = self.places[call.slot].ask("read_play", self._names[call.slot])
        except NodeLost:
            return True
        call.note(progress)
        grace = GRACE_S if block[:1] == progress[1:2] else _UNSEEN_GRACE_S
        limit = self._limits.time_limit_s + grace if progress else self._idle_s
        return time.monotonic() - call.changed > limit

    def _replace(self, slot: int, fate: str) -> LostWorker:
        """Start another process in the place of one that has ended, and tell what it was at."""
        node, progress, block = self.places[slot], [], []
        try:
            progress, block = node.ask("read_play", self._names[slot])
        except NodeLost as error:
            self._leave_node(node, error)
        self._failed_starts = 0 if progress else self._failed_starts + 1
        if self._failed_starts == STARTS:
            text = f"does not start, {STARTS} times in a row: the last {fate}"
            raise RunError(f"episodes: the process of plays {text}")
        self.workers[slot] = self._start_worker(slot)
        _, number, turn = progress or (0, IDLE, 0)
        if fate == HELD and block[:1] == [number]:
            return LostWorker(self.name_worker(slot), fate, *block)
        return LostWorker(self.name_worker(slot), fate, number, turn, "")
