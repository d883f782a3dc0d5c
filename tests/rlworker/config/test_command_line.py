"""What a command line sets, what its help shows, and what it says of options that are not there."""

import re
import runpy
import sys
from dataclasses import dataclass
from typing import Annotated

import pytest
from annotated_types import Ge
from support.program import parse_arguments, run_program, run_recipe

from engines.config import MegatronConfig, OptimizerConfig
from hardware.platforms import PLATFORMS
from rlworker.__main__ import main
from rlworker.base.errors import explain_settings
from rlworker.config.command_line import flatten_config, parse_config
from rlworker.config.run import RunConfig
from rlworker.config.sft import SftConfig


@dataclass(frozen=True)
class OwnConfig(RunConfig):
    """A recipe's own settings, with names that keys of sections have too."""

    multiple: Annotated[int, Ge(2)] = 4
    """How many of something."""
    save_every: int = 3
    """Something else."""


def parse(default, *arguments):
    """Parse as ``parse_arguments`` does, without the boxes that tyro draws around what it says."""
    said, config = parse_arguments(default, *arguments)
    return " ".join(said.replace("│", " ").split()), config


def options(said: str) -> set[str]:
    return set(re.findall(r"--[a-z][\w.-]*", said))


def test_an_option_changes_its_key_alone():
    default = RunConfig(actor=MegatronConfig(ranks=2, optimizer=OptimizerConfig(lr=0.5, adam_eps=0.1)))
    said, config = parse(default, "--actor.optimizer.lr-scheduler", "linear", "--checkpoint.no-keep-best")
    assert said == ""
    before = flatten_config(default)
    changed = {key: value for key, value in flatten_config(config).items() if value != before[key]}
    assert changed == {"actor.optimizer.lr_scheduler": "linear", "checkpoint.keep_best": False}


def test_teachers_are_named_as_the_recipe_names_them():
    from recipes import distill

    (line,) = (line for line in distill.__doc__.splitlines() if "--distill.teachers" in line)
    said, config = parse(distill.DEFAULT, *line.split()[3:])
    assert said == "" and config.distill.teachers == {"openai/gsm8k": "TEACHER", "other": "TEACHER"}


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--placement.colocate", "True", "--resume", "true", "--steps", "3"], (True, True, 3)),
        (["--placement.colocate=True", "--resume=False", "--steps", "3"], (True, False, 3)),
        (["--no-resume", "--steps", "4", "--placement.colocate"], (True, False, 4)),
    ],
)
def test_a_switch_takes_true_and_false_too(arguments, values):
    said, config = parse(RunConfig(), *arguments)
    assert said == "" and (config.placement.colocate, config.resume, config.steps) == values

    said, config = parse(RunConfig(), "--resume", "maybe")
    assert "maybe" in said and config == [], "and no other word"


@pytest.mark.parametrize(
    ("default", "arguments", "dtypes"),
    [
        (RunConfig(), ["--platform", "cuda"], {"actor": "bfloat16", "rollout": "bfloat16"}),
        (SftConfig(), ["--platform", "npu"], {"actor": "bfloat16"}),
        (RunConfig(), ["--platform", "npu", "--actor.dtype", "float32"], {"actor": "float32", "rollout": "bfloat16"}),
        (RunConfig(), ["--platform", "cuda-emulated"], {"actor": "float32", "rollout": "float32"}),
    ],
)
def test_engines_have_the_type_that_is_usual_on_the_platform(default, arguments, dtypes):
    said, config = parse(default, *arguments)
    assert said == "" and config.dtypes == dtypes


def test_help_shows_what_is_in_no_section_and_names_the_sections():
    for word in ("--help", "-h"):
        done = run_recipe("grpo", word)
        assert done.returncode == 0 and "GRPO on your own model" in done.stdout
        shown = options(done.stdout.partition("show this help")[2])
        assert shown >= {"--model", "--run-dir", "--steps", "--prompts-per-step", "--resume"}
        assert not any("." in option for option in shown)
        for line in (
            "  actor       The training engine: its parallel sizes, the layout of its micro-batches, its optimizer.",
            "  checkpoint  The schedule of checkpoints, and the number of them to keep.",
            "  recovery    Detection and replacement of lost processes.",
        ):
            assert line in done.stdout.splitlines()


