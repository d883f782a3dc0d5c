"""Recipes for mathematics share this: how a question is asked, and when an answer is expected."""

from math_verify import parse, verify

from rlworker import Row

INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."


def math_reward(text: str, row: Row) -> float:
    """Return 1 where the last answer of the text equals the row's as mathematics: 0.5, 1/2 and \\frac12 are one.

    Parsing and comparing are math-verify's (https://github.com/huggingface/Math-Verify). The row's answer may be a
    solution that ends in ``#### answer``, as those of GSM8K do.
    """
    expected = parse(f"\\boxed{{{row.answer.rpartition('####')[2].strip()}}}")
    return float(verify(expected, parse(text)))
