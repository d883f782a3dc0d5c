"""``rlworker plan --forecast MACHINE``: the seconds of a step's phases by a roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engines.config import MegatronConfig
from engines.megatron.memory.activations import get_itemsize
from engines.models.spec import ModelSpec
from hardware.machines import Machine
from hardware.platforms import get_platform
from rlworker.checks.plan.work import (
    Tokens,
    Work,
    count_forward,
    count_optimizer,
    count_passes,
    schedule_tokens,
)
from rlworker.config.run import RunConfig

_MOST_AHEAD = 8
"""Largest staleness that is tried."""
Models = Mapping[str, ModelSpec]


@dataclass(frozen=True)
class Forecast:
    """The seconds of a step where all samples are longest.

    Attributes:
        phases: phase -> seconds of the clock. busy: trainers, rollout, driver -> seconds that their devices and, where
            these are cores, their processes are busy, in all.
        step: seconds of the clock, with phases beside each other where rollouts run ahead.
        mfu: part of the trainers' peak that the update reaches. tokens: sampled in a second.
        level: least staleness at which engines keep up with the trainers; 0 where none that was tried is enough.
    """

    phases: dict[str, float]
    busy: dict[str, float]
    step: float
    mfu: float
    tokens: float
    level: int

    @property
    def work(self) -> float:
        """Seconds that all devices are busy, in all."""
        return sum(self.busy.values())


def compute_seconds(
    machine: Machine, work: Work, dtype: str, spans: Mapping[str, int], overlaps: bool = False
) -> float:
    """Compute the seconds of a device's work.

    Args:
        spans: way of parallelism -> consecutive ranks among which its groups are.
        overlaps: products and their operands' way from the memory are beside each other, as where few tokens are
            multiplied by all weights; elsewhere what moves is of other kernels.
    """
    peak = machine.products[dtype]
    products, moved = work.products / peak / machine.product_share, work.moved / machine.memory / machine.memory_share
    device = max(products, moved) if overlaps else products + moved
    device += work.attention / peak / machine.attention_share
    host = work.layers * machine.layer
    seconds = max(device, host) if machine.launches_ahead else device + host
    for way, (size, calls) in work.sent.items():
        rate = machine.link if spans[way] <= machine.devices else machine.network
        seconds += size / rate + calls * machine.call
    return seconds


def forecast_update(
    model: ModelSpec, actor: MegatronConfig, platform: str, tokens: Tokens, machine: Machine, learns: bool = True
) -> tuple[float, float]:
    """Forecast an optimizer step, or a forward pass: seconds of the clock, and those that all ranks are busy."""
    door, slowest, busy = get_platform(platform), 0.0, 0.0
    spans = {"tp": actor.tp, "cp": actor.tp * actor.cp, "ep": actor.ep * actor.etp}
    spans |= {"dp": actor.ranks // actor.pp, "pp": actor.ranks}
    for stage in range(actor.pp):
        passes = compute_seconds(machine, count_passes(model, actor, door, stage, tokens, learns), actor.dtype, spans)
        step = compute_seconds(machine, count_optimizer(model, actor, stage), actor.dtype, spans) if learns else 0.0
        waiting = (tokens.micro_batches + actor.pp - 1) / tokens.micro_batches
        slowest = max(slowest, passes * waiting + step)
        busy += (passes + step) * actor.ranks / actor.pp
    return slowest, busy


def forecast_rollout(config: RunConfig, model: ModelSpec, machine: Machine, together: int = 1) -> tuple[float, float]:
    """Forecast the seconds of prefill and of decode on each engine for a step's samples, all being longest.

    Args:
        together: number of steps whose samples an engine has at once.
    """
    rollout, platform = config.rollout, get_platform(config.platform)
    size, group = get_itemsize(rollout.dtype), config.samples_per_prompt
    prompt, sampled = config.data.max_prompt_tokens, rollout.max_new_tokens
    prompts = together * config.prompts_per_step / rollout.engines
    samples = prompts * group
    token_bytes = model.count_cached(rollout.tp) * size
    cache = (rollout.kv_cache_mb or platform.rollout_kv_cache_mb) * 2**20 / max(1, token_bytes)
    running = max(1.0, min(samples, rollout.max_num_seqs, cache / (prompt / group + sampled)))
    # A prompt's last block is computed for each of its samples, unless the platform copies it.
    rest = 1 if "kv_transfer_config" in platform.rollout_settings else (prompt - 1) % platform.rollout_block_tokens + 1
    filled = prompts * prompt + (samples - prompts) * rest
    prefill = count_forward(model, rollout.tp, size, samples, filled, prompts * prompt**2 / 2)
    rounds = math.ceil(samples / running) * sampled
    at_once = samples * sampled / rounds
    decode = count_forward(model, rollout.tp, size, at_once, at_once, at_once * (prompt + sampled / 2))
    spans = {"tp": rollout.tp}
    own = (1 + rounds) * model.layers * machine.engine_layer + samples * sampled * machine.engine_token
    first = compute_seconds(machine, prefill, rollout.dtype, spans, overlaps=True)
    rest = rounds * compute_seconds(machine, decode, rollout.dtype, spans, overlaps=True) + own
    return first / together, rest / together


def forecast_step(config: RunConfig, models: Models, machine: Machine) -> Forecast:
    """Forecast a step of a run.

    Args:
        models: role -> model.
    """
    actor, model, algorithm = config.actor, models["actor"], config.algorithm
    minis = algorithm.mini_batches
    lengths = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    counts = config.rows_per_mini_batch, config.samples_per_prompt
    tokens = schedule_tokens(model, actor, get_platform(config.platform), *lengths, *counts)
    learners = [role for role in models if role in ("actor", "critic")]
    scoring = [role for role in models if role != "actor"] + ["actor"] * (algorithm.optimizer_steps > 1)
    update = _sum(forecast_update(models[role], actor, config.platform, tokens, machine) for role in learners)
    scored = [(models[role], actor if role in learners else actor.base_settings) for role in scoring]
    score = _sum(forecast_update(*each, config.platform, tokens, machine, False) for each in scored)
    update, score = _scale(update, algorithm.optimizer_steps), _scale(score, minis)
    prefill, decode = forecast_rollout(config, model, machine)
    sync = model.count_weights() * get_itemsize(actor.dtype) / machine.host
    driver = machine.driver_step + config.samples_per_step * machine.sample
    busy = {
        "trainers": update[1] + score[1] + sync + machine.trainer_step * actor.ranks,
        "rollout": (prefill + decode + sync) * config.rollout.devices + machine.rollout_step * config.rollout.engines,
        "driver": driver,
    }
    phases = {"prefill": prefill, "decode": decode, "scoring": score[0], "update": update[0], "sync": sync}
    phases["rest"] = driver + machine.trainer_step + machine.rollout_step
    behind = sum(phases.values()) - prefill - decode
    ahead = [sum(forecast_rollout(config, model, machine, steps)) for steps in range(1, _MOST_AHEAD + 1)]
    level = next((steps for steps, seconds in enumerate(ahead, 1) if seconds <= behind), 0)
    staleness = config.rollout.staleness
    step = max(behind, ahead[min(staleness, _MOST_AHEAD) - 1]) if staleness else prefill + decode + behind
    computed = tokens.slots * actor.dp * minis
    inputs = [sum(lengths) - 1] * config.samples_per_step
    frozen = bool(actor.lora.rank)
    useful = sum(models[role].count_training_flops(inputs, computed, frozen) for role in learners) * algorithm.epochs
    return Forecast(
        phases,
        busy,
        step,
        useful / max(update[0], 1e-12) / actor.ranks / machine.products[actor.dtype],
        config.samples_per_step * lengths[1] / step,
        level,
    )


def _sum(pairs) -> tuple[float, float]:
    """Add up pairs of seconds of the clock and busy seconds."""
    pairs = list(pairs)
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def _scale(pair: tuple[float, float], times: int) -> tuple[float, float]:
    return pair[0] * times, pair[1] * times
