import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import write_config

from engines.models.folders.hf_folder import check_tensors, save_hf_folder
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec
from recipes.common.addition import make_tokenizer
from rlworker.checks.tiny.models import make_tiny_model

EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copied(make_hf_model, tmp_path) -> Path:
    """A folder to damage."""
    shutil.copytree(make_hf_model("qwen2", False), tmp_path / "model")
    return tmp_path / "model"


def load(folder: str | Path, **options) -> torch.nn.Module:
    """Read a language model as transformers does by itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def check(folder: Path) -> SafetensorsFolder:
    found = SafetensorsFolder(str(folder))
    check_tensors(found, ModelSpec.from_folder(folder))
    return found


@pytest.mark.parametrize("order", [list, reversed], ids=["in order", "backwards"])
@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (100_000, 8), (1, 50)])
def test_transformers_loads_what_was_saved(make_hf_model, tmp_path, shard_bytes, files, order):
    """Whatever order the weights come in; files and index are those of the hub, as transformers writes them."""
    spec = ModelSpec.from_folder(make_hf_model("qwen2", True))
    model = load(spec.folder)
    weights = {name: tensor + 1 for name, tensor in model.named_parameters()}
    target = tmp_path / "saved"
    (tmp_path / ".saved.partial").mkdir()
    (tmp_path / ".saved.partial" / "rest-of-a-killed-save.safetensors").write_text("half")
    save_hf_folder(iter(order(list(weights.items()))), spec, str(target), shard_bytes)
    found = sorted(path.name for path in target.glob("*.safetensors"))
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    if files == 8:  # which tensors share a file depends on their order
        files = len(found)
        assert 1 < files < 50
        assert all(path.stat().st_size < shard_bytes + 10_000 for path in target.glob("*.safetensors"))
    else:
        assert found == sorted(path.name for path in (tmp_path / "theirs").glob("*.safetensors"))
    if files == 1:
        assert found == ["model.safetensors"] and not (target / INDEX).exists()
    else:
        assert found == [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
        ours, theirs = (json.loads((folder / INDEX).read_text()) for folder in (target, tmp_path / "theirs"))
        assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
        assert set(ours["weight_map"]) == set(theirs["weight_map"]) == set(weights)
    loaded = load(target)
    assert all(torch.equal(p, weights[name]) for name, p in loaded.named_parameters())
    assert not (tmp_path / ".saved.partial").exists()


def test_an_export_has_the_whole_tokenizer_and_follows_the_umask(copied, tmp_path):
    """Each kind of file that a tokenizer is saved in, and templates beside the main one, as transformers reads them."""
    from transformers import AutoTokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "main", "tool_use": "of tools", "rag": "of texts"}
    tokenizer.save_pretrained(copied)
    kept = ("qwen.tiktoken", "vocab.bpe", "merges.txt", "spiece.model", "chat_template.jinja")
    for name in kept:
        (copied / name).write_text(name)
        (copied / name).chmod(0o400)
    spec, target = ModelSpec.from_folder(copied), tmp_path / "saved"
    before = os.umask(0o027)
    try:
        written = save_hf_folder(load(copied).named_parameters(), spec, str(target), 100_000)
    finally:
        os.umask(before)
    files = [path for path in target.rglob("*") if path.is_file()]
    assert sorted(written) == sorted(str(path.relative_to(target)) for path in files)
    assert {*kept, "config.json", "tokenizer.json", "additional_chat_templates/rag.jinja"} < {*written}
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"} and len(files) > 10
    assert AutoTokenizer.from_pretrained(target).chat_template["tool_use"] == "of tools"


def test_no_weights_write_nothing(make_hf_model, tmp_path):
    save_hf_folder(iter([]), ModelSpec.from_folder(make_hf_model("qwen2", True)), str(tmp_path / "saved"), 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights[1:], r"the export lacks \['model\.embed_tokens\.weight'\] \(1 in all\); '.*' was not"),
        (lambda weights: [*weights, weights[0]], r"'model\.embed_tokens\.weight' is exported twice, or is no weight"),
        (lambda weights: [("model.extra", weights[0][1]), *weights], r"'model\.extra' is exported twice, or is no"),
    ],
    ids=["lacking", "twice", "unknown"],
)
def test_an_export_that_does_not_fit_the_model_is_not_written(make_hf_model, tmp_path, change, message):
    spec = ModelSpec.from_folder(make_hf_model("qwen2", True))
    weights = change(list(load_file(Path(spec.folder, "model.safetensors")).items()))
    with pytest.raises(ValueError, match=message):
        save_hf_folder(iter(weights), spec, str(tmp_path / "saved"), 10**9)
    assert not (tmp_path / "saved").exists()


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
        (torch.ones(100, 128), r"embed_tokens\.weight in .* has shape \(100, 128\), expected \(99, 128\) from config"),
        (torch.ones(99), r"embed_tokens\.weight in .* has shape \(99,\), expected \(99, 128\) from config\.json"),
        (torch.ones(99, 128).char(), r"embed_tokens\.weight in .* has type I8, expected one of F64, F32, F16"),
    ],
    ids=["none", "rows", "dimensions", "type"],
)
def test_a_tensor_that_does_not_fit_is_named(copied, tensor, message):
    change(copied, **{EMBEDDING: tensor})
    with pytest.raises(ValueError, match=message):
        check(copied)


def test_a_tensor_too_many_or_in_two_files_is_named(copied):
    change(copied, **{"model.extra": torch.ones(1)})
    with pytest.raises(ValueError, match=r"missing \[\] \(0 in all\), unexpected \['model\.extra'\] \(1 in all\)"):
        check(copied)
    save_file({EMBEDDING: torch.ones(99, 128)}, copied / "another.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors and .*another\.safetensors both hold 'model\.embed"):
        check(copied)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {EMBEDDING: "model.safetensors", "b": "b.safetensors"}}, r"names \['b\.safetensors'\] \(1 in"),
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


def test_weights_in_their_makers_own_form_are_passed_over_beside_an_index(copied):
    """As the hub has Mistral's models; without an index vLLM would read both."""
    save_file({"layers.0.attention.wq.weight": torch.ones(1)}, copied / "consolidated.safetensors")
    with pytest.raises(ValueError, match=r"consolidated\.safetensors holds the weights once more.*: expected model\.s"):
        check(copied)
    names = load_file(copied / "model.safetensors")
    (copied / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert "layers.0.attention.wq.weight" not in check(copied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tied_head_of_its_own_must_be_the_embedding(make_hf_model, tmp_path, dtype):
    """transformers keeps one that differs, here in its last row, apart, and ties an equal one."""
    shutil.copytree(make_hf_model("qwen2", True), tmp_path, dirs_exist_ok=True)
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING].to(dtype)
    head = embedding.clone()
    change(tmp_path, **{EMBEDDING: embedding, "lm_head.weight": head})
    check(tmp_path)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    head[-1, -1] += 1
    change(tmp_path, **{"lm_head.weight": head})
    model = load(tmp_path)
    assert torch.equal(model.lm_head.weight, head.to(model.dtype)), "what the refusal is for"
    with pytest.raises(
        ValueError,
        match=r"tie_word_embeddings true, but lm_head\.weight in .*model\.safetensors differs from "
        r"model\.embed_tokens\.weight.*; set tie_word_embeddings to false in config\.json, or drop lm_head\.weight",
    ):
        check(tmp_path)
    write_config(tmp_path, tmp_path, tie_word_embeddings=False)
    check(tmp_path)


def test_a_tied_head_in_another_type_and_file_is_compared_by_its_values(make_hf_model, tmp_path, monkeypatch):
    """A few rows at a time, so that the difference is in a later part."""
    monkeypatch.setattr("engines.models.folders.hf_folder._ROWS_AT_ONCE", 40)
    shutil.copytree(make_hf_model("qwen2", True), tmp_path, dirs_exist_ok=True)
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING].bfloat16()
    change(tmp_path, **{EMBEDDING: embedding})
    save_file({"lm_head.weight": embedding.float()}, tmp_path / "head.safetensors")
    check(tmp_path)
    embedding[45, 0] += 1
    save_file({"lm_head.weight": embedding.float()}, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight in .*head\.safetensors differs from model\.embed_tokens"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("family", "embedding"),
    [("qwen2_5_vl", "model.embed_tokens.weight"), ("qwen3_vl", "model.language_model.embed_tokens.weight")],
)
def test_a_tied_head_of_a_model_that_sees_images_must_be_its_embedding(tmp_path, family, embedding):
    make_tiny_model(tmp_path, family)
    head = load_file(tmp_path / "model.safetensors")[embedding].clone()
    change(tmp_path, **{"lm_head.weight": head})
    check(tmp_path)
    change(tmp_path, **{"lm_head.weight": head + 1})
    with pytest.raises(ValueError, match=rf"lm_head\.weight in .* differs from {embedding}, expected the same"):
        check(tmp_path)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_saved_model_is_of_the_type_of_its_weights(make_hf_model, tmp_path, key):
    """A base in bfloat16 that has learned in float32: none of it is rounded away when transformers loads it."""
    base, target = tmp_path / "base", tmp_path / "saved"
    shutil.copytree(make_hf_model("qwen2", False), base)
    write_config(base, base, **{"dtype": ..., key: "bfloat16"})
    config = json.loads((base / "config.json").read_text())
    del config[key]
    weights = {name: tensor + 1e-5 for name, tensor in load_file(base / "model.safetensors").items()}
    save_hf_folder(iter(weights.items()), ModelSpec.from_folder(base), str(target), 10**9)
    for options in ({}, {"dtype": "auto"}):
        loaded = load(target, **options)
        assert all(p.dtype == torch.float32 and torch.equal(p, weights[n]) for n, p in loaded.named_parameters())
    saved = json.loads((target / "config.json").read_text())
    assert {name: saved[name] for name in ("dtype", key)} == dict.fromkeys(("dtype", key), "float32")
    assert saved | config == saved, "the rest is the base's"


