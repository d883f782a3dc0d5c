import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.hf_folder import save_hf_folder
from engines.models import ModelSpec


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
