"""The recipes for real models: each whole and small, and each in full as a plan."""

import asyncio
import importlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.program import run_recipe
from support.ranks.vlm_cases import QWEN2_5_VL_7B, QWEN3_5_35B, QWEN3_VL_30B
from support.rollout_workers import needs

from engines.batch.batch import TrainBatch
from hardware.platforms import get_platform
from hardware.vllm_versions import CAUSAL_FLAGS, TILES_BY_IDS
from recipes.common import squares
from recipes.common.addition import make_expert_model, make_model, make_state_model
from rlworker.algorithms.advantages import distill
from rlworker.algorithms.objective import make_objective
from rlworker.checks.plan.recipe import plan_recipe
from rlworker.config.command_line import parse_config
from rlworker.data.rows import Row, load_tokenizer
from rlworker.tracking.log import read_metrics

RECIPES = {
    "grpo_gsm8k": (),
    "ppo_gsm8k": (),
    "dapo_math": (),
    "served.agent_openai": (),
    "distill": ("--algorithm.reference",),
    "sized.grpo_qwen3_5": (),
    "served.judge_and_math": ("--models.judge.model",),
    "sft": (),
    "images.grpo_geo3k": (),
    "images.ppo_geo3k": (),
    "images.sft_vlm": (),
}
"""Recipe -> options that name further models."""
VERIFIERS, VERIFIERS_PYTHON = "served.verifiers_env", os.environ.get("VERIFIERS_PYTHON", ".venv-verifiers/bin/python")
"""The recipe that needs a Python of its own, and where that is."""
MIXTURES = ("sized.grpo_qwen3_30b", "images.grpo_qwen3_vl_30b", "images.grpo_qwen3_5_35b")
"""Recipes whose models have experts."""
NPU = ("--platform", "npu-emulated")
ON_NPU = ("grpo_gsm8k", "ppo_gsm8k", "images.grpo_geo3k")
"""Recipes that run on the emulated NPU as well."""
LLAMA_8B = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0}
LLAMA_8B |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
"""The shape of Llama 3.1 8B."""
TURNS = "{% for m in messages %}{{ m.content + (eos_token if m.role == 'assistant' else ' ') }}{% endfor %}"
TRACED = ("--profile-steps", "2:2")
KEPT = ("--rollout.top-k", "20")
INTERN = ("--smoke-model", "internvl")
GEMMA = ("--smoke-model", "gemma3")
STATES = ("--smoke-model", "qwen3_5_text")
LORA = ("--actor.lora.rank", "16")
QWEN3_VL = ("--smoke-model", "qwen3_vl")
OPTIONS = {"ppo_gsm8k": NPU + TRACED, "images.grpo_geo3k": KEPT, "images.ppo_geo3k": GEMMA}
"""Recipe -> what differs in its first case."""
SMOKES = [
    *((name, OPTIONS.get(name, ())) for name in (*RECIPES, *MIXTURES)),
    ("sft", LORA),
    ("images.grpo_geo3k", ("--smoke-model", "qwen3_5")),
    (VERIFIERS, ("--python", VERIFIERS_PYTHON)),
]
BY_HAND = [
    *((name, NPU) for name in ("grpo_gsm8k", "images.grpo_geo3k")),
    ("grpo_gsm8k", LORA),
    ("sft", STATES),
    *((name, QWEN3_VL) for name in ("images.grpo_geo3k", "images.ppo_geo3k", "images.sft_vlm")),
    ("images.ppo_geo3k", ()),
    ("images.sft_vlm", GEMMA),
    ("images.grpo_geo3k", INTERN),
]
"""Those that no suite runs: the rest of the emulated platform's matrix, and of the families'."""
ALWAYS = {("images.grpo_geo3k", KEPT)}
"""The one that every suite runs, with images, a KL penalty and truncated sampling. Tests of the trainers have what else
differs in the others."""


