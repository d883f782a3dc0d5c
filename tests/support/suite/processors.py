"""Runs the numeric tests once under each setting that chooses other kernels, and says what each changed.

Processors differ in the kernels that torch, MKL and oneDNN choose for them. Environment variables choose those of older
ones. Arguments go to pytest; files and folders among them take the place of the numeric tests.

    bash scripts/test.sh --processors
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
KEPT = ROOT / ".pytest_cache" / "processors"
"""Has what each run measured, in a file of its own."""
SETTINGS = (
    "",
    "ATEN_CPU_CAPABILITY=avx2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2",
    "ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41",
)
"""The processor's own kernels first, with which the others are compared."""
NUMERIC = (
    "tests/engines",
    "tests/hardware",
    "tests/rlworker/algorithms",
    "tests/rlworker/checks",
    "tests/rlworker/rollouts",
)
"""Where numbers are computed by kernels. The others test what is done with them."""

Results = dict[str, dict]
"""What ``--measured-json`` writes: a test -> its ``outcome``, and by number all values ``measured`` and ``shares``."""


@dataclass(frozen=True)
class Comparison:
    """Numbers under a setting beside those of the processor's own kernels.

    Attributes:
        numbers: how many were measured in both. changed: how many of them are others.
        failed: tests that failed under the setting.
        share: the largest share of a measured limit that was used up. where: its test and number.
    """

    numbers: int
    changed: int
    failed: tuple[str, ...]
    share: float
    where: str


def compare(own: Results, results: Results) -> Comparison:
    """Compare what a run measured with the run of the processor's own kernels."""
    numbers = changed = 0
    for test, result in results.items():
        for name, values in result["measured"].items():
            others = own.get(test, {"measured": {}})["measured"].get(name)
            if others is not None:
                numbers += 1
                changed += values != others
    shares = {
        f"{name} of {test}": max(values)
        for test, result in results.items()
        for name, values in result["shares"].items()
    }
    where = max(shares, key=lambda name: shares[name], default="")
    failed = tuple(test for test, result in results.items() if result["outcome"] == "failed")
    return Comparison(numbers, changed, failed, shares.get(where, 0.0), where)


def describe(setting: str, comparison: Comparison) -> str:
    """Describe a run in a few lines, the setting first."""
    changed = f"of {comparison.numbers:,} measured numbers {comparison.changed:,} changed" if setting else ""
    own = f"{comparison.numbers:,} measured numbers"
    lines = [setting or "nothing set", f"  {changed or own}, {len(comparison.failed)} tests failed"]
    lines += [f"  failed: {test}" for test in comparison.failed]
    if comparison.where:
        lines.append(f"  at most {comparison.share:.0%} of a measured limit: {comparison.where}")
    return "\n".join(lines)


def run_tests(setting: str, arguments: list[str], target: Path) -> int:
    """Run the tests under a setting, and return pytest's exit status; ``target`` gets what they measured."""
    chosen = dict(pair.split("=") for pair in setting.split())
    names = {pair.split("=")[0] for other in SETTINGS for pair in other.split()}
    environment = {name: value for name, value in os.environ.items() if name not in names} | chosen
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    named = any((ROOT / argument.split("::")[0]).exists() for argument in arguments)
    options = ["-q", "-n", "2", "--max-worker-restart", "0", "--measured-json", str(target)]
    command = [sys.executable, "-m", "pytest", *options, *([] if named else NUMERIC), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> None:
    own: Results = {}
    texts, status = [], 0
    for number, setting in enumerate(SETTINGS):
        print(f"\n{setting or 'nothing set'}", flush=True)
        target = KEPT / f"{number}.json"
        ended = run_tests(setting, sys.argv[1:], target)
        status = status or ended
        if not target.exists():
            texts.append(f"{setting or 'nothing set'}\n  pytest ended with {ended} before any test")
            continue
        results = json.loads(target.read_text(encoding="utf-8"))
        own = own or results
        texts.append(describe(setting, compare(own, results)))
    print("\n" + "\n".join(texts) + f"\nwhat each measured: {KEPT}/*.json")
    sys.exit(status)


if __name__ == "__main__":
    main()
