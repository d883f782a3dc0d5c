"""``rlworker bisect``: the first layer that differs from HuggingFace by more than rounding."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from support.models import make_vlm

from engines.batch.batch import TrainBatch
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from rlworker.checks.config import BisectConfig


def test_a_layer_of_the_trainer_is_named(one_rank, make_hf_model):
    """Each prompt is computed once."""
    from support.ranks.capsule_cases import make_groups, mend_difference, plant_difference
    from support.ranks.pool_group import PoolGroup

    from rlworker.checks.bisect import judge, take_trainer_states
    from rlworker.checks.trainer import CheckedTrainer

    model = ModelSpec.from_folder(make_hf_model("qwen2", False))
    group, batch = PoolGroup(one_rank, model, {"micro_batch_tokens": 64, "share": "prompts"}), make_groups(99)
    call_ranks = lambda function, *args: group.run(f"engines.probes.megatron:{function}", *args)  # noqa: E731
    trainer = CheckedTrainer("cpu", group.role.config, model, cast(Any, None), None, call_ranks)
    states = take_trainer_states(trainer, "thd", batch, group.role.temperature)
    found = judge(model, batch, states)
    assert found[0], found
    one_rank.run(plant_difference, "a norm's eps", (1, 12))
    found = judge(model, batch, take_trainer_states(trainer, "thd", batch, group.role.temperature))
    one_rank.run(mend_difference)
    assert not found[0] and found[1].startswith("layer 2 is the first") and found[1].endswith("no other does"), found
    states.stages[3][40, 0] = torch.nan
    assert judge(model, batch, states)[1].startswith("layer 3 is the first that differs: rms nan"), states


def test_the_place_is_that_of_the_batch_where_targets_of_images_do_not_count(monkeypatch):
    from rlworker.checks import bisect

    batch = TrainBatch.from_ids([[1, 99, 99, 99, 5, 6], [7, 8, 9, 10, 11]], [4, 1])
    rows = {number: torch.ones(batch.num_tokens, 4) for number in range(2)}
    states = bisect.States("float32", 1.0, (99,), rows, torch.zeros(batch.num_tokens))
    states.logprobs[7] = 1.0
    anew = lambda model, batch, given, *_: replace(given, logprobs=torch.zeros(batch.num_tokens).double())  # noqa: E731
    monkeypatch.setattr(bisect, "compute_anew", anew)
    passed, text = bisect.judge(cast(ModelSpec, SimpleNamespace(banned_tokens=(99,))), batch, states)
    assert not passed and "at sequence 1, position 2 (id 9)" in text


def test_rows_are_read_or_refused_by_line(tmp_path):
    from rlworker.checks.bisect import read_rows, run_bisect

    path, text = tmp_path / "rows.jsonl", cast(ModelSpec, SimpleNamespace(vocab=10, vision=None))
    path.write_text('{"ids": [5, 6, 7]}\n{"ids": [8, 9], "row": 3}\n')
    batch = read_rows(str(path), 8, text)
    sees = ModelSpec.from_folder(make_vlm(tmp_path / "model", "qwen2_5_vl"))
    assert read_rows(str(path), 8, sees).positions.tolist() == [[0] * 3, [1] * 3, [0] * 3], "of three axes"
    assert batch.lengths == (2, 1) and batch.inputs.tolist() == [5, 6, 8] and batch.targets.tolist() == [6, 7, 9]
    for line, message in (
        ('{"ids": [5]}', r"rows.jsonl:1: expected 2 to 8 ids under 'ids', fewer than rollout.max_model_len"),
        ('{"ids": [5, 6], "images": [{"path": "a.png"}]}', "rows.jsonl:1: has images; leave out --rows"),
        ("[5", "is no JSONL file"),
        (
            '{"ids": [5, 10]}',
            "rows.jsonl:1: has ids from 5 to 10, expected 0 to 9; name the model",
        ),
    ):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=message):
            read_rows(str(path), 8, text)
    path.write_text("")
    with pytest.raises(ValueError, match="has no line; leave it out"):
        read_rows(str(path), 8, text)
    with pytest.raises(ValueError, match=r"expected a model's folder or hf:ORG/NAME, got none; name it after bisect"):
        run_bisect(BisectConfig(), print)


def test_a_checkpoint_is_its_weights_and_a_row_leaves_room_for_a_token(make_hf_model, tmp_path, monkeypatch):
    """vLLM, which scores a row, samples a token after it."""
    from rlworker.checks import bisect

    (tmp_path / "step_40").mkdir()
    (tmp_path / "step_40" / "hf").symlink_to(make_hf_model("qwen2", False))
    started, rows = Mock(side_effect=InterruptedError), tmp_path / "rows.jsonl"
    monkeypatch.setattr(bisect, "start_engines", started)
    sizes = VllmConfig(max_new_tokens=8, max_model_len=32, kv_cache_mb=256)
    config = BisectConfig(str(tmp_path / "step_40"), rows=str(rows), rollout=sizes)
    rows.write_text(json.dumps({"ids": [1] * 31}))
    with pytest.raises(InterruptedError):
        bisect.run_bisect(config, print)
    assert started.call_args[0][0].model == str(tmp_path / "step_40" / "hf")
    rows.write_text(json.dumps({"ids": [1] * 32}))
    with pytest.raises(ValueError, match="expected 2 to 31 ids under 'ids'"):
        bisect.run_bisect(config, print)
