"""Placement of workers, for clusters that this machine need not have."""

import pytest

from rlworker.base.errors import RunError


def plan(devices: tuple[int, ...], *requests: tuple, taken: tuple[str, ...] = ()) -> list[list[str]]:
    """Plan requests (name, count, devices each, and the size of a group) on nodes ``n1``, ``n2``, ... of so many
    devices; an engine of one device is on each node of ``taken``."""
    from rlworker.cluster.placement import RayNode, ResourceRequest, plan_nodes

    nodes = [RayNode(f"n{i}", f"10.0.0.{i}", {"CPU": count}) for i, count in enumerate(devices, 1)]
    asked = [ResourceRequest(name, "cpu", *sizes) for name, *sizes in requests]
    return plan_nodes(nodes, asked, [(node, ResourceRequest("engine", "cpu", 1)) for node in taken])


@pytest.mark.parametrize(
    ("devices", "requests", "places"),
    [
        ((2, 2), [("actor", 4)], [["n1", "n1", "n2", "n2"]]),
        ((3, 4), [("engine", 2, 1), ("actor", 4, 1, 2)], [["n1", "n1"], ["n2"] * 4]),
        ((5, 2), [("engine", 1, 2), ("actor", 4, 1, 2)], [["n1"], ["n1", "n1", "n2", "n2"]]),
        ((3, 3), [("engine", 2, 2)], [["n1", "n2"]]),
    ],
)
def test_nodes_are_filled_in_order_and_hold_engines_and_tensor_parallel_groups_whole(devices, requests, places):
    assert plan(devices, *requests) == places


def test_what_fits_in_sum_and_on_no_node_is_refused_by_name():
    message = (
        r"actor needs 16 CPUs in one node, and none has them left after 0 of 16 are placed \(node 10.0.0.1 has 8 of 8 "
        r"CPUs; node 10.0.0.2 has 8 of 8 CPUs\)"
    )
    with pytest.raises(RunError, match=message):
        plan((8, 8), ("actor", 16, 1, 16))


def test_what_others_have_taken_is_not_given_again():
    assert plan((2, 2), ("actor", 2), taken=("n1", "lost")) == [["n1", "n2"]]
    with pytest.raises(RunError, match=r"node 10.0.0.1 has 1 of 2 CPUs"):
        plan((2, 2), ("actor", 4, 1, 2), taken=("n1",))


# -- rollout engines on the devices of trainer ranks


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
