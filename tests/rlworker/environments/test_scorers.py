"""Scorers that hang, raise or return no number: each is its own text's outcome and no other's."""

import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from importlib import import_module

import numpy as np
import pytest
from support.environments.runners import LIMITS, LocalPool, make_codec, make_rows, run_episodes

from rlworker.config.sections import EnvironmentConfig
from rlworker.data.rows import Row
from rlworker.environments.reward import batch_reward, exact_match, one_turn
from rlworker.environments.user_code import INTERRUPT
from rlworker.rollouts.metrics import EXAMPLES, score_groups

DEFAULT = -1.0
HANGS = dict.fromkeys(("loop", "caught loop", "sleep"), "blocked")
ERRORS = dict.fromkeys(("raise", "exit", "recursion"), "raised")
NO_NUMBERS = dict.fromkeys(("nan", "inf", "no decimal", "none", "text", "dict", "object"), "not_a_number")
LARGE = dict.fromkeys(("beyond float32", "beyond a million"), "too_large")
COUNTS = dict.fromkeys(("pair", "empty"), "wrong_count")
FAILURES = HANGS | ERRORS | NO_NUMBERS | LARGE | COUNTS
FAILURES["inf"] = "not_a_number"
NUMBERS = ("int", "bool", "numpy", "array", "no axis", "decimal", "generator", "a million")


def hang(how: str) -> float:
    if how == "sleep":
        time.sleep(600)
    while True:
        try:
            while True:
                pass
        except BaseException as error:
            if how == "loop" or (how == "caught loop" and not isinstance(error, Exception)):
                raise


def recurse() -> float:
    return recurse()


def misbehave(text: str, row: Row):
    """The number that is the text, except where the row says otherwise."""
    how = row.source["how"]
    if how in HANGS:
        return hang(how)
    if how == "raise":
        raise KeyError("level")
    if how == "exit":
        sys.exit(3)
    if how == "recursion":
        return recurse()
    number = float(text[1:])
    results = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "no decimal": Decimal("sNaN")}
    results |= {"beyond float32": 1e39, "beyond a million": -1e6 - 1, "a million": 1e6}
    results |= {"dict": {"reward": 1.0}, "object": object(), "pair": [number, number], "empty": ()}
    results |= {"int": int(number), "bool": True, "numpy": np.float32(number), "array": np.array([number])}
    results |= {"no axis": np.array(number), "decimal": Decimal(text[1:]), "generator": (x for x in [number])}
    return results.get(how, number)


@batch_reward
def misbehave_in_groups(texts: list[str], rows: list[Row]):
    assert all(row is rows[0] for row in rows)
    values = np.arange(len(texts), dtype=float)
    if rows[0].source["how"] in FAILURES:
        misbehave(texts[0], rows[0])
    if rows[0].source["how"] == "one nan":
        values[1] = float("nan")
    return values[1:] if rows[0].source["how"] == "too few" else values


def score(scorer, how, tmp_path=None, count=1, limits=LIMITS):
    """Roll out a row for each of ``how``, whose samples are its number: the groups, and their scores."""
    made = make_rows(*(f"{number}=" for number in range(len(how))))
    rows = [replace(row, source={"how": each}) for row, each in zip(made, how)]
    numbers = {row.prompt_ids: str(number) for number, row in enumerate(rows)}
    pool = LocalPool(one_turn(scorer), limits=limits, block_file=str(tmp_path / "block") if tmp_path else "")
    found = run_episodes(pool, rows, count, lambda ids, _: numbers[tuple(ids)], default=DEFAULT)
    groups = [found[start : start + count] for start in range(0, len(found), count)]
    return groups, score_groups(groups, make_codec())


@pytest.fixture
def keeping_signals():
    """Take back what watching does to this process."""
    yield
    signal.signal(INTERRUPT, signal.SIG_IGN)


def test_each_failure_is_its_own_texts_outcome(tmp_path, keeping_signals):
    """Failures between good texts, one after another, first and last."""
    how = [kind for failure in FAILURES for kind in (failure, None)]
    how += [*NUMBERS, None, "raise", "raise", None, "raise"]
    _, scores = score(misbehave, how, tmp_path)
    others = dict.fromkeys(FAILURES, DEFAULT) | {"bool": 1.0, "a million": 1e6}
    want = [others.get(kind, float(i)) for i, kind in enumerate(how)]
    assert scores.values == want and all(type(value) is float for value in scores.values)
    assert scores.failures == Counter(FAILURES[kind] for kind in how if kind in FAILURES)
    assert scores.failures == {"blocked": 3, "raised": 6, "not_a_number": 7, "too_large": 2, "wrong_count": 2}