def test_help_of_a_section_shows_its_subsections_with_defaults_and_bounds():
    default = RunConfig(actor=MegatronConfig(ranks=2, optimizer=OptimizerConfig(lr=0.5)))
    said, config = parse(default, "--steps", "5", "--help", "actor")
    assert config == [] and options(said) >= {"--help", "--actor.ranks", "--actor.optimizer.lr"}
    assert all(option.startswith(("--help", "--actor.")) for option in options(said))
    assert "data-parallel size is ranks / (tp x pp x cp). (default: 2; at least 1)" in said
    assert "Peak learning rate. (default: 0.5; finite and not negative)" in said
    assert "AdamW and the schedule of its learning rate." in said
    said, _ = parse(RunConfig(), "--help", "limits")
    assert "--limits.logprob-diff-mean {None}|FLOAT" in said and "(default: None; 0 or more)" in said


def test_every_section_has_its_help():
    keys = flatten_config(RunConfig())
    for section in {key.split(".")[0] for key in keys if "." in key}:
        said, _ = parse(RunConfig(), "--help", section)
        assert options(said) >= {f"--{key.replace('_', '-')}" for key in keys if key.startswith(f"{section}.")}


def test_help_of_a_section_that_is_not_there():
    said, config = parse(SftConfig(), "--help", "critic")
    sections = "data, actor, checkpoint, validation, recovery"
    assert said == f"error: --help critic: there is no such section; take one of {sections}"
    assert config == []


def test_a_curriculum_is_given_as_pairs():
    words = (
        "--curriculum.sources b.jsonl 0.5 hf:o/n:train 2 --curriculum.buckets 0.2 0 1 3 --curriculum.pass-rates 0.1 1"
    )
    curriculum = parse_config(RunConfig(), args=words.split()).curriculum
    assert curriculum.sources == {"b.jsonl": 0.5, "hf:o/n:train": 2.0} and curriculum.pass_rates == (0.1, 1.0)
    assert list(curriculum.buckets.items()) == [(0.2, 0.0), (1.0, 3.0)]
    assert curriculum.weigh_sources("a.jsonl") == {"a.jsonl": 1.0} | curriculum.sources
    assert curriculum.weigh_sources("b.jsonl") == curriculum.weigh_sources("") == curriculum.sources


def test_the_commands_of_rlworker_have_the_same_help():
    done = run_program(main, "check", "--help")
    assert done.returncode == 0 and "--self-test" in done.stdout and "--actor.tp" not in done.stdout
    assert f"--platform {{{','.join(PLATFORMS)}}}" in done.stdout
    assert "Prove masks, layouts, logprobs and weight sync on this machine" in done.stdout
    assert "  rollout     The rollout engines: vLLM, its sizes and its sampling." in done.stdout.splitlines()
    for command in (("check",), ("plan", "recipes.grpo")):
        done = run_program(main, *command, "--help", "rollout")
        assert done.returncode == 0 and "--rollout.max-new-tokens INT" in done.stdout and "--actor" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--actor.tp", "2", "--actor.ranks", "3"], "tp=2 x pp=1 x cp=1 needs a multiple of 2 ranks, got 3"),
        (["--actor.tpp", "2"], "--actor.tp"),
        (["--model", "nowhere", "--run-dir", "none"], "model: folder 'nowhere' does not exist"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, message):
    done = run_recipe("grpo", *arguments)
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert message in said


def test_a_key_of_a_recipes_own_means_what_it_says():
    said, config = parse(OwnConfig(), "--save-every", "7", "--multiple", "5")
    assert (said, config.save_every, config.multiple, config.checkpoint.save_every) == ("", 7, 5, 0)
    said, _ = parse(OwnConfig(), "--multiple", "1")
    assert "config: multiple must be at least 2, got 1; change --multiple" in said


