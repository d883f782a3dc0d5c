"""The recipe of procedural tasks: its rows and its rewards, by the package's own generators."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import reasoning_gym as recipe
from rlworker.data.rows import Row


def test_settings_are_python_literals_or_text():
    settings = ("max_terms=2", "operators=('+', '-')", "style=plain", "ratio=0.5")
    parsed = recipe.parse_difficulty(settings)
    assert parsed == {"max_terms": 2, "operators": ("+", "-"), "style": "plain", "ratio": 0.5}
    with pytest.raises(ValueError, match="'max_terms' is not NAME=VALUE"):
        recipe.parse_difficulty(("max_terms",))


def test_without_the_package_the_way_to_it_is_named(monkeypatch):
    monkeypatch.setattr(recipe, "factory", None)
    with pytest.raises(ValueError, match=r"install it by bash scripts/setup\.sh reasoning"):
        recipe.make_dataset("chain_sum", {}, 0, 1)


@pytest.mark.large  # the package is none of the default run's: scripts/setup.sh reasoning
def test_rows_are_scored_as_their_task_does_and_none_is_held_out_and_learned(tmp_path):
    config = replace(recipe.DEFAULT, run_dir=str(tmp_path / "run"), train_rows=300, heldout_rows=100)
    files = recipe.write_rows(config).data
    train, heldout = ([json.loads(line) for line in Path(path).open()] for path in (files.train, files.heldout))
    assert len(heldout) == 100 and 100 < len(train) < 300
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    for source in heldout[:20]:
        row = Row("", (1,), source["answer"], source)
        right, wrong = int(row.answer), int(row.answer) + 1
        terms = source["prompt"].split(": ")[1].removesuffix(" =")
        assert right == eval(terms)
        for text in (f"{right}", f"{terms} = {right}", f"The answer is {right}.", f"<answer> {right}.0</answer> 1"):
            assert recipe.reward(text, row) == 1, text
        for text in (f"{wrong}", f"{right}0", f"1{abs(right)}", f"{-right or 1}", f"{right} of {wrong}", ""):
            assert recipe.reward(text, row) == 0, "a number that has the right one's digits is another one"
    assert recipe.write_rows(config).data == files, "what is there stays"
    with pytest.raises(ValueError, match="rows of another task, difficulty or seed"):
        recipe.write_rows(replace(config, seed=1))
    with pytest.raises(ValueError, match=r"task 'chain_product' .* the tasks are .*chain_sum"):
        recipe.make_dataset("chain_product", {}, 0, 1)


@pytest.mark.large
def test_answered_questions_stand_before_every_question_and_are_none_of_them(tmp_path):
    config = replace(recipe.DEFAULT, run_dir=str(tmp_path / "run"), train_rows=300, heldout_rows=100)
    config = replace(config, shots=3, shot_answer="The answer is {answer}.")
    files = recipe.write_rows(config).data
    rows = [json.loads(line) for path in (files.train, files.heldout) for line in Path(path).open()]
    *turns, _ = rows[0]["prompt"]
    assert [message["role"] for message in turns] == ["user", "assistant"] * 3
    for question, answer in zip(turns[::2], turns[1::2], strict=True):
        right = eval(question["content"].split(": ")[1].removesuffix(" ="))
        assert answer["content"] == f"The answer is {right}."
    assert all(row["prompt"][:-1] == turns for row in rows)
    assert not {row["prompt"][-1]["content"] for row in rows} & {turn["content"] for turn in turns}
    assert all(recipe.reward(row["answer"], Row("", (1,), row["answer"], row)) == 1 for row in rows[:20])
    with pytest.raises(ValueError, match=r"has no \{answer\}"):
        recipe.write_rows(replace(config, shot_answer="answer"))


@pytest.mark.large
@pytest.mark.parametrize(
    "task", ["gcd", "word_sorting", "simple_equations", "calendar_arithmetic", "prime_factorization"]
)
def test_the_answer_of_any_task_is_right(tmp_path, task):
    config = replace(recipe.DEFAULT, run_dir=str(tmp_path / "run"), task=task, train_rows=20, heldout_rows=8)
    for line in Path(recipe.write_rows(config).data.heldout).open():
        source = json.loads(line)
        row = Row("", (1,), source["answer"], source)
        assert recipe.reward(f"I think it is <answer>{row.answer}</answer>.", row) == 1
        assert recipe.reward(f"So:\n{row.answer}", row) == 1


@pytest.mark.large
def test_an_answer_may_have_several_lines_and_a_number_its_commas(tmp_path):
    for task, write in (("mini_sudoku", "So:\n{}"), ("rotate_matrix", "{}"), ("lcm", "It is {:,}.")):
        draws = ("min_value=1000", "max_value=9999") if task == "lcm" else ()
        config = replace(recipe.DEFAULT, run_dir=str(tmp_path / task), task=task, train_rows=20, heldout_rows=8)
        for line in Path(recipe.write_rows(replace(config, difficulty=draws)).data.heldout).open():
            source = json.loads(line)
            row = Row("", (1,), source["answer"], source)
            answer = int(row.answer) if task == "lcm" else row.answer
            assert recipe.reward(write.format(answer), row) == 1
