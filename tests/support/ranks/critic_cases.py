"""What the ranks of a critic run, and how far their values and gradients are from a reference."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support.ranks.adapter_cases import OPTIMIZER, draw_batch, fill
from support.ranks.engines_cases import build_engine, plan
from support.rounding import Rounding, check_distances
from torch.nn.modules.module import register_module_parameter_registration_hook

from engines.batch.batch import TrainBatch
from engines.megatron.memory.activations import MicroBatch
from engines.megatron.memory.estimate import compute_rank_memory
from engines.models.folders.hf_folder import save_hf_folder
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import probe_loss


def run_critic(
    rank: int, world: int, address: str, folder: str, settings: dict, make: Callable, loss: Callable, target: str = ""
) -> dict:
    """Compute values and gradients of the batch ``make(model)``; with ``target`` the critic is also saved there."""
    model = ModelSpec.from_folder(folder, head="value")
    engine = build_engine(rank, world, address, model, settings)
    from engines.probes.megatron import gather_gradients

    batch = make(model)
    schedule, shard = plan(engine, batch)
    values = engine.forward(shard)
    engine.backward(shard, loss, float(batch.mask.sum()))
    gradients = gather_gradients(engine)
    if target:
        save_hf_folder(engine.export_weights(), model, target, 10**9)
    return {
        "schedule": schedule,
        "dp_rank": engine.dp_rank,
        "values": values.values if engine.is_leader else None,
        "gradients": gradients if engine.is_leader else None,
    }


def run_beside_actor(
    rank: int, world: int, address: str, folder: str, settings: dict, images: tuple[str, ...]
) -> list[dict]:
    """Compute two steps of an actor and a critic with adapters: one that shares the actor's base, and one that does
    not. Parts of both leave the device in between, as they do beside rollout engines."""
    results, settings = [], settings | {"optimizer": replace(OPTIMIZER, lr=1e-2)}
    for shares in (True, False):
        actor = build_engine(rank, world, address, folder, settings)
        there, base = list_tensors(), actor if shares else None
        model, most = ModelSpec.from_folder(folder, head="value"), watch_parameters(actor.decoder)
        critic = build_engine(rank, world, address, model, settings, base=base)
        found = {
            "bytes": count_new_bytes(there),
            "most": most(),
            "planned": plan_parameters(critic, rank, world, shares),
        }
        fill(actor, 5)
        fill(critic, 6)
        results.append(found | {"numbers": [*step_twice(actor, critic, draw_batch(actor.model, images), shares)]})
        del actor, critic, base, there
    return results


def step_twice(actor, critic, batch: TrainBatch, shares: bool) -> Iterator:
    """Yield all that two steps compute: values, logprobs, gradient norms and weights."""
    every = ("weights", "gradients", "optimizer")
    _, shard = plan(actor, batch)

    def pull(outputs, micro):
        loss = ((outputs.values - micro.advantages).square() * micro.mask).sum() / 2
        return loss, {"loss": loss.detach()}

    for _ in range(2):
        yield critic.forward(shard)
        for engine, loss in ((critic, pull), (actor, probe_loss)):
            yield engine.train_step(shard, loss, float(batch.mask.sum())).grad_norm
        critic.offload(every)
        actor.offload(every[1:])
        yield {name: tensor.clone() for name, tensor in actor.export_weights()}
        actor.offload(every[:1])
        critic.onload(every)
        with pytest.raises(RuntimeError, match="while weights were offloaded") if shares else nullcontext():
            critic.forward(shard)
        actor.onload(every)
        yield actor.forward(shard)
    yield {name: tensor.clone() for name, tensor in critic.export_weights()}


def list_tensors() -> list[torch.Tensor]:
    """List the tensors of floating-point numbers of this process, as all parameters are. Those on the list stay: the
    storage of one that an earlier test left is given to no other."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [each for each in tensors if each.is_floating_point() and not each.is_meta]


def count_new_bytes(there: list[torch.Tensor]) -> int:
    """Count the bytes of tensors whose storage none of those that were there has, each storage once."""
    old = {each.untyped_storage().data_ptr() for each in there}
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in list_tensors()}
    return sum(size for place, size in sizes.items() if place not in old)


def watch_parameters(there: torch.nn.Module) -> Callable[[], int]:
    """Watch how many bytes of parameters, but for those that are there, modules have at once as they are built.

    Returns:
        a function that ends the watch and returns the most bytes.
    """
    bytes_by_key, most, old = {}, [0], {*there.parameters()}

    def note(module, name, parameter) -> None:
        if not parameter.is_meta and parameter not in old:
            bytes_by_key[id(parameter)] = parameter.nbytes
            weakref.finalize(parameter, bytes_by_key.pop, id(parameter), None)
            most[0] = max(most[0], sum(bytes_by_key.values()))

    handle = register_module_parameter_registration_hook(note)

    def end() -> int:
        handle.remove()
        return most[0]

    return end


def plan_parameters(engine, rank: int, world: int, shares: bool) -> int:
    """Return the planned bytes of a rank's parameters."""
    from megatron.core import parallel_state as mpu

    stage, place = mpu.get_pipeline_model_parallel_rank(), rank % (world // engine.config.pp)
    sizes = engine.config, stage, place, MicroBatch(), engine.platform.kernel_memory
    return compute_rank_memory(engine.model, *sizes, shares_base=shares).parameters


def check_critic(ranks: list[dict], want: Rounding, measured, label: str) -> None:
    """Compare with values ``[N]`` and gradients by their names."""
    leaders = sorted((rank for rank in ranks if rank["values"] is not None), key=lambda rank: rank["dp_rank"])
    values = leaders[0]["schedule"].restore_order(torch.cat([rank["values"] for rank in leaders]))
    distances = {
        "values": want.compare("values", values),
        "gradients": want.compare("gradients", leaders[0]["gradients"]),
    }
    check_distances(distances, measured, label)
