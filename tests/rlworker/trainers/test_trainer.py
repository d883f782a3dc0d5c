"""The whole loop on real engines: Ray, Megatron ranks and vLLM."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from support.huggingface import compute_logprobs, load_folder

from engines.batch.samples import Request
from engines.config import LoraConfig, MegatronConfig, OptimizerConfig, VllmConfig
from engines.models.safetensors_folder import SafetensorsFolder
from engines.weight_sync import pack_buckets
from recipes.common.addition import make_data, make_tokenizer
from rlworker.algorithms.advantages import distill, grpo, remax
from rlworker.algorithms.losses import policy_loss, sequence_mean
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.run import RunConfig
from rlworker.config.sections import (
    CheckpointConfig,
    CriticConfig,
    CurriculumConfig,
    DataConfig,
    EnvironmentConfig,
    LimitsConfig,
    PlacementConfig,
)
from rlworker.config.validation import ValidationConfig
from rlworker.data.rows import pick_rows
from rlworker.environments.reward import exact_match
from rlworker.rollouts.trajectory import TrajectoryGroup
from rlworker.tracking.log import read_metrics

pytestmark = pytest.mark.usefixtures("cluster", "by_value")
MEAN_LIMIT, MAX_LIMIT = 1e-5, 1e-3
OPTIMIZER = OptimizerConfig(lr=3e-3, adam_eps=1e-5)


def trainer_of(config: RunConfig, reward, **parts):
    from rlworker.trainers.rl import Trainer

    return Trainer(config, reward, **parts)


def digits_reward(text, row) -> float:
    """Share of digits: a reward that a random model gets some of, so that there is something to learn from."""
    return sum(c.isdigit() for c in text) / 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = make_data(tmp_path_factory.mktemp("data"))
    for name, rows in (("train", 200), ("heldout", 40)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    return DataConfig(str(folder / "train.jsonl"), str(folder / "heldout.jsonl"), max_prompt_tokens=8)


def make_config(make_hf_model, data, run_dir, tied, family="qwen2", **changes) -> RunConfig:
    folder = make_hf_model(family, tied)
    make_tokenizer().save_pretrained(folder)
    config = RunConfig(
        model=folder,
        run_dir=str(run_dir),
        data=data,
        actor=MegatronConfig(ranks=2, optimizer=OPTIMIZER),
        rollout=VllmConfig(max_new_tokens=4, max_model_len=16, max_num_seqs=128, kv_cache_mb=64),
        steps=4,
        prompts_per_step=8,
        samples_per_prompt=4,
        checkpoint=CheckpointConfig(save_every=2),
        eval_every=2,
    )
    return replace(config, **changes)


def without_time(line: dict) -> dict:
    measured = ("time", "tokens_per_second", "flops_per_second", "memory_gb", "rollout_memory_gb")
    return {k: v for k, v in line.items() if not k.startswith(measured)}


@pytest.fixture(scope="module")
def finished(make_hf_model, data, tmp_path_factory):
    """A run of four steps over DP2 in thd, and what went wrong after it when it was made to."""
    config = make_config(make_hf_model, data, tmp_path_factory.mktemp("run") / "run", tied=True)
    faults = {}
    with trainer_of(config, digits_reward) as trainer:
        trainer.fit()
        trainer.config = replace(config, limits=LimitsConfig(logprob_diff_mean=1e-12))
        with pytest.raises(RuntimeError) as error:
            trainer.step()
        faults["limit"] = str(error.value)
        trainer.config = replace(config, limits=LimitsConfig(logprob_diff_mean=1e-12, ignore_logprob_diff=True))
        trainer.step()
        trainer.config = config
        trainer.sync_weights, trainer.check_canary = lambda: None, lambda: None
        trainer.step()
        with pytest.raises(RuntimeError) as error:
            trainer.step()
        faults["unsent"] = str(error.value)
        del trainer.sync_weights, trainer.check_canary
        in_third = lambda batch: batch.repeat_per_token(batch.group) == 3  # noqa: E731
        broken = lambda batch: torch.where(in_third(batch), float("nan"), grpo(batch))  # noqa: E731
        objective, trainer.objective = trainer.objective, replace(trainer.objective, advantage=broken)
        with pytest.raises(RuntimeError) as error:
            trainer.step()
        faults["nan"] = str(error.value)
        trainer.objective = objective
        faults["none"] = sync_with(trainer, "none")
        faults["floor"] = trainer.canary.measure_floor()
        faults["rounding"] = trainer.floor
        faults |= steps_of_few_groups(trainer)
        for fault in ("stale", "dropped", "swapped"):
            faults[fault] = sync_with(trainer, fault)
        trainer.config = replace(config, limits=LimitsConfig(logprob_diff_mean=100.0, logprob_diff_max=100.0))
        faults["hidden"] = sync_with(trainer, "stale")
    return config, faults


def steps_of_few_groups(trainer) -> dict:
    """Metrics of a step of one group of four samples for eight mini-batches over two replicas, those of a step without
    a group, and what is said of the tenth in a row."""
    sample, algorithm = trainer.manager.sample, AlgorithmConfig(mini_batches=8, dynamic_sampling=1)
    trainer.config, seen = replace(trainer.config, algorithm=algorithm), []

    def reward_otherwise(group: TrajectoryGroup) -> TrajectoryGroup:
        return [replace(one, rewards=((0, reward),)) for one, reward in zip(group, [0.0, 1.0, 0.5, 1.0])]

    def first_groups(count: int):
        def sampled(clock, version):
            groups, metrics = sample(clock, version)
            return [reward_otherwise(group) for group in groups[:count]], metrics

        return sampled

    take = trainer.actor.train_step
    trainer.actor.train_step = lambda batch, *rest: seen.append(len(batch)) or take(batch, *rest)
    trainer.manager.sample = first_groups(1)
    few, _ = trainer.step()
    trainer.manager.sample = first_groups(0)
    version = trainer.version
    empty = [trainer.step()[0] for _ in range(9)]
    with pytest.raises(RuntimeError) as error:
        trainer.step()
    assert trainer.version == version, "the weights stay, so none are sent"
    trainer.actor.train_step, trainer.manager.sample = take, sample
    return {"few": few, "mini_batches": seen, "empty": empty, "tenth": str(error.value)}


def sync_with(trainer, fault: str) -> str:
    """Sync in buckets of 100 kB, of which the rollout engine makes something wrong. Returns what was said."""
    import ray

    (engine,) = trainer.rollouts.workers
    ray.get(engine.__ray_call__.remote(plant, fault, trainer.models["actor"]))
    try:
        with patch("rlworker.cluster.train_group.choose_bucket_bytes", return_value=100_000):
            trainer.sync_weights()
        trainer.check_canary()
    except (RuntimeError, ray.exceptions.RayTaskError) as error:
        return str(error)
    finally:
        ray.get(engine.__ray_call__.remote(lambda worker: worker.engine.__dict__.pop("load_weights") and None))
    return ""


def plant(worker, fault: str, model) -> None:
    """Let a rollout worker's engine lose something of every sync: this runs in its process."""
    right, seen = worker.engine.load_weights, []
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]
    other = dict(zip(names, names[::-1]))

    def load(bucket, version: int, last: bool) -> None:
        weights = list(bucket.tensors())
        seen.append(version)
        if fault == "dropped" and len(seen) == 2:
            return
        if fault == "stale":  # the values that the run began with
            start = SafetensorsFolder(model.folder)
            weights = [(name, start[name] if name == names[0] else tensor) for name, tensor in weights]
        if fault == "swapped":
            weights = [(other.get(name, name), tensor) for name, tensor in weights]
        for again, _ in pack_buckets(iter(weights), 2**30):
            right(replace(again, first=bucket.first), version, last)

    worker.engine.load_weights = load


