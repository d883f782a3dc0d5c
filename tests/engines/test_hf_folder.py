import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines.hf_folder import SafetensorsFolder, save_hf_folder
from engines.models import ModelSpec

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def copied(make_hf_model, tmp_path) -> Path:
    """A folder to damage."""
    shutil.copytree(make_hf_model("qwen2", False), tmp_path / "model")
    return tmp_path / "model"


def check(folder: Path) -> SafetensorsFolder:
    found = SafetensorsFolder(str(folder))
    found.check(ModelSpec.from_folder(folder))
    return found


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (100_000, 8), (1, 50)])
def test_transformers_loads_what_was_saved(make_hf_model, tmp_path, shard_bytes, files):
    spec = ModelSpec.from_folder(make_hf_model("qwen2", True))
    model = AutoModelForCausalLM.from_pretrained(spec.folder)
    weights = {name: tensor + 1 for name, tensor in model.named_parameters()}
    target = tmp_path / "saved"
    (tmp_path / ".saved.partial").mkdir()
    (tmp_path / ".saved.partial" / "rest-of-a-killed-save.safetensors").write_text("half")
    save_hf_folder(iter(weights.items()), spec, str(target), shard_bytes)
    found = len(list(target.glob("*.safetensors")))
    assert found == files if files != 8 else 1 < found < 50
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert all(torch.equal(p, weights[name]) for name, p in loaded.named_parameters())
    assert not (tmp_path / ".saved.partial").exists()


def test_no_weights_write_nothing(make_hf_model, tmp_path):
    save_hf_folder(iter([]), ModelSpec.from_folder(make_hf_model("qwen2", True)), str(tmp_path / "saved"), 1)
    assert not list(tmp_path.iterdir())


def test_a_whole_folder_is_read(copied):
    weights = load_file(copied / "model.safetensors")
    found = check(copied)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "header too small"), (200, "invalid header length"), (-1, "not fully covered")],
    ids=["empty", "header", "data"],
)
def test_a_cut_file_is_damaged(copied, size, message):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"model\.safetensors is damaged: .*{message}.*; copy or save it again"):
        check(copied)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    weights = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in tensors}
    save_file(weights | {n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, r"missing \['model\.embed_tokens\.weight'\] \(1 in all\), unexpected \[\] \(0 in all\)"),
        (
            torch.ones(100, 128),
            r"embed_tokens\.weight in .* has shape \(100, 128\), expected \(99, 128\) from config\.json",
        ),
        (torch.ones(99), r"embed_tokens\.weight in .* has shape \(99,\), expected \(99, 128\) from config\.json"),
        (
            torch.ones(99, 128, dtype=torch.int8),
            r"embed_tokens\.weight in .* has type I8, expected one of F64, F32, F16",
        ),
    ],
    ids=["none", "rows", "dimensions", "type"],
)
def test_a_tensor_that_does_not_fit_is_named(copied, tensor, message):
    change(copied, **{EMBEDDING: tensor})
    with pytest.raises(ValueError, match=message):
        check(copied)


def test_a_tensor_too_many_is_named(copied):
    change(copied, **{"model.extra": torch.ones(1)})
    with pytest.raises(ValueError, match=r"missing \[\] \(0 in all\), unexpected \['model\.extra'\] \(1 in all\)"):
        check(copied)


def test_a_tensor_in_two_files_is_refused(copied):
    save_file({EMBEDDING: torch.ones(99, 128)}, copied / "another.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.safetensors and .*another\.safetensors both hold 'model\.embed_tokens"
    ):
        check(copied)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {EMBEDDING: "model.safetensors", "b": "b.safetensors"}},
            r"names \['b\.safetensors'\] \(1 in all\)",
        ),
        ({"weight_map": {}}, r"leaves out \['model\.safetensors'\] \(1 in all\)"),
        ({"weight_map": [1]}, "has no weight_map of tensors to files"),
        ([], "must hold a JSON object, got list"),
    ],
    ids=["missing", "unnamed", "list", "nothing"],
)
def test_an_index_must_name_the_files_that_are_there(copied, index, message):
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json .*{message}"):
        check(copied)
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EMBEDDING: "model.safetensors"}}))
    check(copied)
