"""Drawn weights in the shapes of released models: their sizes, their runs on a card, and the stand-ins on a CPU."""

import json
from unittest.mock import patch

import pytest
import torch

from hardware.platforms import get_platform
from recipes.common import shapes
from recipes.common.first_day import SHAPE_PLACES, SHAPE_SIZES, SIZES, plan_memory, plan_shapes
from recipes.common.shapes import SHAPES, make_shape
from recipes.grpo import DEFAULT
from rlworker.checks.tiny import models
from rlworker.config.command_line import parse_config

RELEASED = {"Qwen2.5-3B": 3_085_938_688, "Qwen2.5-VL-3B": 3_754_622_976, "Qwen3-VL-4B": 4_437_815_808}
"""Parameters of the released models."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_that_of_the_released_model_and_its_run_fits_a_card(tmp_path, name):
    """Drawn on a device that has shapes alone, of whose model the config.json is saved."""
    drawn = []

    def save(model, folder, apart=0.0, *, save_original_format=True):
        drawn.append(sum(parameter.numel() for parameter in model.parameters()))
        model.config.save_pretrained(folder)
        return str(folder)

    in_shapes = patch.object(shapes, "_drawing_on", lambda _: torch.device("meta"))
    with in_shapes, patch.multiple(models, save_apart=save, _name_as_released=lambda *_: None):
        folder = make_shape(name, tmp_path, get_platform("cuda"))
    assert drawn == [RELEASED[name]]
    rows = [json.loads(line) for line in (folder / "rows" / "train.jsonl").open()]
    assert len(rows) >= 16 and bool(SHAPES[name].vision) == ("images" in rows[0])
    settings = [
        "--model",
        str(folder / "model"),
        "--platform",
        "cuda",
        *SHAPE_PLACES,
        *SHAPE_SIZES,
        *SHAPES[name].options,
    ]
    settings += ["--data.train", str(folder / "rows" / "train.jsonl")]
    config = parse_config(DEFAULT, args=settings)
    assert config.placement.colocate and config.actor.dtype == config.rollout.dtype == "bfloat16"
    planned = plan_memory(settings)
    assert 40 < planned["memory_gb planned"] < 80 and 8 < planned["rollout_memory_gb planned"] < 20


def test_a_platform_without_devices_has_stand_ins(tmp_path):
    names = plan_shapes(get_platform("cuda"))
    others = plan_shapes(get_platform("cuda-emulated"))
    assert [*names.values()] == [*others.values()] == [*SHAPES] and not names.keys() & others.keys()
    folder = make_shape("Qwen3-VL-4B", tmp_path, get_platform("cuda-emulated"))
    assert sum(path.stat().st_size for path in (folder / "model").iterdir()) < 5e6
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["model_type"] == "qwen3_vl"
    settings = ["--model", str(folder / "model"), *SHAPE_PLACES, *SIZES]
    settings += ["--data.train", str(folder / "rows" / "train.jsonl")]
    assert parse_config(DEFAULT, args=settings).actor.dtype == "float32"
