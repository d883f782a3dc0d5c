"""Seats of rollout engines that take turns with trainer ranks on the same devices."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from rlworker.errors import RunError


@dataclass(frozen=True)
class Seat:
    """A place on one node that is given beside Ray, which counts nothing there.

    Attributes:
        node: Ray's id of it. devices: by the names that its processes see them by; empty on a CPU.
    """

    node: str
    devices: tuple[str, ...] = ()

    def overlaps(self, other: "Seat") -> bool:
        """Tell whether a device belongs to both."""
        return self.node == other.node and not set(self.devices).isdisjoint(other.devices)


def list_engine_seats(ranks: Sequence[Seat], engines: int, devices: int) -> list[Seat]:
    """List seats for rollout engines on the devices of trainer ranks.

    A node's devices are taken in their own order. Which rank has which may change at a restart, and a new engine must
    find the devices of the lost one.

    Args:
        ranks: the seat of each. devices: of an engine.

    Returns:
        at least ``engines`` of them, each within a node.

    Raises:
        RunError: the ranks' nodes do not hold so many.
    """
    seats = []
    for node in dict.fromkeys(rank.node for rank in ranks):
        here = sorted((rank.devices for rank in ranks if rank.node == node), key=_sort_key)
        cuts = range(0, len(here) - devices + 1, devices)
        seats += [Seat(node, tuple(chain.from_iterable(here[cut : cut + devices]))) for cut in cuts]
    if len(seats) < engines:
        counts = Counter(rank.node for rank in ranks).values()
        raise RunError(
            f"placement: {engines} rollout engines of {devices} devices are to share those of the actor, and its nodes "
            f"hold {len(seats)} such engines (devices on each: {', '.join(map(str, counts))}); lower --rollout.engines "
            "or --rollout.tp, or leave --placement.colocate out"
        )
    return seats


def choose_seat(index: int, seats: Sequence[Seat], held: Iterable[Seat]) -> Seat:
    """Choose a seat for engine ``index`` that overlaps with none that others hold: its own before any other.

    Raises:
        RunError: there is none.
    """
    held = list(held)
    for seat in (seats[index], *seats):
        if not any(seat.overlaps(other) for other in held):
            return seat
    raise RunError(
        f"placement: other rollout engines are on the devices of the actor's ranks, which leaves none to rollout "
        f"engine {index}; start the run again with --resume"
    )


def _sort_key(names: tuple[str, ...]) -> list[tuple[int, str]]:
    """Order device 9 before device 10."""
    return [(len(name), name) for name in names]