def test_examples_name_row_turn_and_line_and_are_few(tmp_path, keeping_signals):
    how = ("raise", None, "raise", "none", "raise", "raise", "sleep", "pair")
    _, scores = score(misbehave, how, tmp_path)
    assert EXAMPLES == 3
    kinds = ["raised", "raised", "not_a_number", "raised", "blocked", "wrong_count"]
    assert [e.kind for e in scores.examples] == kinds
    assert [e.text for e in scores.examples] == ["~0", "~2", "~3", "~4", "~6", "~7"]
    said = {e.kind: e.message for e in scores.examples}
    assert said["raised"].startswith("turn 1: KeyError: 'level', at ") and "test_scorers.py:" in said["raised"]
    start, _, places = said["blocked"].partition(f"held its process for {LIMITS.time_limit_s:g} s, at ")
    lines = [open(__file__).read().splitlines()[int(place.split(":")[-1]) - 1].strip() for place in places.split(" > ")]
    assert start == "turn 1: " and lines == ["return hang(how)", "time.sleep(600)"], "where it is, and where it hung"
    assert said["not_a_number"] == "turn 1: RewardError: returned None"
    assert said["wrong_count"] == "turn 1: RewardError: returned 2 numbers for 1 texts: [7.0, 7.0]"
    counts = {"episode_raised": 4, "episode_not_a_number": 1, "episode_blocked": 1, "episode_wrong_count": 1}
    assert scores.count_failures("episode") == {"episode_failures": 7} | counts
    assert scores.summarise().startswith(
        "7 of 8 episodes failed: 4 raised, 1 not_a_number, 1 blocked, 1 wrong_count; "
        "raised on prompt '0=', text '~0': turn 1: KeyError: 'level', at "
    )


def test_a_batch_scorer_fails_for_its_group_alone(tmp_path, keeping_signals):
    how = [None, "one nan", "too few", None, "raise", "sleep", None]
    groups, scores = score(misbehave_in_groups, how, tmp_path, count=3)
    fine = [0.0, 1.0, 2.0]
    fails = [DEFAULT] * 3
    assert [[one.reward for one in group] for group in groups] == [
        fine,
        [0.0, DEFAULT, 2.0],
        fails,
        fine,
        fails,
        fails,
        fine,
    ]
    assert scores.failures == {"not_a_number": 1, "wrong_count": 3, "raised": 3, "blocked": 3}


def test_an_import_is_not_cut_short(tmp_path, monkeypatch, keeping_signals):
    """Its package is whole for the calls after it, as here of one that cannot be imported twice."""
    package = tmp_path / "imported_slowly"
    package.mkdir()
    (package / "registry.py").write_text("names = set()\n")
    first = "import time\nfrom imported_slowly.registry import names\nassert 'chess' not in names\nnames.add('chess')\n"
    (package / "__init__.py").write_text(f"{first}time.sleep({2 * LIMITS.time_limit_s})\nvalue = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def import_first(text: str, row: Row) -> float:
        package = import_module("imported_slowly")
        for _ in range(10**8 if text == "~0" else 1):
            pass
        return package.value

    _, scores = score(import_first, [None] * 3, tmp_path)
    assert scores.values == [DEFAULT, 1.0, 1.0] and scores.failures == {"blocked": 1}


def test_all_reward_functions_of_a_long_batch_reply_in_parts():
    """A process that is lost has lost no more than what it did since it replied last."""
    limits = replace(LIMITS, time_limit_s=5.0)

    def slow(text: str, row: Row) -> float:
        time.sleep(0.1)
        return 1.0

    pool = LocalPool(one_turn(slow), limits=limits)
    found = run_episodes(pool, make_rows("1="), 8)
    assert [one.reward for one in found] == [1.0] * 8 and 3 <= len(pool.messages) <= 8


def test_exact_match_ignores_blanks_around():
    row = Row("", (1,), "answer", {})
    assert [exact_match(text, row) for text in (" answer\n", "Answer", "answer")] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("settings", [dict(workers=0), dict(time_limit_s=0.0), dict(default_reward=float("nan"))])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        EnvironmentConfig(**settings)
