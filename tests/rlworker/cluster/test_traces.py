"""The trace of a training step, read back."""

import gzip
import json

from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address

from rlworker.checks.reference.huggingface import probe_loss


def traced_step(rank: int, world: int, address: str, folder: str, busy: str, idle: str) -> int:
    """Trace a phase with a step and one without anything; returns how many micro-batches the step had."""
    from rlworker.cluster.traces import Tracer

    engine = build_engine(rank, world, address, folder, {"micro_batch_tokens": 32})
    _, shard = plan(engine, make_batch())
    tracer = Tracer(engine.platform.build_profiler)
    tracer.begin("update")
    tracer.worked = True
    engine.train_step(shard, probe_loss, 7.0)
    tracer.end(busy)
    tracer.begin("reward")
    tracer.end(idle)
    return len(shard.micro_batches())


def test_a_trace_shows_the_parts_of_a_step(one_rank, make_hf_model, tmp_path):
    busy, idle = tmp_path / "step_1" / "update.json.gz", tmp_path / "step_1" / "reward.json.gz"
    (count,) = one_rank.run(traced_step, draw_address(), make_hf_model("qwen2", False), str(busy), str(idle))
    assert not idle.exists(), "nothing was done"
    events = json.loads(gzip.decompress(busy.read_bytes()))["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]

    def named(name: str) -> list[dict]:
        return [span for span in spans if span["name"] == name]

    def lies_in(inner: dict, outer: dict) -> bool:
        return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]

    (phase,) = named("phase update")
    (step,) = named("optimizer_step")
    forwards, outputs, products = named("forward_micro_batch"), named("outputs"), named("aten::mm")
    assert len(forwards) == len(outputs) == count > 1
    assert all(lies_in(span, phase) for span in (step, *forwards, *outputs))
    for part in (*forwards, *outputs):
        assert any(lies_in(product, part) for product in products), part["name"]
