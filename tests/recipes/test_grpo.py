"""The reward that a user's own recipe begins with."""

from pathlib import Path

import pytest

from recipes.grpo import find_answer
from rlworker.data.rows import Row

ROOT = Path(__file__).parents[2]

RIGHT = [
    ("4", "4"),
    ("The answer is 4.", "4"),
    ("2 + 2 = 4", "4"),
    ("2+2=4", "4"),
    ("first 7, then 4\n", "4"),
    ("4\nThat is all.", "4"),
    ("4.0", "4"),
    ("3 of 6 is .5", "0.5"),
    ("4", "4.00"),
    ("068", "68"),
    ("It costs $1,000.", "1000"),
    ("1000", "1,000"),
    ("1,234,567.5", "1234567.50"),
    ("x = -4", "-4"),
    ("+4", "4"),
    ("7-3", "3"),
    ("\\boxed{4}", "4"),
    ("**4**", " 4 "),
    ("答案是4。", "4"),
    ("12345678901234567891", "12345678901234567891"),
    ("12345678901234567890123456789012345.50", "12345678901234567890123456789012345.5"),
    pytest.param("9" * 5000, "9" * 5000, id="5000 digits"),
    ("100", "100.0"),
    ("Let me see.\n  Paris \n", "Paris"),
    ("1/2", "1/2"),
    ("A", "A"),
]
WRONG = [
    ("42", "4"),
    ("14", "4"),
    ("4.5", "4"),
    ("0.4", "4"),
    ("-4", "4"),
    ("4", "-4"),
    ("4, no, 5", "4"),
    ("1,000", "1"),
    ("1,000", "0"),
    ("6.02e23", "23"),
    ("1.2.3", "0.3"),
    ("no number", "4"),
    ("12345678901234567892", "12345678901234567891"),
    ("12345678901234567890123456789012345", "12345678901234567890123456789012346"),
    ("", "4"),
    ("   \n", "4"),
    ("anything", ""),
    ("", ""),
    ("", "  "),
    ("42", ""),
    ("A or B", "A"),
    ("Paris", "paris"),
    ("Paris\nor Rome", "Paris"),
    ("", "Paris"),
]


@pytest.fixture(scope="module")
def reward():
    from recipes.grpo import reward

    return reward


@pytest.mark.parametrize(("text", "answer"), RIGHT)
def test_right(reward, text, answer):
    assert reward(text, Row("?", (1,), answer, {})) == 1.0


@pytest.mark.parametrize(("text", "answer"), WRONG)
def test_wrong(reward, text, answer):
    found = reward(text, Row("?", (1,), answer, {}))
    assert found == 0.0 and type(found) is float


def test_the_readme_shows_the_recipe_whole():
    source = (ROOT / "recipes" / "grpo.py").read_text()
    assert f"```python\n{source[source.index('NUMBER = ') :]}```" in (ROOT / "README.md").read_text()


def test_what_is_voted_on_is_the_same_for_one_number_however_it_is_written():
    row = Row("?", (1,), "7", {})
    assert [find_answer(text, row) for text in ("1,000.50", "+1000.5", "so 1000.500", "none")] == ["1000.5"] * 3 + [""]
    assert find_answer("a\n 1,000 or so ", Row("?", (1,), "Rome", {})) == "1,000 or so"
