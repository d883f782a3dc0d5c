"""The ``rlworker`` command, also as ``python -m rlworker``."""

import argparse
import importlib.util
import json
import os
import runpy
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import tyro
from tyro.conf import Positional

from rlworker.base.errors import RunError
from rlworker.base.findings import Finding, format_table
from rlworker.checks.config import BisectConfig, CheckConfig
from rlworker.config.command_line import parse_config
from rlworker.data.starters.new import Kind, make_starter
from rlworker.tracking.report.compare import write_comparison
from rlworker.tracking.report.page import write_report
from rlworker.tracking.report.serve import serve_report


def report(run: Positional[Path], serve: bool = False, host: str = "127.0.0.1", port: int = 0) -> None:
    """Draw a run folder into its report.html, or show it in a browser while the run goes on.

    Args:
        run: Folder of the run.
        serve: Show the report in a browser, drawn anew as the run writes; nothing is written into the folder.
        host: Address at which serve listens. At any other than loopback the page's address has a token.
        port: Port of serve; 0 takes a free one.
    """
    if serve:
        serve_report(run, host, port)
        return
    print(write_report(run))


def new(folder: Positional[Path], kind: Kind = "text") -> None:
    """Write a recipe, ten rows and a reward into a new folder. They run as written on a tiny model.

    Args:
        folder: Folder to make; one that is there already is not touched.
        kind: What the rows are: text, images, or questions that a tool helps with.
    """
    for path in make_starter(folder, kind):
        print(path)
    print(f"try it:   python {folder}/recipe.py --smoke")
    print(f"train:    python {folder}/recipe.py --model FOLDER")


def compare(runs: Positional[tuple[Path, ...]], output: Path | None = None) -> None:
    """Compare runs on a page: settings that differ, curves over steps, tokens and seconds, samples side by side.

    Args:
        runs: Folders of two runs or more.
        output: File of the page; left out, compare.html in the folder of the first run.
    """
    print(write_comparison(runs, output))


def check(config: CheckConfig) -> None:
    """Prove masks, layouts, logprobs and weight sync on this machine; exit status 1 where one of them fails.

    Args:
        config: Settings of the check.
    """
    _, self_test = _import_checks()
    _print_findings(self_test.check_machine(config, _make_teller()), config.json)


def plan(arguments: Positional[tuple[str, ...]] = ()) -> None:
    """Plan the batches, the padding and the memory of each process of a recipe, before anything starts.

    Exit status 1 where it does not fit.

    Args:
        arguments: RECIPE [--memory-gb N] [--forecast MACHINE] [--run-shapes [RANK ...]] [its settings], like
            recipes.grpo --model FOLDER --actor.ranks 2. RECIPE is a module's name, or a file's path like ./own.py.
            Without --memory-gb a device has the memory of the platform's own. --forecast tells the seconds of a step on
            h100, h200, b200, 910b, 910c or cpu. --run-shapes runs trainer ranks without their machine: the first of the
            first, a middle and the last stage, and the last, or those named.
    """
    from rlworker.checks.plan.recipe import plan_recipe

    parser = argparse.ArgumentParser("rlworker plan", add_help=False)
    parser.add_argument("recipe")
    parser.add_argument("--memory-gb", type=float, default=0.0)
    parser.add_argument("--forecast", default="", metavar="MACHINE")
    parser.add_argument("--run-shapes", type=int, nargs="*")
    options, settings = parser.parse_known_args(arguments)
    text, fits = plan_recipe(options.recipe, settings, options.memory_gb, options.run_shapes, options.forecast)
    print(text)
    sys.exit(not fits)