def test_a_supervised_recipe_that_is_to_evaluate_names_another():
    said, _ = parse(SftConfig(), "--model", "folder", "--evaluate")
    assert "has no reward to evaluate by; evaluate its checkpoint by an RL recipe, such as recipes.grpo" in said


WRONG_DEFAULTS = {
    "of one section": "DEFAULT = RunConfig(actor=MegatronConfig(ranks=3, tp=2))",
    "between sections": "DEFAULT = RunConfig(steps=10, critic=CriticConfig(train=True, warmup_steps=50))",
    "of its own class": "@dataclass(frozen=True)\nclass Own(RunConfig):\n    level: int = 1\nDEFAULT = Own(steps=0)",
    "changed": "DEFAULT = replace(RunConfig(), steps=0)",
}
RECIPE = """from dataclasses import dataclass, replace
from rlworker import CriticConfig, MegatronConfig, RunConfig, launch, parse_config
{made}
"""


@pytest.mark.parametrize("kind", WRONG_DEFAULTS)
def test_wrong_settings_of_a_recipe_are_said_in_a_line_with_their_place(tmp_path, capsys, kind):
    """For --help too: the recipe fails before it reads its command line."""
    path = tmp_path / "own.py"
    path.write_text(RECIPE.format(made=WRONG_DEFAULTS[kind]))
    with pytest.raises(ValueError) as error:
        runpy.run_path(str(path))
    sys.excepthook(error.type, error.value, error.tb)  # as Python does where a program ends so
    said = capsys.readouterr().err
    last = len(path.read_text().splitlines())
    assert said.startswith("error: ") and said.count("\n") == 1 and f"{path}:{last}" in said, said
    assert str(error.value) in said and "before any option is read; change them there" in said


@pytest.mark.parametrize("code", ["int('one')", "raise KeyError('level')", "RunConfig(setps=1)"])
def test_other_errors_of_a_recipe_are_pythons(tmp_path, capsys, code):
    (tmp_path / "own.py").write_text(RECIPE.format(made=code))
    with pytest.raises(Exception) as error:
        runpy.run_path(str(tmp_path / "own.py"))
    assert explain_settings(error.value) is None
    sys.excepthook(error.type, error.value, error.tb)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_default_that_cannot_be_moved_is_said_in_a_line():
    @dataclass(frozen=True)
    class Fitted(RunConfig):
        def fit_to_model(self):
            raise ValueError("model: it has no sizes here")

    said, config = parse(Fitted(), "--steps", "3")
    assert said == "error: model: it has no sizes here" and not config


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data.train", "a.parquet", "b.parquet"], "--curriculum.sources b.parquet 1."),
        (["--data.train=['a.parquet','b.parquet', 'c']"], "--curriculum.sources b.parquet 1 c 1."),
        (["--data.train", "[a,b]", "--steps", "3"], "got 2: a b; name the others"),
        (["--data.heldout", "a", "b", "--steps", "3"], "name the others as sets: --data.heldout-sets SET b."),
    ],
)
def test_a_list_of_sources_is_answered_with_what_to_write(arguments, said):
    message, config = parse(RunConfig(), *arguments)
    assert not config and "takes one source of rows" in message and said in message
    message, _ = parse(SftConfig(), *arguments)
    assert "join the files into one" in message or "--data.heldout-sets" in message
    _, config = parse(RunConfig(), "--data.train", "a", "--steps", "3")
    assert config.data.train == "a"


def test_adapters_beside_a_recipes_frozen_tower_have_a_way_out():
    from recipes.images.sft_vlm import DEFAULT

    said, _ = parse(DEFAULT, "--actor.lora.rank", "4")
    assert "set --actor.freeze without a value, which takes back what a recipe sets" in said
    said, config = parse(DEFAULT, "--actor.lora.rank", "4", "--actor.freeze")
    assert not said and config.actor.freeze == () and config.actor.lora.rank == 4
