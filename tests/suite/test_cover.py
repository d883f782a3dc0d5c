"""The cover of matrix tests: what it chooses, and that no run leaves out what it promises."""

import runpy
from itertools import chain, combinations, product
from pathlib import Path

from support.cover import Matrix

TESTS = Path(__file__).parents[1]
MATRICES = 20
"""Number of tests of a matrix: one that is a matrix no longer is missed."""


def load_matrix_tests() -> dict:
    """Test by its name, for every test of a matrix."""
    files = sorted(path for path in TESTS.rglob("test_*.py") if "\n@matrix(" in path.read_text())
    loaded = {path.relative_to(TESTS): runpy.run_path(str(path)) for path in files}
    members = ((f"{file}::{name}", member) for file, names in loaded.items() for name, member in names.items())
    return {name: member for name, member in members if "::test_" in name and hasattr(member, "matrix")}


def list_runs(test) -> dict[str, list[dict]]:
    (parametrize,) = test.pytestmark  # a mark of the whole test would be one more
    names, params = parametrize.args
    runs = {"default": [], "large": [], "product": []}
    for param in params:
        (run,) = [mark.name for mark in param.marks] or ["default"]
        runs[run].append(dict(zip(names, param.values, strict=True)))
    return runs


def find_met(cases: list[dict], factors: dict, strength: int) -> set:
    """Every combination of ``strength`` factors' values that some case has, one case and one choice at a time."""
    choices = list(combinations(factors, min(strength, len(factors))))
    return {tuple((name, case[name]) for name in names) for case in cases for names in choices}


def test_no_pair_is_missing_by_default_and_none_in_ci_nor_a_triple_that_it_promises():
    tests, missing = load_matrix_tests(), {}
    assert len(tests) == MATRICES
    for name, test in tests.items():
        table, runs = test.matrix, list_runs(test)
        whole = [dict(zip(table.factors, values)) for values in product(*table.factors.values())]
        whole = [case for case in whole if table.allowed(case)]
        assert sorted(map(str, chain(*runs.values()))) == sorted(map(str, whole)), f"{name}: each case has one run"
        assert not table.whole or len(runs["default"]) == len(whole), name
        light = [case for case in whole if not table.heavy(case)]
        assert all(case in light for case in runs["default"]), f"{name}: heavy cases are large"
        in_ci = runs["default"] + runs["large"]
        for run, cases, wanted, strength in (
            ("default", runs["default"], light, 2),
            ("CI", in_ci, whole, 2 + table.is_of_triples),
        ):
            absent = find_met(wanted, table.factors, strength) - find_met(cases, table.factors, strength)
            missing[name, run] = len(absent)
    assert not any(missing.values()), missing


def test_a_worked_example():
    """Three factors of two values: the first case is the product's first, the next of three new pairs each is ``xyy``,
    and each of the last two is the first in which no pair of those before comes again."""
    table = Matrix({"a": "xy", "b": "xy", "c": "xy"})
    assert ["".join(case) for case in table.cover(table.pairs)] == ["xxx", "xyy", "yxy", "yyx"]
    assert ["".join(case) for case in table.cover(table.triples, start=[("y", "y", "x")])][:2] == ["yyx", "xxx"]
