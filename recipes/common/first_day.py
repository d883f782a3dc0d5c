"""The first day of a card: every check and a few runs, with their outcomes and figures in one JSON.

    bash scripts/gpu_day.sh --json day.json      installs, and runs this
    python -m recipes.common.first_day --platform cuda-emulated --json day.json

On an emulated platform the same programs run on a CPU, and each line says so. Runs that the machine cannot make, for
instance with CUDA graphs on a CPU, are no lines: ``not_run`` has the reason of each.

Each line is written into ``FOLDER/parts`` when it ends. A further call keeps the lines that are there and goes on
behind them, so that nothing is lost if a command, or a machine, may be had for some minutes only.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engines.models.spec import ModelSpec
from hardware.platform import Platform
from hardware.platforms import PLATFORMS, get_platform
from recipes.common.addition import make_data, make_model
from recipes.common.shapes import SHAPES
from rlworker.checks.device.report import PEAK_TFLOPS
from rlworker.config.command_line import parse_config
from rlworker.config.memory import list_needs
from rlworker.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--prompts-per-step", "8", "--samples-per-prompt", "8", "--rollout.max-new-tokens", "16")
SIZES += ("--data.max-prompt-tokens", "64", "--rollout.max-model-len", "128", "--rollout.max-num-seqs", "64")
SIZES += ("--rollout.kv-cache-mb", "512", "--actor.micro-batch-tokens", "1024")
SIZES += ("--checkpoint.save-minutes", "0", "--checkpoint.no-keep-best")
"""Options of every run of ``--model``."""
SHAPE_PLACES = ("--actor.ranks", "1", "--rollout.engines", "1", "--placement.colocate", "--actor.recompute", "full")
SHAPE_SIZES = ("--prompts-per-step", "16", "--samples-per-prompt", "8", "--rollout.max-new-tokens", "256")
SHAPE_SIZES += ("--data.max-prompt-tokens", "320", "--rollout.max-model-len", "640", "--rollout.max-num-seqs", "128")
SHAPE_SIZES += ("--rollout.kv-cache-mb", "8192", "--actor.micro-batch-tokens", "8192")
SHAPE_SIZES += ("--checkpoint.save-minutes", "0", "--checkpoint.no-keep-best", "--actor.optimizer.lr", "1e-6")
"""Options of a run in the shape of a released model, on one device of 80 GB; a stand-in has ``SIZES``."""
SHAPE_STEPS = 4
_END_S = 60.0
"""Seconds for a run to end after SIGTERM."""
_ENDED = 124
"""Exit status of a program that was ended, as that of timeout(1)."""
_MEASURED = ("time_step", "time_rollout", "time_update", "time_sync", "tokens_per_second", "flops_per_second")
_MEASURED += ("logprob_diff_mean", "prompt_sharing", "memory_gb", "rollout_memory_gb")
"""Fields of metrics.jsonl whose medians are figures of a run; the first two steps do not count."""


@dataclass(frozen=True)
class Line:
    """One thing that ran.

    Attributes:
        name: the run or check. outcome: "ok" or "FAILED". evidence: level of proof, executed or emulated.
        text: the result in words. seconds: duration. figures: measured numbers by name.
    """

    name: str
    outcome: str
    evidence: str
    text: str
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)


def plan_runs(platform: Platform, devices: int) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Plan the runs of GRPO for a machine.

    Args:
        devices: number of devices; with one, trainer and rollout engine take turns on it.

    Returns:
        name of a run -> its options; and name -> reason of those that this machine cannot run.
    """
    apart = ["--actor.ranks", str(max(1, devices // 2)), "--rollout.engines", str(max(1, devices // 2))]
    colocated = ["--actor.ranks", str(devices), "--rollout.engines", str(devices), "--placement.colocate"]
    usual = apart if devices > 1 else colocated
    runs, not_run = {"grpo": usual, "grpo, prompts not shared": [*usual, "--actor.share", "none"]}, {}
    if platform.visible_devices:
        runs["grpo, no graphs"] = [*usual, "--rollout.vllm", "enforce_eager", "True"]
    else:
        not_run["grpo, no graphs"] = "vLLM on a CPU has no graphs; the other runs are without them"
    for placement, options in (("apart", apart), ("colocated", colocated)):
        for way in platform.find_weight_ways(placement == "colocated"):
            name = f"grpo, {placement}, weights by {way}"
            if placement == "apart" and devices < 2:
                not_run[name] = "it takes two devices"
            else:
                runs[name] = [*options, "--rollout.weight-transfer", way]
    for way in {way for name in PLATFORMS for way in get_platform(name).ways_from_all_ranks}:
        if not any(name.endswith(f" {way}") for name in (*runs, *not_run)):
            not_run[f"grpo, colocated, weights by {way}"] = f"platform {platform.name} does not have this way"
    return runs, not_run


def plan_checks(platform: Platform) -> dict[str, list[str]]:
    """Plan the runs of ``rlworker check``: name -> options. On devices vLLM runs with its graphs, and without."""
    checks: dict[str, list[str]] = {"rlworker check": []}
    if platform.visible_devices:
        checks["rlworker check, no graphs"] = ["--rollout.vllm", "enforce_eager", "True"]
    return checks


def plan_shapes(platform: Platform) -> dict[str, str]:
    """Plan the runs in shapes of released models: name -> shape. Without devices they are tiny stand-ins."""
    made = "shape of" if platform.visible_devices else "stand-in for"
    return {f"grpo, {made} {shape}": shape for shape in SHAPES}


class Day:
    """Runs the programs one after another, and writes the JSON after each.

    Args:
        options: the command line.

    Attributes:
        lines: those that an earlier call has written, in their order, then those of this one.
    """

    def __init__(self, options: argparse.Namespace):
        self._began = time.monotonic()
        self.options, self.platform = options, get_platform(options.platform)
        self.folder = options.folder.resolve()
        make_data(self.folder / "rows")
        self.model = options.model or str(self.folder / "model")
        if not Path(self.model).exists():
            make_model(Path(self.model), seed=0)
        self._parts = self.folder / "parts"
        self._parts.mkdir(parents=True, exist_ok=True)
        kept = [json.loads(path.read_text()) for path in sorted(self._parts.glob("*.json"))]
        self.lines = [Line(**part["line"]) for part in kept]
        self.report: dict[str, Any] = {"platform": options.platform, "device": "", "devices": options.devices}
        named = Path(self.model).name if options.model else "a Qwen3 of 132 thousand random parameters"
        self.report |= {"model": named, "dtype": self.platform.default_dtype, "not_run": {}}
        for part in kept:
            self.report |= part["about"]

    def add(self, name: str, passed: bool, text: str, seconds: float, figures: dict | None = None) -> None:
        """Add a line of this platform to the report."""
        self.write(Line(name, "ok" if passed else "FAILED", self.platform.evidence, text, seconds, figures or {}))

    def write(self, line: Line) -> None:
        """Print a line, and write it beside those before it, and all of them into one file."""
        about = {name: self.report[name] for name in ("device", "versions") if self.report.get(name)}
        part = self._parts / f"{len(self.lines):02}-{_to_file_name(line.name)}.json"
        # Under its name at once: a call that is ended here must not leave half a line.
        part.with_suffix(".new").write_text(json.dumps({"line": asdict(line), "about": about}, indent=1) + "\n")
        part.with_suffix(".new").rename(part)
        self.lines.append(line)
        self.show(line)
        report = self.report | {"lines": [asdict(each) for each in self.lines]}
        self.options.json.write_text(json.dumps(report, indent=1) + "\n")

    def show(self, line: Line) -> None:
        """Print a line."""
        print(f"{line.outcome:6}  {line.evidence:8}  {line.name}: {line.text} ({line.seconds:.0f} s)", flush=True)

    def find_kept(self, name: str) -> Line | None:
        """Return a line of an earlier call; with ``--retry`` one that failed is none."""
        found = [line for line in self.lines if line.name == name]
        return found[-1] if found and (found[-1].outcome == "ok" or not self.options.retry) else None

    def count_left(self) -> float:
        """Count the seconds in which a further line may begin."""
        return self.options.minutes * 60 - (time.monotonic() - self._began)

    def run(self, name: str, arguments: Sequence[str]) -> tuple[subprocess.CompletedProcess[str], float]:
        """Run a Python program; returns it and its seconds. Its output goes into a log that is named like the line."""
        start, paths = time.monotonic(), [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
        done = _run_within(self.options.line_minutes, [sys.executable, *arguments], environment)
        (self.folder / f"{_to_file_name(name)}.log").write_text(done.stdout + done.stderr)
        return done, time.monotonic() - start

    def check_device(self, parts: str) -> None:
        """Run ``scripts/device_check.py``, all of it or some parts."""
        path, only = self.folder / "device_check.json", ["--only", parts] if parts else []
        arguments = ["scripts/device_check.py", "--platform", self.platform.name, "--json", str(path), *only]
        done, seconds = self.run("device check", arguments)
        found = json.loads(path.read_text()) if path.exists() else {"findings": []}
        self.report |= {name: found[name] for name in ("device", "versions") if name in found}
        figures = {
            f"{row['where']}: {name}": value
            for row in found["findings"]
            if row["check"] == "speed"
            for name, value in row["figures"].items()
        }
        self.add("device check", *_judge(done, found["findings"]), seconds, figures)

    def check_model(self, name: str, options: Sequence[str]) -> None:
        """Run ``rlworker check`` on the model: the rollout's logprobs against the trainer's, among others."""
        types = [f"--{engine}.dtype={self.platform.default_dtype}" for engine in ("actor", "rollout")]
        arguments = ["-m", "rlworker", "check", self.model, "--platform", self.platform.name, *types, "--json"]
        done, seconds = self.run(name, [*arguments, *options])
        rows = json.loads(done.stdout) if done.stdout.startswith("[") else []
        self.add(name, *_judge(done, rows), seconds)

    def train(self, name: str, options: Sequence[str]) -> None:
        """Run some steps of GRPO with the model of the command line."""
        self._train(name, self.model, self.folder / "rows", self.options.steps, [*SIZES, *options])

    def train_shape(self, name: str, shape: str) -> None:
        """Run some steps of GRPO in the shape of a released model, whose weights are drawn."""
        folder = self.folder / "shapes" / shape
        arguments = ["-m", "recipes.common.shapes", shape, str(folder), "--platform", self.platform.name]
        done, seconds = self.run(f"{name}, made", arguments)
        if done.returncode:
            self.add(name, *_judge(done, []), seconds)
            return
        sizes = (*SHAPE_SIZES, *SHAPES[shape].options) if self.platform.visible_devices else SIZES
        self._train(name, str(folder / "model"), folder / "rows", SHAPE_STEPS, [*SHAPE_PLACES, *sizes])
        shutil.rmtree(folder)  # up to 9 GB of weights

    def _train(self, name: str, model: str, rows: Path, steps: int, options: Sequence[str]) -> None:
        folder = self.folder / "runs" / _to_file_name(name)
        settings = ["--model", model, "--run-dir", str(folder), "--platform", self.platform.name]
        settings += ["--data.train", str(rows / "train.jsonl"), "--steps", str(steps), *options]
        done, seconds = self.run(name, ["-m", "recipes.grpo", *settings])
        figures = _read_figures(folder / "metrics.jsonl")
        if figures:
            figures |= plan_memory(settings)
        if peak := next((peak for card, peak in PEAK_TFLOPS.items() if card in self.report["device"]), None):
            ranks = int(options[options.index("--actor.ranks") + 1])
            figures["MFU"] = figures.get("flops_per_second", 0.0) / (1e12 * peak * ranks)
        passed, text = _judge(done, [])
        text = ", ".join(f"{key} {value:.3g}" for key, value in figures.items()) if passed else text
        self.add(name, passed, text, seconds, figures)


def plan_memory(settings: list[str]) -> dict[str, float]:
    """Plan the memory of a run's largest trainer and of a rollout engine, in GB (10^9 bytes) as metrics are."""
    config = parse_config(RunConfig(), args=settings)
    needs = [need for need in list_needs(config, {"actor": ModelSpec.from_folder(config.model)}) if need.count]
    trainers = [need.total / 1e9 for need in needs if not need.is_rollout]
    rollouts = [need.total / 1e9 for need in needs if need.is_rollout]
    return {"memory_gb planned": max(trainers), "rollout_memory_gb planned": max(rollouts)}


def _run_within(
    minutes: float, command: Sequence[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program, and end it after so many minutes; its exit status is 124 then."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        process.terminate()  # at which a run ends its workers and Ray
        try:
            output, errors = process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
        errors += f"\nended after {minutes:g} minutes, by --line-minutes\n"
        return subprocess.CompletedProcess(command, _ENDED, output, errors)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _to_file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def _judge(done: subprocess.CompletedProcess[str], rows: Sequence[dict]) -> tuple[bool, str]:
    """Tell whether a program ended well, and count its rows or quote its last line."""
    failed = [f"{row['check']} {row['where']}: {row['text']}" for row in rows if row["outcome"] == "FAILED"]
    said = [line for line in (done.stdout + done.stderr).splitlines() if any(map(str.isalnum, line))]  # and no frames
    last = said[-1] if said else "no output"
    text = f"{len(rows) - len(failed)} of {len(rows)} lines passed" if rows else last
    return done.returncode == 0, "; ".join([text, *failed[:5]])


def _read_figures(path: Path) -> dict[str, float]:
    """Read the medians of a run's metrics, over its steps from the third on."""
    rows = [json.loads(line) for line in path.open(encoding="utf-8")] if path.exists() else []
    steps = [row for row in rows if "time_step" in row][2:]
    found = {name: [row[name] for row in steps if row.get(name) is not None] for name in _MEASURED}
    return {name: statistics.median(values) for name, values in found.items() if values}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=[*PLATFORMS], required=True, help="kind of machine")
    parser.add_argument("--model", default="", help="HuggingFace folder; without it a tiny model is made")
    parser.add_argument("--devices", type=int, default=1, help="number of devices to use")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run")
    parser.add_argument("--parts", default="", help="parts of the device check, as its --only; empty takes all")
    parser.add_argument("--only", default="", help="run the lines whose names contain this text, or one of A|B")
    parser.add_argument("--retry", action="store_true", help="run lines again that failed in an earlier call")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no line after so many minutes")
    parser.add_argument("--line-minutes", type=float, default=60, help="end a line after so many minutes")
    parser.add_argument("--installed", default="", help="profile and seconds of the installation, like cpu:90")
    parser.add_argument("--folder", type=Path, default=Path("runs/first_day"), help="for logs, rows and runs")
    parser.add_argument("--json", type=Path, default=Path("first_day.json"), help="file for the report")
    return parser.parse_args()


def main() -> None:
    """Run the command line; exit status 1 where a line failed."""
    options = parse_arguments()
    day = Day(options)
    runs, day.report["not_run"] = plan_runs(day.platform, options.devices)
    if options.installed and not day.find_kept("install"):
        profile, seconds = options.installed.split(":")
        day.write(Line("install", "ok", "executed", f"scripts/setup.sh {profile}", float(seconds)))
    steps: dict[str, Callable[[], None]] = {"device check": partial(day.check_device, options.parts)}
    steps |= {name: partial(day.check_model, name, arguments) for name, arguments in plan_checks(day.platform).items()}
    steps |= {name: partial(day.train, name, arguments) for name, arguments in runs.items()}
    steps |= {name: partial(day.train_shape, name, shape) for name, shape in plan_shapes(day.platform).items()}
    later = []
    for name, step in steps.items():
        if not any(text in name for text in options.only.split("|")):
            continue
        if kept := day.find_kept(name):
            day.show(kept)
        elif day.count_left() > 0:
            step()
        else:
            later.append(name)
    if later:
        print(f"left for another call, by --minutes: {', '.join(later)}")
    for name, reason in day.report["not_run"].items():
        print(f"not run           {name}: {reason}")
    print(f"{options.json} says all of it; please send it to the project, whatever it says")
    newest = {line.name: line.outcome for line in day.lines}
    sys.exit("FAILED" in newest.values())


if __name__ == "__main__":
    main()