def test_rollout_and_trainer_agree_at_every_step(finished, measured):
    assert len(agreement(Path(finished[0].run_dir), measured)) == 4


def test_every_step_samples_from_the_weights_before_it(finished):
    lines = read_metrics(Path(finished[0].run_dir))
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["version"] for line in lines[1:]] == [0, 1, 2, 3]
    assert ["heldout" in line for line in lines] == [True, False, True, False, True]
    assert all(0 <= line["clip_fraction"] <= 1 and line["entropy"] > 0 for line in lines[1:])


def test_a_checkpoint_is_evaluated_without_trainers_to_the_rewards_of_its_run(finished, tmp_path, capsys):
    """By the HuggingFace folder that was saved, where the run had weights that were sent. Two sets of the same rows are
    answered alike greedily and sampled by numbers of their own; another evaluation repeats every number."""
    from rlworker.trainers.launch import launch

    config, sampled = finished[0], ValidationConfig(samples=4, temperature=2.0)
    data = replace(config.data, train="", heldout_sets={"again": config.data.heldout})
    own = dict(model=f"{config.run_dir}/checkpoints/step_4", run_dir=str(tmp_path), data=data, validation=sampled)
    asked = replace(config, evaluate=True, **own)
    first, second = (launch(asked, digits_reward) for _ in range(2))
    assert first == second and "trainer ranks" not in capsys.readouterr().out
    assert first["heldout"] == first["heldout/again"] == read_metrics(Path(config.run_dir))[-1]["heldout"]
    assert 0 < first["heldout_pass_at_1"] < first["heldout_pass_at_4"] <= 1
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir()) == ["step_4", "step_4.1"]
    written = json.loads((tmp_path / "evaluations" / "step_4" / "validation.json").read_text())
    assert written["metrics"] == first and written["provenance"]["platform"] == "cpu (executed)"
    lines = [json.loads(line) for line in (tmp_path / "evaluations" / "step_4" / "samples.jsonl").open()]
    assert len(lines) == 2 * 40 * 5 and [line["drawn"] for line in lines[:6]] == ["greedy", *["sampled"] * 4, "greedy"]
    drawn = {name: [line["completion"] for line in lines if line["set"] == name] for name in ("", "again")}
    assert drawn[""] != drawn["again"] and drawn[""][::5] == drawn["again"][::5]
    greedy = [line["reward"] for line in lines if line["set"] == "" and line["drawn"] == "greedy"]
    assert sum(greedy) / len(greedy) == first["heldout"]


