# ruff: noqa: RUF001  signs that look alike are what is tested
"""The reward that a user's own recipe begins with."""

import time

import pytest

from recipes.grpo import find_answer
from rlworker.data.rows import Row

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

WRITTEN = [
    # What is written with other signs than ASCII's, or in LaTeX.
    ("−5", "-5", 1),
    ("−5", "5", 0),
    ("The sum is –5.", "-5", 1),
    ("3 − 8 = −5", "-5", 1),
    ("½", "0.5", 1),
    ("2½ cups", "2.5", 1),
    ("\\(42\\)", "42", 1),
    ("\\frac{3}{4}", "0.75", 1),
    ("\\frac{3}{4}", "4", 0),
    ("$-\\dfrac{3}{4}$", "-3/4", 1),
    ("1\u202f234\u202f567", "1234567", 1),
    ("5²", "25", 1),
    ("5²", "5", 0),
    # Powers, fractions, times and dates are one thing each, and no number at their end.
    ("10^5", "5", 0),
    ("10^5", "100000", 1),
    ("10^{-2}", "0.01", 1),
    ("3 × 10^5 metres", "300000", 1),
    ("3 × 10^5 metres", "5", 0),
    ("1.5e-3", "0.0015", 1),
    ("3/4", "4", 0),
    ("3/4", "0.75", 1),
    ("3 / 4", "4", 0),
    ("6/8", "3/4", 1),
    ("1/3", "0.333", 0),
    ("1 1/2", "1.5", 1),
    ("π/4", "4", 0),
    ("x^2", "2", 0),
    ("10^n", "10", 0),
    ("5:30", "30", 0),
    ("It starts at 5:30.", "5:30", 1),
    ("2024-01-05", "5", 0),
    ("7,5", "7.5", 1),
    ("7,5", "5", 0),
    # An aside behind the answer is no answer.
    ("5 (see step 3)", "5", 1),
    ("5 (see step 3)", "3", 0),
    ("5 apples (2 red ones and 3 green ones)", "5", 1),
    ("f(3) = 9", "9", 1),
    ("\\boxed{42}, as shown in step 3", "42", 1),
    ("\\boxed{42}, as shown in step 3", "3", 0),
    ("so (5)", "5", 1),
    ("as COVID-19 has shown: 4", "4", 1),
    ("-0.0", "0", 1),
    ("9^99999999", "9", 0),
    ("1/0", "0", 0),
]
"""Text, answer of the row and reward. They were written down before the code that reads them."""


@pytest.mark.parametrize(("text", "answer", "worth"), WRITTEN)
def test_a_number_is_read_whole(reward, text, answer, worth):
    assert reward(text, Row("?", (1,), answer, {})) == worth


def test_texts_that_repeat_themselves_are_read_at_once(reward):
    """A model that fails writes thousands of the same characters; none takes time that grows with their square."""
    texts = [
        piece * 50_000 for piece in ("a", "(a", "[a ", "1,", "1 ", "1/", "a/", "\\boxed{", "\\frac{1}", "^", "((", "9")
    ]
    began = time.process_time()
    for text in texts:
        reward(text, Row("?", (1,), "5", {}))
    assert time.process_time() - began < 5


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


def test_what_is_voted_on_is_the_same_for_one_number_however_it_is_written():
    row = Row("?", (1,), "7", {})
    assert [find_answer(text, row) for text in ("1,000.50", "+1000.5", "so 1000.500", "none")] == ["1000.5"] * 3 + [""]
    assert [find_answer(text, row) for text in ("2/8", "¼", "\\frac{1}{4}", "0.250")] == ["0.25"] * 4
    assert [find_answer(text, row) for text in ("2/6", "1 / 3")] == ["1/3"] * 2
    assert find_answer("a\n 1,000 or so ", Row("?", (1,), "Rome", {})) == "1,000 or so"
