"""The script that asks whether tests notice faults: what it draws, how it breaks a statement, what it says of it."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = str(ROOT / "scripts")


@pytest.fixture(scope="module")
def scripts():
    """The two modules; scripts/ is a folder of programs, which find each other where they lie."""
    sys.path.insert(0, SCRIPTS)
    yield importlib.import_module("mutants"), importlib.import_module("mutations")
    sys.path.remove(SCRIPTS)


def broken(mutations, text: str) -> set[tuple[str, str]]:
    """``(operator, text)`` of everything that a text can become."""
    return {(fault.operator, fault.apply(text)) for faults in mutations.list_mutations(text) for fault in faults}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = a + b", {("sign", "x = a - b")}),
        ("x = (a) - (  # a - b\n    b)", {("sign", "x = (a) + (  # a - b\n    b)")}),
        ("x = -a", {("sign", "x = a")}),
        ("x = 'ü', -a  # über - alles", {("sign", "x = 'ü', a  # über - alles")}),
        ("x = a * b", {("product", "x = a / b")}),
        ("x = a // b", {("product", "x = a * b")}),
        ("x = 7", {("plus-one", "x = 8"), ("minus-one", "x = 6")}),
        ("x = a < b", {("or-equal", "x = a <= b"), ("invert", "x = a >= b")}),
        ("x = a == b", {("invert", "x = a != b")}),
        ("x = a not  in b", {("invert", "x = a in b")}),
        ("x = a is b", {("invert", "x = a is not b")}),
        ("x = a and b", {("invert", "x = a or b")}),
        ("x = ~a & b", {("invert", "x = a & b"), ("invert", "x = ~a | b")}),
        ("if a:\n    b = c", {("invert", "if not (a):\n    b = c")}),
        ("while not a:\n    b = c", {("invert", "while a:\n    b = c")}),
        ("x = [a for a in b if a]", {("invert", "x = [a for a in b if not (a)]")}),
        ("x = f(a, b)", {("swap", "x = f(b, a)")}),
        ("x = f(a, *b, low=c, high=d)", {("swap", "x = f(a, *b, low=d, high=c)")}),
        ("x = f(a, flag=True)", {("flag", "x = f(a, flag=False)")}),
        ("def f(a: bool = False):\n    return a", {("flag", "def f(a: bool = True):\n    return a")}),
        ("a.b = c", {("drop", "pass")}),
        ("a[b] = c", {("drop", "pass")}),
        ("a.f(\n    b\n)  # why", {("drop", "pass  # why")}),
        ("x += a", {("drop", "pass"), ("sign", "x -= a")}),
    ],
)
def test_each_operator_on_a_worked_example(scripts, text, expected):
    assert broken(scripts[1], text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "import a",
        "def f(a: Literal[1] | None) -> Literal[2]:\n    '''1 + 1 < 3'''\n    return a",
        "x: Literal[1] = a",
        "Pair = A | B",
        "raise ValueError(f'{a + 1}', 2)",
        "x = f'{a + 1}'",
        "x = 'a' + b",
        "assert a < 1",
        "def __repr__(self):\n    return a + 1",
        "if TYPE_CHECKING:\n    a.b = 1",
        "@dataclass(frozen=True)\nclass A:\n    pass",
        "x = torch.minimum(a, b)",
        "x = f(a, a)",
    ],
)
def test_what_no_test_should_hang_on_is_left_alone(scripts, text):
    assert not broken(scripts[1], text)


def own(text: str) -> list[str]:
    """Each statement of a file without those inside it."""
    found = []
    for node in [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.stmt)]:
        inside = {"body", "orelse", "finalbody", "handlers", "cases"}
        parts = {name: value for name, value in ast.iter_fields(node) if name not in inside}
        dumped = [
            [ast.dump(x) if isinstance(x, ast.AST) else x for x in (v if isinstance(v, list) else [v])]
            for v in parts.values()
        ]
        found.append(f"{type(node).__name__} {dumped}")
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_mutant_is_its_original_but_for_one_statement(scripts, seed):
    mutants, _ = scripts
    drawn = mutants.draw(ROOT, list(mutants.MODULES), seed, 20)
    assert len({mutant.name for mutant in drawn}) == 20
    for mutant in drawn:
        assert mutant.before == (ROOT / mutant.path).read_text()
        before, after = own(mutant.before), own(mutant.after)
        assert len(before) == len(after) and sum(a != b for a, b in zip(before, after)) == 1, mutant.format_diff()
        was, now = mutant.format_change()
        assert was != now and (now or mutant.mutation.operator == "drop")


def test_a_seed_says_what_is_drawn(scripts):
    mutants, _ = scripts
    first, again, other = (mutants.draw(ROOT, list(mutants.MODULES), seed, 20) for seed in (0, 0, 1))
    assert first == again and first != other
    paths = {mutant.path for seed in range(12) for mutant in mutants.draw(ROOT, list(mutants.MODULES), seed, 20)}
    assert paths == set(mutants.MODULES)
    with pytest.raises(
        ValueError, match=r"--count: the modules have \d+ statements to break, got 99999; ask for fewer"
    ):
        mutants.draw(ROOT, list(mutants.MODULES), 0, 99999)


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        ("t.py::a PASSED\n", 0, (None, "")),
        ("t.py::a FAILED\n== short ==\nFAILED t.py::a - assert 1 == 2\n", 1, ("t.py::a", "assert 1 == 2")),
        ("ERROR t.py - ImportError: x\n", 2, ("t.py", "ImportError: x")),
        ("t.py::a PASSED [ 50%]\nt.py::b[1 2] ", None, ("t.py::b[1 2]", "silent for 600 s")),
    ],
)
def test_what_a_run_of_pytest_says(scripts, log, code, expected):
    outcome = scripts[0]._read_outcome(log, code, 600)
    assert (outcome.failed, outcome.how) == expected


def test_a_run_that_dies_names_its_test_and_one_that_cannot_begin_is_no_verdict(scripts):
    mutants, _ = scripts
    outcome = mutants._read_outcome("t.py::a PASSED [ 50%]\nt.py::b Fatal Python error: Segmentation fault", -11, 600)
    assert outcome.failed.startswith("t.py::b") and "the run died with -11" in outcome.how
    assert mutants._read_outcome("No module named pytest", 1, 600).failed == mutants._NO_TEST
    with pytest.raises(ValueError, match=r"pytest could not begin: .*not found: t\.py"):
        mutants._read_outcome("ERROR: file or directory not found: t.py", 4, 600)


TOY = """\
def seen(a, b):
    return a < b


