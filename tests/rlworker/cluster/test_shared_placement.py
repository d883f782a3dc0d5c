"""Seats of rollout engines on the devices of trainer ranks."""

import pytest

from rlworker.errors import RunError


def make_ranks(*places: str) -> list:
    """Make the device slots of ranks, each written as NODE:DEVICE; a CPU has no device."""
    from rlworker.cluster.placement import DeviceSlot

    pairs = [place.split(":") for place in places]
    return [DeviceSlot(node, (device,) if device else ()) for node, device in pairs]


def list_names(*places: str, engines: int = 1, devices: int = 1) -> list[str]:
    from rlworker.cluster.device_slots import list_engine_slots

    return [f"{s.node}:{','.join(s.devices)}" for s in list_engine_slots(make_ranks(*places), engines, devices)]


def test_an_engine_has_neighbouring_devices_of_one_node():
    assert list_names("a:0", "a:1", "b:0", "b:1", engines=2, devices=2) == ["a:0,1", "b:0,1"]
    assert list_names("a:0", "a:1", "a:2", "b:0", devices=2) == ["a:0,1"], "not over two nodes"
    assert list_names("a:9", "a:10", "a:8", engines=3) == ["a:8", "a:9", "a:10"]
    assert list_names("a:", "a:", "a:", "a:", engines=2, devices=2) == ["a:", "a:"], "processors have no names"


def test_which_rank_has_which_device_does_not_matter():
    """A restart may give them to the ranks in another order, while the other engines stay where they are."""
    assert list_names("a:2", "a:0", "a:3", "a:1", devices=2) == list_names("a:0", "a:1", "a:2", "a:3", devices=2)


def test_engines_that_no_node_holds_are_refused_by_name():
    message = r"2 rollout engines of 2 devices each are to share .* room for 1 such .* \(devices on each node: 3, 1\)"
    with pytest.raises(RunError, match=message):
        list_names("a:0", "a:1", "a:2", "b:0", engines=2, devices=2)


def test_a_new_engine_takes_what_the_others_leave():
    from rlworker.cluster.device_slots import choose_device_slot

    first, second, elsewhere = make_ranks("a:0", "a:1", "b:1")
    assert choose_device_slot(1, [first, second], [first]) == second
    assert choose_device_slot(0, [first, second], [first]) == second, "where ranks lie elsewhere than before"
    assert choose_device_slot(0, [elsewhere], [second]) == elsewhere, "another node's device of the same name"
    processors = make_ranks("a:", "a:")
    assert choose_device_slot(1, processors, processors[:1]) == processors[1]
    with pytest.raises(RunError, match="so that rollout engine 1 finds none"):
        choose_device_slot(1, [first, first], [first])
