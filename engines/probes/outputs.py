"""Outputs of a training engine for a batch that every replica computes, under settings that probes choose."""

from dataclasses import replace
from unittest.mock import patch

from engines.batch.batch import TrainBatch
from engines.batch.beginnings import find_beginnings
from engines.batch.schedule import Schedule, number_image_sets, plan_schedule
from engines.batch.shard import TokenOutputs, require_tokens
from engines.megatron.engine import MegatronEngine


def plan_batch(engine: MegatronEngine, batch: TrainBatch, replicas: int) -> Schedule:
    """Plan the schedule of a batch over replicas, as the trainer does."""
    config, most = engine.config, engine.platform.max_pack_sequences
    whole_images = any(rule.images for rule in engine.model.rules)
    found = number_image_sets(batch), find_beginnings(batch, config, engine.platform, whole_images)
    return plan_schedule(batch.lengths, config, engine.model.hidden, replicas, most, *found)


def compute_outputs(engine: MegatronEngine, kind: str, batch: TrainBatch) -> TokenOutputs | None:
    """Compute outputs ``[N]`` in layout ``kind``, for a batch that every replica computes; only the leader has them."""
    with changing_settings(engine, layout=kind):
        schedule = plan_batch(engine, batch, 1)
        (shard,) = schedule.shards(batch)
        outputs = engine.forward(replace(shard, replica=engine.dp_rank), every=True)
    return None if outputs is None else require_tokens(schedule.restore([outputs]))


def changing_settings(engine: MegatronEngine, **changes):
    """Give the engine other settings for a while; rows of bshd share nothing, whatever is asked for in thd."""
    changes |= {"share": "none"} if changes.get("layout") == "bshd" else {}
    return patch.object(engine, "config", replace(engine.config, **changes))