def unseen(a, b):
    return a < b
"""
TOY_TEST = """\
import toy


def test_broken():
    assert 0


def test_seen():
    assert toy.seen(1, 2) and not toy.seen(1, 1)
"""


@pytest.fixture
def toy(tmp_path):
    """A project of two statements, of which its tests read one; one of its tests fails whatever is planted."""
    root = tmp_path / "toy"
    (root / "tests").mkdir(parents=True)
    (root / "toy.py").write_text(TOY)
    (root / "tests" / "test_toy.py").write_text(TOY_TEST)
    return root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    code = f"import sys; sys.path.insert(0, {SCRIPTS!r}); from pathlib import Path; import mutants\n"
    code += f"sys.exit(mutants.main(Path({str(root)!r}), {{'toy.py': ('tests/test_toy.py',)}}))"
    command = [sys.executable, "-c", code, "--seed", "0", "--count", "2", *arguments]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which take longer than the toy's tests
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.large
def test_one_is_found_and_one_survives(toy):
    done = run(toy, "--fast", "--out", str(toy / "out.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (found,) = (line for line in lines if "found by" in line)
    (survived,) = (line for line in lines if "SURVIVED" in line)
    assert "toy.py:2:" in found and "return a < b  ->  return a " in found and "tests/test_toy.py::test_seen" in found
    assert "toy.py:6:" in survived
    assert "1 of 2 found, by the modules' own tests alone" in lines
    assert "not asked, since it fails on the untouched tree: tests/test_toy.py::test_broken (assert 0)" in lines
    assert "--- a/toy.py" in lines and "-    return a < b" in lines
    stored = json.loads((toy / "out.json").read_text())
    assert stored["found"] == 1 and [bool(row["found_by"]) for row in stored["mutants"]].count(True) == 1
    assert (toy / "toy.py").read_text() == TOY and {p.name for p in toy.iterdir()} == {"toy.py", "tests", "out.json"}


@pytest.mark.large
def test_what_is_equivalent_does_not_count_and_the_rest_of_the_tests_are_asked(toy):
    (toy / "tests" / "test_toy.py").write_text("import toy\n\n\ndef test_it():\n    pass\n")
    (toy / "tests" / "test_rest.py").write_text(TOY_TEST.replace("assert 0", "pass"))
    listed = run(toy, "--list")
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) == 2
    (unseen,) = (word for word in listed.stdout.split() if word.startswith("toy.py:6:"))
    done = run(toy, "--equivalent", unseen)
    assert done.returncode == 0 and "1 of 1 found" in done.stdout.splitlines(), done.stdout + done.stderr
    assert "found by tests/test_rest.py::test_seen (assert " in done.stdout


@pytest.mark.parametrize("given", [["--equivalent", "toy.py:1:drop"], ["--only", "3"], ["--only", "0"]], ids=" ".join)
def test_what_was_not_drawn_is_an_error(scripts, toy, given):
    mutants, _ = scripts
    drawn = mutants.draw(toy, ["toy.py"], 0, 2)
    with pytest.raises(ValueError, match=f"^{given[0]}: .*{given[1] if given[0] != '--only' else 'from 1 to 2, got'}"):
        mutants.choose(mutants.make_parser().parse_args(["--seed", "0", *given]), drawn)


@pytest.mark.large
def test_a_hang_is_found_by_its_test_and_leaves_nothing_behind(toy):
    (toy / "toy.py").write_text("def seen(a, b):\n    return a < b\n")
    test = "import subprocess, time, toy\n\ndef test_it():\n    if not toy.seen(1, 2) or toy.seen(1, 1):\n"
    rest = f"sleep {98765 + os.getpid()}"  # another run of the suite may be at the same test
    test += f"        subprocess.run('{rest} &', shell=True, start_new_session=True)\n        time.sleep(98765)\n"
    (toy / "tests" / "test_toy.py").write_text(test)
    done = run(toy, "--fast", "--count", "1", "--timeout", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found by tests/test_toy.py::test_it (silent for 5 s)" in done.stdout
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert rest not in left
