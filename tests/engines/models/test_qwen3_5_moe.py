"""Qwen3.5 with experts and images: released sizes, and folders whose experts lie fused or apart."""

import math
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import make_vlm, read_config
from support.ranks.vlm_cases import QWEN3_5_35B

from engines.config import MegatronConfig, VllmConfig
from engines.models.folders.hf_folder import check_tensors, save_hf_folder
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec
from hardware.megatron.mixture import Experts
from hardware.megatron.states.mixer import DeltaNet

RELEASED: dict[str, tuple[dict, float]] = {
    "Qwen3.5-35B-A3B": ({}, 35.11),
    "Qwen3.5-122B-A10B": (
        {
            "hidden_size": 3072,
            "linear_num_value_heads": 64,
            "moe_intermediate_size": 1024,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "shared_expert_intermediate_size": 1024,
        },
        122.6,
    ),
    "Qwen3.5-397B-A17B": (
        {
            "hidden_size": 4096,
            "linear_num_value_heads": 64,
            "moe_intermediate_size": 1024,
            "num_attention_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 60,
            "shared_expert_intermediate_size": 1024,
        },
        396.8,
    ),
}
"""Name of a released model -> what its language model's config has other than the first, and its weights by 1e9 without
those that predict further tokens. docs/models.md says where each was read."""
LAYER = "model.language_model.layers.{}.mlp.experts."


def test_sizes_of_35b_are_taken(tmp_path):
    spec = read_config(tmp_path, QWEN3_5_35B)
    assert spec.experts == Experts(256, 8, 512, True, shared=512)
    assert {mixer for mixer in spec.mixers if isinstance(mixer, DeltaNet)} == {DeltaNet(16, 2, 128, 128, 4)}
    assert (spec.rotary_dim, spec.gates_output, spec.tied) == (64, True, False)
    assert spec.vision and [spec.vision.axes.count(axis) for axis in range(3)] == [11, 11, 10]
    shapes = {name: spec.find_hf_shape(LAYER.format(39) + name) for name in ("gate_up_proj", "down_proj")}
    assert shapes == {"gate_up_proj": (256, 1024, 2048), "down_proj": (256, 2048, 512)}
    cut = {"tp": 1, "ep": 8, "etp": 2}
    weights = [spec.weights[f"decoder.layers.0.mlp.experts.weight{n}"].cut_shape(cut) for n in (1, 2)]
    assert weights == [(32, 2, 256, 2048), (32, 2048, 256)]
    VllmConfig(tp=2).check_model(spec)
    MegatronConfig(tp=2, ep=8, ranks=8, dtype="bfloat16").check_model(spec)


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes_are_taken(tmp_path, name):
    """Named on the page with its source."""
    changes, billions = RELEASED[name]
    hidden = (QWEN3_5_35B["text_config"] | changes)["hidden_size"]
    language = {f"text_config.{key}": value for key, value in changes.items()}
    spec = read_config(tmp_path, QWEN3_5_35B, **language, **{"vision_config.out_hidden_size": hidden})
    assert spec.count_weights() / 1e9 == pytest.approx(billions, rel=5e-3)
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert f"| {name} |" in page.partition("## Released models of Qwen3.5")[2].partition("\n## ")[0]
    VllmConfig(tp=4).check_model(spec)
    MegatronConfig(tp=2, ep=8, ranks=8, dtype="bfloat16").check_model(spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config.norm_topk_prob": False}, "norm_topk_prob False, expected true, as transformers computes"),
        ({"text_config.mlp_only_layers": [0]}, "sets mlp_only_layers, which the engine does not build"),
        ({"vision_config.deepstack_visual_indexes": [8]}, r"deepstack_visual_indexes \[8\], expected none"),
        ({"vision_config.out_hidden_size": 4096}, "out_hidden_size 4096, expected hidden_size 2048"),
    ],
    ids=str,
)
def test_what_is_not_built_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, QWEN3_5_35B, **changes)


# -- forms of a folder


def list_apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """List the weights of a folder with a tensor of each expert and projection in the place of fused ones."""
    apart = {}
    for name, tensor in weights.items():
        found = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if not found:
            apart[name] = tensor
            continue
        place, kind = found.groups()
        names = ("gate_proj", "up_proj") if kind == "gate_up" else ("down_proj",)
        for number, expert in enumerate(tensor):
            rows = len(expert) // len(names)
            for part, projection in enumerate(names):
                apart[f"{place}.{number}.{projection}.weight"] = expert[part * rows :][:rows].clone()
    return apart


