"""OpenAI's client plays whole runs, 200 episodes at once, through real engines: nothing differs from an environment."""

import json
import os
import signal
from collections import Counter
from dataclasses import replace

import pytest
from kill_chain import read_metrics_without_times
from support.huggingface import compute_logprobs, load_folder

from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig, EnvironmentConfig, RecoveryConfig

pytestmark = [pytest.mark.large, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]
EPISODES = 200


@pytest.fixture(scope="module")
def config(tmp_path_factory, by_value):
    from recipes.demos.calculator import CALCULATOR, TURNS

    folder = tmp_path_factory.mktemp("calculator")
    CALCULATOR.make_data(folder)
    heldout = (folder / "heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "heldout.jsonl").write_text("".join(heldout[:16]))
    return RunConfig(
        model=str(CALCULATOR.make_model(folder / "model", 0)),
        data=DataConfig(str(folder / "train.jsonl"), str(folder / "heldout.jsonl"), max_prompt_tokens=16),
        actor=MegatronConfig(ranks=2, optimizer=OptimizerConfig(lr=3e-3, adam_eps=1e-5)),
        rollout=VllmConfig(max_new_tokens=12, max_model_len=96, max_num_seqs=256, kv_cache_mb=64),
        environment=EnvironmentConfig(turns=TURNS, tokens=96, workers=2),
        recovery=RecoveryConfig(restarts=3),
        steps=2,
        prompts_per_step=EPISODES // 4,
        samples_per_prompt=4,
        eval_every=2,
    )


def run(config: RunConfig, folder, environment, before=lambda trainer: None):
    """Run to the end: the metrics of every step, without those that are seconds, and the batch of each step."""
    from rlworker.trainers.rl import Trainer

    batches = []
    with Trainer(replace(config, run_dir=str(folder)), environment) as trainer:
        advantage = trainer.objective.advantage

        def keep(batch):
            batches.append(batch)
            return advantage(batch)

        trainer.objective = replace(trainer.objective, advantage=keep)
        before(trainer)
        trainer.fit()
    return read_metrics_without_times(folder), batches


@pytest.fixture(scope="module")
def played(config, tmp_path_factory):
    """A run of the client, in which processes of agents are killed.

    Its metrics, its batches, what clients heard of each turn, and its folder.
    """
    from recipes.common.agents import connect
    from recipes.demos.calculator_openai import play

    folder = tmp_path_factory.mktemp("played")
    heard = str(folder / "heard.jsonl")

    async def play_and_note(policy, row):
        """Play by a client that asks for ids and logprobs of every reply, and notes them."""

        def connect_and_note(endpoint):
            client = connect(endpoint).with_options()
            create = client.chat.completions.create

            async def create_and_note(**options):
                reply = await create(**options, logprobs=True, extra_body={"return_token_ids": True})
                (choice,) = reply.choices
                numbers = [token.logprob for token in choice.logprobs.content] if choice.logprobs else []
                with open(heard, "a") as file:
                    file.write(json.dumps([choice.token_ids, numbers]) + "\n")
                return reply

            client.chat.completions.create = create_and_note
            return client

        return await play(policy, row, connect_and_note)

    lines, batches = run(config, folder / "run", play_and_note, kill_some)
    return lines, batches, [json.loads(line) for line in open(heard)], folder / "run"


def kill_some(trainer) -> None:
    """End a process of agents in the second round of samples, and the other one in the fifth."""
    import ray

    sample, calls = trainer.rollouts.sample, iter(range(1000))

    def sample_and_kill(requests, stream, equal_shares=False):
        call = -1 if equal_shares else next(calls)  # those are the canary's
        if call in (1, 4):
            worker = trainer.manager.loop._pool.workers[call % 2]
            os.kill(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        return sample(requests, stream, equal_shares)

    trainer.rollouts.sample = sample_and_kill


def test_a_run_by_calls_has_the_metrics_of_the_environment_though_processes_are_killed(played, config, tmp_path):
    """The environment plays the same, undisturbed."""
    from recipes.demos.calculator import ask_calculator

    lines, _ = run(config, tmp_path / "run", ask_calculator)
    assert played[0] == lines
    assert len((played[-1] / "outages.jsonl").read_text().splitlines()) == 2
    steps = [line for line in lines if "turns" in line]
    assert [line["samples"] for line in steps] == [EPISODES] * 2
    assert all(1 < line["turns"] <= 3 and line["episode_failures"] == line["forks"] == 0 for line in steps)


def test_clients_hear_the_ids_and_logprobs_that_were_sampled_and_huggingface_agrees(played, config, measured):
    _, batches, heard, _ = played
    sampled = Counter()
    for batch in batches:
        starts = [0, *batch.lengths]
        for number in range(len(batch.lengths)):
            span = slice(sum(starts[: number + 1]), sum(starts[: number + 2]))
            turns = batch.turn[span]
            for turn in sorted({*turns.tolist()} - {-1}):
                ids, logprobs = batch.targets[span][turns == turn], batch.rollout_logprobs[span][turns == turn]
                sampled[json.dumps([ids.tolist(), logprobs.tolist()])] += 1
    trained = Counter(json.dumps(each) for each in heard if each[1])  # not those of greedy validation
    # Episodes of a killed process run again, and hear the same again.
    assert {*trained} == {*sampled} and trained >= sampled and sampled.total() > 2 * EPISODES
    batch = batches[0]  # which the saved weights have sampled
    difference = (compute_logprobs(load_folder(config.model), batch) - batch.rollout_logprobs)[batch.mask].abs()
    measured({"endpoint: mean": float(difference.mean()), "endpoint: largest": float(difference.max())})
    assert difference.max() <= 1e-5
