"""A model that sees images both ways pays for a rollout that reads them causally: how much, on a laptop CPU.

A tiny Gemma 3 is made on the spot and warmed up on answers. From it start short runs of GRPO that differ in the
rollout alone: one honours the rule for images; one does not, as vLLM by itself on a CPU, and is stopped; a third is
the second with its limits on logprobs lifted. It shows the mismatch, and nothing of who learns better in the end.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from hardware.platforms import get_platform
from recipes.common import twins
from recipes.common.toys import Toy, find_warm_model, prepare
from recipes.demos import cpu as demo_cpu
from rlworker import (
    AlgorithmConfig,
    DataConfig,
    MegatronConfig,
    OptimizerConfig,
    Trainer,
    VllmConfig,
    exact_match,
    parse_config,
)
from rlworker.cluster.ray import running_ray
from rlworker.errors import RunError
from rlworker.tracking.log import read_metrics
from rlworker.tracking.report import tell_report
from rlworker.trainers.stop import Stop, ending_well

_WARM_UP = dict(lr=2e-3, min_lr=2e-4, lr_warmup_steps=50, lr_scheduler="linear", lr_decay_steps=900, weight_decay=0.0)
TWINS = Toy(twins.make_data, twins.make_model, demo_cpu.warm_up_on_answers(_WARM_UP, rows=64))
CAUSALLY = ("vllm_cpu/images",)
"""The cell of the capability table of rollouts that vLLM's own backend on a CPU is."""
DEFAULT = demo_cpu.DemoConfig(
    run_dir="runs/demo_image_rule",
    data=DataConfig(max_prompt_tokens=16),
    actor=MegatronConfig(
        ranks=2, optimizer=OptimizerConfig(lr=5e-4, min_lr=5e-5, lr_scheduler="linear", lr_warmup_steps=5)
    ),
    rollout=VllmConfig(max_new_tokens=2, max_model_len=32, max_num_seqs=512, kv_cache_mb=64),
    algorithm=AlgorithmConfig(mini_batches=1),
    warm_up_steps=900,
    warm_up_loss=0.25,
    steps=20,
    prompts_per_step=64,
    samples_per_prompt=8,
    eval_every=5,
)


def list_runs(config: demo_cpu.DemoConfig) -> dict[str, demo_cpu.DemoConfig]:
    """List the runs by name, each in a folder of its own, from the model that is warmed up in ``config``."""
    model, folder = str(find_warm_model(config)), Path(config.run_dir)
    with_rule = replace(config, model=model, run_dir=str(folder / "with_rule"))
    rollout = replace(config.rollout, attention_override=CAUSALLY)
    causal = replace(with_rule, run_dir=str(folder / "causal"), rollout=rollout)
    limits = replace(config.limits, ignore_logprob_diff=True)
    return {
        "with_rule": with_rule,
        "causal": causal,
        "causal_without_limits": replace(causal, run_dir=str(folder / "causal_without_limits"), limits=limits),
    }


def summarise(config: demo_cpu.DemoConfig) -> dict:
    """Sum a run up: the logprob difference of its first step and of all, and its rewards."""
    lines = read_metrics(Path(config.run_dir))
    steps = [line for line in lines if "logprob_diff_mean" in line]
    return {
        "steps": len(steps),
        "logprob_diff_mean": max((line["logprob_diff_mean"] for line in steps), default=None),
        "logprob_diff_max": max((line["logprob_diff_max"] for line in steps), default=None),
        "reward": [round(line["reward"], 3) for line in steps],
        "heldout": [line["heldout"] for line in lines if "heldout" in line],
    }


def run_one(config: demo_cpu.DemoConfig, stop: Stop) -> dict:
    """Make one run; where it is one without the rule and within limits, what stops it is a part of its summary."""
    stopped, must_end_well = "", config.limits.ignore_logprob_diff or not config.rollout.attention_override
    with Trainer(config, exact_match, stop=stop) as trainer:
        try:
            trainer.fit()
        except RunError as error:
            if must_end_well:
                raise
            stopped = str(error)
    print(tell_report(Path(config.run_dir)))
    return summarise(config) | ({"stopped": stopped} if stopped else {})


def main(config: demo_cpu.DemoConfig, stop: Stop) -> None:
    """Warm the model up, make every run and write ``summary.json`` beside them."""
    folder = Path(config.run_dir)
    summaries = {}
    with running_ray(config.num_workers, config.platform):
        if not find_warm_model(config).exists():
            TWINS.warm_up(config, str(find_warm_model(config)))
        for name, run in list_runs(config).items():
            summaries[name] = run_one(run, stop)
            if stop.signal:
                return
    (folder / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    print(json.dumps(summaries, indent=2))


if __name__ == "__main__":
    settings = parse_config(DEFAULT, __doc__)
    with ending_well() as stop_request:
        try:
            if "vllm_cpu" not in get_platform(settings.platform).rollout_backends:
                raise ValueError(
                    f"demo: platform {settings.platform!r} does not roll out on a CPU, where vLLM reads images "
                    "causally by itself; expected cpu, cuda-emulated or npu-emulated"
                )
            settings, run_folder = prepare(settings, TWINS)
        except ValueError as problem:
            sys.exit(f"error: {problem}")
        run_folder.release()
        main(settings, stop_request)
