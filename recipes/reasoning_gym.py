"""GRPO on a procedural task of reasoning-gym (Stojanovski et al. 2025, https://arxiv.org/abs/2505.24760).

    python -m recipes.reasoning_gym --model FOLDER                              sums of two terms
    python -m recipes.reasoning_gym --model FOLDER --task gcd --difficulty max_value=60
    python -m recipes.reasoning_gym --model FOLDER --shots 3 --shot-answer "It is {answer}." --data.instruction ""

``bash scripts/setup.sh reasoning`` installs the package. Questions are drawn by its generators, answers scored by the
task's own ``score_answer``. Held-out questions come from another seed. The sizes are those of a model of 135 million
parameters on two cores.
"""

import json
import sys
from ast import literal_eval
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from recipes.common.numbers import find_expression, is_number, normalise
from rlworker import (
    AlgorithmConfig,
    DataConfig,
    MegatronConfig,
    OptimizerConfig,
    Row,
    RunConfig,
    VllmConfig,
    launch,
    one_turn,
    parse_config,
)

factory: Any = None
utils: Any = None
with suppress(ImportError):  # here, so that a process that scores imports it before it is timed
    from reasoning_gym import factory, utils  # pyright: ignore[reportMissingImports]  in no list of pins

EASY = {"chain_sum": ("min_terms=2", "max_terms=2", "min_digits=1", "max_digits=2")}
"""Settings of a generator where none are given."""
_DATASETS: dict[str, Any] = {}  # what functools caches is pickled by its name, which no worker knows
MOST_ROWS = 1_000_000
"""Rows of a seed, before those of the next begin."""


@dataclass(frozen=True)
class ReasoningConfig(RunConfig):
    """Settings of the recipe: a RunConfig and the task that rows are drawn from."""

    task: str = "chain_sum"
    """A generator of reasoning-gym by its name."""
    difficulty: tuple[str, ...] = ()
    """Settings of the generator, for instance min_terms=2; other settings keep the package's defaults. Without any,
    chain_sum has two terms of one or two digits."""
    train_rows: Annotated[int, Ge(1), Le(MOST_ROWS)] = 4096
    """Questions drawn to learn from, less those that are held out."""
    heldout_rows: Annotated[int, Ge(1), Le(MOST_ROWS)] = 200
    """Questions drawn from another seed, never trained on."""
    shots: Annotated[int, Ge(0), Le(64)] = 0
    """Answered questions that stand before every question, as earlier turns of the chat. The model takes their form of
    an answer, so that no form is left to learn."""
    shot_answer: str = "{answer}"
    """The text of an answer in these turns; {answer} stands for the answer itself."""
    shuffle_rewards: bool = False
    """Control: hand out the same rewards, or distributions of a teacher, at random. The model must then not get
    better."""


DEFAULT = ReasoningConfig(
    run_dir="runs/reasoning_gym",
    data=DataConfig(max_prompt_tokens=256, instruction="Answer with the number alone."),
    actor=MegatronConfig(
        ranks=2,
        micro_batch_tokens=1024,
        optimizer=OptimizerConfig(lr=2e-5, lr_scheduler="constant"),
    ),
    rollout=VllmConfig(max_new_tokens=16, max_model_len=512, max_num_seqs=64, kv_cache_mb=512),
    # So much that answers that are rare at first, such as negative numbers, are still sampled after many steps.
    algorithm=AlgorithmConfig(kl_coef=0.15),
    steps=60,
    prompts_per_step=8,
    samples_per_prompt=16,
    eval_every=10,
)


