"""HuggingFace folders: weights read from one, and a trained model written as one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from engines.models import ModelSpec

if TYPE_CHECKING:  # a folder is checked before anything takes the time to import torch
    from torch import Tensor

_COPIED = (".json", ".jinja", ".model", ".txt")
"""Endings of the configuration and tokenizer files that a saved model takes along."""


class SafetensorsFolder:
    """Every tensor of a folder's safetensors files by name, read one at a time."""

    def __init__(self, folder: str):
        self.folder = folder
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"model: {folder!r} has no *.safetensors file; weights are read from safetensors only")
        self._file_of = {}
        for path in files:
            handle = safe_open(path, "pt")
            self._file_of.update(dict.fromkeys(handle.keys(), handle))

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def check(self, model: ModelSpec) -> None:
        """Raise ValueError, naming the tensors, unless the folder holds exactly the model's weights."""
        # Old Llama checkpoints carry the rotary frequencies, which every model computes for itself.
        wanted, have = model.all_hf_names(), {n for n in self._file_of if not n.endswith("rotary_emb.inv_freq")}
        if model.tied:
            have -= {"lm_head.weight"}
        missing, extra = sorted(wanted - have), sorted(have - wanted)
        if missing or extra:
            raise ValueError(
                f"model: weights in {self.folder!r} do not fit model_type {model.model_type!r}: "
                f"missing {missing[:5]} ({len(missing)} in all), unexpected {extra[:5]} ({len(extra)} in all)"
            )


def save_hf_folder(weights: Iterable[tuple[str, Tensor]], model: ModelSpec, folder: str, shard_bytes: int) -> None:
    """Write weights in files of at most ``shard_bytes`` (a larger tensor gets its own), one in memory at a time.

    The configuration and tokenizer are copied from the folder that the model was read from. The folder appears under
    its name once it is whole. A stream without weights (ranks that export nothing) writes nothing.
    """
    from safetensors.torch import save_file

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
    for path in Path(model.folder).iterdir():
        if path.suffix in _COPIED and not path.name.endswith(".index.json") and path.is_file():
            shutil.copy(path, target)
    os.replace(target, folder)
