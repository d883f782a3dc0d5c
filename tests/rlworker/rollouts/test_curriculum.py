"""Which prompts a curriculum picks: shares, orders, buckets, what is left out; and that a state goes on with them."""

import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rlworker.config.run import RunConfig
from rlworker.config.sections import CurriculumConfig, DataConfig, EnvironmentConfig
from rlworker.data.rows import Row, Rows
from rlworker.rollouts.curriculum import RETURNS_AFTER, WINDOW, Curriculum


def make(sizes=(12,), levels=None, seed=0, **settings) -> Curriculum:
    """A curriculum of sources a, b, ... of so many rows; row i has the level ``levels[i]``."""
    count = sum(sizes)
    rows = [Row(str(i), (1,), "", {"level": levels[i]} if levels else {}) for i in range(count)]
    data = DataConfig("a.jsonl")
    sources = dict(zip("bcd", settings.pop("weights", [1.0] * 3)))
    sources = {f"{name}.jsonl": sources[name] for name, _ in zip("bcd", sizes[1:])}
    config = RunConfig(data=data, seed=seed, curriculum=CurriculumConfig(sources=sources, **settings))
    return Curriculum(config, rows, sizes)


def run(curriculum: Curriculum, rewards, rollouts: int, count: int = 4, first: int = 0) -> list[list[int]]:
    """Pick and note rollouts; ``rewards(row)`` are those of a row's samples."""
    picked = []
    for draw in range(first, first + rollouts):
        curriculum.forget_before(draw)
        picked.append(curriculum.pick(draw, count))
        curriculum.note(draw, [rewards(row) for row in picked[-1]])
    return picked


def right(row: int) -> list[float]:
    return [1.0, 1.0]


def test_sources_take_turns_by_their_weights():
    """Weights 2, 1 and 1, of sources whose sizes say otherwise; every source runs through all its rows."""
    curriculum = make((4, 10, 6), weights=[0.5, 0.5])
    picked = [row for rows in run(curriculum, right, 20) for row in rows]
    sources = [int(row >= 4) + int(row >= 14) for row in picked]
    assert sources[:8] == [0, 1, 2, 0, 0, 1, 2, 0], "worked by hand: 1/2, 1/4 and 1/4 of a turn each"
    for taken in range(1, 81):
        counts = Counter(sources[:taken])
        assert all(abs(counts[source] - taken * share) <= 1 for source, share in enumerate((0.5, 0.25, 0.25)))
    for source, (start, size) in enumerate(((0, 4), (4, 10), (14, 6))):
        own = [row for row, of in zip(picked, sources) if of == source]
        epochs = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        assert len(epochs) >= 2 and epochs[0] != epochs[1], "every epoch has an order of its own"
        assert all(sorted(epoch) == list(range(start, start + size)) for epoch in epochs)


def test_buckets_of_a_field_have_their_shares_and_open_one_after_another():
    levels = [place % 3 + 1 for place in range(30)]
    settings = dict(difficulty_field="level", buckets={1: 1.0, 2: 2.0, 3: 1.0})
    picked = [row for rows in run(make((30,), levels, **settings), right, 10, 8) for row in rows]
    assert Counter(levels[row] for row in picked) == {1: 20, 2: 40, 3: 20}

    opening = make((30,), levels, advance_at=0.75, **settings)
    rewards = lambda row: [1.0, 1.0, 1.0, float(levels[row] == 1)]  # noqa: E731
    steps = [run(opening, rewards, 1, 8, first=draw)[0] for draw in range(40)]
    seen = [{levels[row] for row in rows} for rows in steps]
    assert opening.open_buckets == 3 and seen[0] == {1} and seen[-1] == {1, 2, 3}
    first_of_two = next(step for step, found in enumerate(seen) if 2 in found)
    assert first_of_two == WINDOW // 8, "the first bucket's window is full of rates of 1"
    # Bucket 2 passes 3 of 4 samples, which is just enough; two of three prompts are its own.
    prompts_of_two = [levels[row] == 2 for rows in steps for row in rows]
    first_of_three = next(step for step, found in enumerate(seen) if 3 in found)
    assert sum(prompts_of_two[: 8 * first_of_three]) >= WINDOW > sum(prompts_of_two[: 8 * (first_of_three - 1)])


def test_a_bucket_that_is_not_passed_opens_no_other():
    curriculum = make((4,), [1, 1, 2, 2], difficulty_field="level", buckets={1: 1.0, 2: 1.0}, advance_at=0.5)
    picked = run(curriculum, lambda row: [0.0, 0.0, 1.0], 60, 2)
    assert {row for rows in picked for row in rows} == {0, 1} and curriculum.open_buckets == 1


