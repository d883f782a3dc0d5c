"""Episodes of several turns on real engines: Ray, Megatron ranks, vLLM, and environments in processes of their own."""

import json
import os
import signal
from dataclasses import replace

import pytest
import support.environments.tool_functions
from kill_chain import read_metrics_without_times
from support.environments.tool_functions import draw_slowly
from support.huggingface import compute_logprobs, load_folder

from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from recipes.common.addition import make_data, make_tokenizer
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig, EnvironmentConfig, RecoveryConfig
from rlworker.environments import Episode

pytestmark = [pytest.mark.large, pytest.mark.timeout(600), pytest.mark.usefixtures("cluster")]
MEAN_LIMIT, MAX_LIMIT = 2e-6, 1e-3
KILLS = 10


async def environment(policy, row):
    """Write, read what a slow tool makes of it, and write again in one of three cases; rewards per turn."""
    episode = Episode(row)
    sample = await policy.sample(episode)
    episode.reward(sum(letter.isdigit() for letter in sample.text) / 4)
    episode.observe(f"{len(sample.text)};{await policy.tool(draw_slowly, len(sample.token_ids))}=")
    if int(row.answer) % 3:
        sample = await policy.sample(episode, max_tokens=3, stop=["+"])
        episode.reward(sum(letter.isdigit() for letter in sample.text) / 3)
    if int(row.answer) % 3 == 2:
        episode.fork("again=")
        await policy.sample(episode)
    return episode


@pytest.fixture(scope="module")
def config(make_hf_model, tmp_path_factory, by_value):
    import ray

    ray.cloudpickle.register_pickle_by_value(support.environments.tool_functions)
    folder = make_data(tmp_path_factory.mktemp("data"))
    for name, rows in (("train", 40), ("heldout", 16)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    model = make_hf_model("qwen2", True)
    make_tokenizer().save_pretrained(model)
    return RunConfig(
        model=model,
        data=DataConfig(str(folder / "train.jsonl"), str(folder / "heldout.jsonl"), max_prompt_tokens=8),
        actor=MegatronConfig(ranks=2, optimizer=OptimizerConfig(lr=3e-3, adam_eps=1e-5)),
        rollout=VllmConfig(max_new_tokens=4, max_model_len=32, max_num_seqs=128, kv_cache_mb=64),
        environment=EnvironmentConfig(turns=3, tokens=32, workers=2, time_limit_s=20.0),
        recovery=RecoveryConfig(restarts=KILLS + 1),
        steps=3,
        prompts_per_step=8,
        samples_per_prompt=4,
        eval_every=3,
    )


def run(config: RunConfig, folder, environment=environment, before=lambda trainer: None) -> list[dict]:
    """Run to the end and return the metrics of every step, without those that are seconds or count restarts."""
    from rlworker.trainers.rl import Trainer

    with Trainer(replace(config, run_dir=str(folder)), environment) as trainer:
        before(trainer)
        trainer.fit()
    return read_metrics_without_times(folder)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """Metrics of a run, its folder, and the batch of each of its steps with what was made of it."""
    folder, batches = tmp_path_factory.mktemp("run") / "run", []

    def record(trainer):
        advantage = trainer.objective.advantage

        def keep(batch):
            batches.append(batch)
            return advantage(batch)

        trainer.objective = replace(trainer.objective, advantage=keep)

    return run(config, folder, before=record), folder, batches


def test_a_run_of_episodes_learns_from_what_was_sampled_alone(finished):
    lines, folder, _ = finished
    steps = [line for line in lines if "turns" in line]
    assert len(steps) == 3
    for line in steps:
        assert 1 < line["turns"] < 3 and 0 < line["forks"] < 1
        assert line["tool_calls"] == 1 and line["observed_tokens"] > 2
        assert line["episode_failures"] == line["tool_failures"] == 0 and line["samples"] == 32
        assert line["logprob_diff_mean"] <= MEAN_LIMIT and line["logprob_diff_max"] <= MAX_LIMIT
    assert len({line["reward"] for line in steps}) == 3
    assert {"heldout", "heldout_failures"} <= lines[0].keys()
    assert not (folder / "outages.jsonl").exists()


def test_sampled_tokens_have_huggingfaces_logprobs_over_the_whole_sequence(finished, config, measured):
    """Of the first step, which the saved weights have sampled; each sequence by itself, with all that was observed."""
    batch = finished[2][0]
    assert set(batch.turn.tolist()) == {-1, 0, 1, 2}
    logprobs = compute_logprobs(load_folder(config.model), batch)
    difference = (logprobs - batch.rollout_logprobs)[batch.mask].abs()
    measured({"episodes: mean": float(difference.mean()), "episodes: largest": float(difference.max())})
    assert difference.mean() <= MEAN_LIMIT and difference.max() <= MAX_LIMIT


def test_the_run_folder_has_episodes_turn_by_turn(finished):
    samples = [json.loads(line) for line in next((finished[1] / "rollouts").glob("*1.jsonl")).read_text().splitlines()]
    assert len(samples) == 8
    for sample in samples:
        assert sample["outcome"] == "ok" and sample["turns"][0]["by"] == "prompt"
        assert [turn["learns"] for turn in sample["turns"]] == [turn["by"] == "model" for turn in sample["turns"]]
        assert sum(turn["reward"] for turn in sample["turns"]) == pytest.approx(sample["reward"])


def test_a_run_of_episodes_repeats_line_for_line_also_where_processes_are_killed(finished, config, tmp_path):
    """Tools of random duration; ten processes of environments, and an engine, are killed in the middle of rounds."""

    def kill_some(trainer):
        import ray

        sample, calls = trainer.rollouts.sample, iter(range(1000))

        def sample_and_kill(requests, stream, equal_shares=False):
            if equal_shares:  # the canary's
                return sample(requests, stream, equal_shares)
            call = next(calls)
            if call <= KILLS:
                victim = trainer.manager.loop._pool.workers[call % 2] if call < KILLS else trainer.rollouts.workers[0]
                os.kill(ray.get(victim.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
            return sample(requests, stream)

        trainer.rollouts.sample = sample_and_kill

    assert run(config, tmp_path / "killed", before=kill_some) == finished[0]
    assert len((tmp_path / "killed" / "outages.jsonl").read_text().splitlines()) == KILLS + 1


def test_an_environment_that_fails_is_counted_and_the_run_goes_on(config, tmp_path, capsys):
    async def fail_at_times(policy, row):
        episode = Episode(row)
        await policy.sample(episode)
        if "1" in row.prompt:
            raise KeyError("level")
        episode.reward(policy.random.random())
        return episode

    lines = run(replace(config, steps=1, eval_every=0), tmp_path / "failing", fail_at_times)
    assert lines[-1]["episode_raised"] == lines[-1]["episode_failures"] > 0
    assert "episodes failed" in capsys.readouterr().out
