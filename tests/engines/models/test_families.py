"""A family is one file: one that is added to them is read and planned for like any other."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.models import write_config

from engines.config import MegatronConfig
from engines.megatron.memory.activations import MicroBatch
from engines.megatron.memory.estimate import compute_rank_memory, list_parameters
from engines.models import families
from engines.models.spec import ModelSpec
from hardware.attention.capabilities import find_backend
from hardware.attention.rollouts import find_rollout_backend, list_parts
from hardware.attention.rules import CAUSAL
from hardware.megatron.kernel_memory import KernelMemory
from hardware.platforms import get_platform

SIZES = ({}, {"tp": 2, "ranks": 2}, {"pp": 2, "ranks": 4}, {"tp": 2, "cp": 2, "ranks": 4, "dtype": "bfloat16"})


def write_family(folder: Path, model_type: str, name: str | None = None) -> str:
    """Write what llama's file states under another ``model_type``: all that is done to add a family."""
    text = Path(families.__path__[0], "text", "llama.py").read_text()
    assert text.count('model_type="llama"') == 1
    folder.mkdir()
    (folder / f"{name or model_type}.py").write_text(text.replace('model_type="llama"', f'model_type="{model_type}"'))
    return str(folder)


@contextmanager
def families_in(folder: str) -> Iterator[None]:
    """Find the families of a further folder as well, as if its files lay among ours."""
    before = set(sys.modules)
    families.__path__.append(folder)
    try:
        yield
    finally:
        families.__path__.remove(folder)
        for name in set(sys.modules) - before:
            if name.startswith(f"{families.__name__}.") and str(sys.modules[name].__file__).startswith(folder):
                del sys.modules[name]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_added_family_is_read_and_planned_as_the_one_that_it_copies(make_hf_model, tmp_path, tied):
    folder, ours = make_hf_model("llama", tied), list(families.list_families())
    copied = write_config(shutil.copytree(folder, tmp_path / "model"), folder, model_type="llama_again")
    with families_in(write_family(tmp_path / "families", "llama_again")):
        assert list(families.list_families()) == sorted([*ours, "llama_again"]) and "qwen3_vl" in ours
        for head in ("language", "value"):
            want, got = ModelSpec.from_folder(folder, head), ModelSpec.from_folder(copied, head)
            assert (want.model_type, got.model_type) == ("llama", "llama_again")
            assert got.architecture == want.architecture and got.rules == want.rules
            assert got.weights == want.weights and list(got.weights) == list(want.weights) and len(got.weights) > 24
            names = want.list_hf_names() | want.list_optional_hf_names()
            assert got.list_hf_names() | got.list_optional_hf_names() == names
            assert {name: got.find_hf_shape(name) for name in names} == {
                name: want.find_hf_shape(name) for name in names
            }
            for config in (MegatronConfig(**size) for size in SIZES):
                for stage in range(config.pp):
                    assert list_parameters(got, config, stage) == list_parameters(want, config, stage)
                    sizes = config, stage, 0, MicroBatch(64, 2), KernelMemory()
                    assert compute_rank_memory(got, *sizes) == compute_rank_memory(want, *sizes)
    with pytest.raises(ValueError, match="model_type 'llama_again', expected one of"):
        ModelSpec.from_folder(copied)


def test_a_file_that_states_another_name_than_its_own_is_refused(tmp_path):
    write_config(tmp_path, {"model_type": "other"})
    added = write_family(tmp_path / "families", "llama_again", name="other")
    with families_in(added), pytest.raises(ValueError, match=r"states .*'llama_again', expected"):
        ModelSpec.from_folder(tmp_path)
    write_config(tmp_path, {"model_type": "_pieces"})  # what families share is none
    with pytest.raises(ValueError, match=r"model_type '_pieces', expected one of \['gemma3', .*'llama', .*'qwen2', "):
        ModelSpec.from_folder(tmp_path)


def test_a_parameter_that_no_family_states_is_named(make_hf_model):
    model = ModelSpec.from_folder(make_hf_model("llama", True))
    with pytest.raises(ValueError, match=r"llama states no parameter .*linear_qkv\.bias.* engines/models/fam"):
        model.find_weight("decoder.layers.0.self_attention.linear_qkv.bias")


def test_shapes_on_ranks_by_hand(make_hf_model):
    """Of 4 heads and 2 key-value heads of 32, hidden 128, MLP 96, and 99 ids, which two ranks pad to 100."""
    weights = ModelSpec.from_folder(make_hf_model("qwen2", False)).weights
    layer = {name.removeprefix("decoder.layers.3."): weights[name] for name in weights if ".3." in name}
    by_hand = {
        "input_layernorm.weight": (128,),
        "self_attention.linear_proj.weight": (128, 64),
        "self_attention.linear_qkv.weight": (128, 128),
        "self_attention.linear_qkv.bias": (128,),
        "pre_mlp_layernorm.weight": (128,),
        "mlp.linear_fc1.weight": (96, 128),
        "mlp.linear_fc2.weight": (128, 48),
    }
    assert {name: weight.cut_shape({"tp": 2}) for name, weight in layer.items()} == by_hand and list(layer) == list(
        by_hand
    )
    assert weights["output_layer.weight"].cut_shape({"tp": 2}) == (50, 128)
    assert weights["output_layer.weight"].cut_shape({"tp": 1}) == (99, 128)


WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
"""Keys of a config with a window."""


def is_refused(find: Callable, *arguments) -> bool:
    try:
        find(*arguments)
    except ValueError:
        return True
    return False


def test_the_page_on_models_has_every_family_and_what_each_platform_refuses():
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    titles, _, *lines = (line.strip("| ").split(" | ") for line in page.splitlines() if line.count("|") == 13)
    shown = {}
    for row in (dict(zip(titles, line, strict=True)) for line in lines):
        family = families.find_family(row["family"], Path("docs"))
        shown.setdefault(row["family"], []).append(row["sees"])
        windowed = {key: value for key, value in WINDOW.items() if key not in family.refused}
        config = dict.fromkeys([*family.needed, "num_experts"], 8) | family.defaults | windowed
        config |= {"num_hidden_layers": 4, "norm_topk_prob": True, "moe_intermediate_size": 2}
        config |= {"first_k_dense_replace": 0} if family.model_type == "glm4_moe" else {}
        kinds = family.read_layers(config, Path(row["family"]), family.layer)
        rules = list(dict.fromkeys([CAUSAL, *(kind.rule for kind in kinds)]))
        assert row["rules"] == ", ".join(list_parts(rules)), row["family"]
        for platform in map(get_platform, ("cpu", "cuda", "npu")):
            backends, refused = platform.attention_backends, {}
            for layout in ("bshd", "thd"):
                refused[layout] = any(is_refused(find_backend, backends, layout, 1, rule) for rule in rules)
            refused["rollout"] = is_refused(find_rollout_backend, platform.rollout_backends, rules)
            told = {part: row[f"{platform.name}: {part}"] == "refused" for part in refused}
            assert told == refused, (row["family"], platform.name)
    assert list(shown) == list(families.list_families())
    for name, inputs in shown.items():
        tower = families.find_family(name, Path("docs")).tower
        assert inputs == (["text"] if not tower else ["images"] if tower.no_videos else ["images", "videos"]), name
