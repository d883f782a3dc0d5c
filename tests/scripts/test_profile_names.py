"""Names that this project takes from the packages of profiles which nobody can install here."""

import json
import runpy
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.program import run_program

ROOT = Path(__file__).parents[2]
SOME = {
    "npu": {"torch_npu.npu.set_device", "vllm.LLM", "transformers.AutoConfig"},
    "cuda": {"torch.nn.functional.scaled_dot_product_attention", "vllm.LLM", "transformers.AutoConfig"},
}
LEAST = {"npu": 50, "cuda": 150}
WRONG = {
    "npu": {
        "from vllm import LLMs": "vllm.LLMs is not known to be in the npu profile",
        "torch_npu.npu.set_device(devices=0)": "torch_npu.npu.set_device takes no ['devices'], it takes ['device']",
        "torch_npu.npu_flash_attention()": "torch_npu.npu_flash_attention is not known",
        "torch.ops.npu.npu_fusion_attention(1, 2, 3, 4, 'TND', attention_mask=None)": "['**', 'attention_mask']",
        "torch.ops.npu.npu_fusion_attention(1, 2, 3, 4, 'TND', **{})": "torch.ops.npu.npu_fusion_attention takes no",
    },
    "cuda": {
        "from megatron.core import parallel": "megatron.core.parallel is not known to be in the cuda profile",
        "dist.all_reduced()": "torch.distributed.all_reduced is not known",
        "torch.empty(1, sizes=2)": "torch.empty takes no ['sizes']",
        "F.silu(1, in_place=True)": "torch.nn.functional.silu takes no ['in_place'], it takes ['input', 'inplace']",
        "torch.float33": "torch.float33 is not known",
    },
}
"""A line of code -> what is said of it."""


def look_up(profile: str, tree: Path) -> CompletedProcess[str]:
    script = partial(runpy.run_path, str(ROOT / "scripts" / "profile_names.py"), run_name="__main__")
    return run_program(script, profile, "--tree", tree)


@pytest.mark.parametrize("profile", SOME)
def test_every_name_is_in_the_profile(profile):
    """Imports, reads and calls with their keywords, in the versions that its requirements pin."""
    done = look_up(profile, ROOT)
    assert done.returncode == 0, done.stdout
    stored = json.loads((ROOT / "hardware" / profile / "profile.json").read_text())
    assert SOME[profile] < set(stored["names"])
    assert len(stored["names"]) >= LEAST[profile]
    for package, version in stored["profile"].items():
        assert stored["wheels"][package].startswith(f"{package.replace('-', '_')}-{version}-")


@pytest.mark.parametrize("profile", WRONG)
def test_a_name_that_is_not_there_is_found(tmp_path, profile):
    (tmp_path / "hardware").mkdir()
    imports = "import torch\nimport torch_npu\nimport torch.distributed as dist\nimport torch.nn.functional as F\n"
    (tmp_path / "hardware" / "wrong.py").write_text(imports + "\n".join(WRONG[profile]) + "\n")
    done = look_up(profile, tmp_path)
    assert done.returncode == 1
    for line in WRONG[profile].values():
        assert line in done.stdout
