"""Each shim is taken back alone: what then fails is the proof that it is still needed."""

import pytest
import torch
from support.ranks.engines_cases import build_engine, join_group, leave_groups, make_batch, plan, start_process
from support.ranks.pool import Ranks, draw_address
from torch.utils._python_dispatch import TorchDispatchMode

from hardware.megatron import shims as megatron_shims
from hardware.megatron.shims import SHIMS
from rlworker.checks.reference.huggingface import probe_loss

SINGLE = ("current_device", "factories", "tensor_types")
NO_DEVICE = "Torch not compiled with CUDA enabled"
SYMPTOMS = {
    "current_device": NO_DEVICE,
    "factories": NO_DEVICE,
    "tensor_types": "torch.cuda.FloatTensor",
    "synchronize": NO_DEVICE,
    "tensor_cuda": NO_DEVICE,
    "rng": NO_DEVICE,
    "adam": "KeyError: 'step'",
}
"""What each shim keeps from happening."""


def train_without(rank, world, address, folder, shim_name, settings):
    """What one optimizer step raises with one shim taken back; None where it runs."""
    start_process(rank)
    shim = next(s for s in SHIMS if s.name == shim_name)
    leave_groups()
    undo = taken_back(shim)
    try:
        engine = build_engine(rank, world, address, folder, settings)
        _, shard = plan(engine, make_batch())
        engine.train_step(shard, probe_loss, 10.0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        undo()
        leave_groups()
    return None


def taken_back(shim):
    """Undo an installed shim, by the originals that it kept; returns how to put it on again."""
    megatron_shims.INSTALLED.pop(shim.name)()

    def again():
        megatron_shims.INSTALLED[shim.name] = shim.apply(megatron_shims.CPU)

    return again


@pytest.fixture(scope="module")
def patched_ranks():
    """Ranks of their own, which end with these tests: what was taken back may leave something behind."""
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.mark.large
@pytest.mark.parametrize("name", SINGLE)
def test_a_step_fails_without(patched_ranks, make_hf_model, name):
    error = patched_ranks.take_first(1).run(train_without, draw_address(), make_hf_model("qwen2", False), name, {})[0]
    assert SYMPTOMS[name] in str(error), f"megatron no longer needs the shim {name!r}: remove it"


@pytest.mark.large
@pytest.mark.parametrize("name", ["synchronize", "tensor_cuda"])
def test_a_tied_pipeline_fails_without(patched_ranks, make_hf_model, name):
    errors = patched_ranks.run(train_without, draw_address(), make_hf_model("qwen2", True), name, {"pp": 2})
    assert all(SYMPTOMS[name] in str(e) for e in errors), f"megatron no longer needs the shim {name!r}: remove it"


@pytest.mark.large
def test_sequence_parallelism_fails_without_rng(patched_ranks, make_hf_model):
    errors = patched_ranks.run(train_without, draw_address(), make_hf_model("qwen2", False), "rng", {"tp": 2})
    assert all(SYMPTOMS["rng"] in str(e) for e in errors), "megatron no longer needs the shim 'rng': remove it"


@pytest.mark.large
def test_resuming_fails_without_adam(patched_ranks, make_hf_model, tmp_path):
    """torch's AdamW does not come back from a distributed checkpoint."""

    def save_and_load(rank, world, address, folder, target):
        start_process(rank)
        again = taken_back(next(s for s in SHIMS if s.name == "adam"))
        try:
            engine = build_engine(rank, world, address, folder, {})
            engine.train_step(plan(engine, make_batch())[1], probe_loss, 10.0)
            engine.save(target)
            engine.load(target)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            again()
        return None

    error = patched_ranks.take_first(1).run(
        save_and_load, draw_address(), make_hf_model("qwen2", False), str(tmp_path)
    )[0]
    assert SYMPTOMS["adam"] in str(error), "torch's AdamW now resumes: remove the shim 'adam' and FusedAdam"


def test_a_device_context_holds_for_factories(one_rank):
    def make(rank, world):
        start_process(rank)
        with torch.device("meta"):
            return torch.zeros(1).device.type, torch.tensor([]).device.type, torch.empty(1).device.type

    assert one_rank.run(make) == [("meta", "meta", "meta")]


def test_dropout_repeats_under_recompute_and_differs_between_tp_ranks(two_ranks):
    """What the RNG shim is for: a checkpointed region draws the same mask twice, tensor-parallel ranks differ."""

    def draw(rank, world, address):
        start_process(rank)
        from megatron.core import parallel_state as mpu
        from megatron.core import tensor_parallel

        join_group(rank, world, address)
        mpu.initialize_model_parallel(2, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(3)
        masks = []

        def region(x):
            with tensor_parallel.get_cuda_rng_tracker().fork():
                kept = torch.nn.functional.dropout(x, 0.5)
            masks.append(kept.detach() != 0)
            outside = torch.nn.functional.dropout(x, 0.5)
            masks.append(outside.detach() != 0)
            return kept + outside

        x = torch.ones(64, requires_grad=True)
        tensor_parallel.checkpoint(region, False, x).sum().backward()
        return masks, x.grad

    (first, gradient), (second, _) = two_ranks.run(draw, draw_address())
    inside, outside, inside_again, outside_again = first
    assert inside.equal(inside_again) and outside.equal(outside_again)
    assert gradient.tolist() == (2.0 * inside.float() + 2.0 * outside.float()).tolist()
    assert not inside.equal(second[0]), "inside the fork each tensor-parallel rank has its own stream"
    assert outside.equal(second[1]), "outside it all ranks share one"


def step_watched(rank, world, address, folder):
    """Collectives over a buffer's shards in an optimizer step, its gradient norm and the weights that it leaves."""
    names = set()

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            names.add(operator.name())
            return operator(*args, **kwargs or {})

    engine = build_engine(rank, world, address, folder, {})
    _, shard = plan(engine, make_batch())
    with Collectives():
        norm = engine.train_step(shard, probe_loss, 10.0).grad_norm
    weights = torch.cat([weight.flatten() for _, weight in engine.export_weights()])
    return {name for name in names if name.startswith("c10d::") and "coalesced" in name}, norm, weights


def test_a_lone_rank_neither_sums_nor_gathers_buffers(one_rank, make_hf_model):
    """Without the shim the same numbers take two collectives, which copy: else megatron no longer needs it."""

    def step_both_ways(*case):
        start_process(case[0])
        with_shim = step_watched(*case)
        again = taken_back(next(s for s in SHIMS if s.name == "lone_rank"))
        try:
            return with_shim, step_watched(*case)
        finally:
            again()

    found = one_rank.run(step_both_ways, draw_address(), make_hf_model("qwen2", False))[0]
    (names, norm, weights), (names_without, norm_without, weights_without) = found
    assert names_without == {"c10d::reduce_scatter_tensor_coalesced_", "c10d::allgather_into_tensor_coalesced_"}
    assert not names and norm == norm_without > 0 and weights.equal(weights_without)


@pytest.mark.parametrize(("size", "total"), [("one", 1), ("DP2", 3)])
def test_shards_are_summed_and_gathered_in_place_and_apart(pool_of, size, total):
    def reduce_and_gather(rank, world, address):
        start_process(rank)
        from megatron.core.distributed import param_and_grad_buffer as buffers

        group = join_group(rank, world, address)
        buffer = lambda: torch.arange(1.0, 5) * (rank + 1)  # noqa: E731
        in_place, apart, weights, copies = buffer(), torch.zeros(4 // world), buffer(), torch.zeros(4)
        mine = [buffers.shard_buffer(whole, world)[rank] for whole in (in_place, weights)]
        buffers.dist_reduce_scatter_func(mine[0], in_place, group=group)
        buffers.dist_reduce_scatter_func(apart, buffer(), group=group)
        buffers.dist_all_gather_func(weights, mine[1], group=group)
        buffers.dist_all_gather_func(copies, mine[1], group=group)
        return [x.tolist() for x in (mine[0], apart, weights, copies)]

    ranks = pool_of(size).run(reduce_and_gather, draw_address())
    sums, gathered = [total, 2 * total, 3 * total, 4 * total], [1, 2, 3 * len(ranks), 4 * len(ranks)]
    for rank, shard in zip(ranks, [sums] if len(ranks) == 1 else [sums[:2], sums[2:]]):
        assert rank[0] == rank[1] == shard and rank[2] == rank[3] == gathered