def parse_difficulty(settings: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` settings; a value that is no Python literal is text.

    Raises:
        ValueError: one has another form.
    """
    difficulty = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name.isidentifier() and equals):
            raise ValueError(f"difficulty: {setting!r} is not NAME=VALUE; write --difficulty max_terms=2 max_digits=1")
        try:
            difficulty[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            difficulty[name] = value
    return difficulty


def make_dataset(task: str, difficulty: dict[str, Any], seed: int, size: int):
    """Make a task's data set; rows are generated on access.

    Raises:
        ValueError: the package is missing, or does not have the task or the setting.
    """
    if factory is None:
        raise ValueError("reasoning_gym cannot be imported; install it by bash scripts/setup.sh reasoning")
    try:
        return factory.create_dataset(task, seed=seed, size=size, **difficulty)
    except (ValueError, TypeError, AssertionError) as error:
        names = ", ".join(sorted(factory.DATASETS))
        raise ValueError(f"task {task!r} with {difficulty}: {error}; the tasks are {names}") from None


def make_turns(config: ReasoningConfig, difficulty: dict[str, Any], seed: int) -> list[dict[str, str]]:
    """Make the messages that stand before every question: questions and their answers, by turns."""
    if "{answer}" not in config.shot_answer:
        raise ValueError(f"shot_answer: {config.shot_answer!r} has no {{answer}}; write 'The answer is {{answer}}.'")
    shown = make_dataset(config.task, difficulty, seed, config.shots) if config.shots else ()
    return [
        message
        for entry in shown
        for message in (
            {"role": "user", "content": entry["question"]},
            {"role": "assistant", "content": config.shot_answer.replace("{answer}", str(entry["answer"]))},
        )
    ]


def write_rows(config: ReasoningConfig) -> ReasoningConfig:
    """Write the rows of the run beside its folder; returns the settings that name their files.

    A question that is held out, or shown with its answer, is no row to learn from, wherever else the generator draws
    it. A file that is there was written for the same run, and stays as it is.

    Raises:
        ValueError: there are rows of another task, difficulty or seed, or none is left to learn from.
    """
    difficulty = parse_difficulty(config.difficulty or EASY.get(config.task, ()))
    folder, first = Path(f"{config.run_dir}_data"), config.seed * 2 * MOST_ROWS
    # A generator draws row i from the seed plus i, so that neighbouring seeds share their rows.
    turns = make_turns(config, difficulty, first + MOST_ROWS + config.heldout_rows)
    files, taken = {}, {message["content"] for message in turns}
    for name, seed, size in (
        ("heldout", first + MOST_ROWS, config.heldout_rows),
        ("train", first, config.train_rows),
    ):
        draw = {"task": config.task, "difficulty": difficulty, "seed": seed, "size": size}
        entries = [(index, entry) for index, entry in enumerate(make_dataset(**draw)) if entry["question"] not in taken]
        if not entries:
            raise ValueError(f"task {config.task!r}: every question is held out; raise --train-rows or the difficulty")
        taken |= {entry["question"] for _, entry in entries}
        rows = [
            {
                "prompt": [*turns, {"role": "user", "content": entry["question"]}] if turns else entry["question"],
                "answer": str(entry["answer"]),
                "draw": draw,
                "index": index,
            }
            for index, entry in entries
        ]
        text, path = "".join(json.dumps(row) + "\n" for row in rows), folder / f"{name}.jsonl"
        if path.exists() and path.read_text() != text:
            raise ValueError(f"{path} has rows of another task, difficulty or seed; choose another --run-dir")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        files[name] = str(path)
    return replace(config, data=replace(config.data, **files))


def find_answer(text: str, row: Row) -> str:
    """Find the answer in a text: the content of its last <answer> tags; else its last number where a number is
    expected, or as many of its last lines as the row's answer has."""
    if (tagged := utils.extract_answer(text)) is not None:
        return tagged
    # A task that spells its numbers otherwise, such as by a sign of multiplication, reads a text's own spelling alone.
    if is_number(row.answer) and normalise(row.answer) == row.answer:
        return find_expression(text).replace(",", "")
    lines = row.answer.strip().count("\n") + 1
    return "\n".join(text.strip().split("\n")[-lines:]).strip()


def reward(text: str, row: Row) -> float:
    """Score the answer of a text as its task does."""
    draw = row.source["draw"]
    if (key := json.dumps(draw)) not in _DATASETS:
        _DATASETS[key] = make_dataset(**draw)
    dataset, found = _DATASETS[key], find_answer(text, row)
    score = dataset.score_answer(found, dataset[row.source["index"]])
    # Many tasks give a part of 1 where the answer stands in a longer text. A number that stands in a longer one, as 4
    # does in 24 and in -4, is a wrong answer: a model that is paid for it learns to name longer numbers.
    is_other_number = score < 1 and row.answer in found and is_number(found)
    return 0.0 if is_other_number else score


def main() -> None:
    config = parse_config(DEFAULT, __doc__)
    try:
        config = write_rows(config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    parts: dict[str, Any] = {}
    if config.shuffle_rewards:
        from recipes.common.toys import make_control

        parts = make_control(config)
    launch(config, one_turn(reward, find_answer), **parts)


if __name__ == "__main__":
    main()
