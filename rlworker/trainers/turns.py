"""Turns: trainers and rollout engines on the same devices, one after the other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engines.interfaces import Holding, Tag
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import WorkerGroup

HOLDINGS: tuple[Holding, ...] = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Turn:
    """A share of the devices for some phases; what is not named waits in the host's memory.

    Attributes:
        actor, others: what the actor's engine holds, and those of the models in its processes. engines: what the
            rollout engines hold.
        level: at which these sleep where they hold nothing: 1 keeps their weights on the host, 2 drops them, where the
            next that they get are new ones.
    """

    actor: tuple[Holding, ...] = ()
    others: tuple[Holding, ...] = ()
    engines: tuple[Tag, ...] = ()
    level: int = 2


_SAMPLING = Turn(engines=("weights", "kv_cache"))
_LEARNING = Turn(actor=HOLDINGS, others=HOLDINGS)
_SYNC = Turn(actor=("weights",), engines=("weights",))
_CANARY = Turn(actor=("weights",), engines=("weights", "kv_cache"))
_SAVING = Turn(actor=("weights", "optimizer"), others=("weights", "optimizer"), level=1)
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
    "save": _SAVING,
}
"""Phase -> what it needs on the devices. One that is not here needs none of them."""


class Turns:
    """The turns on devices that trainers and rollout engines share. Where they share none, nothing is moved.

    Attributes:
        groups: the engines in the actor's processes, by the names of their roles.
    """

    def __init__(self):
        self.groups: dict[str, WorkerGroup] = {}
        self._rollouts: Rollouts | None = None
        self._turn: Turn | None = None

    def begin(self, rollouts: Rollouts) -> None:
        """Take turns from now on, beginning with the rollout engines, which have the devices while they start."""
        self._rollouts, self._turn = rollouts, _SAMPLING
        self.free_devices()

    def take(self, phase: str) -> None:
        """Bring what a phase needs onto the devices, and take off what it does not."""
        if not self._rollouts:
            return
        if phase == "restart":  # new trainers hold everything as they start
            self._turn = None
            self._rollouts.call_living("sleep", _LEARNING.level)
        elif (turn := PHASES.get(phase)) and turn != self._turn:
            self._move(turn)

    def _move(self, turn: Turn) -> None:
        """Move what leaves the devices before what comes."""
        assert self._rollouts
        self._turn = None  # unknown, where one of these fails
        self._offload(turn)
        if turn.engines:
            self._rollouts.call("wake", turn.engines)
        else:
            self._rollouts.call("sleep", turn.level)
        for name, group in self.groups.items():
            group.call("onload", _choose_holdings(turn, name))
        self._turn = turn

    def _offload(self, turn: Turn) -> None:
        for name, group in self.groups.items():
            kept = _choose_holdings(turn, name)
            group.call("offload", tuple(holding for holding in HOLDINGS if holding not in kept))

    def free_devices(self) -> None:
        """Take the trainers off the devices, for new engines, which start with all of their memory."""
        if self._rollouts:
            self._offload(Turn())

    @contextmanager
    def lending_weights(self) -> Iterator[None]:
        """Have the actor's weights on the devices while new engines get them; then all is as the turn has it."""
        if self._rollouts:
            self.groups["actor"].call("onload", ("weights",))
        yield
        if self._rollouts and self._turn:
            self._move(self._turn)


def _choose_holdings(turn: Turn, name: str) -> Sequence[Holding]:
    return turn.actor if name == "actor" else turn.others