def mark_smoke(case: tuple) -> tuple:
    if case in ALWAYS:
        return ()
    if case[0] == VERIFIERS:
        lacks = not Path(VERIFIERS_PYTHON).exists()
        reason = f"there is no {VERIFIERS_PYTHON}: bash scripts/setup.sh verifiers makes it"
        return pytest.mark.large, pytest.mark.skipif(lacks, reason=reason)
    lacking = {INTERN: TILES_BY_IDS, GEMMA: CAUSAL_FLAGS}.get(case[1])
    needed = (needs(lacking),) if lacking and "images" in case[0] else ()
    return (*needed, pytest.mark.product if case in BY_HAND else pytest.mark.large)


@pytest.mark.parametrize(
    ("recipe", "options"), [pytest.param(*case, marks=mark_smoke(case)) for case in [*SMOKES, *BY_HAND]]
)
def test_it_runs_whole_and_small(cluster, tmp_path, recipe, options):
    done = run_recipe(recipe, "--smoke", "--run-dir", tmp_path / recipe, *options)
    assert done.returncode == 0, done.stderr
    run = tmp_path / f"{recipe}_smoke" / "run"
    start, first, last = read_metrics(run)
    assert (first["step"], last["step"]) == (1, 2)
    assert load_tokenizer(str(run / "checkpoints" / "step_2" / "hf")).chat_template
    name = recipe.rpartition(".")[2]
    if name.startswith("sft"):
        assert last["heldout_loss"] < start["heldout_loss"]
        return
    told = [line.split(" s  ")[1] for line in done.stdout.splitlines() if line.startswith("start ")]
    parts = {"settings, folders and fields of rows are checked", "Ray is up", "rollout engines are up: 1"}
    assert parts < {*told} and told[-1] == "rollout engines are up: 1"
    if recipe == "dapo_math":  # a random model is nearly always wrong, which is -1: rollouts for want of a difference
        assert first["reward"] < -0.9 and first["samples"] == 3 * 8 * 4
        for step in (first, last):
            # Groups of like rewards teach all the same if the penalty for length tells their answers apart.
            assert "empty_steps" not in step or step["groups"] == step["zero_variance_groups"]
            assert ("grad_norm" in step) != ("empty_steps" in step)
        return
    assert "heldout" in start and 0 < last["logprob_diff_mean"] <= 1e-5
    # What a recipe decides shows: a critic, a KL penalty in the reward or in the loss, who learns where all are wrong.
    assert ("explained_variance" in last, "penalty" in last) == ((name.startswith("ppo"),) * 2)
    assert ("kl" in last) == (name.startswith(("grpo", "judge")) and recipe not in MIXTURES)
    assert ("reward_judge_mean" in last and 0 < last["reward_judge_mean"] < 1) == (recipe == "served.judge_and_math")
    assert ("expert_load_max" in last) == (recipe in MIXTURES)
    if recipe in ("images.grpo_geo3k", *MIXTURES[1:]):  # images beside answers and rewards
        assert '<img src="data:image/png;base64,' in (run / "report.html").read_text()
    is_npu = options[:2] == NPU
    platform = "npu-emulated (emulated), which says nothing about pse" if is_npu else "cpu (executed)<"
    assert platform in (run / "report.html").read_text()
    if options[-2:] == TRACED:
        found = {path.name.removesuffix(".json.gz") for path in (run / "profile" / "step_2").iterdir()}
        traced = {"rollout.rollout_engine_0", "values.actor_rank_0", "update.actor_rank_1", "sync.rollout_engine_0"}
        assert traced < found
        assert not {"rollout.actor_rank_0", "reward.actor_rank_0"} & found
    if recipe == "distill":
        assert first["zero_variance_groups"] >= first["groups"] / 2 and first["grad_norm"] > 0


