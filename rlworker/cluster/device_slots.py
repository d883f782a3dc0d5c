"""Choose the devices of rollout engines that take turns with trainer ranks on the same devices."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from rlworker.base.errors import RunError
from rlworker.cluster.placement import DeviceSlot


def list_engine_slots(ranks: Sequence[DeviceSlot], engines: int, devices: int) -> list[DeviceSlot]:
    """Divide the devices of trainer ranks into device slots for rollout engines.

    The devices of a node are taken in their own order. Which rank has which device may change at a restart, and a new
    engine must find the devices of the lost one.

    Args:
        ranks: device slot of each rank.
        engines: number of engines. devices: number of devices of an engine.

    Returns:
        at least ``engines`` device slots, each on one node.

    Raises:
        RunError: the ranks' nodes have too few devices for them.
    """
    device_slots = []
    for node in dict.fromkeys(rank.node for rank in ranks):
        here = [rank.devices for rank in ranks if rank.node == node]
        here.sort(key=lambda names: [(len(name), name) for name in names])  # device 9 before device 10
        cuts = range(0, len(here) - devices + 1, devices)
        device_slots += [DeviceSlot(node, tuple(chain.from_iterable(here[cut : cut + devices]))) for cut in cuts]
    if len(device_slots) < engines:
        counts = Counter(rank.node for rank in ranks).values()
        raise RunError(
            f"placement: {engines} rollout engines of {devices} devices each are to share the actor's devices, but the "
            f"actor's nodes have room for {len(device_slots)} such engines (devices on each node: "
            f"{', '.join(map(str, counts))}); lower --rollout.engines or --rollout.tp, or leave --placement.colocate "
            "out"
        )
    return device_slots


def choose_device_slot(index: int, device_slots: Sequence[DeviceSlot], held: Iterable[DeviceSlot]) -> DeviceSlot:
    """Choose a device slot for engine ``index`` that shares no device with ``held``, preferably number ``index``.

    Args:
        device_slots: result of ``list_engine_slots``. held: device slots of the other engines.

    Raises:
        RunError: no device slot is free.
    """
    held = list(held)
    for device_slot in (device_slots[index], *device_slots):
        here = [name for other in held if other.node == device_slot.node for name in other.devices]
        if set(device_slot.devices).isdisjoint(here):
            return device_slot
    raise RunError(
        f"placement: other rollout engines hold all devices of the actor's ranks, so that rollout engine {index} finds "
        "none; start the run again with --resume"
    )
