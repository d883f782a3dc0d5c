"""Supervised training: its loss against HuggingFace, a run that is cut short, and what is refused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from recipes.common.smoke import SftRecipeConfig, shrink_supervised
from recipes.sft import DEFAULT
from rlworker.config.sections import CheckpointConfig, DataConfig
from rlworker.config.sft import SftConfig
from rlworker.data.rows import load_tokenizer
from rlworker.tracking.log import read_metrics


def make_config(folder: Path) -> SftRecipeConfig:
    data = DataConfig(instruction="Reason step by step, and end with #### and the final answer.")
    config = shrink_supervised(replace(DEFAULT, run_dir=str(folder / "sft"), data=data))
    optimizer = replace(config.actor.optimizer, lr=1e-2, lr_warmup_steps=0, lr_scheduler="constant")
    actor = replace(config.actor, optimizer=optimizer)
    half = folder / "half.jsonl"
    half.write_text("".join(Path(config.data.heldout).read_text().splitlines(keepends=True)[::2]))
    data = replace(config.data, heldout_sets={"half": str(half)})
    return replace(config, actor=actor, data=data, steps=3, checkpoint=CheckpointConfig(save_every=1), eval_every=1)


@pytest.fixture
def config(tmp_path) -> SftRecipeConfig:
    return make_config(tmp_path)


def make_trainer(config: SftConfig):
    from rlworker.trainers.sft import SftTrainer

    return SftTrainer(config)


def fit(config: SftConfig) -> Path:
    with make_trainer(config) as trainer:
        trainer.fit()
    return Path(config.run_dir)


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory) -> SftRecipeConfig:
    """The settings of a run that has gone on to its end."""
    config = make_config(tmp_path_factory.mktemp("finished"))
    fit(config)
    return config


def heldout_loss(model: str, config: SftConfig, name: str = "") -> float:
    """Mean over the answers' tokens, their ends included: transformers' own loss of labels, a row at a time, from text.

    This is the second oracle of the loss: no batch, mask or reference of ours has a part in it.
    """
    from transformers import AutoModelForCausalLM

    tokenizer, model = load_tokenizer(config.model), AutoModelForCausalLM.from_pretrained(model)
    total, count = 0.0, 0
    for line in Path(config.data.heldouts[name]).open():
        row = json.loads(line)
        messages = [{"role": "user", "content": f"{row['question']}\n\n{config.data.instruction}"}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        start, whole = (tokenizer(text)["input_ids"] for text in (prompt, prompt + row["answer"]))
        ids = torch.tensor([[*whole, tokenizer.eos_token_id]])
        labels, answer = ids.clone(), ids.shape[1] - len(start)
        labels[0, : len(start)] = -100  # transformers leaves these out, and shifts the others itself
        with torch.no_grad():
            total, count = total + answer * float(model(ids, labels=labels).loss), count + answer
    return total / count


def test_the_loss_is_huggingfaces_and_falls(finished):
    config, run = finished, Path(finished.run_dir)
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["heldout_loss"] == pytest.approx(heldout_loss(config.model, config), abs=1e-5)
    assert lines[-1]["heldout_loss"] == pytest.approx(heldout_loss(f"{run}/checkpoints/step_3/hf", config), abs=1e-5)
    assert lines[-1]["heldout_loss"] < 0.95 * lines[0]["heldout_loss"]
    assert (run / "report.html").stat().st_size < 10**6 < (run / "plotly.min.js").stat().st_size
    assert all(line["flops_per_second"] > 0 and line["memory_gb"] > 0.2 for line in lines[1:])
    half = heldout_loss(f"{run}/checkpoints/step_3/hf", config, "half")
    assert lines[-1]["heldout/half_loss"] == pytest.approx(half, abs=1e-5) != lines[-1]["heldout_loss"]


def test_a_resumed_run_is_the_unbroken_one(finished, tmp_path, capsys):
    """Of a run that was cut off after its first step; the second is traced this time."""
    config, whole, part = finished, Path(finished.run_dir), tmp_path / "part"
    shutil.copytree(whole, part)
    for step in (2, 3):
        shutil.rmtree(part / "checkpoints" / f"step_{step}")
    capsys.readouterr()
    fit(replace(config, run_dir=str(part), resume=True, profile_steps="2:2"))
    traces = {str(path.relative_to(part / "profile")) for path in part.glob("profile/*/*")}
    assert {f"step_2/update.actor_rank_{rank}.json.gz" for rank in range(config.actor.ranks)} <= traces
    assert all(trace.startswith("step_2/") for trace in traces)
    told = [line.split("s  ", 1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("start ")]
    read, *rest = told
    assert re.fullmatch(r"rows are read: \d+ to train on, \d+ held out", read)
    assert rest == [f"trainer ranks are up: {config.actor.ranks}", "step 1 is restored"]
    keys = ("step", "train_loss", "heldout_loss", "grad_norm", "lr")
    found = [[{key: line.get(key) for key in keys} for line in read_metrics(run)] for run in (whole, part)]
    assert found[0] == found[1]
    weights = [load_file(next(run.glob("checkpoints/step_3/hf/*.safetensors"))) for run in (whole, part)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_that_goes_on_with_another_batch_takes_the_rows_that_come_next(config):
    """Half an epoch of sixteen rows in steps of four, the rest in steps of two: every row once."""
    taken, state = [], {"step": 0}
    for rows_per_step, steps in ((4, 2), (2, 4)):
        trainer = make_trainer(replace(config, rows_per_step=rows_per_step))
        take = lambda batch, *_: (taken.extend(batch.split(len(batch))), ({"loss": 0.0, "grad_norm": 0.0}, None))[1]  # noqa: E731
        trainer.group, trainer.list_learners = SimpleNamespace(train_step=take), list
        trainer.restore(state)
        for _ in range(steps):
            trainer.step()
        state = {"step": 2} | trainer.get_state()
    rows = {tuple(row.targets.tolist()) for row in taken}
    assert len(taken) == len(rows) == 16 and state["rows"] == 16


def test_long_answers_are_an_error_or_left_out(config):
    short = replace(config, max_answer_tokens=20)
    with pytest.raises(ValueError, match=r"has \d+ tokens and an end, expected at most 20; raise --max-answer-tokens"):
        make_trainer(short)
    trainer = make_trainer(replace(short, data=replace(config.data, skip_long_prompts=True)))
    answers = [json.loads(line)["answer"] for line in Path(config.data.train).open()]
    kept = [answer for answer in answers if len(answer) < 20]  # a token a character
    assert 0 < len(trainer.train) == len(kept) < len(answers)
    assert trainer.skipped["skipped_train"] == len(answers) - len(kept)
    with pytest.raises(ValueError, match="all answers are longer than 2 tokens"):
        make_trainer(replace(short, data=replace(config.data, skip_long_prompts=True), max_answer_tokens=2))


def test_what_cannot_work_is_refused_before_anything_starts(config):
    from rlworker.trainers.launch import launch_supervised

    with pytest.raises(ValueError, match="rows_per_step=1 leaves some of 2 data-parallel ranks"):
        replace(config, rows_per_step=1)
    with pytest.raises(ValueError, match="slots=64 does not hold the longest sequence, 256 tokens, which takes 255"):
        replace(config, actor=replace(config.actor, slots=64))
    with pytest.raises(ValueError, match="= 392 is above the model's 256 positions"):
        make_trainer(replace(config, max_answer_tokens=200))
    Path(config.run_dir).mkdir(parents=True)
    (Path(config.run_dir) / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"error: run_dir: .* already holds a run"):
        launch_supervised(config)