def test_past_the_limit_the_run_stops_and_says_why(finished):
    assert "step 5: rollout and trainer disagree" in finished[1]["limit"]
    assert "limits 1.0e-12 and" in finished[1]["limit"] and "--limits.logprob-diff-mean" in finished[1]["limit"]


def test_weights_that_were_not_sent_stop_the_run_at_the_next_step(finished):
    assert "Weights did not arrive whole" in finished[1]["unsent"]


def test_a_step_that_is_not_finite_is_refused_and_its_rows_are_kept(finished):
    """Prompt 3 of 8 was given NaN advantages: its four samples are named, and nothing was learned from them."""
    config, faults = finished
    assert "the actor's gradient is not finite, so the step was not taken. 4 of 32 rows" in faults["nan"]
    (path,) = (Path(config.run_dir) / "rejected").iterdir()
    rows = [json.loads(line) for line in path.open()]
    assert [row["row"] for row in rows] == [12, 13, 14, 15]
    assert all(row["not_finite"] == ["advantages"] and row["advantages"][0] == "nan" for row in rows)
    assert all("=" in row["text"] for row in rows) and len({row["text"][:9] for row in rows}) == 1
    assert faults["none"] == "", "the weights are still those that a sync can compare"


def test_a_step_learns_from_what_is_left_of_its_groups(finished):
    """One sample for each of four optimizer steps, a dummy beside it on the other replica; none from nothing."""
    faults = finished[1]
    assert faults["mini_batches"] == [1, 1, 1, 1]
    assert faults["few"]["grad_norm"] > 0 and faults["few"]["logprob_diff_mean"] <= MEAN_LIMIT
    assert [step["empty_steps"] for step in faults["empty"]] == list(range(1, 10))
    assert all("grad_norm" not in step and step["samples"] == 32 for step in faults["empty"])
    assert "in 10 steps in a row no group had two different rewards (their mean is" in faults["tenth"]


