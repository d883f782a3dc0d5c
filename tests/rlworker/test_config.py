import dataclasses
import subprocess
import sys

import pytest

from engines.config import MegatronConfig, VllmConfig
from rlworker.config import AlgorithmConfig, DataConfig, RunConfig
from rlworker.data import load_tokenizer


def run_recipe(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-m", "recipes.grpo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(steps=0), "steps must be at least 1"),
        (
            dict(actor=MegatronConfig(ranks=8), prompts_per_step=2, samples_per_prompt=2),
            "4 samples cannot feed 1 mini-batches on 8 data-parallel ranks",
        ),
        (dict(rollout=VllmConfig(engines=3), prompts_per_step=2), "leaves some of 3 rollout engines without work"),
        (dict(data=DataConfig(max_prompt_tokens=2000)), "max_prompt_tokens \\+ max_new_tokens = 2256 exceeds"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


def test_logprob_limits_follow_the_type():
    assert RunConfig().logprob_limits == (2e-5, 5e-3)
    assert RunConfig(actor=MegatronConfig(dtype="bfloat16")).logprob_limits == (5e-2, float("inf"))
    assert RunConfig(logprob_diff_mean=1e-3).logprob_limits == (1e-3, 5e-3)


def test_a_reference_takes_as_many_actors_as_the_policy():
    config = RunConfig(actor=MegatronConfig(ranks=2), algorithm=AlgorithmConfig(kl_coef=0.1))
    assert config.actors == 5 and RunConfig().actors == 2


def count_keys(config) -> int:
    nested = [getattr(config, f.name) for f in dataclasses.fields(config)]
    return sum(count_keys(value) if dataclasses.is_dataclass(value) else 1 for value in nested)


def test_there_are_few_keys():
    assert count_keys(RunConfig()) <= 80


def test_help_shows_every_section():
    done = run_recipe("--help")
    assert done.returncode == 0
    for option in ("--model", "--actor.tp", "--rollout.max-new-tokens", "--algorithm.kl-coef", "--data.train"):
        assert option in done.stdout


ERRORS = [
    (["--actor.tp", "2", "--actor.ranks", "3"], "tp=2 x pp=1 x cp=1 needs a multiple of 2 ranks, got 3"),
    (["--actor.tpp", "2"], "--actor.tp"),
    (["--model", "nowhere"], "model: folder 'nowhere' does not exist"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=["ranks", "unknown-key", "model"])
def test_the_command_line_says_what_is_wrong(arguments, message):
    done = run_recipe(*arguments)
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).replace("│", " ").split())  # tyro draws a box around its errors
    assert message in said and "Traceback" not in said


def test_a_head_size_without_a_rollout_kernel_is_refused(make_hf_model):
    rollout = VllmConfig(max_new_tokens=8, max_model_len=64)
    config = RunConfig(model=make_hf_model("qwen3", False), data=DataConfig(max_prompt_tokens=8), rollout=rollout)
    with pytest.raises(ValueError, match=r"has no attention for the model's head_dim 48, expected one of \[32, 64"):
        config.check_model()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "make",
    [
        lambda: AlgorithmConfig(mini_batches=0),
        lambda: AlgorithmConfig(kl_coef=-0.1),
        lambda: RunConfig(eval_every=-1),
        lambda: RunConfig(seed=-1),
        lambda: DataConfig(max_prompt_tokens=0),
        lambda: MegatronConfig(lr=1e-5, min_lr=1e-4),
        lambda: MegatronConfig(lr_warmup_steps=-1),
        lambda: MegatronConfig(lr_warmup_steps=5, lr_decay_steps=5),
        lambda: VllmConfig(kv_cache_mb=-1),
    ],
)
def test_impossible_numbers_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()
