"""Qwen3-VL-MoE's config.json, and its fused and transposed experts in a folder."""

import pytest
import torch
from safetensors import safe_open
from support.models import make_vlm, read_config
from support.ranks.vlm_cases import QWEN3_VL_30B

from engines.config import MegatronConfig, VllmConfig
from engines.models.folders.hf_folder import check_tensors
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec


def test_published_sizes_are_taken(tmp_path):
    spec = read_config(tmp_path, QWEN3_VL_30B)
    assert spec.experts and (spec.experts.count, spec.experts.chosen, spec.experts.is_normed) == (128, 8, True)
    assert not spec.tied and spec.vision and spec.vision.deepstack == 3
    assert [spec.vision.axes.count(axis) for axis in range(3)] == [24, 20, 20]
    assert spec.find_hf_shape("model.language_model.layers.47.mlp.experts.gate_up_proj") == (128, 2048, 1536)
    assert spec.find_hf_shape("model.language_model.layers.47.mlp.experts.down_proj") == (128, 768, 2048)
    assert round(spec.count_weights() / 1e9, 2) == 31.07
    layer = "decoder.layers.0.mlp.experts."
    cut = {"tp": 1, "ep": 8, "etp": 2}
    shapes = [spec.weights[layer + name].cut_shape(cut) for name in ("weight1", "weight2")]
    assert shapes == [(16, 2, 384, 2048), (16, 2048, 384)]
    VllmConfig(tp=4).check_model(spec)
    MegatronConfig(tp=2, ep=8, ranks=8, dtype="bfloat16").check_model(spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob false, expected true: transformers scales"),
        ({"moe_intermediate_size": 1024}, "moe_intermediate_size 1024, expected neither hidden_size 2048 nor half"),
        ({"moe_intermediate_size": 2048}, "moe_intermediate_size 2048, expected neither hidden_size 2048 nor half"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sets use_sliding_window, which the engine does not build"),
        ({"decoder_sparse_step": 49}, "has experts in no layer, expected some; lower decoder_sparse_step"),
    ],
    ids=str,
)
def test_what_is_not_built_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, QWEN3_VL_30B, **{f"text_config.{key}": value for key, value in changes.items()})


def test_dense_layers_are_where_the_config_has_them(tmp_path):
    changes = {"text_config.decoder_sparse_step": 2, "text_config.mlp_only_layers": [3]}
    spec = read_config(tmp_path, QWEN3_VL_30B, **changes)
    sparse = [number for number, kind in enumerate(spec.kinds) if kind.options.experts]
    assert sparse == [1, *range(5, 48, 2)]
    assert spec.find_hf_shape("model.language_model.layers.3.mlp.gate_proj.weight") == (6144, 2048)


def test_fused_experts_are_turned_by_hand(tmp_path):
    """A row of a folder's tensor is an input; its columns are the outputs of the gate, and then of up."""
    spec = ModelSpec.from_folder(make_vlm(tmp_path, "qwen3_vl_moe"))
    folder = SafetensorsFolder(spec.folder)
    check_tensors(folder, spec)
    for name, shape, places in (
        ("weight1", (8, 2, 32, 128), {(0, 1, 5, 7): (0, 7, 37), (7, 0, 31, 127): (7, 127, 31)}),
        ("weight2", (8, 128, 32), {(0, 5, 7): (0, 7, 5), (7, 127, 31): (7, 31, 127)}),
    ):
        weight = spec.find_weight(f"decoder.layers.2.mlp.experts.{name}")
        (tensor,) = weight.tensors
        saved = folder[tensor]
        joined = weight.join.join([saved])
        assert joined.shape == shape and weight.cut_shape({"ep": 1, "etp": 1}) == shape
        assert all(joined[place] == saved[source] for place, source in places.items())
        assert torch.equal(folder.read_rows(tensor, 4, 4), saved[4:])
        (exported,) = weight.split(joined).values()
        assert torch.equal(exported, saved) and exported.is_contiguous()


def test_experts_as_transformers_saves_them_are_refused(tmp_path):
    """Version 5.19 saves experts as its module has them; vLLM reads them transposed."""
    from transformers import AutoModelForImageTextToText

    folder = make_vlm(tmp_path / "model", "qwen3_vl_moe")
    AutoModelForImageTextToText.from_pretrained(folder).save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        shape = file.get_slice("model.language_model.layers.0.mlp.experts.down_proj").get_shape()
    assert shape == [8, 128, 32]
    spec = ModelSpec.from_folder(tmp_path / "again")
    with pytest.raises(ValueError, match=r"experts.down_proj .* has shape \(8, 128, 32\), expected \(8, 32, 128\)"):
        check_tensors(SafetensorsFolder(spec.folder), spec)