def test_the_widest_type_is_named_in_every_part_that_names_one(tmp_path):
    from transformers import AutoModelForImageTextToText

    make_tiny_model(tmp_path / "base", "qwen3_vl")
    path = tmp_path / "base" / "config.json"
    config = json.loads(path.read_text()) | {"dtype": "float16"}
    config["text_config"] |= {"dtype": "float16"}
    config["vision_config"] = {k: v for k, v in config["vision_config"].items() if k != "dtype"}
    path.write_text(json.dumps(config))
    spec = ModelSpec.from_folder(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights = {n: t.bfloat16() if spec.find_part(n) == "language" else t.float() for n, t in weights.items()}
    for wanted in ("float32", "bfloat16"):
        target = tmp_path / wanted
        save_hf_folder(iter(weights.items()), spec, str(target), 10**9)
        saved = json.loads((target / "config.json").read_text())
        assert (saved["dtype"], saved["text_config"]["dtype"]) == (wanted, wanted)
        assert "dtype" not in saved["vision_config"] and "torch_dtype" not in saved
        loaded = AutoModelForImageTextToText.from_pretrained(target)
        assert all(p.dtype == getattr(torch, wanted) for p in loaded.parameters())
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}


def test_what_predicts_further_tokens_is_kept_byte_for_byte(make_hf_model, tmp_path):
    """Of whatever type, as released beside weights that are trained in another; its numbers need not even be finite."""
    folder, target, critic = tmp_path / "released", tmp_path / "trained", tmp_path / "critic"
    shutil.copytree(make_hf_model("qwen3_5_text", False), folder)
    weights = load_file(folder / "model.safetensors")
    further = {
        "mtp.fc.weight": torch.randn(8, 16).bfloat16(),
        "mtp.layers.0.mlp.up_proj.weight": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "mtp.norm.weight": torch.tensor([-0.0, float("nan"), float("inf"), 1e-40]),
    }
    save_file(further, folder / "further.safetensors", metadata={"format": "pt"})
    spec = ModelSpec.from_folder(folder)
    check(folder)
    trained = {name: tensor + 1 for name, tensor in weights.items()}
    save_hf_folder(iter(trained.items()), spec, str(target), 400_000)
    found = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == trained.keys() | further.keys()
    assert all(torch.equal(found[name], trained[name]) for name in trained)
    for name, tensor in further.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert json.loads((target / INDEX).read_text())["weight_map"].keys() == found.keys()
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32", "that of the weights that learn"
    check(target)
    assert all(torch.equal(p, trained[name]) for name, p in load(target).named_parameters())
    heads = {"score.weight": torch.ones(1, spec.hidden), "score.bias": torch.ones(1)}
    body = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"} | heads
    save_hf_folder(iter(body.items()), ModelSpec.from_folder(folder, "value"), str(critic), 10**9)
    assert load_file(critic / "model.safetensors").keys() == body.keys()


def test_only_a_family_that_keeps_them_takes_what_predicts_further_tokens(copied):
    change(copied, **{"mtp.fc.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"unexpected \['mtp.fc.weight'\] \(1 in all\)"):
        check(copied)