def write_weights(folder: Path, source: str, weights: dict[str, torch.Tensor]) -> str:
    """Write other weights beside the settings of a folder."""
    shutil.copytree(source, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of each form, both of the same weights; predicting layers are apart or fused, as in 3.5 and 3.6."""
    base = tmp_path_factory.mktemp("forms")
    made = make_vlm(base / "made", "qwen3_5_moe")
    fused = load_file(f"{made}/model.safetensors")
    fused["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.randn(8, 64, 128).bfloat16()
    fused["mtp.fc.weight"] = torch.tensor([-0.0, float("nan"), 1e-40])
    each = list_apart(fused)
    assert "mtp.layers.0.mlp.experts.7.up_proj.weight" in each
    return {name: write_weights(base / name, made, weights) for name, weights in (("fused", fused), ("each", each))}


def test_both_forms_are_one_model(folders):
    specs = {form: ModelSpec.from_folder(folder) for form, folder in folders.items()}
    assert specs["fused"].weights.keys() == specs["each"].weights.keys()
    read = {form: SafetensorsFolder(folder) for form, folder in folders.items()}
    differing = 0
    for name, weight in specs["fused"].weights.items():
        other = specs["each"].weights[name]
        joined = weight.join.join([read["fused"][tensor] for tensor in weight.tensors])
        assert torch.equal(joined, other.join.join([read["each"][tensor] for tensor in other.tensors])), name
        assert weight.cut == other.cut and weight.cut_shape({"ep": 2, "etp": 2, "tp": 1}) == other.cut_shape(
            {"ep": 2, "etp": 2, "tp": 1}
        )
        differing += weight.tensors != other.tensors
    assert differing == 2 * 4, "gates with up projections, and down projections, of four layers"


@pytest.mark.parametrize("form", ["fused", "each"])
def test_an_export_is_the_import(folders, form, tmp_path):
    """In names, shapes, types and values, of what predicts further tokens too."""
    spec, folder = ModelSpec.from_folder(folders[form]), SafetensorsFolder(folders[form])
    check_tensors(folder, spec)

    def export():
        for weight in spec.weights.values():
            yield from weight.split(weight.join.join([folder[name] for name in weight.tensors])).items()

    save_hf_folder(export(), spec, str(tmp_path / "saved"), 2**40)
    want, got = (load_file(Path(place, "model.safetensors")) for place in (folders[form], tmp_path / "saved"))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in got.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in want.items()
    }
    assert all(torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in want.items())


@pytest.mark.parametrize("mixed", ["all of both", "a layer of each", "half of a layer"])
def test_a_folder_of_both_forms_is_refused(folders, mixed, tmp_path):
    fused, each = (load_file(f"{folders[form]}/model.safetensors") for form in ("fused", "each"))
    if mixed == "all of both":
        weights = fused | each
    else:
        part = "layers.2.mlp.experts." if mixed == "a layer of each" else "layers.2.mlp.experts.down_proj"
        weights = {name: tensor for name, tensor in fused.items() if part not in name}
        weights |= {name: each[name] for name in each if re.search(r"layers\.2\.mlp\.experts\.\d+\.down", name)}
    folder = write_weights(tmp_path / "mixed", folders["fused"], weights)
    message = r"weights in several forms, such as \S+\.experts\.\S+ and \S+\.experts\.\S+, expected one form of all"
    with pytest.raises(ValueError, match=message):
        _ = ModelSpec.from_folder(folder).weights


def test_half_a_form_is_refused(folders, tmp_path):
    weights = load_file(f"{folders['fused']}/model.safetensors")
    missing = LAYER.format(1) + "gate_up_proj"
    folder = write_weights(
        tmp_path / "half", folders["fused"], {name: tensor for name, tensor in weights.items() if name != missing}
    )
    with pytest.raises(ValueError, match=rf"missing \['{re.escape(missing)}'\] \(1 in all\)"):
        check_tensors(SafetensorsFolder(folder), ModelSpec.from_folder(folder))


@pytest.mark.large  # it loads transformers' models
def test_transformers_computes_the_same_of_both_forms(folders, tmp_path):
    """Of a folder that it saves itself as well, which has a tensor of each expert."""
    from rlworker.checks.reference.huggingface import load_huggingface

    model = load_huggingface(ModelSpec.from_folder(folders["fused"]))
    model.save_pretrained(tmp_path / "saved", save_original_format=True)
    shutil.copy(f"{folders['fused']}/config.json", tmp_path / "saved")
    ids = torch.arange(3, 60)[None]
    logits = []
    for folder in (*folders.values(), str(tmp_path / "saved")):
        loaded = load_huggingface(ModelSpec.from_folder(folder))
        with torch.no_grad():
            logits.append(loaded(input_ids=ids, use_cache=False).logits)
    assert all(torch.equal(first, second) for first, second in pairwise(logits))
    assert math.isfinite(logits[0].sum().item()) and logits[0].std() > 0.1