def evaluate(arguments: Positional[tuple[str, ...]] = ()) -> None:
    """Evaluate a model on the held-out rows of a recipe, by its reward or environment. Nothing is trained.

    It is the recipe's own command with --model MODEL --evaluate.

    Args:
        arguments: MODEL RECIPE [its settings], like runs/mine/checkpoints/step_40 recipes.grpo --run-dir runs/mine
            --data.heldout heldout.jsonl. MODEL is a run's checkpoint, a HuggingFace folder or hf:ORG/NAME. RECIPE is a
            module's name, or a file's path like ./own.py.
    """
    if len(arguments) < 2:
        raise ValueError("evaluate: give MODEL RECIPE [its settings]; rlworker evaluate --help explains them")
    model, recipe, *settings = arguments
    is_file, advice = recipe.endswith(".py"), "give a module such as recipes.grpo or a recipe's file, such as ./own.py"
    sys.path.insert(0, str(Path(recipe).resolve().parent) if is_file else "")  # as python FILE and python -m have it
    if is_file and not Path(recipe).is_file():
        raise ValueError(f"evaluate: {recipe!r} is no file; {advice}")
    try:
        is_there = is_file or importlib.util.find_spec(recipe) is not None
    except (ImportError, ValueError):  # a package before the last dot is none, or the name is no name
        is_there = False
    if not is_there:
        raise ValueError(f"evaluate: there is no module {recipe!r}; {advice}")
    sys.argv = [recipe, *settings, "--model", model, "--evaluate"]
    if is_file:
        runpy.run_path(recipe, run_name="__main__")
    else:
        runpy.run_module(recipe, run_name="__main__", alter_sys=True)


def replay(arguments: Positional[tuple[str, ...]] = ()) -> None:
    """Compute a kept step anew, here or on another machine, and name the first place that differs beyond rounding.

    Exit status 1 where one does.

    Args:
        arguments: CAPSULE [settings], like runs/mine/capsules/step_3 --platform cpu --actor.tp 1. Settings that are
            left out are the capsule's.
    """
    from rlworker.tracking.capsule import replay as command

    default = command.make_default_config(arguments[0]) if arguments else command.ReplayConfig()
    config = parse_config(default, (replay.__doc__ or "").partition("\n")[0], arguments, "rlworker replay")
    _print_findings(command.run_replay(config, _make_teller()), config.json)


def bisect(config: BisectConfig) -> None:
    """Name the first layer of trainer or rollout engine that differs from HuggingFace by more than rounding.

    HuggingFace computes each layer anew from the states that the engine had before it. Exit status 1 where one differs.

    Args:
        config: Settings of the comparison.
    """
    comparison, _ = _import_checks()
    _print_findings(comparison.run_bisect(config, _make_teller()), config.json)


def _import_checks():
    """Import what starts engines and compares them, which takes seconds; other commands do without."""
    from rlworker.checks import bisect, self_test

    return bisect, self_test


def _make_teller() -> Callable[[str], None]:
    """Return a function that prints a line with the seconds since now."""
    start = time.monotonic()
    return lambda line: print(f"{time.monotonic() - start:6.0f} s  {line}", file=sys.stderr, flush=True)


def _print_findings(findings: Sequence[Finding], as_json: bool) -> None:
    """Print findings as a table or as JSON, and end the program with status 1 where one of them failed."""
    rows = [asdict(finding) for finding in findings]
    print(json.dumps(rows, indent=1) if as_json else format_table(findings))
    sys.exit(any(finding.outcome == "FAILED" for finding in findings))


def main() -> None:
    """Run the command line."""
    commands: dict[str, Callable] = {
        each.__name__: each for each in (bisect, check, compare, evaluate, new, plan, replay, report)
    }
    command, arguments = "".join(sys.argv[1:2]), sys.argv[2:]
    own = partial(parse_config, args=arguments, prog=f"rlworker {command}")
    try:
        try:
            if command in ("evaluate", "plan", "replay") and not {"-h", "--help"} & set(arguments[:1]):
                commands[command](tuple(arguments))  # its settings are those of what it names first
            elif command == "bisect":
                bisect(own(BisectConfig(), (bisect.__doc__ or "").partition("\n")[0]))
            elif command == "check":
                check(own(CheckConfig(), (check.__doc__ or "").partition("\n")[0]))
            else:
                tyro.extras.subcommand_cli_from_dict(commands, prog="rlworker", description="RL post-training.")
        finally:
            sys.stdout.flush()
    except (ValueError, RunError) as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):  # it has its reader: another pipe broke
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest once more as it ends
        sys.exit(1)


if __name__ == "__main__":
    main()