CAN_START = [
    *((name, (), "cpu") for name in (*RECIPES, *MIXTURES[:2]) if name not in dict(ALWAYS)),
    pytest.param(MIXTURES[2], (), "cpu", marks=pytest.mark.large),  # as the one before, with another model
    (
        "dapo_math",
        ("--validation.patience", "2", "--data.heldout-sets", "aime", "none.jsonl", "--eval-every", "1"),
        "cpu",
    ),
    *((name, ("--platform", given), "npu-emulated") for name, given in zip(ON_NPU, ("npu", "npu", "npu-emulated"))),
]
"""Recipe, options and the platform that it then runs on."""


@pytest.mark.parametrize(("recipe", "options", "platform"), CAN_START)
def test_small_it_can_start(monkeypatch, tmp_path, recipe, options, platform):
    """Its settings, models, rows and functions go together, which is checked before engines are started."""
    import rlworker.trainers.launch
    from rlworker.trainers.rl import Trainer
    from rlworker.trainers.sft import SftTrainer

    built = []
    monkeypatch.setattr(
        rlworker.trainers.launch, "launch", lambda *args, **parts: built.append(Trainer(*args, **parts))
    )
    monkeypatch.setattr(rlworker.trainers.launch, "launch_supervised", lambda config: built.append(SftTrainer(config)))
    done = run_recipe(recipe, "--smoke", "--run-dir", tmp_path / recipe, *options)
    assert done.returncode == 0, done.stderr
    (trainer,) = built
    config, run = trainer.config, tmp_path / f"{recipe}_smoke" / "run"
    assert (config.run_dir, config.steps, config.actor.ranks, config.platform) == (str(run), 2, 2, platform)
    if "sft" in recipe:
        assert isinstance(trainer, SftTrainer)
        return
    in_reward = config.algorithm.parts.kl_in == "reward"
    assert ("critic" in trainer.models, in_reward) == (("ppo" in recipe,) * 2)
    assert ("reference" in trainer.models, trainer.objective.advantage is distill) == (
        recipe not in ("dapo_math", "served.agent_openai", *MIXTURES),
        recipe == "distill",
    )


def test_conversations_are_rows_of_supervised_training(monkeypatch, tmp_path):
    import rlworker.trainers.launch
    from rlworker.trainers.launch import check_run
    from rlworker.trainers.sft import SftTrainer

    def build(config):
        check_run(config).release()
        built.append(SftTrainer(config))

    built, say = [], [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "7"}]
    for name, turns in (("train", 2), ("heldout", 1)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": say * turns}) + "\n")
    model = make_model(tmp_path / "model", 0, chat_template=TURNS)
    monkeypatch.setattr(rlworker.trainers.launch, "launch_supervised", build)
    sizes = ["--data.max-prompt-tokens", 48, "--max-answer-tokens", 16, "--run-dir", tmp_path / "run"]
    rows = [word for name in ("train", "heldout") for word in (f"--data.{name}", tmp_path / f"{name}.jsonl")]
    done = run_recipe("sft", "--model", model, *rows, *sizes)
    assert done.returncode == 0, done.stderr
    ((example,), tokenizer) = built[0].train, built[0].tokenizer
    assert tokenizer.decode(example.ids) == "3+4? 7<eos>" * 2
    assert [tokenizer.decode(example.ids[first:end]) for first, end in example.turns] == ["7<eos>"] * 2
    assert len(built[0].heldout[""]) == 1


SIZES = {
    ("cpu", False): (8, 4, 32),
    ("npu", False): (8, 8, 24),
    ("cpu", True): (8, 0, 0),
    ("npu", True): (16, 0, 0),
}
"""By platform and whether it is supervised training: ranks, rollout engines and GiB for the keys and values of each."""


@pytest.mark.parametrize("recipe", [*(name for name in RECIPES if name != "sft"), VERIFIERS])
@pytest.mark.parametrize("platform", ["cpu", "npu"])
def test_in_full_it_fits_its_devices(tmp_path, recipe, platform):
    """Of 80 GB as the recipe states, of a node's sixteen cards as its platform does."""
    sees = recipe in ("images.grpo_geo3k", "images.ppo_geo3k", "images.sft_vlm")
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_VL_7B if sees else LLAMA_8B))
    others = [word for option in RECIPES.get(recipe, ()) for word in (option, str(tmp_path))]
    settings = ["--model", str(tmp_path), "--platform", platform, *others]
    node = get_platform(platform).node
    text, fits = plan_recipe(f"recipes.{recipe}", settings, node.device_gb if node else 80.0)
    ranks, engines, kv_cache_gb = SIZES[platform, "sft" in recipe]
    assert fits and "= 4 ranks; " in text and f" of an optimizer step for each of {ranks // 4}\n" in text, text
    default = importlib.import_module(f"recipes.{recipe}").DEFAULT.move_to_platform(platform)
    assert default.actor.ranks == ranks and (not engines or default.rollout.engines == engines)
    (cache,) = re.findall(r"^rollout engines +[\d.]+ +0.000 +0.000 +([\d.]+)", text, re.M) or ["0"]
    assert float(cache) == kv_cache_gb, text


