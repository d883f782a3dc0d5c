"""Recipes for mathematics share this: how a question is asked, and when an answer is expected."""

from math_verify import parse, verify
from sympy import nsimplify

from rlworker import Row

INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."


_PARSED: dict[str, list] = {}  # of the last text alone; what functools caches is pickled by its name


def math_reward(text: str, row: Row) -> float:
    """Return 1 where the last answer of the text equals the row's as mathematics: 0.5, 1/2 and \\frac12 are one.

    Parsing and comparing are math-verify's (https://github.com/huggingface/Math-Verify). The row's answer may be a
    solution that ends in ``#### answer``, as those of GSM8K do.
    """
    expected = parse(f"\\boxed{{{row.answer.rpartition('####')[2].strip()}}}")
    return float(verify(expected, _parse(text)))


def find_answer(text: str, row: Row) -> str:
    """Find the last answer of a text, as mathematics where it can be read so: 0.5 and 1/2 are one vote."""
    found = next(iter(_parse(text)), "")
    return str(nsimplify(found, rational=True) if getattr(found, "is_Float", False) else found)


def _parse(text: str) -> list:
    if text not in _PARSED:
        _PARSED.clear()
        _PARSED[text] = parse(text)
    return _PARSED[text]
