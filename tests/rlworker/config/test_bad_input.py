"""Every broken setting, model folder or row ends a run before it starts, with a message that names what is broken.

Hypothesis draws the breakages: one, or two in different parts of the input, of which the message names either.
"""

import json
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from engines.config import (
    MegatronConfig,
    OptimizerConfig,
    VllmConfig,
)
from engines.validation import MEGATRON_OWN, MEGATRON_REFUSED, VLLM_OWN, VLLM_REFUSED
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

CONFIG = {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 48}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 64}
CONFIG |= {"rms_norm_eps": 1e-6}
LAYER = dict.fromkeys(("self_attn.q_proj.weight", "self_attn.o_proj.weight"), (64, 64))
LAYER |= dict.fromkeys(("self_attn.k_proj.weight", "self_attn.v_proj.weight"), (32, 64))
LAYER |= dict.fromkeys(("self_attn.k_proj.bias", "self_attn.v_proj.bias"), (32,))
LAYER |= dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), (48, 64)) | {"mlp.down_proj.weight": (64, 48)}
LAYER |= dict.fromkeys(("self_attn.q_proj.bias", "input_layernorm.weight", "post_attention_layernorm.weight"), (64,))
SHAPES = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}
SHAPES |= {"model.embed_tokens.weight": (40, 64), "model.norm.weight": (64,)}
WEIGHTS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
ROW = {"prompt": "1+1=", "answer": "2"}
SECTIONS = {"config": RunConfig, "actor": MegatronConfig, "rollout": VllmConfig, "algorithm": AlgorithmConfig}
SECTIONS |= {
    "data": DataConfig,
    "environment": EnvironmentConfig,
    "checkpoint": CheckpointConfig,
    "critic": CriticConfig,
}
SECTIONS |= {"placement": PlacementConfig, "limits": LimitsConfig, "optimizer": OptimizerConfig}


@dataclass
class Input:
    """A good input, for breakages to work on."""

    folder: Path
    settings: dict[str, dict] = field(default_factory=lambda: {name: {} for name in SECTIONS})
    model: dict = field(default_factory=lambda: CONFIG | {"tie_word_embeddings": True})
    weights: dict = field(default_factory=lambda: dict(WEIGHTS))
    files: dict[str, bytes | None] = field(default_factory=dict)  # in place of what the others say; None for no file
    rows: dict = field(default_factory=lambda: {name: [json.dumps(ROW)] * 3 for name in ("train", "heldout")})

    def build(self) -> RunConfig:
        """Write the files and make the settings."""
        files = {"model/config.json": json.dumps(self.model).encode(), "model/model.safetensors": save(self.weights)}
        files |= {f"{name}.jsonl": "\n".join(lines).encode() for name, lines in self.rows.items()}
        (self.folder / "model").mkdir()
        for name, content in (files | self.files).items():
            if content is not None:
                (self.folder / name).write_bytes(content)
        good = {
            "config": {"model": str(self.folder / "model"), "run_dir": str(self.folder / "run")},
            "actor": {"ranks": 2},
            "rollout": {"max_new_tokens": 8, "max_model_len": 32},
            "data": {name: str(self.folder / f"{name}.jsonl") for name in self.rows} | {"max_prompt_tokens": 8},
        }
        good["config"] |= {"prompts_per_step": 4, "samples_per_prompt": 2}
        given = {name: good.get(name, {}) | values for name, values in self.settings.items()}
        given["actor"] = {"optimizer": OptimizerConfig(**given.pop("optimizer"))} | given["actor"]
        parts = {name: SECTIONS[name](**values) for name, values in given.items() if name != "config"}
        return RunConfig(**parts | given["config"])


@dataclass
class Breakage:
    """``said``: what the message must match."""

    part: str
    said: str
    apply: Callable[[Input], Any]


def of_settings(section: str, values: dict, said: str) -> Breakage:
    return Breakage("settings", said, lambda to: to.settings[section].update(values))


def of_model(key: str, value: Any, said: str) -> Breakage:
    return Breakage("model", said, lambda to: to.model.update({key: value}))


def of_weights(name: str, array: np.ndarray | None, said: str) -> Breakage:
    def apply(to: Input):
        to.weights.pop(name, None) if array is None else to.weights.update({name: array})

    return Breakage("model", said, apply)


def of_file(name: str, content: bytes | None, said: str) -> Breakage:
    return Breakage("model", said, lambda to: to.files.update({f"model/{name}": content}))