@pytest.mark.parametrize("recipe", MIXTURES)
@pytest.mark.parametrize(
    ("platform", "device_gb", "ranks", "engines", "kv_cache_gb"),
    [("cpu", 80, 8, 4, 24), ("cuda", 80, 8, 4, 24), ("npu", 64, 16, 8, 16)],
)
def test_a_mixture_fits_one_node(tmp_path, recipe, platform, device_gb, ranks, engines, kv_cache_gb):
    """With a reserve of a tenth: experts may get more tokens on one rank than on others."""
    text = QWEN3_VL_30B["text_config"] | {"model_type": "qwen3_moe", "rope_scaling": None, "tie_word_embeddings": False}
    config = dict(zip(MIXTURES, (text, QWEN3_VL_30B, QWEN3_5_35B), strict=True))[recipe]
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = ["--model", str(tmp_path), "--platform", platform]
    text, fits = plan_recipe(f"recipes.{recipe}", settings, 0.9 * device_gb)
    shared_out = "32 of 256 on each rank" if recipe == MIXTURES[2] else "16 of 128 on each rank"
    assert fits and f"{shared_out}; 8 for each token" in text and "at the canary" in text, text
    default = importlib.import_module(f"recipes.{recipe}").DEFAULT.move_to_platform(platform)
    engines = engines // 2 if recipe == MIXTURES[2] else engines  # of four devices, and not of two
    assert (default.actor.ranks, default.rollout.devices, default.rollout.engines) == (ranks, ranks, engines)
    assert default.rollout.kv_cache_mb == kv_cache_gb * 1024
    node = get_platform(platform).node
    assert platform == "cpu" or (node and ranks == node.devices)


SMALL = {"smollm2": (9, 3, 576, 1536), "qwen05": (14, 2, 896, 4864), "gemma270": (4, 1, 640, 2048)}
"""Heads, key-value heads, hidden and ffn size of real models, most of which four ranks cannot share."""


@pytest.mark.parametrize(
    ("recipe", "model", "options", "sizes"),
    [
        ("grpo_gsm8k", "smollm2", (), (3, 6)),
        ("grpo_gsm8k", "smollm2", ("--actor.tp", "1", "--actor.ranks", "8"), (1, 8)),
        ("grpo_gsm8k", "smollm2", ("--platform", "npu"), (3, 6)),
        ("sft", "smollm2", ("--platform", "npu"), (1, 16)),
        ("grpo_gsm8k", "qwen05", (), (2, 8)),
        ("ppo_gsm8k", "gemma270", (), (4, 8)),
    ],
)
def test_it_is_cut_over_as_many_ranks_as_the_model_can_be(tmp_path, recipe, model, options, sizes):
    heads, kv_heads, hidden, ffn = SMALL[model]
    shape = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=hidden, intermediate_size=ffn)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | shape))
    default = importlib.import_module(f"recipes.{recipe}").DEFAULT
    actor = parse_config(default, args=["--model", str(tmp_path), *options]).actor
    assert (actor.tp, actor.ranks) == sizes


