"""Toys that play: a perfect player wins each, and each runs as a program from end to end."""

import asyncio
import importlib
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.program import run_recipe

from rlworker.tracking.log import read_metrics

TOYS = {
    "guess": ("GUESS", "say_middle"),
    "calculator": ("CALCULATOR", "say_next"),
    "look_again": ("LOOK_AGAIN", "say_right"),
}
"""Recipe -> its toy, and what a player says in it who knows the answer."""
FEW_IMAGES = {"train": 32, "heldout": 8}


def load(name: str) -> tuple:
    """Import a recipe: its module, its toy, and what a perfect player says."""
    module = importlib.import_module(f"recipes.demos.{name}")
    return module, *(getattr(module, each) for each in TOYS[name])


@pytest.fixture(scope="module", params=TOYS)
def made(request, tmp_path_factory):
    """A toy that is made: settings, toy, player, rows, a codec of its tokenizer and its model."""
    from engines.models.spec import ModelSpec
    from rlworker.data.images import build_image_reader
    from rlworker.data.rows import list_stop_tokens, load_tokenizer, read_rows
    from rlworker.environments.codec import Codec

    module, toy, say = load(request.param)
    folder, data = tmp_path_factory.mktemp(request.param), module.DEFAULT.data
    (partial(toy.make_data, counts=FEW_IMAGES) if request.param == "look_again" else toy.make_data)(folder)
    model = ModelSpec.from_folder(str(toy.make_model(folder / "model", 0)))
    tokenizer, reader = load_tokenizer(model.folder), build_image_reader(model, str(folder), 256)
    files = (str(folder / f"{part}.jsonl") for part in ("train", "heldout"))
    rows = [read_rows(file, tokenizer, data, reader).rows for file in files]
    codec = Codec(tokenizer, list_stop_tokens(model.folder, tokenizer, model.vocab), reader, data)
    return module.DEFAULT, toy, say, rows, codec, model


def test_a_perfect_player_wins_every_row_within_the_limits(made):
    from recipes.common.plays import batch_worked_episodes, play_worked_episodes

    config, toy, say, (train, heldout), codec, model = made
    assert model.vision or not {row.prompt for row in train} & {row.prompt for row in heldout}
    episodes = play_worked_episodes(toy.learn_from, say, [*train[:64], *heldout[:64]], codec)
    assert [sum(value for _, value in episode.rewards) for episode in episodes] == [1.0] * len(episodes)
    assert max(episode.turns for episode in episodes) == config.environment.turns
    assert max(map(len, episodes)) <= config.environment.tokens <= config.rollout.max_model_len
    assert not any(episode.forks for episode in episodes)
    said = [piece.token_ids for episode in episodes for piece in episode.sequences[0] if piece.turn >= 0]
    assert max(map(len, said)) <= config.rollout.max_new_tokens
    batch = batch_worked_episodes(episodes, model.vision)
    assert batch.targets[batch.mask].tolist() == np.concatenate(said).tolist(), "what was said is what counts"


def test_a_player_who_does_not_look_wins_little(made):
    """One who says what is right for another row."""
    from recipes.common.plays import play_worked_episodes

    _, toy, say, (train, _), codec, _ = made
    other = train[len(train) // 2]
    episodes = play_worked_episodes(toy.learn_from, lambda _, turn: say(other, turn), train[:30], codec)
    assert sum(value for episode in episodes for _, value in episode.rewards) <= 6


class Guard:
    """A tokenizer that raises where it is asked to encode what was said."""

    def __init__(self, tokenizer):
        self.tokenizer, self.said = tokenizer, []

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, text: str, **options):
        assert not any(said in text for said in self.said), f"{text!r} has what was said: {self.said}"
        return self.tokenizer(text, **options)


