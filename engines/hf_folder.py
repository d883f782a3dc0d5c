"""A trained model as a HuggingFace folder: what transformers and vLLM load."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from engines.models import ModelSpec

_NOT_COPIED = ("*.safetensors", "*.bin", "*.index.json")


def save_hf_folder(weights: Iterable[tuple[str, Tensor]], model: ModelSpec, folder: str, shard_bytes: int) -> None:
    """Write weights in files of at most ``shard_bytes`` (a larger tensor gets its own), one in memory at a time.

    The configuration and tokenizer are copied from the folder that the model was read from. The folder appears under its
    name once it is whole. A stream without weights (ranks that export nothing) writes nothing.
    """
    target = Path(folder).with_name(f".{Path(folder).name}.partial")
    held, size, file_of = {}, 0, {}

    def flush():
        name = f"model-{len(set(file_of.values())) + 1:05d}.safetensors"
        save_file(held, target / name, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in weights:
        if held and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        if not held and not file_of:  # the first weight: clear what a killed save may have left
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        held[name] = tensor.detach().cpu().clone().contiguous()
        size += tensor.nbytes
    if not held:
        return
    flush()
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}, indent=2))
    shutil.copytree(model.folder, target, ignore=shutil.ignore_patterns(*_NOT_COPIED), dirs_exist_ok=True)
    os.replace(target, folder)
