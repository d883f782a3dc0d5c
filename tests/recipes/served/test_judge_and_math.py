"""The judge's recipe learns from verdicts alone: a judge that was taught to tell right sums from wrong teaches a policy
to add. Where the same rewards are handed out at random, it does not."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.program import run_recipe

from recipes.common.addition import make_data, make_model, write_rows
from rlworker.tracking.log import read_metrics

pytestmark = [pytest.mark.product, pytest.mark.timeout(3600), pytest.mark.usefixtures("cluster")]
FORM = 'verdict = "choice"\nprompt = "{{ row.sum }} {{ text }} "\noptions = {Y = 1, N = 0}\n'
STEPS = 10
SIZES = {
    "models.judge": dict(template="judge.toml", engines=1, max_model_len=32, weight=1),
    "data": dict(train="train.jsonl", heldout="heldout.jsonl", instruction="", max_prompt_tokens=8),
    "actor": dict(ranks=1, tp=1, dtype="float32", recompute="none"),
    "actor.optimizer": dict(lr=2e-4, lr_scheduler="constant", lr_warmup_steps=8, adam_beta2=0.99),
    "rollout": dict(engines=1, max_new_tokens=4, max_model_len=16, kv_cache_mb=64, dtype="float32", temperature=0.7),
    "environment": dict(workers=1),
    "checkpoint": dict(save_every=0),
}
"""Sections of the settings that are those of a tiny run. No answer is right as mathematics: the rows have none."""


def teach(folder: Path, seed: int, loss: float, rows: list[dict]) -> str:
    """Train a tiny model on rows with answers down to a loss, and return its folder."""
    from recipes.demos.cpu import ADDITION, DEFAULT

    data = replace(DEFAULT.data, train=str(write_rows(folder, {"train": rows}) / "train.jsonl"))
    sizes = dict(run_dir=str(folder), actor=replace(DEFAULT.actor, ranks=1), seed=seed, warm_up_loss=loss)
    config = replace(DEFAULT, model=str(make_model(folder / "random", seed)), data=data, **sizes)
    ADDITION.warm_up(config, str(folder / "taught"))
    return str(folder / "taught")


def draw_verdicts(count: int) -> list[dict]:
    """Draw a judge's questions and answers: an expected sum, and another text for half of them, often nearly equal."""
    random, rows = Random(0), []
    for _ in range(count):
        right = f"{random.randrange(199):03d}"
        text = right
        if random.random() < 0.5:
            place = random.randrange(3)
            near = f"{right[:place]}{random.randrange(10)}{right[place + 1 :]}"
            text = random.choice([near, near, f"{random.randrange(1000):03d}"])
        rows.append({"prompt": f"{right} {text} ", "answer": "NY"[text == right]})
    return rows


def count_right(folder: Path | str, rows: list[dict]) -> float:
    """The share of questions that a model answers with the sum, greedily, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    ids = torch.tensor(tokenizer([row["question"] for row in rows], add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    texts = tokenizer.batch_decode(said[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(text == row["sum"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def test_the_policy_learns_from_verdicts_and_the_control_does_not(tmp_path, monkeypatch, measured):
    rows = [json.loads(line) for line in (make_data(tmp_path / "sums") / "train.jsonl").read_text().splitlines()]
    policy = teach(tmp_path / "policy", 0, 0.5, rows)
    judge = teach(tmp_path / "judge", 1, 0.02, draw_verdicts(20000))
    asked = [{"question": row["prompt"], "answer": "?", "sum": row["answer"]} for row in rows]
    Random(0).shuffle(asked)
    write_rows(tmp_path, {"train": asked[:-256], "heldout": asked[-256:]})
    (tmp_path / "judge.toml").write_text(FORM)
    monkeypatch.chdir(tmp_path)
    options = [f"--{section}.{name}={value}" for section, sizes in SIZES.items() for name, value in sizes.items()]
    options += [f"--model={policy}", f"--models.judge.model={judge}", f"--steps={STEPS}", f"--eval-every={STEPS}"]
    options += ["--prompts-per-step=128", "--samples-per-prompt=8"]
    before, found = count_right(policy, asked[-256:]), {}
    for name, control in (("learned", ()), ("shuffled", ("--shuffle-rewards",))):
        done = run_recipe("served.judge_and_math", *options, "--run-dir", tmp_path / name, *control)
        assert done.returncode == 0, done.stderr
        start, *lines = read_metrics(tmp_path / name)
        assert all(line["reward"] == pytest.approx(line["reward_judge_mean"]) for line in lines)
        after = count_right(tmp_path / name / "checkpoints" / f"step_{STEPS}" / "hf", asked[-256:])
        found[name] = lines[-1]["heldout"] - start["heldout"], after - before
        measured({f"{name}: verdicts": lines[-1]["heldout"], f"{name}: right": after})
    measured({"verdicts before": start["heldout"], "right before": before})
    assert min(found["learned"]) > 0.2 and max(found["shuffled"]) < 0.02, found
