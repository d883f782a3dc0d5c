"""Verdicts as judges write them, on a scale from 1 to 10 where none is named: what is right was written down first."""

import pytest

from engines.config.verdicts import cut_thinking, read_boolean, read_score

LISTED = [
    ("7 on a scale of 1 to 10", 7),
    ("Score: 8. There is 1 mistake", 8),
    ('{"score": 8, "errors": 2}', 8),
    ("7,5", 7.5),
    ("It could be a 3, but 2 steps are right", None),
    ("Score: 11", None),
]
"""Forms of which the last number is wrong."""
SCORES = [
    ("On a scale from 1 to 10, I would give it a 6.", 6),
    ("I'd rate this 9 out of 10 because 3 of the points are right.", 9),
    ("**Score:** 4\n\nThe answer has 2 gaps and 1 slip.", 4),
    ("Rating: [[5]]", 5),
    ("The final answer is $\\boxed{8}$.", 8),
    ("\\boxed{\\text{Score: } 3}", 3),
    ("Score (1-10): 7", 7),
    ("Score (out of 10): 7", 7),
    ("Score/10: 7", 7),
    ('```json\n{"reason": "1 of 2 facts", "score": "6"}\n```', 6),
    ('{"overall_score": 9, "max_score": 10}', 9),
    ("{'rating': 2.5, 'confidence': 0.9}", 2.5),
    ("Score: 7-8", None),
    ("Score: between 7 and 8", None),
    ("7 to 8", None),
    ("Score: 8/10\nScore: 6/10", None),
    ("Score: 8/10. To repeat, the score is 8.", 8),
    ("Score: 8.0 (8 out of 10)", 8),
    ("4/5", None),
    ("Score: 80%", None),
    ("Score - 8", 8),
    ("Score -8", None),
    ("Score: 80%. There is 1 mistake", None),
    ("-3", None),
    ("Score: \u22123", None),
    ("Grade: 1,000", None),
    ("| criterion | score |\n|---|---|\n| all | 7 |", 7),
    ("### Score\n\n9", 9),
    ("The 2nd sentence is wrong. Rating = 5", 5),
    ("1. Right.\n2. Short.\nVerdict: 10", 10),
    ("I give it a 7.", 7),
    ("It deserves a score of 6 for its 3 sources.", 6),
    ("It is seven.", None),
    ("Clarity score: 7. Accuracy score: 9.", None),
    ("Clarity: 7\nAccuracy: 9", None),
    ("The answer 42 is wrong, rating: 2", 2),
    ("Answer: 42 is wrong. Score: 2", 2),
    ("7 / 10!", 7),
    ("10/10", 10),
    ("7 stars of 10", 7),
    ("<score>7</score> after 3 checks", 7),
    ("GPT-4 would be proud: Score: 9", 9),
    ("The score is a solid 8, with 2 flaws", 8),
    ("Score: I would say 6", 6),
    ("Rating (1 = worst, 10 = best): 8", 8),
    ("I'd give this answer an 8, although it has 2 errors", 8),
    ("It deserves a 7 for its 3 sources", 7),
    ("Total score: 7 + 1 = 8", None),
    ("10 - 3 = 7", None),
    ("Score: N/A (2 errors)", None),
    ("Score: ~8, 2 errors", 8),
    ("Score: 8,5/10", 8.5),
    ("Step 1: fine. Step 2: fine. Final: 7", 7),
    ("Accuracy: 8/10, style: 6/10", None),
    ("", None),
]
BOOLEANS = [
    ("Yes. There is no error.", True),
    ("yes", True),
    ("No.", False),
    ("No, the sum is wrong.", False),
    ("Verdict: no. The answer says yes to everything.", False),
    ("**Answer:** Yes", True),
    ('{"correct": false, "reason": "it is not true that no one asked"}', False),
    ('{"verdict": "yes", "notes": "no gaps"}', True),
    ("\\boxed{\\text{no}}", False),
    ("[[true]]", True),
    ("It is not true.", False),
    ("It isn't true.", False),
    ("That is true.", True),
    ("Yes and no.", None),
    ("Is it right, yes or no? Yes.", True),
    ("True/False: False", False),
    ("No errors were found.", None),
    ("There are no mistakes, so yes.", True),
    ("The proof is correct.", None),
    ("No it is wrong", False),
    ("No \u2014 it is wrong, no doubt", False),
    ('{"is_correct": true, "has_errors": false}', True),
    ("It is neither true nor false.", None),
    ("Verdict: yes\nVerdict: no", None),
    ("NO", False),
    ("Not yes but NO", False),
    ("I know nothing", None),
    ("", None),
]
THOUGHTS = [
    ("<think>Score: 3, or 4?</think>Score: 8", 8),
    ("Score: 3, or 4?\n</think>\n\n8", 8),
    ("<think>Score: 3", None),
    ("<think>Score: 3</think>", None),
    ("<think>5</think>Hm. <think>6</think>7", 7),
]


@pytest.mark.parametrize(("text", "score"), LISTED + SCORES)
def test_a_score_is_read_where_it_is_named_and_else_where_it_stands_alone(text, score):
    assert read_score(text, 1, 10) == score


@pytest.mark.parametrize(("text", "is_true"), BOOLEANS)
def test_a_boolean_is_read_where_all_its_words_agree(text, is_true):
    assert read_boolean(text) == is_true


@pytest.mark.parametrize(("text", "score"), THOUGHTS)
def test_what_a_judge_thinks_is_no_verdict(text, score):
    assert read_score(cut_thinking(text), 1, 10) == score


@pytest.mark.parametrize(
    ("text", "low", "high", "score"),
    [
        ("80%", 0, 100, 80),
        ("Score: 80/100", 0, 100, 80),
        ("1,000", 0, 2000, 1000),
        ("0.75", 0, 1, 0.75),
        (".75", 0, 1, 0.75),
        ("Score: -1 on a scale of -2 to 2", -2, 2, -1),
        ("4 on a 1-5 scale", 1, 5, 4),
        ("4 on a 5-point scale", 1, 5, 4),
        ("7 on a scale of 1 to 10", 1, 100, None),
        ("3/4", 0, 1, None),
    ],
)
def test_a_score_is_one_of_its_own_scale(text, low, high, score):
    assert read_score(text, low, high) == score
