"""Every setting that has a wrong value ends a run before it starts, with a message that names it.

Hypothesis draws the values. What can be wrong of a model's folder stands in ``tests/engines/models``, what of rows in
``tests/rlworker/data``.
"""

import json
import math
import re
import shutil
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from engines.pass_through import MEGATRON_OWN, MEGATRON_REFUSED, VLLM_OWN, VLLM_REFUSED
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.run import RunConfig
from rlworker.config.sections import (
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    EnvironmentConfig,
    LimitsConfig,
    PlacementConfig,
)
from rlworker.config.validation import ValidationConfig
from rlworker.environments.reward import exact_match

SECTIONS = {"config": RunConfig, "actor": MegatronConfig, "rollout": VllmConfig, "algorithm": AlgorithmConfig}
SECTIONS |= {"data": DataConfig, "environment": EnvironmentConfig, "checkpoint": CheckpointConfig}
SECTIONS |= {"validation": ValidationConfig}
SECTIONS |= {"critic": CriticConfig, "placement": PlacementConfig, "limits": LimitsConfig, "optimizer": OptimizerConfig}
NOT_ZERO = "steps prompts_per_step samples_per_prompt ranks tp pp cp micro_batch_tokens timeout_s adam_eps engines "
NOT_ZERO += "max_new_tokens max_model_len max_num_seqs temperature mini_batches max_prompt_tokens workers time_limit_s"
TOO_LARGE = {"seed": 2**32, "ranks": 9, "tp": 3, "pp": 3, "cp": 3, "timeout_s": 10**9 + 1, "adam_beta1": 1}
TOO_LARGE |= {"adam_beta2": 1, "min_lr": 1, "engines": 5, "max_new_tokens": 32, "max_model_len": 257}
TOO_LARGE |= {"max_num_seqs": 4097, "mini_batches": 5, "max_prompt_tokens": 25}
"""The least of the numbers that are."""
MAY_BE_INFINITE = ("clip_low", "clip_high", "logprob_diff_mean", "logprob_diff_max")


def wrong_type(kind: Any) -> st.SearchStrategy:
    """What a field of this annotation cannot hold."""
    null = st.none()
    if NoneType in (parts := get_args(kind)):
        kind, null = next(part for part in parts if part is not NoneType), st.nothing()
    if kind in (int, float, bool):
        number = {int: st.floats(), bool: st.integers()}.get(kind, st.just(math.nan))
        return st.one_of(number, st.text(), st.just([]), null, st.nothing() if kind is bool else st.booleans())
    text = st.text().filter(lambda text: text not in get_args(kind)) if kind is not str else st.nothing()
    return st.one_of(st.integers(), null, text, st.just([("a", 1)]))


def wrong_values(section: str, name: str, kind: Any) -> list[st.SearchStrategy]:
    """What a field must refuse: values of other types, negative and infinite ones, zero and too large ones."""
    found = [wrong_type(kind)]
    if kind in (int, int | None):
        found += [st.integers(max_value=-1)]
    if kind in (float, float | None):
        found += [st.just(math.nan)]
        found += [] if name in MAY_BE_INFINITE else [st.just(math.inf)]
        found += [] if name in ("default_reward", "pass_reward") else [st.floats(max_value=-1e-300)]
    found += [st.just(0)] if name in NOT_ZERO.split() else []
    found += [st.integers(TOO_LARGE[name], 10**30)] if name in TOO_LARGE else []
    return found


FIELDS = [
    wrong.map(lambda value, section=section, name=name: (section, {name: value}, rf"\b{name}\b"))
    for section, kind in SECTIONS.items()
    for name, hint in get_type_hints(kind).items()
    for wrong in wrong_values(section, name, hint)
]
PASS_THROUGH = st.one_of(
    st.tuples(
        st.just((section, name)),
        st.one_of(
            st.sampled_from(sorted(own | refused)), st.text("abcxyz_", min_size=1).map("zz".__add__), st.just(typed)
        ),
        st.sampled_from(["text", "another text"]),
    )
    for section, name, own, refused, typed in (
        ("actor", "megatron", MEGATRON_OWN, MEGATRON_REFUSED, "init_method_std"),
        ("rollout", "vllm", VLLM_OWN, VLLM_REFUSED, "gpu_memory_utilization"),
    )
).map(lambda x: (x[0][0], {x[0][1]: {x[1]: x[2]}}, rf"--{x[0][0]}\.{x[0][1]}.*{x[1]}"))


class Started(BaseException):
    """Something heavy was about to start."""


def start(*_, **__):
    raise Started


@pytest.fixture(scope="module")
def launch(make_hf_model, tmp_path_factory):
    """``launch(section, values)``: start a run on a good input, but for these values; returns what is said."""
    import ray

    import rlworker.trainers.launch

    folder = tmp_path_factory.mktemp("input")
    model, rows = shutil.copytree(make_hf_model("qwen2", True), folder / "model"), folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    good = {
        "config": {"model": str(model), "run_dir": str(folder / "run"), "prompts_per_step": 4, "samples_per_prompt": 2},
        "actor": {"ranks": 2},
        "rollout": {"max_new_tokens": 8, "max_model_len": 32},
        "data": {"train": str(rows), "heldout": str(rows), "max_prompt_tokens": 8},
    }

    def launch_with(section: str = "config", values: dict | None = None) -> str:
        sections = {name: good.get(name, {}) | ((values or {}) if name == section else {}) for name in SECTIONS}
        try:
            sections["actor"] = {"optimizer": OptimizerConfig(**sections.pop("optimizer"))} | sections["actor"]
            own = sections.pop("config")
            config = RunConfig(**{name: SECTIONS[name](**each) for name, each in sections.items()} | own)
        except ValueError as error:
            return str(error)
        with pytest.raises(SystemExit) as end:
            rlworker.trainers.launch.launch(config, exact_match)
        return end.value.code.removeprefix("error: ")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlworker.trainers.launch, "running_ray", start)
        patch.setattr(rlworker.trainers.launch, "_build_trainer", start)
        patch.setattr(ray, "init", start)
        launch_with.model = Path(model)
        yield launch_with


def test_the_input_that_is_broken_below_is_good(launch):
    with pytest.raises(Started):
        launch()


def test_an_end_beyond_the_vocabulary_is_refused_before_anything_starts(launch):
    saved = launch.model / "generation_config.json"
    before = saved.read_text()
    saved.write_text('{"eos_token_id": [1, 99]}')
    assert "generation_config.json' has eos_token_id 99, the model has 99 tokens" in launch()
    saved.write_text(before)


@pytest.mark.parametrize("cases_each", [1, pytest.param(20, marks=pytest.mark.large)])
def test_whatever_is_broken_is_refused_by_name(launch, cases_each):
    for wrong in (*FIELDS, *[PASS_THROUGH] * 3):

        @settings(max_examples=cases_each, deadline=None, derandomize=True, database=None)
        @given(wrong)
        def refuse(case: tuple[str, dict, str]):
            section, values, said = case
            assert re.search(said, found := launch(section, values), re.DOTALL), (case, found)

        refuse()
