"""Runs with images on real engines: an image that comes in a later turn, and a rollout that reads images causally."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from support.huggingface import compute_logprobs

from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from recipes.common import squares
from rlworker.base.errors import RunError
from rlworker.checks.reference.huggingface import load_huggingface
from rlworker.checks.tiny.models import make_tiny_vlm
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig, EnvironmentConfig, LimitsConfig
from rlworker.environments import Episode
from rlworker.environments.reward import exact_match
from rlworker.rollouts.trajectory import batch_groups
from rlworker.tracking.log import StepClock, read_metrics

pytestmark = [pytest.mark.large, pytest.mark.timeout(600), pytest.mark.usefixtures("cluster", "by_value")]


def make_config(folder: Path, family: str) -> RunConfig:
    squares.make_data(folder / "data", {"train": 32, "heldout": 8})
    files = (str(folder / "data" / f"{name}.jsonl") for name in ("train", "heldout"))
    return RunConfig(
        model=make_tiny_vlm(folder / "model", family, squares.make_tokenizer(), 64),
        run_dir=str(folder / "run"),
        data=DataConfig(*files, max_prompt_tokens=64),
        actor=MegatronConfig(ranks=2, optimizer=OptimizerConfig(lr=1e-3)),
        rollout=VllmConfig(max_new_tokens=3, max_model_len=192, max_num_seqs=64, kv_cache_mb=64),
        environment=EnvironmentConfig(turns=2, tokens=192, workers=1),
        steps=2,
        prompts_per_step=8,
        samples_per_prompt=4,
        eval_every=0,
    )


async def look_again(policy, row):
    """Show another image after the first answer, which has as many tokens as its colour says."""
    episode = Episode(row)
    first = await policy.sample(episode)
    episode.observe("<image> ?", images=[Image.new("RGB", (56, 56), (200, 40 * len(first.token_ids), 0))])
    second = await policy.sample(episode)
    episode.reward(float(len(second.token_ids)))
    return episode


def test_tokens_behind_an_image_of_a_later_turn_have_huggingfaces_logprobs(tmp_path, measured):
    """Of every sampled token, over sequences as they were recorded."""

    from rlworker.trainers.rl import Trainer

    config = make_config(tmp_path, "qwen2_5_vl")
    with Trainer(config, look_again) as trainer:
        groups, metrics = trainer.manager.sample(StepClock(), trainer.version)
        spec = trainer.models["actor"]
        batch = batch_groups(groups, spec.vision)
    assert metrics["turns"] == 2 and metrics["observed_tokens"] > 4 and set(batch.turn.tolist()) == {-1, 0, 1}
    logprobs = compute_logprobs(load_huggingface(spec), batch, config.rollout.temperature, spec)
    apart = (batch.rollout_logprobs - logprobs)[batch.mask].abs()
    measured({"mean": float(apart.mean()), "max": float(apart.max())})
    assert apart.mean() <= 2e-6 and apart.max() <= 1e-3


def test_a_rollout_that_reads_images_causally_is_stopped_in_its_first_step(tmp_path, measured):
    from rlworker.trainers.rl import Trainer

    config = make_config(tmp_path, "gemma3")
    causal = replace(config, rollout=replace(config.rollout, attention_override=("vllm_cpu/images",)))
    lifted = replace(causal, run_dir=str(tmp_path / "lifted"), limits=LimitsConfig(ignore_logprob_diff=True))
    said = "step 1: rollout and trainer disagree on the logprobs"
    with Trainer(causal, exact_match) as trainer, pytest.raises(RunError, match=said):
        trainer.fit()
    with Trainer(lifted, exact_match) as trainer:
        trainer.fit()
    lines = [line for line in read_metrics(Path(lifted.run_dir)) if "logprob_diff_mean" in line]
    measured({"mean": max(line["logprob_diff_mean"] for line in lines)})
    assert [line["approximate_rules"] for line in lines] == [1, 1] and lines[0]["logprob_diff_mean"] > 1e-2
