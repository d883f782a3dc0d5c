"""Placement of workers, for clusters that this machine need not have."""

import pytest

from rlworker.errors import RunError


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
