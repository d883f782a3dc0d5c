"""The cover of matrix tests: what it chooses, and that no suite leaves out what it promises."""

import os
import random
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from support.cover import Matrix

TESTS = Path(__file__).parents[1]
CONVERTED = {
    "engines/megatron/test_bf16_engine.py::test_it_is_as_exact_as_huggingface_in_bfloat16",
    "engines/megatron/test_bf16_engine.py::test_it_is_as_exact_over_two_ranks",
    "engines/megatron/test_critic.py::test_parity",
    "engines/megatron/test_engine_parity.py::test_parity",
    "engines/megatron/test_engine_parity.py::test_sliding_window",
    "engines/megatron/test_mask_matrix.py::test_rules_at_every_size",
    "engines/megatron/test_memory.py::test_planned_bytes_are_those_of_the_engine",
    "engines/megatron/test_memory.py::test_planned_bytes_of_a_vision_language_model",
    "engines/megatron/vision/test_vlm_critic.py::test_parity",
    "engines/megatron/vision/test_vlm_parity.py::test_parity",
    "hardware/attention/test_core_attention.py::test_attention_is_what_the_oracle_allows",
    "hardware/attention/test_core_attention.py::test_shared_beginnings_are_seen_as_the_oracle_allows",
    "rlworker/algorithms/test_loss_invariance.py::test_gradients_do_not_depend_on_the_cut",
}
"""Every test of a matrix; one that is missing here, or is one no longer, fails below."""


class Recorder:
    """A plugin of pytest that keeps what was collected and not deselected."""

    def pytest_collection_finish(self, session):
        self.items = list(session.items)


def collect(*options: str) -> list:
    """What pytest would run of the files with a matrix, under pyproject.toml's own options and these."""
    files = sorted(str(path) for path in TESTS.rglob("test_*.py") if "\n@matrix(" in path.read_text())
    quiet = ["--collect-only", "-s", "-p", "no:terminal", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    recorder = Recorder()
    assert pytest.main([*quiet, *options, *files], plugins=[recorder]) == 0
    return recorder.items


def cases_of(items: list) -> dict[str, list[dict]]:
    """Test -> the cases ``{factor: value}`` of it among the items, for tests of a matrix."""
    found = {}
    for item in items:
        if hasattr(item.function, "matrix"):
            found.setdefault(name_of(item), []).append(item.callspec.params)
    return found


def name_of(item) -> str:
    return f"{item.path.relative_to(TESTS)}::{item.originalname}"


def met(cases: list[dict], factors: dict, strength: int) -> set:
    """Every combination of ``strength`` factors' values that some case has, one case and one choice at a time."""
    found = set()
    for case in cases:
        for names in combinations(factors, strength):
            found.add(tuple((name, case[name]) for name in names))
    return found


def whole(table: Matrix) -> list[dict]:
    """The product of a table, case by case, without what the cover made of it."""
    cases = [dict(zip(table.factors, values)) for values in product(*table.factors.values())]
    return [case for case in cases if table.allowed(case)]


@pytest.fixture(scope="module")
def collected() -> dict[str, list]:
    """Marker expression -> items."""
    return {"default": collect(), "large": collect("-m", "large"), "product": collect("-m", "product")}


def test_no_pair_is_missing_by_default_and_no_triple_in_ci(collected, measured):
    by_default, large, rest = (cases_of(collected[run]) for run in ("default", "large", "product"))
    functions = {name_of(item): item.function for items in collected.values() for item in items}
    tables = {name: function.matrix for name, function in functions.items() if hasattr(function, "matrix")}
    assert set(tables) == CONVERTED
    missing = {}
    for test, table in sorted(tables.items()):
        default, ci, want = by_default[test], by_default[test] + large.get(test, []), whole(table)
        assert sorted(map(str, ci + rest.get(test, []))) == sorted(map(str, want)), f"{test}: each case has one run"
        line = f"{test}: {len(default)} + {len(ci) - len(default)} of {len(want)} cases; missing"
        for cases, strength, kind in ((default, 2, "pairs"), (ci, 3, "triples")):
            wanted = met(want, table.factors, min(strength, len(table.factors)))
            absent = wanted - met(cases, table.factors, min(strength, len(table.factors)))
            missing[test, kind] = len(absent)
            line += f" {len(absent)} of {len(wanted)} {kind},"
        print(line[:-1])
        measured({f"{kind} missing": missing[test, kind] for kind in ("pairs", "triples")})
    assert not any(missing.values()), missing


def test_the_runs_share_nothing(collected):
    """``-m large`` and ``-m product`` are those cases alone."""
    for run, items in collected.items():
        assert items
        for item in items:
            marks = {mark.name for mark in item.iter_markers()} & {"large", "product"}
            assert marks == ({run} - {"default"}), item.nodeid


# -- the cover itself


EXAMPLE = {"size": ("one", "TP2", "CP2"), "layout": ("bshd", "thd"), "recompute": ("none", "full")}


def runs_of(table: Matrix) -> dict[str, list[tuple]]:
    """Run -> values of its cases, by the marks of the parameters."""
    found = {"": [], "large": [], "product": []}
    for param in table.make_params():
        (mark,) = param.marks or [None]
        found[mark.name if mark else ""].append(param.values)
    return found


def test_a_worked_example():
    """Three factors of two values: the first case is the product's first, the next of three new pairs each is ``xyy``,
    and each of the last two is the first in which no pair of those before comes again."""
    table = Matrix({"a": "xy", "b": "xy", "c": "xy"})
    assert ["".join(case) for case in table.cover(table.pairs)] == ["xxx", "xyy", "yxy", "yyx"]
    assert ["".join(case) for case in table.cover(table.triples, start=[("y", "y", "x")])][:2] == ["yyx", "xxx"]


@pytest.mark.parametrize("seed", range(20))
def test_random_tables_are_covered(seed):
    """Tables of two to five factors, some of whose cases cannot be; triples go on from the pairs."""
    draw = random.Random(seed)
    factors = {name: tuple(range(draw.randint(1, 4))) for name in "abcde"[: draw.randint(2, 5)]}
    banned = {case for case in product(*factors.values()) if draw.random() < draw.choice([0, 0.3])}
    table = Matrix(factors, allowed=lambda case: tuple(case.values()) not in banned)
    pairs, want = table.cover(table.pairs), whole(table)
    triples = table.cover(table.triples, start=pairs)
    assert triples[: len(pairs)] == pairs and len(set(triples)) == len(triples)
    for cases, strength in ((pairs, 2), (triples, 3)):
        strength = min(strength, len(factors))
        assert met([dict(zip(factors, case)) for case in cases], factors, strength) == met(want, factors, strength)
    runs = runs_of(table)
    assert (set(runs[""]), set(runs["large"])) == (set(pairs), set(triples) - set(pairs))


def test_a_table_that_is_taken_whole_has_one_run():
    assert [len(cases) for cases in runs_of(Matrix(EXAMPLE, whole=True)).values()] == [12, 0, 0]


def test_it_chooses_the_same_in_every_process():
    """Whatever the order in which Python's sets and dictionaries hash strings: here, and in a process of another."""
    code = f"from support.cover import Matrix; table = Matrix({EXAMPLE}); print(table.cover(table.pairs))"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    path = os.pathsep.join((str(TESTS), os.environ["PYTHONPATH"]))  # which the count of processes has set
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    table = Matrix(EXAMPLE)
    assert done.stdout == f"{table.cover(table.pairs)}\n"