# -- settings

NOT_ZERO = "steps prompts_per_step samples_per_prompt ranks tp pp cp micro_batch_tokens timeout_s adam_eps engines "
NOT_ZERO += "max_new_tokens max_model_len max_num_seqs temperature mini_batches max_prompt_tokens workers time_limit_s"
TOO_LARGE = {"seed": 2**32, "ranks": 9, "tp": 3, "pp": 3, "cp": 3, "timeout_s": 10**9 + 1, "adam_beta1": 1}
TOO_LARGE |= {"adam_beta2": 1, "min_lr": 1, "engines": 5, "max_new_tokens": 32, "max_model_len": 65}
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
        found += [] if name == "default_reward" else [st.floats(max_value=-1e-300)]
    found += [st.just(0)] if name in NOT_ZERO.split() else []
    found += [st.integers(TOO_LARGE[name], 10**30)] if name in TOO_LARGE else []
    return found


FIELDS = [
    wrong.map(lambda value, section=section, name=name: of_settings(section, {name: value}, rf"\b{name}\b"))
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
).map(lambda x: of_settings(x[0][0], {x[0][1]: {x[1]: x[2]}}, rf"--{x[0][0]}\.{x[0][1]}.*{x[1]}"))
CONTRADICTIONS = st.sampled_from(
    [
        ("actor", {"tp": 2}, "tp=2 does not divide the model's 1 key-value heads"),
        ("actor", {"pp": 4, "ranks": 4}, "pp=4 does not divide the model's 2 layers"),
        ("actor", {"tp": 2, "ranks": 3}, "tp=2 x pp=1 x cp=1 needs a multiple of 2 ranks, got 3"),
        ("optimizer", {"lr_warmup_steps": 5, "lr_decay_steps": 5}, "lr_decay_steps=5 must be above lr_warmup_steps=5"),
        ("rollout", {"temperature": 0.005}, "temperature must be from 0.01 to 2"),
        (
            "rollout",
            {"max_num_seqs": 9, "vllm": {"max_num_batched_tokens": 8}},
            "above vLLM's max_num_batched_tokens=8",
        ),
        ("config", {"model": "nowhere"}, "folder 'nowhere' does not exist"),
        ("config", {"run_dir": ""}, "set --run-dir"),
        ("data", {"train": "nowhere.jsonl"}, "nowhere.jsonl"),
    ]
).map(lambda x: of_settings(*x))

# -- the model's folder

