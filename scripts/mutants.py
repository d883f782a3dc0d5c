"""Plant small faults, one at a time: do the tests notice when the code is wrong? They must find each.

    python scripts/mutants.py --seed 1 [--count 20] [--list] [--only K] [--fast] [--out mutants.json]

Statements are drawn from the modules that the project exists for, all alike, and each is broken by one operator
(scripts/mutations.py). A mutant stands in a copy of the tree in a temporary folder: first the module's own tests run
there, then the rest of the default run, until one fails. A test counts where it passes on the untouched tree. A mutant
that was shown to compute the same is left out by its name, ``--equivalent FILE:LINE:OPERATOR``.

Ends with 0 where nine in ten were found, with 1 where fewer were, with 2 where nothing can be said.
"""

import argparse
import ctypes
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from mutations import Mutation, list_mutations

ROOT = Path(__file__).parent.parent
_E, _H, _R = "tests/engines", "tests/hardware", "tests/rlworker"
_LOWERED = (
    f"{_H}/attention/test_core_attention.py",
    f"{_H}/attention/test_masks.py",
    f"{_H}/attention/test_capabilities.py",
    f"{_E}/megatron/test_mask_matrix.py",
)
_ENGINE = (f"{_E}/megatron/test_megatron_weights.py", f"{_E}/megatron/test_megatron_engine.py")
MODULES = {
    "engines/megatron/layout.py": (
        f"{_E}/megatron/test_layout.py",
        f"{_H}/attention/test_core_attention.py",
        f"{_E}/megatron/test_engine_parity.py",
    ),
    "hardware/attention/rules.py": (
        f"{_H}/attention/test_masks.py",
        f"{_E}/megatron/test_layout.py",
        f"{_E}/batch/test_schedule.py",
        *_LOWERED[:1],
        *_LOWERED[2:],
    ),
    "hardware/attention/mask_spec.py": (
        f"{_H}/attention/test_masks.py",
        f"{_E}/megatron/test_layout.py",
        *_LOWERED[:1],
        *_LOWERED[2:],
    ),
    "hardware/cpu/attention_plan.py": (*_LOWERED, f"{_E}/megatron/test_engine_parity.py"),
    "hardware/npu/attention_plan.py": (*_LOWERED, f"{_H}/npu/test_npu_platform.py", f"{_H}/npu/test_npu_faults.py"),
    "engines/megatron/logprobs.py": (
        f"{_E}/megatron/test_logprobs.py",
        f"{_E}/megatron/test_megatron_engine.py",
        f"{_E}/megatron/test_engine_parity.py",
    ),
    "engines/megatron/weights.py": (*_ENGINE, f"{_E}/megatron/test_engine_parity.py"),
    "engines/weight_sync.py": (f"{_E}/test_weight_sync.py", f"{_E}/vllm/test_vllm_engine.py"),
    "rlworker/algorithms/losses.py": (
        f"{_R}/algorithms/test_losses.py",
        f"{_R}/algorithms/test_advantages.py",
        f"{_R}/algorithms/test_loss_invariance.py",
    ),
    "rlworker/algorithms/advantages.py": (
        f"{_R}/algorithms/test_advantages.py",
        f"{_R}/algorithms/test_episode_advantages.py",
        f"{_R}/trainers/test_trainer.py",
    ),
    "rlworker/rollouts/to_batch.py": (f"{_R}/rollouts/test_rollout.py", f"{_R}/rollouts/test_episodes.py"),
    "rlworker/rollouts/episodes.py": (f"{_R}/rollouts/test_episodes.py",),
    "engines/batch/batch.py": (f"{_E}/batch/test_batch.py", f"{_R}/rollouts/test_episodes.py"),
    "engines/batch/places.py": (f"{_E}/batch/test_places.py", f"{_E}/batch/test_batch.py"),
    "engines/batch/samples.py": (f"{_E}/batch/test_samples.py", f"{_R}/data/test_images.py"),
    "rlworker/algorithms/discounting.py": (f"{_R}/algorithms/test_advantages.py",),
    "engines/batch/balance.py": (f"{_E}/batch/test_schedule.py",),
    "engines/batch/schedule.py": (f"{_E}/batch/test_schedule.py", f"{_E}/megatron/test_megatron_engine.py"),
    "engines/megatron/checkpoint.py": (*_ENGINE, f"{_E}/megatron/test_bf16_engine.py"),
    "rlworker/tracking/run_folder.py": (f"{_R}/tracking/test_checkpoint.py", f"{_R}/trainers/test_run.py"),
}
"""File that faults are planted in -> tests that are asked first, those that say most in least time before others."""
ENOUGH = 0.9
OWN_TEST = "tests/scripts/test_mutants.py"
"""Not asked: it tests this script."""
_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER``: what a test run leaves behind becomes a child of this process, and so can be ended."""
_NO_TEST = "(before any test)"
_POLL_S = 0.05
_EXIT_FAILED, _EXIT_INTERRUPTED, _EXIT_UNUSABLE, _EXIT_NOTHING = 1, 2, 4, 5


@dataclass(frozen=True)
class Mutant:
    path: str
    mutation: Mutation
    before: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.mutation.line}:{self.mutation.operator}"

    @property
    def after(self) -> str:
        return self.mutation.apply(self.before)

    def format_change(self) -> tuple[str, str]:
        """Return the lines from the first to the last that differ, before and after, each put into one line."""
        before, after = self.before.splitlines(), self.after.splitlines()
        first = _count_alike(before, after)
        last = _count_alike(before[first:][::-1], after[first:][::-1])  # counted from the end
        return tuple(" ".join(" ".join(lines[first : len(lines) - last]).split()) for lines in (before, after))

    def format_diff(self) -> str:
        texts = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(*texts, f"a/{self.path}", f"b/{self.path}", n=1))


def _count_alike(some: list[str], others: list[str]) -> int:
    """Count the lines at the beginning that are the same in both."""
    pairs = enumerate(zip(some, others))
    return next((place for place, (one, other) in pairs if one != other), min(len(some), len(others)))


@dataclass(frozen=True)
class Outcome:
    """The result of a run of tests: the test that ``failed`` or hung with its message; None where all passed."""

    failed: str | None = None
    how: str = ""


def draw(root: Path, paths: list[str], seed: int, count: int) -> list[Mutant]:
    """Draw ``count`` mutants, each of another statement: statements are drawn alike, then an operator, then its place.

    Raises:
        ValueError: the modules have fewer statements that can be broken.
    """
    texts = {path: (root / path).read_text(encoding="utf-8") for path in paths}
    statements = [(path, faults) for path in paths for faults in list_mutations(texts[path])]
    if count > len(statements):
        raise ValueError(f"--count: the modules have {len(statements)} statements to break, got {count}; ask for fewer")
    mutants, rng = [], random.Random(seed)
    for path, faults in rng.sample(statements, count):
        operator = rng.choice(sorted({fault.operator for fault in faults}))
        fault = rng.choice([fault for fault in faults if fault.operator == operator])
        mutants.append(Mutant(path, fault, texts[path]))
    return mutants


def copy_tree(root: Path, target: Path) -> Path:
    """Copy the project to ``target`` without what git ignores."""
    ignore = root / ".gitignore"
    names = [line.strip("/") for line in ignore.read_text().split()] if ignore.exists() else []
    return Path(shutil.copytree(root, target, symlinks=True, ignore=shutil.ignore_patterns(".git", *names)))


def run_tests(tree: Path, arguments: list[str], silence_s: float) -> Outcome:
    """Run pytest in a tree until a test fails, or none has ended for ``silence_s``; nothing that it started lives on.

    Raises:
        ValueError: pytest could not begin.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += [f"--basetemp={tree.parent / 'pytest'}", *arguments]
    environment = (
        {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "250"}
    )
    log = tree.parent / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        is_silent = _wait(process, log, silence_s)
        _end_children()
    return _read_outcome(log.read_text(errors="replace"), None if is_silent else process.returncode, silence_s)


