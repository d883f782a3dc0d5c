"""The runs of a card's first day: their options are options of a run."""

import pytest

from hardware.platforms import get_platform
from recipes.common.addition import make_data, make_model
from recipes.common.first_day import SIZES, plan_runs
from recipes.grpo import DEFAULT
from rlworker.config.command_line import parse_config


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first_day")
    make_data(folder / "rows")
    make_model(folder / "model", seed=0)
    return ["--model", str(folder / "model"), "--data.train", str(folder / "rows" / "train.jsonl")]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("platform", ["cuda", "cuda-emulated"])
def test_its_runs_are_runs(platform, devices, named):
    """Each way of weights of the platform is one of them, as far as there are devices, or has a reason."""
    runs, not_run = plan_runs(get_platform(platform), devices)
    ways = {False: set(), True: set()}
    for options in runs.values():
        config = parse_config(DEFAULT, args=[*named, "--platform", platform, *SIZES, *options])
        ways[config.placement.colocate].add(config.rollout.weight_transfer)
    for colocated in (False, True):
        expected = set(get_platform(platform).find_weight_ways(colocated)) if colocated or devices > 1 else set()
        assert ways[colocated] - {"auto"} == expected
    assert not set(runs) & set(not_run) and all(not_run.values())
