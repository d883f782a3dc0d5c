"""What the command line says to settings by their names in verl and TRL, and that the page of them is whole."""

import re
from collections import Counter
from pathlib import Path

import pytest
from support.program import parse_arguments as parse

from rlworker.config.command_line import flatten_config
from rlworker.config.help.other_names import PAGE, find_counterparts, read_counterparts
from rlworker.config.run import RunConfig
from rlworker.config.sft import SftConfig

COUNTERPARTS = read_counterparts(PAGE.read_text())
OPTIONS = {f"--{key.replace('_', '-')}" for config in (RunConfig, SftConfig) for key in flatten_config(config())}

WISHES = [
    # as verl's command line has them
    ("algorithm.adv_estimator=rloo", "--algorithm.name, or --algorithm.advantage alone"),
    ("actor_rollout_ref.actor.use_kl_loss=True", "--algorithm.kl-coef with --algorithm.kl-in loss"),
    ("actor_rollout_ref.actor.kl_loss_type=low_var_kl", "--algorithm.kl-estimate"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "--algorithm.mini-batches. Prompts per step divided by"),
    ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "(docs/from_verl.md#aggregations) has the values"),
    ("actor_rollout_ref.rollout.n=8", "--samples-per-prompt"),
    ("actor_rollout_ref.rollout.val_kwargs.n=8", "--validation.samples"),
    ("actor_rollout_ref.rollout.gpu_memory_utilization=0.6", "--rollout.kv-cache-mb"),
    ("actor_rollout_ref.actor.fsdp_config.param_offload=True", "--placement.colocate True"),
    ("actor_rollout_ref.rollout.multi_turn.enable=True", "launch(config, env)"),
    ("actor_rollout_ref.model.lora_rank=32", "--actor.lora.rank"),
    ("actor_rollout_ref.model.mtp.enable=True", "no option. No multi-token prediction"),
    ("+reward_model.overlong_buffer.enable=True", "--algorithm.overlong-buffer"),
    ("custom_reward_function.path=my.py", "launch(config, reward). A function of the recipe"),
    ("data.truncation=left", "no option. Prompts are never cut: an error, or skipped with --data.skip-long-prompts"),
    ("+data.apply_chat_template_kwargs.enable_thinking=False", "--data.chat-template-args enable_thinking False"),
    ("trainer.val_only=True", "--evaluate"),
    # with two hyphens, parts of a section, or a wrong one
    ("--rollout.n 8", "--samples-per-prompt"),
    ("--trainer.save_freq 10", "--checkpoint.save-every"),
    ("--algorithm.clip_ratio_high 0.28", "--algorithm.clip-high"),
    ("--ppo-epochs 2", "--algorithm.epochs"),
    # as TRL has them
    ("--num_generations 8", "--samples-per-prompt"),
    ("--beta=0.04", "--algorithm.kl-coef"),
    ("--loss_type dr_grpo", "(docs/from_verl.md#loss-types) has the values"),
    ("--scale_rewards none", "--algorithm.advantage"),
    ("--mask_truncated_completions", "no option. A truncated sample is trained with its reward."),
    ("--reward_weights 0.8 0.2", "One function of the recipe, which adds them"),
    ("--use_vllm True", "no option. Always vLLM; leave it out."),
    ("--push_to_hub", "no option. hf upload"),
    ("--per_device_train_batch_size 8", "--prompts-per-step"),
    ("--report_to wandb", "--trackers"),
]


@pytest.mark.parametrize(("typed", "answer"), WISHES, ids=[typed.split()[0] for typed, _ in WISHES])
def test_a_setting_of_another_library_is_answered_with_its_counterpart(typed, answer):
    said, config = parse(RunConfig(), "--steps", "3", *typed.split())
    first, *lines = said.strip().splitlines()
    assert first == "error: settings of verl or TRL, and those in their place here (docs/from_verl.md):"
    assert config == [] and len(lines) in (1, 2), said
    name = re.split("[ =]", typed)[0]
    assert all(line.startswith(f"  {name}: ") for line in lines) and answer in said


def test_all_are_told_at_once_and_those_of_other_programs_as_such():
    typed = "--packing True --num_generations 8 --trackers wandb trainer.logger=x"
    said, _ = parse(SftConfig(), *typed.split())
    named = [line.split(":")[0].strip() for line in said.splitlines()[1:]]
    assert named == ["--packing", "--num_generations", "trainer.logger"]
    assert "--samples-per-prompt (of RL recipes)" in said and "--actor.layout thd." in said


def test_an_option_that_only_rl_recipes_have_is_not_its_own_counterpart():
    said, _ = parse(SftConfig(), "--rollout.max-model-len", "64")
    assert "--rollout.max-model-len: an option of RL recipes, which this one has no use for" in said


@pytest.mark.parametrize(
    "typed",
    [
        "--seed 3 --rollout.top_k 5 --rollout.top_p 0.9",
        "--rollout.vllm max_num_batched_tokens 4096",
        "--data.train=a.lr=1.jsonl --run-dir runs/algorithm.name=x",
        "--no-resume --checkpoint.no-keep-best",
    ],
)
def test_own_settings_and_values_are_left_alone(typed):
    said, config = parse(RunConfig(), *typed.split())
    assert said == "" and config


@pytest.mark.parametrize(
    ("typed", "answer"), [("--kl_coef", "--algorithm.kl-coef"), ("--rollout.temprature", "--rollout.temperature")]
)
def test_an_own_setting_misspelled_is_answered_with_the_nearest(typed, answer):
    said, config = parse(RunConfig(), typed, "0.1")
    assert config == [] and "Perhaps you meant" in said and answer in said


def test_the_page_is_the_one_that_the_command_line_reads():
    assert PAGE.resolve() == Path(__file__).parents[3] / "docs" / "from_verl.md"
    assert PAGE.is_symlink(), "it would be a second page"
    found = Counter(bool(other.section) for other in COUNTERPARTS)
    assert found[True] > 180 and found[False] > 100, found


def test_every_row_of_the_page_has_an_answer():
    assert [other.name for other in COUNTERPARTS if not (other.here or other.remark)] == [], "say why, and what instead"
    assert sum(not other.here for other in COUNTERPARTS) > 80
    options = {option for other in COUNTERPARTS for option in re.findall(r"--[a-z][\w.-]*", other.here)}
    assert len(options) > 80 and options - OPTIONS == set()
    for other in COUNTERPARTS:
        assert other in find_counterparts(other.name.replace("*", "x"), COUNTERPARTS), other.name


def test_a_row_is_read_with_its_section_and_without_markup():
    page = (
        "# Page\n\n## data\n\n| verl | here | differs |\n|---|---|---|\n"
        "| `a_b`, `c: auto` | `--data.x` | As *told* in [masks](masks.md#x) and [here](#y). |\n\n"
        "### optim\n\n| value | here | differs |\n|---|---|---|\n| `no` | \u2013 | |\n\n"
        "## Rewards\n\n| TRL | here | differs |\n|---|---|---|\n| `d.*` | \u2013 | |\n"
    )
    remark = "As told in docs/masks.md#x and here (docs/from_verl.md#y)."
    assert read_counterparts(page) == [
        ("data", "a_b", "--data.x", remark),
        ("data", "c", "--data.x", remark),
        ("", "d.*", "", ""),
    ]
