import json

import torch

from engines.batch.batch import TrainBatch
from recipes.common.addition import make_tokenizer
from rlworker.trainers.rejected_step import find_offending_rows, save_rejected


def make_batch(**columns) -> TrainBatch:
    return TrainBatch.from_ids([[14, 15, 16], [17], [18, 19], [20, 21, 22, 23]], [1, 1, 1, 2], **columns)


def test_the_rows_with_broken_numbers_are_found():
    advantages = torch.tensor([0.0, 1.0, float("inf"), 0.0, 0.0, 0.0])
    rewards = torch.tensor([float("nan"), 0.0, 1.0, 1.0])
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, float("nan")])
    found = find_offending_rows(make_batch(advantages=advantages, rewards=rewards), {"logprobs": logprobs})
    assert found == {0: ["rewards"], 2: ["advantages"], 3: ["now_logprobs"]}
    assert find_offending_rows(make_batch(), {"values": torch.zeros(6)}) == {0: [], 1: [], 2: [], 3: []}


def test_entries_that_are_not_used_are_no_broken_numbers(tmp_path):
    top = torch.zeros(6, 2)
    top[0, 1], top[5, 0] = float("-inf"), float("nan")
    batch = make_batch(rollout_top_logprobs=top)
    assert find_offending_rows(batch, {}) == {3: ["rollout_top_logprobs"]}
    assert save_rejected(tmp_path / "rejected" / "step.jsonl", batch, {}, make_tokenizer()) == 1


def test_rows_are_written_as_json_that_any_reader_takes(tmp_path):
    batch, file = make_batch(advantages=torch.tensor([0.0, 1.0, float("-inf")] + [0.0] * 3)), tmp_path / "a" / "b.jsonl"
    assert save_rejected(file, batch, {"logprobs": torch.zeros(6)}, make_tokenizer()) == 1
    refuse = lambda word: (_ for _ in ()).throw(AssertionError(word))  # noqa: E731
    (line,) = file.read_text().splitlines()
    row = json.loads(line, parse_constant=refuse)
    assert row["ids"] == [18, 19] and row["advantages"] == ["-inf"] and row["not_finite"] == ["advantages"]