def test_a_damaged_sync_stops_the_run_at_once(finished):
    """A stale tensor, a bucket that got lost and two names that changed places."""
    faults = finished[1]
    assert faults["none"] == "", "buckets of this size arrive"
    assert "after sync" in faults["stale"] and "Weights did not arrive whole" in faults["stale"]
    assert "came without ['model." in faults["dropped"]
    assert "after sync" in faults["swapped"] and "Weights did not arrive whole" in faults["swapped"]
    assert "of the same tokens: mean" in faults["stale"], "the logprobs show it too"
    assert "2 of 50 tensors are not those that were sent: model.layers.0.mlp.down_proj.weight, " in faults["swapped"]


def test_a_stale_tensor_that_logprobs_cannot_show_stops_the_run(finished):
    """As in bfloat16, whose rounding hides it; what the engine computes with is compared with what was sent."""
    said = finished[1]["hidden"]
    assert "1 of 50 tensors are not those that were sent: model.layers.0.mlp.down_proj.weight. " in said
    assert "logprobs" not in said.partition("Weights did not arrive")[0] and "--limits.ignore-logprob-diff" in said


def test_engines_agree_on_the_tokens_that_a_floor_is_measured_on(finished):
    assert 0 < finished[1]["floor"] <= MEAN_LIMIT
    line = json.loads((Path(finished[0].run_dir) / "starts.jsonl").read_text())
    assert 0 < line["logprob_diff_floor"] == finished[1]["rounding"] <= MEAN_LIMIT
    assert {line["logprob_diff_limit"] for line in read_metrics(Path(finished[0].run_dir))[1:]} == {2e-5}


def test_the_run_folder_is_whole(finished):
    folder = Path(finished[0].run_dir)
    assert json.loads((folder / "config.json").read_text())["actor"]["ranks"] == 2
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step_2", "step_4"}
    samples = [json.loads(line) for line in (folder / "rollouts" / "step_000004.jsonl").open()]
    assert samples and all(s["reward"] == digits_reward(s["completion"], None) for s in samples)
    report = (folder / "report.html").read_text()
    assert "start rollouts" in report and "Of a step" in report and samples[0]["prompt"] in report
    assert report.count("<figure ") == 12 and (folder / "plotly.min.js").stat().st_size > 10**6
    assert "qwen2, 4 layers, " in report and "<th>actor.ranks</th><td>2</td>" in report


def test_rates_and_memory_are_measured(finished):
    """A million weights and a hundred tokens are a billion operations; a process holds torch and Megatron at least."""
    for line in read_metrics(Path(finished[0].run_dir))[1:]:
        assert 1e5 < line["flops_per_second"] < 1e12
        assert 0.2 < line["memory_gb"] < 8 and 0.2 < line["rollout_memory_gb"] < 16
        lengths = [line[f"completion_tokens_{name}"] for name in ("p10", "p50", "p90", "max")]
        assert lengths == sorted(lengths) and lengths[0] >= 1 and lengths[-1] <= 4


def test_the_saved_model_is_the_trained_one(finished, make_hf_model):
    from transformers import AutoModelForCausalLM

    folder = Path(finished[0].run_dir) / "checkpoints" / "step_4" / "hf"
    trained, start = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, make_hf_model("qwen2", True)))
    pairs = zip(trained.parameters(), start.parameters(), strict=True)
    assert all((one != other).any() for one, other in pairs), "every weight took part in the steps"
    assert trained.config.eos_token_id == 2 and (folder / "tokenizer.json").exists()


def agreement(run: Path, measured) -> list[dict]:
    """The lines of a run's steps; rollout and trainer must have agreed at each."""
    lines = read_metrics(run)[1:]
    mean, largest = (max(line[f"logprob_diff_{kind}"] for line in lines) for kind in ("mean", "max"))
    measured({"mean logprob difference": mean, "largest": largest})
    assert 0 < mean <= MEAN_LIMIT and largest <= MAX_LIMIT
    return lines


