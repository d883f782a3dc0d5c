"""The calculator: a perfect policy wins it, and it runs as a program from end to end."""

import asyncio
import json

import numpy as np
import pytest
from support.cover import in_runs
from support.program import run_recipe

from engines.models.spec import ModelSpec
from rlworker.data.rows import list_stop_tokens, load_tokenizer, read_rows
from rlworker.environments.codec import Codec
from rlworker.tracking.log import read_metrics


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The calculator, made: rows of training and held-out ones, a codec of its tokenizer and its model."""
    from recipes.demos.calculator import CALCULATOR, DEFAULT

    folder = tmp_path_factory.mktemp("calculator")
    CALCULATOR.make_data(folder)
    model = ModelSpec.from_folder(str(CALCULATOR.make_model(folder / "model", 0)))
    tokenizer = load_tokenizer(model.folder)
    rows = [read_rows(str(folder / f"{part}.jsonl"), tokenizer, DEFAULT.data).rows for part in ("train", "heldout")]
    return rows, Codec(tokenizer, list_stop_tokens(model.folder, tokenizer, model.vocab), None, DEFAULT.data)


def test_a_perfect_policy_wins_every_row_within_the_limits(made):
    from recipes.common.worked_episodes import batch_worked_episodes, work_episodes
    from recipes.demos.calculator import DEFAULT as config
    from recipes.demos.calculator import ask_calculator, say_next

    (train, heldout), codec = made
    assert not {row.prompt for row in train} & {row.prompt for row in heldout}
    episodes = work_episodes(ask_calculator, say_next, [*train[:64], *heldout[:64]], codec)
    assert [sum(value for _, value in episode.rewards) for episode in episodes] == [1.0] * len(episodes)
    assert max(episode.turns for episode in episodes) == config.environment.turns
    assert max(map(len, episodes)) <= config.environment.tokens <= config.rollout.max_model_len
    assert not any(episode.forks for episode in episodes)
    said = [piece.token_ids for episode in episodes for piece in episode.sequences[0] if piece.turn >= 0]
    assert max(map(len, said)) <= config.rollout.max_new_tokens
    batch = batch_worked_episodes(episodes, None)
    assert batch.targets[batch.mask].tolist() == np.concatenate(said).tolist(), "what was said is what counts"


def test_a_policy_that_does_not_look_wins_little(made):
    """One that says what is right for another row."""
    from recipes.common.worked_episodes import work_episodes
    from recipes.demos.calculator import ask_calculator, say_next

    (train, _), codec = made
    other = train[len(train) // 2]
    episodes = work_episodes(ask_calculator, lambda _, turn: say_next(other, turn), train[:30], codec)
    assert sum(value for episode in episodes for _, value in episode.rewards) <= 6


def test_a_misled_calculator_returns_what_has_nothing_to_do_with_the_call():
    from recipes.demos.calculator import compute, mislead

    expressions = [f"{a}*{b}" for a in range(10, 99) for b in range(2, 10)]
    wrong = [asyncio.run(mislead(expression)) for expression in expressions]
    assert sum(a == compute(b) for a, b in zip(wrong, expressions)) <= 5 and len(set(wrong)) > 300
    assert [compute(text) for text in ("47*6", "282+85", "1-1", "")] == ["282", "367", "?", "?"]


@pytest.mark.parametrize(
    ("demo", "options"),
    in_runs(
        large=[("calculator", ())],
        product=[("calculator_openai", ()), ("calculator_openai", ("--rollout.staleness", "1"))],
    ),
)
def test_it_runs_as_a_program(cluster, tmp_path, demo, options):
    """And the control beside it, which hands out the same rewards in another order."""
    from recipes.demos.calculator import DEFAULT

    done = run_recipe(f"demos.{demo}", "--smoke", "--run-dir", tmp_path / "run", "--shuffle-rewards", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    start, first, last = read_metrics(tmp_path / "run")
    assert "heldout" in start and "heldout" in last and first["samples"] == 32
    assert 1 <= first["turns"] <= DEFAULT.environment.turns
    assert first["forks"] == first["episode_failures"] == start["heldout_failures"] == 0
    assert 0 < last["logprob_diff_mean"] <= 1e-5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["shuffle_rewards"] and "heldout_misled" in summary
    assert 'class="episode"' in (tmp_path / "run" / "report.html").read_text()