def test_what_was_said_is_never_encoded_again(made):
    from recipes.common.plays import Teacher
    from rlworker.environments.codec import using_codec
    from rlworker.environments.policy import Policy

    _, toy, say, (train, _), codec, _ = made
    for row in train[:8]:
        guard = Guard(codec.tokenizer)

        def say_aloud(row, turn, guard=guard):
            guard.said.append(say(row, turn))
            return guard.said[-1]

        with using_codec(replace(codec, tokenizer=guard)):
            episode = asyncio.run(toy.learn_from(Policy(Teacher(say_aloud, codec), 0, (0,)), row))
        assert len(guard.said) == episode.turns > 0


def test_a_misled_calculator_returns_what_has_nothing_to_do_with_the_call():
    from recipes.demos.calculator import compute, mislead

    expressions = [f"{a}*{b}" for a in range(10, 99) for b in range(2, 10)]
    wrong = [asyncio.run(mislead(expression)) for expression in expressions]
    assert sum(a == compute(b) for a, b in zip(wrong, expressions)) <= 5 and len(set(wrong)) > 300
    assert [compute(text) for text in ("47*6", "282+85", "1-1", "")] == ["282", "367", "?", "?"]


@pytest.mark.large
@pytest.mark.parametrize("name", TOYS)
def test_it_runs_as_a_program(cluster, tmp_path, monkeypatch, name):
    """And the control beside it, which hands out the same rewards in another order."""
    from recipes.common import squares

    for part, count in FEW_IMAGES.items():
        monkeypatch.setitem(squares.IMAGE_COUNTS, part, count)
    done = run_recipe(f"demos.{name}", "--smoke", "--run-dir", tmp_path / name, "--shuffle-rewards")
    assert done.returncode == 0, done.stdout + done.stderr
    start, first, last = read_metrics(tmp_path / name)
    assert "heldout" in start and "heldout" in last and first["samples"] == 32
    assert 1 <= first["turns"] <= load(name)[0].DEFAULT.environment.turns
    assert first["forks"] == first["episode_failures"] == start["heldout_failures"] == 0
    assert 0 < last["logprob_diff_mean"] <= 1e-5
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    assert summary["shuffle_rewards"] and ("heldout_misled" in summary) == (name == "calculator")
    assert 'class="episode"' in (tmp_path / name / "report.html").read_text()


@pytest.mark.large
@pytest.mark.parametrize(
    "name", [name if name == "guess" else pytest.param(name, marks=pytest.mark.product) for name in TOYS]
)
def test_logprobs_of_whole_episodes_are_those_of_huggingface(cluster, tmp_path, measured, name):
    """Of every sampled token, over sequences as they were recorded, after a warm-up that wins a few episodes."""
    from support.huggingface import compute_logprobs

    from recipes.common.toys import find_warm_model, prepare
    from rlworker import Trainer
    from rlworker.checks.huggingface import load_huggingface
    from rlworker.rollouts.trajectory import batch_groups
    from rlworker.tracking.log import StepClock

    module, toy, _ = load(name)
    settings = dict(run_dir=str(tmp_path / "run"), warm_up_success=0.1, prompts_per_step=32)
    config, folder = prepare(replace(module.DEFAULT, **settings), toy)
    warm = find_warm_model(config)
    toy.warm_up(config, str(warm))
    with Trainer(replace(config, model=str(warm)), toy.learn_from, folder=folder) as trainer:
        groups, metrics = trainer.manager.sample(StepClock(), trainer.version)
        spec = trainer.models["actor"]
        batch = batch_groups(groups, spec.vision)
    assert metrics["turns"] > 1.5 and metrics["observed_tokens"] > 0
    logprobs = compute_logprobs(
        load_huggingface(spec), batch, config.rollout.temperature, spec if spec.vision else None
    )
    apart = (batch.rollout_logprobs - logprobs)[batch.mask].abs()
    measured({"mean": float(apart.mean()), "max": float(apart.max())})
    assert apart.mean() <= 2e-6 and apart.max() <= 1e-3
