"""Colocation: trainers and rollout engines on the same devices, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.interfaces import OffloadPart, Tag
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import WorkerGroup
from rlworker.cluster.workers import RolloutWorker, TrainWorker

if TYPE_CHECKING:
    from rlworker.rollouts.scoring.group import ScoringGroup

OFFLOAD_PARTS: tuple[OffloadPart, ...] = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Occupancy:
    """The parts of engines that are on the shared devices during a phase; all other parts wait in the host's memory.

    Attributes:
        actor: parts of the actor's engine. others: parts of the other engines in the actor's processes.
        engines: parts of the rollout engines.
        level: vLLM's sleep level of rollout engines that have no part on the devices: 1 keeps their weights on the
            host, 2 drops them, because new weights come next.
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
"""Name of a phase -> the parts that it needs on the devices. A phase that is not listed needs none."""


class SharedDevices:
    """Moves trainers and rollout engines on and off the devices that they share. Before ``begin`` nothing is moved.

    Attributes:
        groups: role -> training engine, of the engines in the actor's processes.
    """

    def __init__(self):
        self.groups: dict[str, WorkerGroup] = {}
        self._rollouts: Rollouts | None = None
        self._occupancy: Occupancy | None = None
        self._served: list[Rollouts] = []

    def begin(self, rollouts: Rollouts) -> None:
        """Share devices from now on. The rollout engines have the devices first, while they start."""
        self._rollouts, self._occupancy = rollouts, _SAMPLING
        self.free_devices()

    def take(self, phase: str) -> None:
        """Move the parts that the phase does not need off the devices, then the parts that it needs onto them."""
        if not self._rollouts:
            return
        if phase == "restart":  # new trainers hold everything as they start
            self._occupancy = None
            self._rollouts.call_alive(RolloutWorker.sleep, _LEARNING.level)
            for group in self._served:
                group.call_alive(RolloutWorker.sleep, 1)
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
        """Move the trainers off the devices, since new rollout engines need all memory to start."""
        if self._rollouts:
            self._offload(Occupancy())

    def wait_for_served(self, group: ScoringGroup) -> None:
        """Wait until the engines of a served model have loaded it; on shared devices they begin now, and then sleep."""
        if self._rollouts:
            self._rollouts.call(RolloutWorker.sleep, 1)
            group.begin().wait()
            group.call(RolloutWorker.sleep, 1)
            self._rollouts.call(RolloutWorker.wake, _SAMPLING.engines)
            self._served.append(group)
        else:
            group.wait()

    @property
    def lend(self) -> Callable[[Rollouts], AbstractContextManager[None]] | None:
        """``lending_to`` on shared devices; None where engines have devices of their own."""
        return self.lending_to if self._rollouts else None

    @contextmanager
    def lending_to(self, group: Rollouts) -> Iterator[None]:
        """Give the engines of a served model the devices in this context, while the rollout engines sleep."""
        assert self._rollouts
        self._rollouts.call(RolloutWorker.sleep, 1)
        group.call(RolloutWorker.wake, _SAMPLING.engines)
        yield
        group.call_alive(RolloutWorker.sleep, 1)
        self._rollouts.call(RolloutWorker.wake, _SAMPLING.engines)

    @contextmanager
    def lending_weights(self) -> Iterator[None]:
        """Keep the actor's weights on the devices in this context, while new engines receive them."""
        if self._rollouts:
            self.groups["actor"].call(TrainWorker.onload, ("weights",))
        yield
        if self._rollouts and self._occupancy:
            self._move(self._occupancy)


def _choose_parts(occupancy: Occupancy, name: str) -> tuple[OffloadPart, ...]:
    return occupancy.actor if name == "actor" else occupancy.others
