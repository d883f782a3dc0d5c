"""Colocation: trainers and rollout engines on the same devices, one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engines.interfaces import OffloadPart, Tag
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import WorkerGroup
from rlworker.cluster.workers import RolloutWorker, TrainWorker

OFFLOAD_PARTS: tuple[OffloadPart, ...] = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Occupancy:
    """A share of the devices for some phases; all else waits in the host's memory.

    Attributes:
        actor, others: parts of the actor's engine on the devices, and of the other models in its processes.
        engines: parts of the rollout engines.
        level: at which these sleep where they hold nothing: 1 keeps their weights on the host, 2 drops them, where the
            next that they get are new ones.
    """

    actor: tuple[OffloadPart, ...] = ()
    others: tuple[OffloadPart, ...] = ()
    engines: tuple[Tag, ...] = ()
    level: int = 2


_SAMPLING = Occupancy(engines=("weights", "kv_cache"))
_LEARNING = Occupancy(actor=OFFLOAD_PARTS, others=OFFLOAD_PARTS)
_SYNC = Occupancy(actor=("weights",), engines=("weights",))
_CANARY = Occupancy(actor=("weights",), engines=("weights", "kv_cache"))
_SAVING = Occupancy(actor=("weights", "optimizer"), others=("weights", "optimizer"), level=1)
PHASES = {
    "rollout": _SAMPLING,
    "greedy": _SAMPLING,
    "evaluate": _SAMPLING,
    "logprobs": _LEARNING,
    "values": _LEARNING,
    "update": _LEARNING,
    "restore": _LEARNING,
    "sync": _SYNC,
    "canary": _CANARY,
    "floor": _CANARY,
    "save": _SAVING,
}
"""Phase -> what it needs on the devices. One that is not here needs none of them."""


class SharedDevices:
    """The devices that trainers and rollout engines share. Where they share none, nothing is moved.

    Attributes:
        groups: the engines in the actor's processes, by the names of their roles.
    """

    def __init__(self):
        self.groups: dict[str, WorkerGroup] = {}
        self._rollouts: Rollouts | None = None
        self._occupancy: Occupancy | None = None

    def begin(self, rollouts: Rollouts) -> None:
        """Share devices from now on. The rollout engines have them first, while they start."""
        self._rollouts, self._occupancy = rollouts, _SAMPLING
        self.free_devices()

    def take(self, phase: str) -> None:
        """Bring the parts that a phase needs onto the devices, and take the others off."""
        if not self._rollouts:
            return
        if phase == "restart":  # new trainers hold everything as they start
            self._occupancy = None
            self._rollouts.call_alive(RolloutWorker.sleep, _LEARNING.level)
        elif (occupancy := PHASES.get(phase)) and occupancy != self._occupancy:
            self._move(occupancy)

    def _move(self, occupancy: Occupancy) -> None:
        """Move the leaving parts off the devices before the arriving parts come."""
        assert self._rollouts
        self._occupancy = None  # unknown, where one of these fails
        self._offload(occupancy)
        if occupancy.engines:
            self._rollouts.call(RolloutWorker.wake, occupancy.engines)
        else:
            self._rollouts.call(RolloutWorker.sleep, occupancy.level)
        for name, group in self.groups.items():
            group.call(TrainWorker.onload, _choose_parts(occupancy, name))
        self._occupancy = occupancy

    def _offload(self, occupancy: Occupancy) -> None:
        for name, group in self.groups.items():
            kept = _choose_parts(occupancy, name)
            group.call(TrainWorker.offload, tuple(holding for holding in OFFLOAD_PARTS if holding not in kept))

    def free_devices(self) -> None:
        """Take the trainers off the devices, for new engines, which start with all of their memory."""
        if self._rollouts:
            self._offload(Occupancy())

    @contextmanager
    def lending_weights(self) -> Iterator[None]:
        """Have the actor's weights on the devices while new engines get them; then all is as it was."""
        if self._rollouts:
            self.groups["actor"].call(TrainWorker.onload, ("weights",))
        yield
        if self._rollouts and self._occupancy:
            self._move(self._occupancy)


def _choose_parts(occupancy: Occupancy, name: str) -> tuple[OffloadPart, ...]:
    return occupancy.actor if name == "actor" else occupancy.others
