"""Device slots of rollout engines that take turns with trainer ranks on the same devices."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from rlworker.cluster.placement import DeviceSlot
from rlworker.errors import RunError


def list_engine_slots(ranks: Sequence[DeviceSlot], engines: int, devices: int) -> list[DeviceSlot]:
    """List the device slots for rollout engines on the devices of trainer ranks.

    A node's devices are taken in their own order. Which rank has which may change at a restart, and a new engine must
    find the devices of the lost one.

    Args:
        ranks: the device slot of each. devices: of an engine.

    Returns:
        at least ``engines`` of them, each within a node.

    Raises:
        RunError: the ranks' nodes do not hold so many.
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
            f"placement: {engines} rollout engines of {devices} devices are to share those of the actor, and its nodes "
            f"hold {len(device_slots)} of them (devices on each: {', '.join(map(str, counts))}); lower "
            "--rollout.engines or --rollout.tp, or leave --placement.colocate out"
        )
    return device_slots


def choose_device_slot(index: int, device_slots: Sequence[DeviceSlot], held: Iterable[DeviceSlot]) -> DeviceSlot:
    """Choose a device slot for engine ``index`` that overlaps with no held one; its own comes first.

    Raises:
        RunError: there is none.
    """
    held = list(held)
    for device_slot in (device_slots[index], *device_slots):
        here = [name for other in held if other.node == device_slot.node for name in other.devices]
        if set(device_slot.devices).isdisjoint(here):
            return device_slot
    raise RunError(
        f"placement: other rollout engines are on the devices of the actor's ranks, which leaves none to rollout "
        f"engine {index}; start the run again with --resume"
    )