SIZES = [key for key in CONFIG if key not in ("model_type", "rms_norm_eps")]
NOT_SIZE = st.one_of(st.integers(max_value=0), st.floats(), st.booleans(), st.text(), st.just([]), st.just({}))
NO_END = st.one_of(st.integers(40), st.integers(max_value=-1), st.sampled_from([[1, 40], [None], {}]), st.text())
OTHER_KEYS = [
    ("rms_norm_eps", st.one_of(st.floats(max_value=0), st.just(math.nan), st.text(), st.just([]), st.booleans())),
    ("model_type", st.one_of(st.text(), st.integers(), st.just([]), st.just({}), st.none())),
    ("tie_word_embeddings", st.one_of(st.integers(), st.text(), st.none())),
    ("use_sliding_window", st.one_of(st.integers(), st.text(), st.none())),
    ("head_dim", st.one_of(st.integers().filter(lambda x: x != 32), st.text(), st.booleans())),
    ("num_key_value_heads", st.integers(3)),
    ("num_attention_heads", st.sampled_from([3, 5, 6, 7, 65])),
    ("attention_bias", st.one_of(st.just(True), st.integers(1))),
    ("quantization_config", st.just({"quant_method": "fp8"})),
    ("hidden_act", st.text().filter(lambda x: x != "silu")),
    ("architectures", st.lists(st.text(), min_size=1)),
    ("layer_types", st.lists(st.sampled_from(["full_attention", "sliding_attention", "linear"]), min_size=3)),
    ("rope_type", st.text().map(lambda x: ("rope_scaling", {"type": f"x{x}"}))),
    ("factor", st.sampled_from(["linear", "llama3", "yarn"]).map(lambda x: ("rope_scaling", {"rope_type": x}))),
    ("rope_theta", st.one_of(st.floats(max_value=0), st.text(), st.just([]), st.just(math.inf), st.none())),
    ("partial_rotary_factor", st.floats(0.1, 0.9)),
    ("torch_dtype", st.one_of(st.text(), st.integers())),
    ("bos_token_id", st.text()),
    ("eos_token_id", NO_END),
]
WRONG_KEY = st.one_of(
    st.sampled_from(SIZES).flatmap(lambda key: NOT_SIZE.map(lambda value: (key, value))),
    st.sampled_from(OTHER_KEYS).flatmap(lambda x: x[1].map(lambda value: (x[0], value))),
).map(lambda x: of_model(*(x[1] if isinstance(x[1], tuple) else x), rf"config\.json.*\b{x[0]}"))
MISSING_KEY = st.sampled_from([*CONFIG]).map(
    lambda key: Breakage("model", rf"config\.json.*\b{key}\b", lambda to: to.model.pop(key))
)
UNLIKE_WEIGHTS = st.one_of(  # right by themselves, and not what the weights are
    st.integers(1, 10**6).filter(lambda x: x != 40).map(lambda x: ("vocab_size", x, "embed_tokens.* has shape")),
    st.integers(1, 10**6).filter(lambda x: x != 48).map(lambda x: ("intermediate_size", x, r"mlp\..* has shape")),
    st.integers(3, 50).map(lambda x: ("num_hidden_layers", x, r"missing \['model\.layers\.\d+\.")),
    st.integers(1, 31).map(lambda x: ("max_position_embeddings", x, f"above the model's {x} positions")),
    st.just(("num_hidden_layers", 1, r"unexpected \['model\.layers\.1\.")),
    st.just(("num_key_value_heads", 2, r"k_proj.* has shape \(32")),
    st.just(("hidden_size", 128, r"has shape .* expected \(.*128")),
    st.just(("tie_word_embeddings", False, r"missing \['lm_head\.weight'\]")),
).map(lambda x: of_model(*x))
WHOLE = save(WEIGHTS)
INDEX = {"weight_map": dict.fromkeys(WEIGHTS, "model.safetensors") | {"a": "gone.safetensors"}}
WRONG_FILE = st.one_of(
    st.text(max_size=50).filter(lambda x: "{" not in x).map(lambda x: ("config.json", x.encode(), r"config\.json")),
    st.binary(max_size=50).map(lambda x: ("config.json", b"\xff" + x, r"config\.json")),
    st.integers(0, len(WHOLE) - 1).map(lambda n: ("model.safetensors", WHOLE[:n], r"model\.safetensors is damaged")),
    st.binary(max_size=200).map(lambda x: ("model.safetensors", x, r"model\.safetensors is damaged")),
    st.sampled_from([INDEX, {}, [], {"weight_map": {"a": 1}}, {"weight_map": {"a": "other.safetensors"}}]).map(
        lambda x: ("model.safetensors.index.json", json.dumps(x).encode(), r"index\.json")
    ),
    NO_END.map(lambda x: ("generation_config.json", json.dumps({"eos_token_id": x}).encode(), "has eos_token_id")),
    st.just(("config.json", None, r"has no config\.json")),
    st.just(("model.safetensors", None, r"has no \*\.safetensors")),
    st.just(("more.safetensors", WHOLE, r"more\.safetensors .* both hold")),
).map(lambda x: of_file(*x))
NAMES = st.sampled_from(sorted(SHAPES))
WRONG_TENSOR = st.one_of(
    NAMES.map(lambda name: of_weights(name, None, rf"missing \['{name}'")),
    st.text("abc", min_size=1).map(lambda name: of_weights(name, np.ones(3, np.float32), rf"unexpected \['{name}'")),
    st.tuples(NAMES, st.sampled_from([np.int8, np.uint8, np.int64, np.bool_])).map(
        lambda x: of_weights(x[0], np.ones(SHAPES[x[0]], x[1]), f"{x[0]} .* has type")
    ),
    st.tuples(NAMES, st.lists(st.integers(0, 70), max_size=3).map(tuple))
    .filter(lambda x: SHAPES[x[0]] != x[1])
    .map(
        lambda x: of_weights(x[0], np.ones(x[1], np.float32), rf"{x[0]} .* has shape {re.escape(str(x[1]))}, expected")
    ),
)

# -- rows

