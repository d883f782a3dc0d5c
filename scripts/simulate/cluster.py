"""Simulate the steps of a large cluster: the real driver, Ray and schedule, with workers that sleep.

    python -m scripts.simulate.cluster [--workers 64 256 1024] [--processes 64] [--steps 3] [--json FILE]

Of every eight workers one is a rollout engine and seven are ranks of trainers, TP 8, of a model of 8 billion
parameters. Each sleeps as long as the forecast of the machine says, and answers with data of the right sizes. A process
stands for several workers where there are more workers than processes. The weights of a sync travel in as many buckets
as the model's, each of ``BUCKET`` bytes. So what is measured is the work of the driver, of Ray's daemons and of the
object store on one node; neither links nor devices are.
"""

import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import ray

from rlworker.cluster.train_group import choose_bucket_bytes
from scripts.bench.timing import make_parser, write_figures
from scripts.simulate.stand_ins import CALLS, TP, Cluster, Seconds

SHARE = 8
"""One of how many workers is a rollout engine."""
SIZES = dict(  # of Qwen3-8B
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip


def make_inputs(folder: Path, prompt: int) -> None:
    """Write a model's folder with a file that has none of its weights, and prompts of one length."""
    from safetensors.numpy import save_file
    from transformers import Qwen3Config

    from recipes.common.addition import make_tokenizer

    make_tokenizer().save_pretrained(folder / "model")
    Qwen3Config(**SIZES, bos_token_id=1, eos_token_id=2, architectures=["Qwen3ForCausalLM"]).save_pretrained(
        folder / "model"
    )
    save_file({"none": np.zeros(1)}, folder / "model" / "model.safetensors")
    rows = ({"prompt": f"{i:0{prompt}d}", "answer": "0"} for i in range(2048))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_config(folder: Path, workers: int, options: Any):
    """Make the settings of a run of some workers: 64 samples a replica and step."""
    from engines.config import MegatronConfig, VllmConfig
    from rlworker.config.run import RunConfig
    from rlworker.config.sections import DataConfig, LimitsConfig

    engines, most = workers // SHARE, dict(max_model_len=4096, kv_cache_mb=40960)
    ranks = workers - engines
    return RunConfig(
        model=str(folder / "model"),
        run_dir=str(folder / f"run_{workers}"),
        data=DataConfig(str(folder / "train.jsonl"), max_prompt_tokens=options.prompt),
        actor=MegatronConfig(ranks=ranks, tp=TP, micro_batch_tokens=16384),
        rollout=VllmConfig(engines=engines, ignore_eos=True, max_new_tokens=options.sampled, **most),
        steps=1 + options.steps,
        prompts_per_step=8 * ranks // TP,
        samples_per_prompt=8,
        limits=LimitsConfig(logprob_diff_mean=2e-5),  # simulated ranks have no rounding to measure
    )


def forecast(config: Any, machine: str) -> Seconds:
    """Forecast the seconds of a step's calls on the devices of a machine, in bfloat16."""
    from engines.models.spec import ModelSpec
    from hardware.machines import MACHINES
    from rlworker.checks.plan.forecast import forecast_step

    model = ModelSpec.from_folder(config.model)
    actor = replace(config.actor, dtype="bfloat16", recompute="full")
    rollout = replace(config.rollout, dtype="bfloat16")
    full = replace(config, actor=actor, rollout=rollout)
    phases = forecast_step(full, {"actor": model}, MACHINES[machine]).phases
    buckets = -(-model.count_weights() * 2 // choose_bucket_bytes(config.rollout.engines))
    return Seconds(phases["prefill"] + phases["decode"], phases["scoring"], phases["update"], phases["sync"], buckets)


def reward(text: str, row) -> float:
    return len(set(text)) / 100


def read_daemons() -> dict[str, float]:
    """Read the CPU-seconds of Ray's daemons and of this driver, and the bytes that the object store has created."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    times: dict[str, float] = {"driver CPU s": time.process_time()}
    for process in psutil.Process(os.getpid()).children(recursive=True):
        name = process.name()
        if name in ("gcs_server", "raylet"):
            used = process.cpu_times()
            times[f"{name} CPU s"] = used.user + used.system
    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    return times | {"store MB": stats.cumulative_created_bytes / 1e6, "store objects": stats.cumulative_created_objects}


def simulate(folder: Path, workers: int, options: Any) -> dict[str, float]:
    """Run the steps of a cluster of some workers: medians over the steps after the first."""
    from rlworker.cluster.ray import running_ray
    from rlworker.config.sizes import count_batch_bytes
    from rlworker.trainers.rl import Trainer

    config = make_config(folder, workers, options)
    seconds = forecast(config, options.machine)
    cluster, steps = Cluster(workers, options.processes, seconds), []

    class Measured(Trainer):
        taken: dict[str, float] | None = None

        @contextmanager
        def _phase(self, clock, name: str) -> Iterator[None]:
            began, used = time.perf_counter(), time.process_time()
            with super()._phase(clock, name):
                yield
            if self.taken is not None:
                self.taken[f"{name} s"] = time.perf_counter() - began
                self.taken[f"{name} driver CPU s"] = time.process_time() - used

        def step(self):
            CALLS.clear()
            self.taken, before, began = {}, read_daemons(), time.perf_counter()
            result = super().step()
            self.taken |= {name: now - before[name] for name, now in read_daemons().items()}
            self.taken |= {"step s": time.perf_counter() - began, "calls": sum(CALLS.values())}
            self.taken["sender CPU s"] = ray.get(self.actor.workers[0].read_sender_seconds.remote())
            steps.append(self.taken)
            return result

    with ExitStack() as patched:
        for module in ("train_group", "rollout_group"):
            patched.enter_context(patch(f"rlworker.cluster.{module}.start_workers", cluster.start))
            patched.enter_context(patch(f"rlworker.cluster.{module}.end_workers", cluster.end))
        patched.enter_context(patch.object(type(config), "num_workers", 4))
        for check in ("rlworker.trainers.run.check_room", "rlworker.config.model_checks.check_folder"):
            patched.enter_context(patch(check))  # of devices and weights that are not there
        patched.enter_context(running_ray(4, config.platform, count_batch_bytes(config)))
        began = time.perf_counter()
        with Measured(config, reward) as trainer:
            started = time.perf_counter() - began
            trainer.fit()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    medians = {name: float(np.median([step.get(name, 0.0) for step in steps[1:]])) for name in steps[-1]}
    return {"workers": workers, "start s": started} | vars(seconds) | medians | {"driver peak MB": peak}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--sampled", type=int, default=512)
    parser.add_argument("--machine", default="h100")
    options = parser.parse_args()
    if options.tiny:
        options.workers, options.processes, options.steps, options.prompt, options.sampled = [64], 4, 1, 8, 4
    rows = []
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name), options.prompt)
        for workers in options.workers:
            rows.append(simulate(Path(name), workers, options))
            print("  ".join(f"{title} {value:.4g}" for title, value in rows[-1].items()), flush=True)
    write_figures(options.json, rows)


if __name__ == "__main__":
    main()
