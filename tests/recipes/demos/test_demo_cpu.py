"""The demo's path from end to end, short: it learns in scripts/demo.sh, here it only has to arrive."""

import json
import subprocess
import sys
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from support.program import run_recipe

from engines.batch.batch import TrainBatch
from rlworker.algorithms.advantages import grpo
from rlworker.tracking.log import read_metrics

SUMMARY = {"heldout_before", "heldout_after", "steps", "wall_seconds", "logprob_diff_mean", "logprob_diff_max"}
SHORT = ["--steps", "2", "--warm-up-steps", "3", "--prompts-per-step", "16", "--eval-every", "1"]


def check(run: Path, said: str, options: list[str]) -> None:
    lines = said.splitlines()
    assert len([line for line in lines if line.startswith("step ")]) == 3
    told = [line for line in lines if line.startswith("start ")]
    parts = ("Ray is up", "the model is warmed up", "rows are read")
    parts += ("trainer ranks are up: 2", "rollout engines are up: 1")
    assert [part in line for line, part in zip(told, parts, strict=True)] == [True] * 5, told
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    tp = 2 if "--actor.tp" in options else 1
    sizes = [summary[name] for name in ("layout", "tp", "pp", "cp", "dp", "steps")]
    assert sizes == ["thd" if tp == 2 else "bshd", tp, 1, 1, 2 // tp, 2]
    assert summary["shuffle_rewards"] == ("--shuffle-rewards" in options)
    assert 0 < summary["logprob_diff_mean"] <= 1e-5
    assert (run / "report.html").stat().st_size < 10**6 < (run / "plotly.min.js").stat().st_size


@pytest.mark.large
def test_it_runs_and_sums_itself_up(cluster, tmp_path):
    """And the finished run is one that could be gone on with, under its own settings alone."""
    from recipes.common.toys import prepare
    from recipes.demos.cpu import ADDITION, DEFAULT, DemoConfig

    run, options = tmp_path / "demo", ["--actor.tp", "2"]
    done = run_recipe("demos.cpu", "--run-dir", run, *SHORT, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    check(run, done.stdout, options)
    config = config_from(DemoConfig, json.loads((run / "config.json").read_text()))
    config = replace(config, model="", resume=True, data=DEFAULT.data)
    prepared, folder = prepare(config, ADDITION)
    folder.release()
    assert prepared.data.train == str(run / "data" / "train.jsonl")
    with pytest.raises(ValueError, match=r"cannot be resumed with other settings of its model.* seed was 0, is 7"):
        prepare(replace(config, seed=7), ADDITION)


def test_a_demo_with_a_critic_can_be_made_small(monkeypatch):
    from recipes.common import toys
    from recipes.demos import ppo

    made = []
    monkeypatch.setattr(sys, "argv", ["ppo", "--smoke"])
    monkeypatch.setattr(toys, "prepare", lambda config, toy: (config, None))
    monkeypatch.setattr(toys, "train_toy", lambda config, *_: made.append((config.steps, config.critic.warmup_steps)))
    toys.run_toy(ppo.DEFAULT, "", ppo.demo_cpu.ADDITION)
    assert made == [(2, 1)], "the critic leaves the actor a step"


VLM, VLM_NPU = ["--actor.layout", "bshd", "--shuffle-rewards"], ["--actor.tp", "2", "--platform", "npu-emulated"]
PPO = ["--critic.warmup-steps", "1", *VLM]


@pytest.mark.product
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param("demos.ppo", PPO, id="ppo-dp2"),
        pytest.param("demos.experts", ["--actor.layout", "bshd"], id="experts-ep2"),
        pytest.param("demos.states", ["--actor.tp", "2"], id="states-tp2"),
        pytest.param("demos.vlm", VLM, id="vlm-dp2"),
        pytest.param("demos.vlm", VLM_NPU, id="vlm-tp2-npu"),
    ],
)
def test_others_run_as_programs(tmp_path, recipe, options):
    run = tmp_path / "demo"
    command = [sys.executable, "-W", "ignore", "-m", f"recipes.{recipe}", "--run-dir", str(run), *SHORT, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    check(run, done.stdout, options)
    assert ("explained_variance" in read_metrics(run)[-1]) == (recipe == "demos.ppo")
    assert ('<img src="data:image/png;base64,' in (run / "report.html").read_text()) == (recipe == "demos.vlm")


def config_from(kind: type, stored: dict):
    parts = {name: part for name, part in get_type_hints(kind).items() if is_dataclass(part)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    return kind(**values | {name: config_from(part, stored[name]) for name, part in parts.items()})


def test_the_control_hands_out_the_same_rewards_in_another_order():
    from recipes.common.toys import shuffle_advantage

    rewards = torch.arange(64.0)
    batch = TrainBatch.from_ids([[1, 2]] * 64, [1] * 64, rewards=rewards, group=torch.arange(64) // 8, versions=rewards)
    control = shuffle_advantage(grpo)(batch)
    assert not torch.equal(control, grpo(batch))
    assert control.view(8, 8).sum(1).abs().max() < 1e-5, "each group still has a mean of zero"


def test_a_run_whose_groups_taught_nothing_is_summed_up(tmp_path):
    """DAPO leaves out groups of one reward: of a model that is never right it compares no step."""
    from recipes.common.toys import summarise
    from recipes.demos.cpu import DEFAULT

    lines = [{"step": 0, "heldout": 0.0}, {"step": 1, "heldout": 0.0, "time_step": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarise(replace(DEFAULT, run_dir=str(tmp_path)), 1.0, 0.5)
    assert summary["logprob_diff_max"] is None and summary["seconds_per_step"] == 0.5
