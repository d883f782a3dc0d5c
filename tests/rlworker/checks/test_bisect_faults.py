"""``rlworker bisect``: six faults of a real model, planted into trainer and rollout engine, are named."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Literal
from unittest.mock import patch

import pytest

from engines.config import MegatronConfig
from rlworker.checks.config import BisectConfig, CheckConfig

if TYPE_CHECKING:
    from rlworker.checks.context import CheckedEngines


LAYER = 3
"""Layer that faults of one layer are planted into, from 1."""
PLACES = {
    "a stale projection": f"layer {LAYER}",
    "the rope base": "layer 1",
    "a norm's eps": f"layer {LAYER}",
    "the attention's scale": f"layer {LAYER}",
    "a window": "layer 1",
    "the last norm's eps": "the output layer",
}
"""Fault -> the stage that must be named first."""
_EPS, _SCALE, _WINDOW = 100.0, 1.25, 8


def plant(engine, name: str) -> None:
    """Plant a fault of ``PLACES`` into an engine of this process."""
    patches = _in_vllm if hasattr(engine, "llm") else _in_megatron
    engine.planted = ExitStack()
    for owner, attribute, value in patches(engine, name):
        engine.planted.enter_context(patch.object(owner, attribute, value))


def mend(engine) -> None:
    """Remove the fault."""
    engine.planted.close()


def _scaled(forward: Callable) -> Callable:
    def call(*args, **kwargs):
        output = forward(*args, **kwargs)
        return (_SCALE * output[0], *output[1:]) if isinstance(output, tuple) else _SCALE * output

    return call


def _in_megatron(engine, name: str) -> list[tuple]:
    from dataclasses import replace

    from engines.probes.faults import REAL_FAULTS
    from hardware.attention import grouped_sdpa

    decoder, build = engine.decoder.decoder, grouped_sdpa.build_dense_mask
    layer = next(layer for layer in decoder.layers if layer.layer_number == LAYER)
    if name == "the rope base":
        make = REAL_FAULTS["a rotary base of twice the size"].patches
        assert make
        return [(owner, attribute, wrap(getattr(owner, attribute))) for owner, attribute, wrap in make()]
    attention = layer.self_attention.core_attention
    return [
        {
            "a stale projection": (layer.mlp.linear_fc2, "forward", _scaled(layer.mlp.linear_fc2.forward)),
            "a norm's eps": (layer.pre_mlp_layernorm, "eps", _EPS),
            "the attention's scale": (attention, "softmax_scale", _SCALE * attention.softmax_scale),
            "a window": (
                grouped_sdpa,
                "build_dense_mask",
                lambda spec, rule, *rest: build(spec, replace(rule, window=_WINDOW), *rest),
            ),
            "the last norm's eps": (decoder.final_layernorm, "eps", _EPS),
        }[name]
    ]


def _in_vllm(engine, name: str) -> list[tuple]:
    from engines.probes.vllm import find_decoder

    decoder = find_decoder(engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker)
    layer = decoder.layers[LAYER - 1]
    rotary, attention = layer.self_attn.rotary_emb, layer.self_attn.attn.impl
    if name == "the rope base":
        with patch.object(rotary, "base", 2 * rotary.base):
            cache = rotary._compute_cos_sin_cache().to(rotary.cos_sin_cache)
        return [(each.self_attn.rotary_emb, "cos_sin_cache", cache) for each in decoder.layers[:1]]  # shared by all
    if name == "a window":
        return [(each.self_attn.attn.impl, "sliding_window", _WINDOW) for each in decoder.layers]
    return [
        {
            "a stale projection": (layer.mlp.down_proj, "forward", _scaled(layer.mlp.down_proj.forward)),
            "a norm's eps": (layer.post_attention_layernorm, "variance_epsilon", _EPS),
            "the attention's scale": (attention, "scale", _SCALE * attention.scale),
            "the last norm's eps": (decoder.norm, "variance_epsilon", _EPS),
        }[name]
    ]


def call_engine(engines: "CheckedEngines", side: str, function: Callable, *args) -> None:
    """Call a function of the tests, which workers cannot import, with an engine."""
    import ray

    if side == "trainer":
        call = engines.actor.workers[0].__ray_call__.remote(lambda worker: function(worker.engines["actor"], *args))
    else:
        call = engines.rollouts.workers[0].__ray_call__.remote(
            lambda worker: worker.loop.call(function, worker.engine, *args)
        )
    ray.get(call)


def check_six_faults(model: str, dtype: Literal["float32", "bfloat16"]) -> None:
    """Check that no layer is named without a fault, and the right stage with each of six, in either engine."""
    from rlworker.checks.bisect import judge, take_rollout_states, take_trainer_states
    from rlworker.checks.context import start_engines

    rollout = replace(BisectConfig().rollout, dtype=dtype)
    config = CheckConfig(model, actor=MegatronConfig(dtype=dtype), rollout=rollout, huggingface=False)
    with start_engines(config, print) as engines:
        trainer, batch = engines.trainer, engines.trainer.case.batch.select(6, 9)
        found = {}
        for side, take in (
            ("trainer", lambda: take_trainer_states(trainer, "thd", batch)),
            ("rollout", lambda: take_rollout_states(engines, batch)),
        ):
            found[side, ""] = take()
            for name in PLACES:
                call_engine(engines, side, plant, name)
                found[side, name] = take()
                call_engine(engines, side, mend)
    for (side, name), states in found.items():
        passed, text = judge(trainer.model, batch, states)
        print(side, name or "without a fault", text)
        assert text.startswith(f"{PLACES[name]} is the first that differs") if name else passed, (side, name, text)


@pytest.mark.large
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_faults_of_either_engine_are_named_in_a_real_model(cluster, by_value, smollm2, dtype):
    check_six_faults(smollm2, dtype)
