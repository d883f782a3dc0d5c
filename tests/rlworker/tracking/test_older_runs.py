"""Run folders whose settings have the keys that they had before the sections: they are taken up as what they are."""

import json
from dataclasses import replace

import pytest

from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from rlworker.config.run import RunConfig
from rlworker.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    LimitsConfig,
    PlacementConfig,
)
from rlworker.config.sft import SftConfig
from rlworker.tracking.run_folder import RunFolder

SHARED = """
  "model": "m", "run_dir": "r", "platform": "cpu", "steps": 240, "eval_every": 40, "save_every": 7, "save_minutes": 5.0,
  "keep_checkpoints": 1, "keep_best": false, "seed": 3, "resume": false, "trackers": [],
  "data": {"train": "t.jsonl", "heldout": "", "prompt_field": "prompt", "answer_field": "answer",
    "image_field": "images", "instruction": "", "max_prompt_tokens": 8, "skip_long_prompts": false},
  "actor": {"ranks": 2, "tp": 1, "pp": 1, "cp": 1, "layout": "thd", "multiple": 16, "slots": 0,
    "attention_override": [], "dtype": "float32", "micro_batch_tokens": 16384, "recompute": "none", "lr": 0.0007,
    "min_lr": 0.0001, "lr_warmup_steps": 40, "lr_decay": "linear", "lr_decay_steps": 90, "weight_decay": 0.01,
    "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_eps": 1e-05, "clip_grad": 0.5, "image_memory_mb": 1024, "freeze": [],
    "timeout_s": 600, "megatron": {"disable_bf16_reduced_precision_matmul": true}}"""
RL = """,
  "rollout": {"engines": 1, "max_new_tokens": 4, "temperature": 0.7, "max_model_len": 16, "max_num_seqs": 256,
    "kv_cache_mb": 0, "dtype": "float32", "image_memory_mb": 8192, "vllm": {}},
  "algorithm": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "kl_coef": 0.1, "kl_in": "loss", "reference": "",
    "entropy_coef": 0.0, "mini_batches": 4, "greedy_baseline": false, "dynamic_sampling": 0},
  "critic": {"train": true, "model": "", "lr": 1e-05, "clip": 0.0, "warmup_steps": 0, "gamma": 1.0, "lam": 0.95},
  "separate": ["critic"], "reward": {"workers": 1, "time_limit_s": 10.0, "default": 0.0}, "prompts_per_step": 32,
  "samples_per_prompt": 8, "logprob_diff_mean": 0.001, "logprob_diff_max": 0.1, "ignore_logprob_diff": true"""
SFT = """, "rows_per_step": 64, "max_answer_tokens": 1024"""

OPTIMIZER = OptimizerConfig(
    lr=7e-4,
    min_lr=1e-4,
    lr_scheduler="linear",
    lr_warmup_steps=40,
    lr_decay_steps=90,
    weight_decay=0.01,
    adam_beta1=0.8,
    adam_beta2=0.99,
    adam_eps=1e-5,
    clip_grad=0.5,
)
AS_SHARED = dict(
    model="m",
    data=DataConfig("t.jsonl", max_prompt_tokens=8),
    actor=MegatronConfig(
        ranks=2, pad_to_multiple_of=16, optimizer=OPTIMIZER, megatron={"disable_bf16_reduced_precision_matmul": True}
    ),
    checkpoint=CheckpointConfig(save_every=7, save_minutes=5.0, keep_newest=1, keep_best=False),
    steps=240,
    eval_every=40,
    seed=3,
    resume=True,
)
AS_RL = RunConfig(
    **AS_SHARED,
    rollout=VllmConfig(max_new_tokens=4, max_model_len=16, temperature=0.7),
    algorithm=AlgorithmConfig(kl_coef=0.1, mini_batches=4),
    critic=CriticConfig(train=True),
    placement=PlacementConfig(("critic",)),
    limits=LimitsConfig(1e-3, 0.1, ignore_logprob_diff=True),
)


@pytest.fixture(params=[(RL, AS_RL), (SFT, SftConfig(**AS_SHARED))], ids=["rl", "sft"])
def older(request, tmp_path):
    """A run folder with settings of the older form, and the same settings."""
    own, config = request.param
    (tmp_path / "config.json").write_text(f"{{{SHARED}{own}}}")
    return RunFolder(str(tmp_path)), config


def test_the_same_settings_take_it_up(older):
    folder, config = older
    folder.check(config)
    state, said = folder.begin(config)
    assert state is None and said.startswith("run: begins again at step 0")
    spread = replace(config.actor, ranks=4, tp=2)
    folder.check(replace(config, actor=spread, checkpoint=CheckpointConfig()))


OTHERS = {"lr_scheduler": "cosine", "lr_warmup_steps": 41}
"""Other values for the optimizer's keys; a number is halved where none is named."""


def test_another_setting_is_named_by_its_key(older):
    folder, config = older
    for key, value in vars(OPTIMIZER).items():
        other = OTHERS.get(
            key, 1.0 if key == "optimizer_offload_fraction" else value / 2 if isinstance(value, float) else 91
        )
        actor = replace(config.actor, pad_to_multiple_of=16, optimizer=replace(OPTIMIZER, **{key: other}))
        said = folder.begin(replace(config, actor=actor))[1]
        assert said.endswith(f"; with other settings: actor.optimizer.{key} {value} -> {other}"), said
        folder.begin(config)
    with pytest.raises(ValueError, match=r"other settings .*: actor\.megatron was \{'disable.*\}, is \{\}\. Set them"):
        folder.check(replace(config, actor=replace(config.actor, megatron={})))


def test_it_is_told_what_no_setting_of_ours_is(older):
    folder, config = older
    stored = json.loads((folder.path / "config.json").read_text())
    (folder.path / "config.json").write_text(json.dumps(stored | {"level": 3}))
    with pytest.raises(ValueError, match=r"other settings .*: level was 3, is None\."):
        folder.check(config)