def test_ppo_with_reference_and_critic_resumes(make_hf_model, data, tmp_path, capsys, measured):
    """An untied model over TP2 in bshd; a critic in the actor's processes and a reference in its own, two optimizer
    steps per rollout, with centered scores; the critic learns alone first; prompts of two sources in buckets of their
    pass rates. Cut off after step 2 and resumed, the last steps are the same, though the host now holds the reference
    and half of the optimizers."""
    from transformers import AutoModelForTokenClassification

    optimizer = replace(OPTIMIZER, lr=4e-4, lr_scheduler="linear")
    config = make_config(
        make_hf_model,
        data,
        tmp_path / "run",
        tied=False,
        actor=MegatronConfig(ranks=2, tp=2, layout="bshd", optimizer=optimizer),
        algorithm=AlgorithmConfig(kl_coef=0.05, mini_batches=2, score_centering=8),
        critic=CriticConfig(train=True, lr=1e-2, clip=0.5, warmup_steps=1),
        placement=PlacementConfig(("reference",)),
        curriculum=CurriculumConfig({data.heldout: 1.0}, buckets={0.5: 1.0, 1: 2.0}, pass_rates=(0.2, 1.0)),
        environment=EnvironmentConfig(pass_reward=0.5),
    )
    with trainer_of(config, digits_reward) as trainer:
        trainers = [name for name in trainer.name_workers() if "rank" in name]
        assert trainers == ["actor rank 0", "actor rank 1", "reference rank 0", "reference rank 1"]
        trainer.fit()
    lines = agreement(tmp_path / "run", measured)
    assert "grad_norm" not in lines[0] and all(line["critic_grad_norm"] > 0 for line in lines)
    assert lines[0]["explained_variance"] == pytest.approx(0.0, abs=1e-5), "its head starts at zero"
    assert {line["curriculum/heldout/share"] for line in lines} == {0.5} and lines[-1]["curriculum/seen"] > 0.1
    assert 0 < lines[1]["kl"] < lines[2]["kl"], "the policy starts at the reference and leaves it"
    assert all(0.1 < line["top_mass"] < 1 for line in lines[1:]), "the likeliest 8 tokens, not all"
    assert lines[1]["ratio_max"] > 1.0001, "the second mini-batch is off the policy that sampled it"
    # Both decays end with the run: the critic's over eight optimizer steps, the actor's over its six. The last two take
    # 2/8 and 1/8 of the peak, 2/6 and 1/6.
    assert (lines[-1]["critic_lr"], lines[-1]["lr"]) == pytest.approx((1e-2 * 3 / 16, 4e-4 / 4))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_4"
    trained = AutoModelForTokenClassification.from_pretrained(checkpoint / "hf_critic")
    assert trained.score.weight.abs().max() > 0 and (checkpoint / "hf" / "tokenizer.json").exists()
    shutil.copytree(config.run_dir, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_4")
    capsys.readouterr()
    hosted = replace(config.actor, optimizer=replace(optimizer, offload_fraction=0.5))
    placed = PlacementConfig(("reference",), cpu_offload=("reference",))
    changes = dict(actor=hosted, placement=placed, resume=True)
    with trainer_of(replace(config, run_dir=str(tmp_path / "again"), **changes), digits_reward) as trainer:
        trainer.fit()
    assert "s  step 2 is restored\n" in capsys.readouterr().out
    want, got = ([without_time(line) for line in read_metrics(tmp_path / run)] for run in ("run", "again"))
    assert got == want
    drawn = [(tmp_path / run / "prompts.jsonl").read_text() for run in ("run", "again")]
    assert drawn[0] == drawn[1] and drawn[0].count("\n") == 4


@pytest.mark.large
def test_adapters_learn_are_sent_merged_and_resume(make_hf_model, data, tmp_path, capsys, measured):
    """Over TP2, with a critic and with a reference that is the actor with its adapters off. Cut off after step 2 and
    resumed, the last steps are the same; a folder of adapters starts another run where this one ended."""
    actor = MegatronConfig(ranks=2, tp=2, optimizer=OPTIMIZER, lora=LoraConfig(rank=4))
    config = make_config(
        make_hf_model,
        data,
        tmp_path / "run",
        tied=True,
        actor=actor,
        algorithm=AlgorithmConfig(kl_coef=0.05, mini_batches=2),
        critic=CriticConfig(train=True, lr=1e-2),
    )
    with trainer_of(config, digits_reward) as trainer:
        assert [name for name in trainer.name_workers() if "rank" in name] == ["actor rank 0", "actor rank 1"]
        trainer.fit()
    lines = agreement(tmp_path / "run", measured)
    assert 0 < lines[0]["kl"] < lines[-1]["kl"], "the policy leaves the weights, which stay the reference"
    checkpoint = tmp_path / "run" / "checkpoints" / "step_4"
    base, merged = (load_file(Path(folder, "model.safetensors")) for folder in (config.model, checkpoint / "hf"))
    adapters = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    for name, tensor in base.items():
        place = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        a, b = (adapters.pop(f"{place}{kind}.weight", None) for kind in "AB")
        change = 0 * tensor if a is None or b is None else actor.lora.scale * b @ a
        assert torch.allclose(merged[name], tensor + change, atol=1e-6) and (a is None or change.any())
    assert not adapters, "each is of a weight"
    critic = load_file(checkpoint / "hf_critic" / "model.safetensors")
    assert critic["score.weight"].any() and not torch.equal(critic["model.layers.0.mlp.up_proj.weight"], merged[name])
    shutil.copytree(config.run_dir, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_4")
    with trainer_of(replace(config, run_dir=str(tmp_path / "again"), resume=True), digits_reward) as trainer:
        trainer.fit()
    want, got = ([without_time(line) for line in read_metrics(tmp_path / run)] for run in ("run", "again"))
    assert got == want
    started = replace(actor, lora=replace(actor.lora, start=str(checkpoint / "adapter")))
    further = replace(config, run_dir=str(tmp_path / "further"), actor=started, steps=1, eval_every=0)
    with trainer_of(further, digits_reward) as trainer:
        trainer.fit()
    before, first = read_metrics(tmp_path / "further")
    assert before["heldout"] == lines[-1]["heldout"], "vLLM has the adapters before the first sample"
    assert first["kl"] > lines[-1]["kl"] and first["logprob_diff_mean"] <= MEAN_LIMIT


@pytest.mark.product
def test_a_critic_that_shares_the_actors_weights_learns_bit_for_bit_as_one_with_a_copy(make_hf_model, data, tmp_path):
    """In processes beside the rollout engines, and in turns with them on the same devices."""
    config = make_config(
        make_hf_model,
        data,
        tmp_path / "shared",
        tied=True,
        actor=MegatronConfig(ranks=2, tp=2, optimizer=OPTIMIZER, lora=LoraConfig(rank=4)),
        algorithm=AlgorithmConfig(kl_coef=0.05, mini_batches=2),
        critic=CriticConfig(train=True, lr=1e-2, warmup_steps=1),
        steps=3,
    )
    critic = replace(config.critic, model=str(shutil.copytree(config.model, tmp_path / "copy")))
    runs = {"shared": {}, "turns": {"placement": PlacementConfig(colocate=True)}, "copied": {"critic": critic}}
    lines = {}
    for name, changes in runs.items():
        with trainer_of(replace(config, run_dir=str(tmp_path / name), **changes), digits_reward) as trainer:
            trainer.fit()
            assert trainer.critic.role.shares_base == (name != "copied")
        lines[name] = [without_time(line) for line in read_metrics(tmp_path / name)]
    assert len(lines["copied"]) == 4 and all(line["critic_grad_norm"] > 0 for line in lines["copied"][1:])
    assert lines["copied"][-1]["explained_variance"] != 0, "the critic has learned"
    assert lines["shared"] == lines["copied"]
    assert lines["turns"] == lines["copied"]


@pytest.mark.large
def test_pipeline_stages_and_rewards_that_fail(make_hf_model, data, tmp_path, capsys, measured):
    """A tied llama over PP2; some calls of the reward raise, some end its process, and the run goes on."""

    def fragile(text, row):
        print("fragile was asked", row.answer)
        if row.answer.endswith("7"):
            raise KeyError("level")
        if row.answer.endswith("3"):
            os._exit(1)
        return digits_reward(text, row)

    actor = MegatronConfig(ranks=2, pp=2, optimizer=OPTIMIZER, micro_batch_tokens=64)
    config = make_config(make_hf_model, data, tmp_path / "run", tied=True, family="llama", actor=actor, steps=2)
    with trainer_of(config, fragile) as trainer:
        trainer.fit()
        answers = [row.answer for row in trainer.heldout[""]]
        taken = pick_rows(trainer.rows, 8, 0, config.seed)
    assert "WARNING after 0 steps: " in capsys.readouterr().out
    said = (tmp_path / "run" / "environment.log").read_text()
    assert all(f"fragile was asked {answer}\n" in said for answer in answers), "also those whose process died"
    first, last = agreement(tmp_path / "run", measured)
    start = read_metrics(tmp_path / "run")[0]
    sevens, threes = (sum(answer.endswith(digit) for answer in answers) for digit in "73")
    assert start["heldout_raised"] == sevens > 0 and start["heldout_died"] == threes > 0
    assert start["heldout_failures"] == sevens + threes and last["step"] == 2
    sevens, threes = (4 * sum(row.answer.endswith(digit) for row in taken) for digit in "73")
    assert first["episode_failures"] == sevens + threes > 0
    assert (first.get("episode_raised", 0), first.get("episode_died", 0)) == (sevens, threes)


@pytest.mark.large
def test_teacher_greedy_baseline_and_dynamic_sampling(make_hf_model, data, tmp_path, capsys, measured):
    """An untied llama over CP2 and two rollout engines; a teacher of another family, whose KL is part of the reward;
    ReMax's baseline; groups that are all alike give way to others."""

    from rlworker.rollouts.manager import CANARY

    teacher = make_hf_model("qwen2", False)
    config = make_config(
        make_hf_model,
        data,
        tmp_path / "run",
        tied=False,
        family="llama",
        actor=MegatronConfig(ranks=2, cp=2, optimizer=OPTIMIZER, micro_batch_tokens=64),
        algorithm=AlgorithmConfig(reference=teacher, kl_coef=0.1, kl_in="reward", greedy_baseline=True),
        steps=1,
    )
    config = replace(config, rollout=replace(config.rollout, engines=2))
    config = replace(config, algorithm=replace(config.algorithm, dynamic_sampling=2))
    seen = []

    def advantage(batch):
        seen.append(batch)
        return remax(batch) + distill(batch)

    def half_alike(text, row) -> float:
        return digits_reward(text, row) if int(row.answer) % 2 else 0.0

    with trainer_of(config, half_alike, advantage=advantage, aggregation=sequence_mean) as trainer:
        trainer.fit()
        drawn, rows = trainer.manager.rollouts_done, trainer.rows
        trainer.manager.rollouts_done = 0
        drawn_anew = []
        for _ in range(3):  # the weights stay, as at a learning rate of 0
            for sampling in (trainer.manager.make_sampling(16), trainer.manager.make_sampling(16, CANARY)):
                samples = trainer.rollouts.sample([Request(rows[0].prompt_ids, sampling)] * 2, sampling.stream)
                drawn_anew += [samples[:16], samples[16:]]
            trainer.manager.rollouts_done += 1
    agreement(tmp_path / "run", measured)
    texts = {str([c.token_ids.tolist() for c in group]) for group in drawn_anew}
    assert len(texts) == 12, "steps, engines and the canary draw from streams of their own"
    assert {c.version for group in drawn_anew for c in group} == {1}, "every engine has the newest weights"
    (batch,) = seen
    assert 2 <= drawn <= 3, "half of the groups are alike, so that one rollout cannot do"
    odd = {row.prompt_ids for index in range(drawn) for row in pick_rows(rows, 8, 8 * index, 0) if int(row.answer) % 2}
    prompts = {tuple(batch.select(i, i + 1).inputs[:6].tolist()) for i in range(0, len(batch), 4)}
    assert prompts <= odd and len(prompts) >= min(8, len(odd)) - 1, "groups without a difference are dropped"
    assert len(batch.greedy_rewards) == len(batch)
    assert torch.equal(batch.greedy_rewards[::4], batch.greedy_rewards[3::4])
    one = batch.select(5, 6)
    want = compute_logprobs(load_folder(teacher), one)
    assert float((one.ref_logprobs - want)[one.mask].abs().max()) <= 1e-5
    assert torch.equal(one.penalties, -0.1 * (one.rollout_logprobs - one.ref_logprobs) * one.mask)
    state = json.loads(next((tmp_path / "run" / "checkpoints" / "step_1").glob("*.json")).read_text())
    assert state["rollouts"] == drawn


def test_what_is_wrong_is_said_before_anything_starts(make_hf_model, data, tmp_path, finished, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "remote", None)  # nothing can start
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"prompt": "1+1=", "answer": "2"}\n{"answer": "3"}\n')
    config = make_config(make_hf_model, data, tmp_path / "run", tied=True)
    cases = [
        (replace(config, critic=CriticConfig(train=True, model=str(tmp_path / "none"))), "does not exist"),
        (replace(config, run_dir=finished[0].run_dir), "already holds a run"),
        (replace(config, model=str(tmp_path / "none")), "does not exist"),
        (replace(config, data=replace(data, train=str(broken))), 'line 2: field "prompt" is missing'),
        (replace(config, data=replace(data, train="")), "set --data.train"),
        (replace(config, actor=MegatronConfig(tp=3, ranks=3)), "tp=3 does not divide"),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            trainer_of(wrong, exact_match)
    with pytest.raises(ValueError, match=r"center=True, which needs a number .* algorithm.score_centering is 0"):
        trainer_of(config, exact_match, loss=partial(policy_loss, center=True))
    regularised = replace(config, algorithm=AlgorithmConfig(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"loss: algorithm\.kl_coef is 0\.1, and .* has no parameter for it"):
        trainer_of(regularised, exact_match, loss=lambda outputs, batch: (outputs.logprobs.sum(), {}))
    assert not (tmp_path / "run").exists()


@pytest.mark.large
def test_the_limit_of_a_run_in_bfloat16_is_measured_once(make_hf_model, data, tmp_path, capsys):
    """It is told and recorded, a resumed run keeps it, and a layer that is held back is found under it."""
    actor = MegatronConfig(dtype="bfloat16", optimizer=OPTIMIZER)
    config = make_config(make_hf_model, data, tmp_path / "run", tied=True, actor=actor, steps=1)
    config = replace(config, rollout=replace(config.rollout, dtype="bfloat16"))
    with trainer_of(config, digits_reward) as trainer:
        trainer.fit()
        floor = trainer.floor
        assert sync_with(trainer, "none") == ""
        said = sync_with(trainer, "stale")
    assert "1 of 50 tensors are not those that were sent: model.layers.0.mlp.down_proj.weight. " in said
    told = (
        f"trainer logprob| may be {min(0.5, 5 * floor):.1e}; by rounding alone it is {floor:.1e} before the first step"
    )
    assert floor > 0 and told in capsys.readouterr().out
    with trainer_of(replace(config, steps=2, resume=True), digits_reward) as trainer:
        trainer.fit()
        assert trainer.floor == floor
    starts = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert [start["logprob_diff_floor"] for start in starts] == [floor] * 2
    assert [line["logprob_diff_limit"] for line in read_metrics(tmp_path / "run")[1:]] == [min(0.5, 5 * floor)] * 2