NOT_TEXT = st.one_of(st.integers(), st.booleans(), st.none(), st.just({}), st.just([]), st.just([1]))
MESSAGES = st.sampled_from([["text"], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}]])
MESSAGES |= st.sampled_from([{"a": 1}, ["x"], 1, None]).map(lambda x: [{"role": "user", "content": x}])
MESSAGES |= st.just('[{"role": "user", "content": "x"}]')
WRONG_ROW = st.tuples(
    st.sampled_from(["train", "heldout"]),
    st.integers(0, 3),
    st.one_of(
        st.one_of(NOT_TEXT, MESSAGES, st.just("")).map(lambda x: (json.dumps(ROW | {"prompt": x}), "prompt")),
        NOT_TEXT.map(lambda x: (json.dumps(ROW | {"answer": x}), "answer")),
        st.sampled_from(["prompt", "answer"]).map(lambda x: (json.dumps({k: ROW[k] for k in ROW if k != x}), x)),
        st.one_of(st.lists(st.integers()), st.integers(), st.text()).map(lambda x: (json.dumps(x), "object")),
        st.integers(1, len(json.dumps(ROW)) - 1).map(lambda n: (json.dumps(ROW)[:n], "JSON")),
    ),
).map(
    lambda x: Breakage(
        "rows", rf"{x[0]}\.jsonl, line {x[1] + 1}\b.*{x[2][1]}", lambda to: to.rows[x[0]].insert(x[1], x[2][0])
    )
)
NO_ROWS = st.tuples(st.sampled_from(["train", "heldout"]), st.lists(st.sampled_from(["", "  "]), max_size=3)).map(
    lambda x: Breakage("rows", rf"{x[0]}\.jsonl has no rows", lambda to: to.rows.update({x[0]: x[1]}))
)

# -- the tests


class Started(BaseException):
    """Something heavy was about to start."""


def start(*_, **__):
    raise Started


@pytest.fixture(scope="module")
def nothing_starts():
    import ray

    import rlworker.trainers.launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlworker.trainers.launch, "running_ray", start)
        patch.setattr(rlworker.trainers.launch, "_build_trainer", start)
        patch.setattr(ray, "init", start)
        yield


def launch(*breakages: Breakage) -> str:
    """Launch a run on an input with these breakages. Returns what it says."""
    from rlworker.environments.reward import exact_match
    from rlworker.trainers.launch import launch as launch_run

    with tempfile.TemporaryDirectory() as folder:
        given = Input(Path(folder))
        for breakage in breakages:
            breakage.apply(given)
        try:
            config = given.build()
        except ValueError as error:
            return str(error)
        with pytest.raises(SystemExit) as end:
            launch_run(config, exact_match)
        return end.value.code.removeprefix("error: ")


def refuse_all(inputs: st.SearchStrategy, most: int) -> int:
    """Launch what is drawn, each of which must be refused by name. Returns how many there were."""
    launched = []

    @settings(max_examples=most, deadline=None, derandomize=True, database=None)
    @given(inputs)
    def refuse(breakages: list[Breakage]):
        said = launch(*breakages)
        launched.append(said)
        assert said
        # What two breakages say together may name what they make of each other.
        assert len(breakages) > 1 or re.search(breakages[0].said, said, re.DOTALL), said

    refuse()
    return len(launched)


def test_the_input_that_is_broken_below_is_good(nothing_starts):
    with pytest.raises(Started):
        launch()


def test_an_end_beyond_the_vocabulary_is_refused_before_anything_starts(nothing_starts):
    said = launch(of_file("generation_config.json", b'{"eos_token_id": [1, 40]}', ""))
    assert "generation_config.json' has eos_token_id 40, the model has 40 tokens" in said


@pytest.mark.parametrize("cases_each", [15, pytest.param(60, marks=pytest.mark.large)])
def test_whatever_is_broken_is_refused_by_name(nothing_starts, cases_each):
    kinds = [PASS_THROUGH, CONTRADICTIONS, WRONG_KEY, MISSING_KEY, UNLIKE_WEIGHTS, WRONG_FILE, WRONG_TENSOR, WRONG_ROW]
    kinds.append(NO_ROWS)
    cases = sum(refuse_all(st.lists(wrong, min_size=1, max_size=1), 5) for wrong in FIELDS)
    cases += sum(refuse_all(st.lists(wrong, min_size=1, max_size=1), cases_each) for wrong in kinds)
    two = st.lists(st.one_of(*FIELDS, *kinds), min_size=2, max_size=2, unique_by=lambda breakage: breakage.part)
    cases += refuse_all(two, 2 * cases_each)
    assert cases >= 10 * cases_each