@pytest.mark.parametrize("recipe", ["demos.cpu", "demos.ppo", "demos.experts", "demos.states", "grpo", "demos.vlm"])
def test_small_ones_fit_this_machine(tmp_path, recipe):
    makers = {"demos.experts": make_expert_model, "demos.states": make_state_model, "demos.vlm": squares.make_model}
    make = makers.get(recipe, make_model)
    short = ["--data.max-prompt-tokens", "64", "--rollout.max-new-tokens", "8", "--rollout.max-model-len", "256"]
    settings = ["--model", str(make(tmp_path, 0)), *(short if recipe == "grpo" else [])]
    text, fits = plan_recipe(f"recipes.{recipe}", settings, memory_gb=0)
    assert fits, text


def test_a_recipe_with_a_teacher_asks_for_one(tmp_path):
    model = make_model(tmp_path, 0)
    sizes = ["--actor.tp", "2", "--rollout.max-new-tokens", "8", "--rollout.max-model-len", "256"]
    sizes += ["--data.max-prompt-tokens", "64"]
    done = run_recipe("distill", "--model", model, *sizes)
    assert done.returncode == 1
    assert re.search(r"reference \(--algorithm\.reference\): .*'TEACHER'", done.stderr)


def test_a_recipe_of_another_python_says_how_to_make_it(tmp_path):
    done = run_recipe(VERIFIERS, "--python", tmp_path / "none", "--model", tmp_path)
    assert done.returncode == 1 and "No such file" in done.stderr and "bash scripts/setup.sh verifiers" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"expression": " 6 * 7"}', "42"),
        ('{"expression": 12}', "12"),
        ('{"expression": null}', "error: write numbers"),
    ],
)
def test_a_calculator_tells_a_model_about_the_arguments_it_wrote(arguments, said):
    from recipes.common.agents import _answer
    from recipes.served.agent_openai import calculate

    call = SimpleNamespace(name="calculate", arguments=arguments)
    assert asyncio.run(_answer(call, {"calculate": calculate})).startswith(said)


def test_dapo_holds_length_against_right_and_wrong_alike():
    """Of 20 tokens at most the last 4 cost: none at 16, half at 18, 1 at 20. Then the group of three is normalised."""
    from recipes import dapo_math

    tokens, right = (16, 18, 20), (1.0, 1.0, -1.0)
    batch = TrainBatch.from_ids([[5] * (n + 1) for n in tokens], [1] * 3)
    batch = replace(batch, rewards=torch.tensor(right), group=torch.zeros(3, dtype=torch.long))
    config = replace(dapo_math.DEFAULT, rollout=replace(dapo_math.DEFAULT.rollout, max_new_tokens=20))
    found = make_objective(config).add_advantages(batch).require_column("advantages").split(tokens)
    rewards = torch.tensor([1.0, 0.5, -2.0])
    want = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert [float(part[0]) for part in found] == pytest.approx(want.tolist())
    assert dapo_math.right_or_wrong(r"\boxed{7}", Row("", (1,), "7", {})) == 1
    assert dapo_math.right_or_wrong("7 it is not", Row("", (1,), "8", {})) == -1


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"So it is \boxed{72}.", "48 / 2 = 24. 48 + 24 = 72.\n#### 72", 1.0),
        (r"So it is \boxed{71}.", "#### 72", 0.0),
        (r"\boxed{1,234}", "#### 1234", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{0.5}", r"\frac12", 1.0),
        (r"\boxed{x + 1}", "1 + x", 1.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_an_answer_is_right_as_mathematics(text, answer, reward):
    from recipes.common.mathematics import math_reward

    assert math_reward(text, Row("", (1,), answer, {})) == reward