def test_prompts_are_left_out_by_their_running_pass_rate_and_come_back():
    """Of 6 prompts 0 is always right and 1 never; the others in half of their samples."""
    rates = {0: [1.0, 1.0], 1: [0.0, 0.9]}
    curriculum = make((6,), pass_rates=(0.1, 0.9))
    picked = [row for rows in run(curriculum, lambda row: rates.get(row, [1.0, 0.0]), 66, 1) for row in rows]
    counts = Counter(picked)
    epochs = 1 + (66 - 6) / (4 + 2 / (RETURNS_AFTER + 1))  # the first has all six, later ones a quarter of two
    assert all(abs(counts[row] - epochs) <= 1 for row in (2, 3, 4, 5))
    assert all(abs(counts[row] - epochs / (RETURNS_AFTER + 1)) <= 1 for row in (0, 1))
    metrics = curriculum.measure()
    assert metrics == {"curriculum/seen": 1.0, "curriculum/too_hard": 1 / 6, "curriculum/too_easy": 1 / 6}
    curriculum.note(65, [[1.0, 0.0]])
    assert curriculum.rates[picked[-1]] == pytest.approx(0.5)


def test_a_running_rate_follows_what_the_model_has_learned():
    """0, then always 1: means of 0, 1/2 and 3/4 of the newest and all before."""
    curriculum, rates = make((1,), pass_rates=(0.6, 1.0)), []
    for draw, reward in enumerate((0.0, 1.0, 1.0, 1.0)):
        run(curriculum, lambda row, reward=reward: [reward], 1, 1, first=draw)
        rates.append(float(curriculum.rates[0]))
    assert rates == [0.0, 0.5, 0.75, 0.875]


def test_a_sample_passes_from_the_reward_of_the_environments_settings_on():
    config = RunConfig(environment=EnvironmentConfig(pass_reward=0.5), curriculum=CurriculumConfig(pass_rates=(0.1, 1)))
    curriculum = Curriculum(config, [Row("a", (1,), "", {})], [1])
    run(curriculum, lambda row: [0.0, 0.49, 0.5, 1.0], 1, 1)
    assert curriculum.rates[0] == 0.5
    run(curriculum, lambda row: [0.2 + 0.2 + 0.1 - 1e-16, 0.7 + 0.2 + 0.1 - 0.5, 0.5, 1.0], 1, 1, first=1)
    assert curriculum.rates[0] == 0.75, "half of a half and of one: what rounding takes away is no miss"