def _wait(process: subprocess.Popen, log: Path, silence_s: float) -> bool:
    """Wait until the process ends, or its log has not grown for so long: whether it is the latter.

    Imports and collection say nothing, and on a busy machine take their time: they may take ten times as long.
    """
    size, since, limit = 0, time.monotonic(), 10 * silence_s
    while process.poll() is None:
        time.sleep(_POLL_S)
        if (now := log.stat().st_size) != size:
            size, since = now, time.monotonic()
            limit = silence_s if b"::" in log.read_bytes() else limit
        elif time.monotonic() - since > limit:
            return True
    return False


def _end_children() -> None:
    """End whatever descends from this process, which is all that the tests started, also what a killed parent left."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(children, timeout=10)


def _read_outcome(log: str, code: int | None, silence_s: float) -> Outcome:
    """Read a log of ``pytest -x -v``; a ``code`` of None is a run that fell silent."""
    if code in (0, _EXIT_NOTHING):
        return Outcome()
    if code == _EXIT_UNUSABLE:
        raise ValueError(f"pytest could not begin: {log.strip()[-500:]!r}; do the tests named in MODULES exist?")
    failures = re.findall(r"(?m)^(?:FAILED|ERROR) (\S+\.py.*)$", log)
    if code in (_EXIT_FAILED, _EXIT_INTERRUPTED) and failures:
        test, _, message = failures[-1].partition(" - ")
        return Outcome(test, message or "failed")
    running = re.findall(r"(?m)^(\S+\.py::.+?)(?: (?:PASSED|FAILED|SKIPPED|XFAIL|ERROR).*)?$", log) or [_NO_TEST]
    ending = f"silent for {silence_s:.0f} s" if code is None else f"the run died with {code}"
    return Outcome(running[-1].strip(), f"{ending} {log.strip()[-300:] if code is not None else ''}".strip())


class Judge:
    """Runs tests against mutants, and against the untouched tree the tests that found one."""

    def __init__(self, root: Path, modules: dict[str, tuple[str, ...]], silence_s: float, fast: bool):
        self.root, self.modules, self.silence_s, self.fast = root, modules, silence_s, fast
        self.broken: dict[str, str] = {}
        """Tests that fail without a mutant too -> their message; they are not asked again."""
        self._sound: set[str] = set()

    def decide(self, mutant: Mutant) -> Outcome:
        """Run the tests against a mutant: which of them found it, if any did."""
        module_tests = self.modules[mutant.path]
        other_tests = [f"--ignore={test}" for test in (*module_tests, OWN_TEST)]
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            tree = copy_tree(self.root, Path(folder, "tree"))
            (tree / mutant.path).write_text(mutant.after, encoding="utf-8")
            for tests in (list(module_tests),) if self.fast else (list(module_tests), other_tests):
                if (outcome := self._find_failure(tree, tests)).failed:
                    return outcome
        return Outcome()

    def _find_failure(self, tree: Path, tests: list[str]) -> Outcome:
        while True:
            deselected = [f"--deselect={test}" for test in self.broken]
            outcome = run_tests(tree, tests + deselected, self.silence_s)
            if outcome.failed is None or self._is_sound(outcome.failed):
                return outcome

    def _is_sound(self, test: str) -> bool:
        """Tell whether a test passes on the untouched tree; one that does not is left out from here on.

        Raises:
            ValueError: it does not, and cannot be left out either.
        """
        if test in self._sound:
            return True
        if test in self.broken:
            raise ValueError(f"{test} cannot be left out and fails on the untouched tree; mend it: {self.broken[test]}")
        if message := self._run_untouched(test).how:
            self.broken[test] = message
        else:
            self._sound.add(test)
        return not message

    def _run_untouched(self, test: str) -> Outcome:
        arguments = [test] if "::" in test else ["--collect-only", *([] if test == _NO_TEST else [test])]
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            return run_tests(copy_tree(self.root, Path(folder, "tree")), arguments, self.silence_s)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="which statements are drawn")
    parser.add_argument("--count", type=int, default=20, help="how many")
    parser.add_argument("--list", action="store_true", help="show what is drawn, run nothing")
    parser.add_argument("--only", type=int, metavar="K", help="run the K-th alone, from 1")
    parser.add_argument("--fast", action="store_true", help="only the tests that MODULES maps to the module")
    parser.add_argument("--timeout", type=float, default=600, help="seconds without a test ending that count as found")
    parser.add_argument("--out", type=Path, help="a JSON file for everything, written after each mutant")
    equivalent_help = "mutants of this seed that compute the same; they are not run and do not count"
    parser.add_argument("--equivalent", nargs="+", default=[], metavar="FILE:LINE:OPERATOR", help=equivalent_help)
    return parser


def choose(arguments: argparse.Namespace, mutants: list[Mutant]) -> list[tuple[int, Mutant]]:
    """Choose the mutants to run, with their numbers from 1.

    Raises:
        ValueError: an option names a mutant that was not drawn.
    """
    if unknown := set(arguments.equivalent) - {mutant.name for mutant in mutants}:
        raise ValueError(f"--equivalent: seed {arguments.seed} draws no {sorted(unknown)}; --list shows what it draws")
    if arguments.only is not None and not 1 <= arguments.only <= len(mutants):
        raise ValueError(f"--only: expected a number from 1 to {len(mutants)}, got {arguments.only}")
    numbered = list(enumerate(mutants, 1))
    selected = numbered if arguments.only is None else [numbered[arguments.only - 1]]
    return [(number, mutant) for number, mutant in selected if mutant.name not in arguments.equivalent]


def judge_all(arguments: argparse.Namespace, mutants: list[tuple[int, Mutant]], judge: Judge) -> bool:
    """Decide each mutant and print it: whether enough were found."""
    rows, survivors = [], []
    for number, mutant in mutants:
        start = time.monotonic()
        outcome, (before, after) = judge.decide(mutant), mutant.format_change()
        seconds = round(time.monotonic() - start, 1)
        verdict = f"found by {outcome.failed} ({outcome.how})" if outcome.failed else "SURVIVED"
        print(f"{number:3} {mutant.name}  {before}  ->  {after}  {verdict} after {seconds:.0f} s", flush=True)
        rows.append(dict(number=number, name=mutant.name, diff=mutant.format_diff(), found_by=outcome.failed))
        rows[-1] |= dict(message=outcome.how, seconds=seconds)
        survivors += [] if outcome.failed else [mutant]
        found_count = len(rows) - len(survivors)
        if arguments.out:
            summary = dict(seed=arguments.seed, count=arguments.count, fast=arguments.fast, found=found_count)
            summary |= dict(equivalent=arguments.equivalent, fail_untouched=judge.broken, mutants=rows)
            arguments.out.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"{found_count} of {len(rows)} found" + (", by the modules' own tests alone" if arguments.fast else ""))
    for test, message in judge.broken.items():
        print(f"not asked, since it fails on the untouched tree: {test} ({message})")
    for mutant in survivors:
        print(f"\n{mutant.name} survived:\n{mutant.format_diff()}", end="")
    return found_count >= ENOUGH * len(rows)


def main(root: Path = ROOT, modules: dict[str, tuple[str, ...]] = MODULES) -> int:
    arguments = make_parser().parse_args()
    try:
        if missing := [name for tests in modules.values() for name in tests if not (root / name).is_file()]:
            raise ValueError(f"MODULES: {root} has no {missing}; name tests that exist")
        mutants = choose(arguments, draw(root, list(modules), arguments.seed, arguments.count))
        if arguments.list:
            for number, mutant in mutants:
                print(f"{number:3} {mutant.name}  {'  ->  '.join(mutant.format_change())}")
            return 0
        if not mutants:
            raise ValueError("--equivalent: no mutant is left to run; name fewer")
        return 0 if run_all(arguments, mutants, root, modules) else 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_all(arguments: argparse.Namespace, mutants: list[tuple[int, Mutant]], root: Path, modules: dict) -> bool:
    """Judge the mutants of the tree as it is now, whatever is edited meanwhile; no process outlives it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        untouched = copy_tree(root, Path(folder, "tree"))
        try:
            return judge_all(arguments, mutants, Judge(untouched, modules, arguments.timeout, arguments.fast))
        finally:
            _end_children()


if __name__ == "__main__":
    sys.exit(main())
