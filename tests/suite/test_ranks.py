"""The pool of ranks: what a forked rank computes, and what of one test may reach the next."""

import os
import sys

import pytest
from support.ranks.engines_cases import build_engine, run_case
from support.ranks.pool import Ranks, draw_address


@pytest.mark.large
def test_forked_ranks_compute_what_spawned_ones_do_bit_for_bit(make_hf_model):
    import torch

    folder = make_hf_model("qwen2", True)
    cases = (
        {"tp": 2, "layout": "thd"},
        {"pp": 2, "layout": "bshd", "micro_batch_tokens": 16},
        {"cp": 2, "layout": "thd", "recompute": "full"},
    )
    results = []
    for method in ("forkserver", "spawn"):
        ranks = Ranks(2, method)
        results.append([ranks.run(run_case, draw_address(), folder, case, timeout=250) for case in cases])
        ranks.close()
    for forked, spawned in zip(*results, strict=True):
        assert any(rank["weights"] for rank in forked) and any(rank["gradients"] for rank in forked)
        for a, b in zip(forked, spawned, strict=True):
            assert a["grad_norms"] == b["grad_norms"] and all(norm > 0 for norm in a["grad_norms"])
            assert (a["logits"] is None) == (b["logits"] is None)
            assert a["logits"] is None or torch.equal(a["logits"], b["logits"])
            for kind in ("weights", "gradients"):
                assert a[kind].keys() == b[kind].keys()
                assert all(torch.equal(tensor, b[kind][name]) for name, tensor in a[kind].items())


def whole_sum(rank, world, address, folder):
    """How many ranks the engine's group really has, as a sum over them, and this process."""
    assert "support.ranks.server" in sys.modules, "the fork server has loaded the engine"
    import torch
    import torch.distributed as dist

    build_engine(rank, world, address, folder, {})
    one = torch.ones(1)
    dist.all_reduce(one)
    return int(one), os.getpid()


def fail(rank, world):
    assert rank != 1, "as asked"
    return os.getpid()


def test_pools_of_all_sizes_are_the_same_processes(four_ranks, make_hf_model):
    """Groups of one size are never taken for those of another, in whatever order the sizes come."""
    folder, seen = make_hf_model("qwen2", True), {}
    for world in (2, 1, 2, 4, 1, 4):
        results = four_ranks.take_first(world).run(whole_sum, draw_address(), folder)
        assert [count for count, _ in results] == [world] * world
        for rank, (_, pid) in enumerate(results):
            assert seen.setdefault(rank, pid) == pid


@pytest.mark.large
def test_ranks_of_a_run_that_fails_are_ended():
    pool = Ranks(3)
    first = pool.take_first(1).run(fail)
    with pytest.raises(AssertionError, match=r"rank 1 failed(.|\n)*as asked"):
        pool.take_first(2).run(fail)
    again = pool.take_first(1).run(fail)
    pool.close()
    assert first != again, "a rank that ran with one that failed is not used again"
