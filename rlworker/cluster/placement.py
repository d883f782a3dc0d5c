"""Placement of a run's workers: devices that belong together into one node, nodes in the order of their addresses."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hardware.platform import list_ray_resources
from hardware.platforms import get_platform
from rlworker.errors import RunError


@dataclass(frozen=True)
class RayNode:
    """A machine as Ray has it.

    Attributes:
        name: Ray's id of it. resources: what it offers in all.
    """

    name: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True)
class Demand:
    """Workers that are placed together.

    Attributes:
        who: they are, for messages. workers: how many. devices: of each.
        together: consecutive workers that must lie in one node, such as a tensor-parallel group.
    """

    who: str
    platform: str
    workers: int
    devices: int = 1
    together: int = 1


def list_nodes() -> list[RayNode]:
    """List the living nodes of Ray's cluster in the order of their addresses."""
    alive = [
        RayNode(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
    ]
    return sorted(alive, key=lambda node: (_sort_key(node.address), node.name))


def pin_to(node: str) -> NodeAffinitySchedulingStrategy:
    """Make the strategy by which Ray starts something on one node or not at all."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def check_room(demands: Sequence[Demand]) -> None:
    """Raise RunError where the nodes of Ray's cluster, each by itself, have no room for all of the ``demands``."""
    plan_nodes(list_nodes(), demands)


def plan_nodes(nodes: Sequence[RayNode], demands: Sequence[Demand], taken: Iterable[tuple[str, Demand]] = ()) -> list:
    """Plan the node of every worker of every demand; nodes are filled one after another.

    Consecutive workers share a node, so that ranks which talk most, tensor-parallel ones, are neighbours.

    Args:
        taken: node and demand of workers that are placed already, each for one worker.

    Returns:
        a list of nodes' names for each demand.

    Raises:
        RunError: no node has room for workers that must lie together; the message says who, and what each node has.
    """
    room = {node.name: dict(node.resources) for node in nodes}
    for name, demand in taken:
        if name in room:
            _take(room[name], demand, 1)
    plan = []
    for demand in demands:
        chosen: list[str] = []
        while len(chosen) < demand.workers:
            count = min(demand.together, demand.workers - len(chosen))
            fitting = [node for node in nodes if _fits(room[node.name], demand, count)]
            if not fitting:
                raise RunError(_say_no_room(nodes, room, demand, count, len(chosen)))
            _take(room[fitting[0].name], demand, count)
            chosen += [fitting[0].name] * count
        plan.append(chosen)
    return plan


def _count(demand: Demand, workers: int) -> dict[str, float]:
    """Count the resources of some workers of a demand."""
    return list_ray_resources(get_platform(demand.platform), demand.devices * workers)


def _fits(room: Mapping[str, float], demand: Demand, workers: int) -> bool:
    return all(room.get(resource, 0) >= need for resource, need in _count(demand, workers).items())


def _take(room: dict[str, float], demand: Demand, workers: int) -> None:
    for resource, need in _count(demand, workers).items():
        room[resource] = room.get(resource, 0) - need


def _say_no_room(
    nodes: Sequence[RayNode], room: Mapping[str, Mapping[str, float]], demand: Demand, workers: int, placed: int
) -> str:
    need = _count(demand, workers)
    wanted = " and ".join(f"{count:g} {resource}s" for resource, count in need.items())
    have = "; ".join(
        f"node {node.address} has "
        + " and ".join(f"{room[node.name].get(name, 0):g} of {node.resources.get(name, 0):g} {name}s" for name in need)
        for node in nodes
    )
    return (
        f"placement: {demand.who} needs {wanted} in one node, and none has them left after {placed} of "
        f"{demand.workers} are placed ({have}); lower the engine's parallel sizes or the number of engines, or start "
        "Ray with more on a node"
    )


def _sort_key(address: str) -> tuple:
    """Order 10.0.0.9 before 10.0.0.10; what is no IPv4 address comes last, as text."""
    parts = address.split(".")
    return (0, *map(int, parts)) if len(parts) == 4 and all(part.isdecimal() for part in parts) else (1, address)


# -- rollout engines on the devices of trainer ranks


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
        here = sorted((rank.devices for rank in ranks if rank.node == node), key=_sort_devices)
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


def _sort_devices(names: tuple[str, ...]) -> list[tuple[int, str]]:
    """Order device 9 before device 10."""
    return [(len(name), name) for name in names]
