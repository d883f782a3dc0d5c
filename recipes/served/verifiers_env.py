"""GRPO on a taskset of ``verifiers`` (https://github.com/PrimeIntellect-ai/verifiers), played by its own harness.

    python -m recipes.served.verifiers_env --model FOLDER --taskset gsm8k-v1     an instruct model
    python -m recipes.served.verifiers_env --smoke                               sums, tiny, on a CPU

``bash scripts/setup.sh verifiers`` makes a Python with the package; ``--python`` names another one, with the tasksets
that are installed there. Harness and rewards are the taskset's. In full, which is untested: eight training ranks and
four vLLM engines, each on a device of 80 GB.
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from recipes.common.smoke import RecipeConfig, parse_recipe_config
from recipes.served import agent_openai
from rlworker import DataConfig, launch
from rlworker.environments.adapters.verifiers import VerifiersEnvironment
from rlworker.environments.adapters.verifiers_program import make_command


@dataclass(frozen=True)
class VerifiersConfig(RecipeConfig):
    """Settings of the recipe: a RecipeConfig and the taskset."""

    python: str = ".venv-verifiers/bin/python"
    """The interpreter that has the package and the taskset."""
    taskset: str = "gsm8k-v1"
    """A taskset by its name. Smoke takes the one beside this file."""
    harness: str = "null"
    """The harness by its name; null is a chat with the taskset's tools."""
    tool_parser: str = "hermes"
    """vLLM's parser of the model's tool calls; empty for a taskset without tools."""
    heldout_tasks: Annotated[int, Ge(1)] = 100
    """Tasks at the end of the taskset that are never trained on."""


def make_environment(config: VerifiersConfig) -> VerifiersEnvironment:
    """Make the environment of a taskset, its harness in processes of this machine."""
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": config.harness}}
    taskset, folder = ("sums_v1", str(Path(__file__).parent)) if config.smoke else (config.taskset, "")
    python = str(Path(config.python).absolute())  # processes of environments have another working directory
    return VerifiersEnvironment(python, {"taskset": {"id": taskset}, "agent": agent}, config.tool_parser, folder)


def write_rows(config: VerifiersConfig, environment: VerifiersEnvironment) -> VerifiersConfig:
    """Write the rows of the taskset beside the run's folder, and return the settings that name their files.

    Raises:
        ValueError: the interpreter is missing, or cannot load the taskset; there are rows of another taskset.
    """
    try:
        command = *make_command(environment.python, environment.settings, environment.tasksets), "rows"
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = (getattr(error, "stderr", "").strip() or str(error)).splitlines()[-1]
        raise ValueError(
            f"{environment.python} lists no tasks: {told}; make it by bash scripts/setup.sh verifiers, or name one "
            "that has the taskset by --python"
        ) from None
    lines, folder, files = done.stdout.splitlines(keepends=True), Path(f"{config.run_dir}_data"), {}
    if len(lines) <= config.heldout_tasks:
        raise ValueError(f"{len(lines)} tasks, all of them held out; lower --heldout-tasks={config.heldout_tasks}")
    parts = {"train": lines[: -config.heldout_tasks], "heldout": lines[-config.heldout_tasks :]}
    for name, part in parts.items():
        path = folder / f"{name}.jsonl"
        if path.exists() and path.read_text() != "".join(part):
            raise ValueError(f"{path} has rows of another taskset; choose another --run-dir")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(part))
        files[name] = str(path)
    return replace(config, data=replace(config.data, prompt_field="prompt", **files))


def main() -> None:
    config = parse_recipe_config(DEFAULT, __doc__)
    if config.smoke:  # each episode starts a process of the harness
        config = replace(config, prompts_per_step=4, samples_per_prompt=2, heldout_tasks=4)
    environment = make_environment(config)
    try:
        config = write_rows(config, environment)
    except ValueError as error:
        sys.exit(f"error: {error}")
    launch(config, environment)


_OWN: dict[str, Any] = dict(
    run_dir="runs/verifiers_env",
    data=DataConfig(max_prompt_tokens=1024),
    # A harness is a program that starts, which counts.
    environment=replace(agent_openai.DEFAULT.environment, time_limit_s=300.0),
)
DEFAULT = VerifiersConfig(**vars(agent_openai.DEFAULT) | _OWN)

if __name__ == "__main__":
    main()
