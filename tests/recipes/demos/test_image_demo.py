"""Rollouts that read images causally are stopped in the first step, by the trainer's own logprobs."""

import json
from dataclasses import replace
from functools import partial

import pytest

from rlworker.tracking.log import read_metrics


@pytest.mark.large
@pytest.mark.usefixtures("cluster")
def test_the_rule_left_out_is_found_in_the_first_step(tmp_path, monkeypatch, measured):
    """The demo from end to end, its warm-up too short to learn anything."""
    from recipes.common import twins
    from recipes.common.toys import prepare
    from recipes.demos import image_rule
    from rlworker.trainers.stop import Stop

    make_data = partial(twins.make_data, counts={"train": 32, "heldout": 16})
    toy = replace(image_rule.TWINS, make_data=make_data)
    monkeypatch.setattr(image_rule, "TWINS", toy)
    short = dict(run_dir=str(tmp_path / "run"), steps=2, warm_up_steps=3, prompts_per_step=16, eval_every=0)
    config, folder = prepare(replace(image_rule.DEFAULT, **short), toy)
    folder.release()
    image_rule.main(config, Stop())
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    measured({f"{name}, mean": run["logprob_diff_mean"] for name, run in found.items() if run["steps"]})
    assert found["with_rule"]["steps"] == 2 and found["with_rule"]["logprob_diff_mean"] <= 2e-6
    assert found["causal"]["steps"] == 0
    assert "step 1: rollout and trainer disagree on the logprobs" in found["causal"]["stopped"]
    assert found["causal_without_limits"]["steps"] == 2 and found["causal_without_limits"]["logprob_diff_mean"] > 1e-2
    lines = read_metrics(tmp_path / "run" / "causal_without_limits")
    assert [line.get("approximate_rules") for line in lines] == [None, 1, 1]