def test_buckets_of_pass_rates_move_their_prompts():
    """Difficulty is 1 less the pass rate: 8 prompts that pass always, 8 in half and 8 never, of weights 0, 3 and 1."""
    rewards = lambda row: [1.0, 1.0] if row < 8 else [1.0, 0.0] if row < 16 else [0.0, 0.0]  # noqa: E731
    curriculum = make((24,), buckets={0.2: 0.0, 0.8: 3.0, 1: 1.0})
    first = run(curriculum, rewards, 30)
    assert {row for rows in first for row in rows} == set(range(24)), "a row without a rate is of every bucket"
    curriculum.measure()
    later = [row for rows in run(curriculum, rewards, 20, first=30) for row in rows]
    assert Counter(row // 8 for row in later) == {1: 60, 2: 20}
    assert set(later) == set(range(8, 24))
    parts = {f"curriculum/bucket_{number}/share": share for number, share in ((1, 0.0), (2, 0.75), (3, 0.25))}
    parts |= {"curriculum/bucket_2/pass_rate": 0.5, "curriculum/bucket_3/pass_rate": 0.0}
    assert curriculum.measure() == {"curriculum/seen": 1.0} | parts


@pytest.mark.parametrize("samples", [10, 12, 20])
def test_a_difficulty_on_a_bound_is_of_the_bucket_below(samples):
    """1 less a rate is above the bound by rounding for some: 0.3 and 7 of 10, 0.7 and 14 of 20."""
    for wrong in range(1, samples):
        curriculum = make((1,), buckets={wrong / samples: 1.0, 1: 1.0})
        curriculum.note(0, [[1.0] * (samples - wrong) + [0.0] * wrong] * len(curriculum.pick(0, 1)))
        assert curriculum._find_members(np.array([0])).tolist() == [[True, False]], wrong


def test_a_rollout_has_a_row_twice_only_where_there_are_too_few():
    settings = dict(buckets={0.5: 1.0, 1: 1.0}, pass_rates=(0.2, 0.8))
    curriculum, generator = make((7, 6), **settings), random.Random(0)
    for rows in run(curriculum, lambda row: [float(generator.random() < 0.5) for _ in range(3)], 50, 12):
        assert len(set(rows)) == 12
    (rows,) = run(curriculum, right, 1, 30, first=50)
    assert set(Counter(rows)) == set(range(13)) and max(Counter(rows).values()) <= 3


CASES = {
    "sources": (dict(sizes=(5, 9, 4), weights=[0.3, 2.0], pass_rates=(0.2, 0.8)), 4),
    "field": (
        dict(sizes=(20, 10), levels=[i % 3 for i in range(30)], difficulty_field="level")
        | dict(buckets={0: 1.0, 1: 1.5, 2: 0.7}, advance_at=0.3, pass_rates=(0.0, 0.9)),
        9,
    ),
    "rates": (dict(sizes=(40,), buckets={0.3: 1.0, 0.7: 2.0, 1: 0.5}), 7),
}


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_from_any_state_bit_for_bit(case, ahead):
    """A state is JSON. Rollouts may be picked ahead of those that are noted; those that were are picked again."""
    settings, count = CASES[case]

    def step(curriculum: Curriculum, draw: int) -> list[int]:
        curriculum.forget_before(draw)
        curriculum.pick(draw, count)
        rows = curriculum.picks[draw]
        generator = random.Random(draw)
        curriculum.note(draw, [[float(generator.random() < 0.2 + row % 5 / 5) for _ in range(4)] for row in rows])
        for further in range(draw + 1, draw + 1 + ahead):
            curriculum.pick(further, count)
        return rows

    whole = make(seed=3, **settings)
    picked, states = [], [json.dumps(whole.get_state())]
    for draw in range(60):
        picked.append(step(whole, draw))
        states.append(json.dumps(whole.get_state()))
    assert len({tuple(rows) for rows in picked}) > 50
    used = make(seed=3, **settings)
    for start in (0, 1, 17, 40):
        state = json.loads(states[start])
        used.restore(state)  # whatever it has done since
        step(used, start)
        used.restore(state)  # a run may lose its trainers twice before it saves
        for draw in range(start, 60):
            assert step(used, draw) == picked[draw]
            assert json.dumps(used.get_state()) == states[draw + 1]
    other = make(seed=4, **settings)
    assert [step(other, draw) for draw in range(5)] != picked[:5]


@pytest.mark.parametrize("level", [None, "3", True, float("nan"), 2.5])
def test_rows_without_a_difficulty_or_beyond_the_last_bucket_are_refused(level):
    with pytest.raises(ValueError, match=r"the row of prompt '1' has .* in the field \"level\", expected a number, at"):
        make((2,), [1, level], difficulty_field="level", buckets={1: 1.0, 2: 1.0})


def test_sources_are_read_one_after_another_and_a_plain_run_has_no_curriculum(capsys):
    from rlworker.rollouts.running import read_sources

    contents = {"x/a.jsonl": "ab", "y/a.jsonl": "c", "y/b.jsonl": "c", "hf:o/n:train": "def"}

    def read(path: str) -> Rows:
        return Rows([Row(text, (1,), "", {}) for text in contents[path]], skipped=len(contents[path]))

    config = RunConfig(data=DataConfig("x/a.jsonl"))
    assert read_sources(config, read)[1] is None
    sources = {"y/a.jsonl": 2.0, "x/a.jsonl": 0.5}
    rows, curriculum = read_sources(replace(config, curriculum=CurriculumConfig(sources)), read)
    assert ("".join(row.prompt for row in rows.rows), rows.skipped) == ("abc", 3)
    assert curriculum and curriculum.weights == [0.5, 2.0], "data.train has the weight that it is named with"
    assert curriculum.names == ["x:a.jsonl", "y:a.jsonl"], "stems that are alike name nothing"
    sources = {"y/a.jsonl": 1.0, "hf:o/n:train": 1.0}
    _, curriculum = read_sources(replace(config, data=DataConfig(), curriculum=CurriculumConfig(sources)), read)
    assert curriculum and curriculum.names == ["a", "n:train"] and len(curriculum.source) == 4
    capsys.readouterr()
    chosen = CurriculumConfig({"y/b.jsonl": 3.0}, buckets={0.5: 1.0, 1: 3.0}, pass_rates=(0.1, 1.0))
    assert isinstance(read_sources(replace(config, curriculum=chosen), read)[1], Curriculum)
    said = "a 2 rows 25 %, b 1 rows 75 %; buckets up to 0.5 25 %, up to 1 75 %; pass rates from 0.1 to 1"
    assert f" s  curriculum: {said}\n" in capsys.readouterr().out


def test_a_million_rows_are_picked_by_stretches():
    """A bucket that has one row in a million is found, and nothing of it is passed over."""
    levels = np.zeros(1_000_000)
    levels[654_321] = 1.0
    curriculum = make((4,), [0, 0, 0, 1], difficulty_field="level", buckets={0: 1.0, 1: 1.0})
    curriculum.source, curriculum.fixed_buckets = np.zeros(len(levels), int), levels.astype(int)
    curriculum.spans = [np.arange(len(levels))]
    curriculum._clear()
    rows = curriculum.pick(0, 2)
    assert rows[1] == 654_321 and levels[rows[0]] == 0 and not curriculum.passed_over.any()
