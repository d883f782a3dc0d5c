"""Faults of a real model in the trainer or in vLLM, which ``rlworker bisect`` must name by engine and layer."""

import re
from contextlib import ExitStack

import pytest
from support.ranks.capsule_cases import make_groups

from engines.config import MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec


def plant_in_trainer(worker, name: str) -> None:
    from unittest.mock import patch

    engine = worker.engines["actor"]
    layers = engine.decoder.decoder.layers
    if name == "a weight":
        layers[11].mlp.linear_fc2.weight.data.mul_(1.5)
    elif name == "a norm's eps":
        norm = layers[4].pre_mlp_layernorm
        patch.object(norm, "eps", 1e-2).start()
    else:
        patch.object(engine.rotary, "inverse_frequency", engine.rotary.inverse_frequency * 0.8).start()


def mend_in_trainer(worker, name: str) -> None:
    from unittest.mock import patch

    patch.stopall()
    if name == "a weight":
        worker.engines["actor"].decoder.decoder.layers[11].mlp.linear_fc2.weight.data.div_(1.5)


def plant_in_vllm(worker, name: str) -> None:
    def change(model) -> None:
        layers = model.model.layers
        if name == "a weight":
            layers[20].input_layernorm.weight.data.mul_(1.5)
        elif name == "a norm's eps":
            layers[7].post_attention_layernorm.variance_epsilon = 1e-2
        else:
            layers[2].self_attn.attn.impl.scale *= 1.5

    worker.loop.call(worker.engine.llm.apply_model, change)


FAULTS = {"a weight": (12, 21), "a norm's eps": (5, 8), "rotation or scale": (1, 3)}
"""Fault -> the layer where it is planted in the trainer, and in vLLM."""


@pytest.mark.large
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_and_the_layer_of_a_fault_are_named(by_value, smollm2, dtype):
    from rlworker.cluster.ray import running_ray
    from rlworker.cluster.rollout_group import Rollouts
    from rlworker.cluster.train_group import StartingGroup
    from rlworker.cluster.watch import wait_for
    from rlworker.cluster.workers import Role
    from rlworker.tracking.capsule.bisect import Judge, compute_reference, compute_rollouts, compute_trainer

    model, batch = ModelSpec.from_folder(smollm2), make_groups(40_000)
    judge = Judge(compute_reference(model, batch, dtype), batch, "executed")

    def name_layer(engine: str, states) -> int:
        layers, logprobs = judge.judge(engine, states)
        print(layers.text, logprobs.text)
        assert layers.outcome == logprobs.outcome
        return int(re.match(r"layer (\d+) of 30", layers.text)[1]) if layers.outcome == "FAILED" else 0

    with ExitStack() as running:
        running.enter_context(running_ray(2, "cpu"))
        role = Role("actor", model, MegatronConfig(dtype=dtype), trainable=False)
        starting = running.enter_context(StartingGroup("actor", "cpu", (role,), 0))
        group = starting.wait()["actor"]
        assert name_layer("trainer", compute_trainer(group, batch)) == 0
        for name, (layer, _) in FAULTS.items():
            wait_for([worker.__ray_call__.remote(plant_in_trainer, name) for worker in group.workers])
            assert name_layer("trainer", compute_trainer(group, batch)) == layer, name
            wait_for([worker.__ray_call__.remote(mend_in_trainer, name) for worker in group.workers])
    for name, (_, layer) in ({"": (0, 0)} | FAULTS).items():
        with running_ray(1, "cpu"), Rollouts("cpu", 1) as rollouts:
            rollouts.start(model, VllmConfig(dtype=dtype, max_model_len=64, max_new_tokens=1, kv_cache_mb=256)).wait()
            if name:
                wait_for([worker.__ray_call__.remote(plant_in_vllm, name) for worker in rollouts.workers])
            assert name_layer("vLLM", compute_rollouts(rollouts, batch)) == layer, name
