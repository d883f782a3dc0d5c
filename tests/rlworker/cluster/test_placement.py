"""Placement of workers, for clusters that this machine need not have."""

import pytest

from rlworker.errors import RunError


def make_nodes(*devices: int) -> list:
    from rlworker.cluster.placement import RayNode

    return [RayNode(f"n{i}", f"10.0.0.{i}", {"CPU": count}) for i, count in enumerate(devices, 1)]


def test_ranks_fill_nodes_in_their_order():
    from rlworker.cluster.placement import ResourceRequest, plan_nodes

    (places,) = plan_nodes(make_nodes(2, 2), [ResourceRequest("actor", "cpu", 4)])
    assert places == ["n1", "n1", "n2", "n2"]


def test_a_tensor_parallel_group_stays_within_a_node():
    from rlworker.cluster.placement import ResourceRequest, plan_nodes

    engines, ranks = plan_nodes(
        make_nodes(3, 4), [ResourceRequest("engine", "cpu", 2, 1), ResourceRequest("actor", "cpu", 4, 1, 2)]
    )
    assert engines == ["n1", "n1"] and ranks == ["n2"] * 4
    engines, ranks = plan_nodes(
        make_nodes(5, 2), [ResourceRequest("engine", "cpu", 1, 2), ResourceRequest("actor", "cpu", 4, 1, 2)]
    )
    assert engines == ["n1"] and ranks == ["n1", "n1", "n2", "n2"]


def test_an_engine_of_several_devices_stays_within_a_node():
    from rlworker.cluster.placement import ResourceRequest, plan_nodes

    (places,) = plan_nodes(make_nodes(3, 3), [ResourceRequest("engine", "cpu", 2, 2)])
    assert places == ["n1", "n2"]


def test_what_fits_in_sum_and_on_no_node_is_refused_by_name():
    from rlworker.cluster.placement import ResourceRequest, plan_nodes

    message = (
        r"actor needs 16 CPUs in one node, and none has them left after 0 of 16 are placed \(node 10.0.0.1 has 8 of 8 "
        r"CPUs; node 10.0.0.2 has 8 of 8 CPUs\)"
    )
    with pytest.raises(RunError, match=message):
        plan_nodes(make_nodes(8, 8), [ResourceRequest("actor", "cpu", 16, 1, 16)])


def test_what_others_have_taken_is_not_given_again():
    from rlworker.cluster.placement import ResourceRequest, plan_nodes

    nodes, one = make_nodes(2, 2), ResourceRequest("engine", "cpu", 1)
    assert plan_nodes(nodes, [ResourceRequest("actor", "cpu", 2)], [("n1", one), ("lost", one)]) == [["n1", "n2"]]
    with pytest.raises(RunError, match=r"node 10.0.0.1 has 1 of 2 CPUs"):
        plan_nodes(nodes, [ResourceRequest("actor", "cpu", 4, 1, 2)], [("n1", one)])
