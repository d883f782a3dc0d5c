"""Placement of a run's workers: devices that belong together go to one node; nodes are filled by address."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hardware.platform import Platform, list_ray_resources
from hardware.platforms import get_platform
from rlworker.base.errors import RunError


@dataclass(frozen=True)
class RayNode:
    """A node of Ray's cluster.

    Attributes:
        name: Ray's id of the node. address: the node's IP address. resources: name -> amount of all that the node
            offers.
    """

    name: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True)
class ResourceRequest:
    """A request to place workers.

    Attributes:
        who: name of the workers in messages. platform: name of the platform.
        workers: number of workers. devices: number of devices of each worker.
        together: number of consecutive workers that must be on one node, as a tensor-parallel group must.
    """

    who: str
    platform: str
    workers: int
    devices: int = 1
    together: int = 1


@dataclass(frozen=True)
class DeviceSlot:
    """Devices on one node that are assigned without Ray, which does not count them.

    Attributes:
        node: Ray's id of the node. devices: names by which processes see the devices; empty on a CPU.
    """

    node: str
    devices: tuple[str, ...] = ()


def list_nodes() -> list[RayNode]:
    """Return the living nodes of Ray's cluster in order of address."""
    alive = [
        RayNode(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
    ]
    return sorted(alive, key=lambda node: (_sort_key(node.address), node.name))


def pin_to(node: str) -> NodeAffinitySchedulingStrategy:
    """Return a scheduling strategy that makes Ray start a process on this node or not at all."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def find_interfaces(platform: Platform) -> dict[str, str]:
    """Find the network interface through which Ray's other nodes see this node.

    Returns:
        environment variable -> name of the interface; empty on a cluster of one node, which needs no network. Variables
            that the user has set keep their values.
    """
    import psutil

    if len(list_nodes()) == 1:
        return {}
    here = ray.util.get_node_ip_address()
    holders = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address.split("%")[0] == here for address in addresses)
    ]
    if not holders:
        raise RuntimeError(
            f"node {here}: no network interface has the address that Ray uses for this node; start Ray with "
            "`ray start --node-ip-address` and the address of an interface, or set "
            f"{' and '.join(platform.interface_variables)} to an interface"
        )
    return {name: os.environ.get(name, holders[0]) for name in platform.interface_variables}


def check_room(requests: Sequence[ResourceRequest]) -> None:
    """Raise RunError if the nodes of Ray's cluster do not have the resources for all ``requests``."""
    plan_nodes(list_nodes(), requests)


def plan_nodes(
    nodes: Sequence[RayNode], requests: Sequence[ResourceRequest], taken: Iterable[tuple[str, ResourceRequest]] = ()
) -> list:
    """Plan the node of every worker; nodes are filled one after another.

    Consecutive workers share a node, so that tensor-parallel ranks, which communicate most, are neighbours.

    Args:
        nodes: nodes in the order in which they are filled. requests: the workers to place.
        taken: node and request of each worker that is placed already.

    Returns:
        for each request, the names of the nodes of its workers.

    Raises:
        RunError: no node has room for workers that must be together; the message names them and each node.
    """
    room = {node.name: dict(node.resources) for node in nodes}
    for name, request in taken:
        if name in room:
            _take(room[name], request, 1)
    plan = []
    for request in requests:
        chosen: list[str] = []
        while len(chosen) < request.workers:
            count = min(request.together, request.workers - len(chosen))
            needs = _count(request, count).items()
            fitting = [node for node in nodes if all(room[node.name].get(name, 0) >= need for name, need in needs)]
            if not fitting:
                raise RunError(_say_no_room(nodes, room, request, count, len(chosen)))
            _take(room[fitting[0].name], request, count)
            chosen += [fitting[0].name] * count
        plan.append(chosen)
    return plan


def _count(request: ResourceRequest, workers: int) -> dict[str, float]:
    """Count the resources of some workers of a request."""
    return list_ray_resources(get_platform(request.platform), request.devices * workers)


def _take(room: dict[str, float], request: ResourceRequest, workers: int) -> None:
    for resource, need in _count(request, workers).items():
        room[resource] = room.get(resource, 0) - need


def _say_no_room(
    nodes: Sequence[RayNode],
    room: Mapping[str, Mapping[str, float]],
    request: ResourceRequest,
    workers: int,
    placed: int,
) -> str:
    need = _count(request, workers)
    wanted = " and ".join(f"{count:g} {resource}s" for resource, count in need.items())
    have = "; ".join(
        f"node {node.address} has "
        + " and ".join(f"{room[node.name].get(name, 0):g} of {node.resources.get(name, 0):g} {name}s" for name in need)
        for node in nodes
    )
    return (
        f"placement: {request.who} needs {wanted} in one node, and none has them left after {placed} of "
        f"{request.workers} are placed ({have}); lower the engine's parallel sizes or the number of engines, or start "
        "Ray on nodes with more of them"
    )


def _sort_key(address: str) -> tuple:
    """Order 10.0.0.9 before 10.0.0.10; other addresses than IPv4 come last, as text."""
    parts = address.split(".")
    return (0, *map(int, parts)) if len(parts) == 4 and all(part.isdecimal() for part in parts) else (1, address)
