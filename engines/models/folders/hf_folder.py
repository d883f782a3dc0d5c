"""HuggingFace folders: weights read from one, and a trained model written as one."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import safe_open

from engines.models.hub import SETTINGS
from engines.models.safetensors_folder import INDEX, SafetensorsFolder, find_weight_files
from engines.models.weight import EMBEDDING
from engines.validation import read_object

if TYPE_CHECKING:  # a folder is checked before anything takes the time to import torch
    import torch
    from torch import Tensor

    from engines.models.spec import ModelSpec

_TEMPLATES = "additional_chat_templates"
"""Folder in which transformers saves the chat templates of a tokenizer that has several, but for the main one."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Names that config.json has for the type of the weights, now and in older transformers."""
_PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Names that config.json has for the number of layers that predict further tokens."""
_ROWS_AT_ONCE = 1024
"""Rows of two matrices that are compared at a time."""


def check_tensors(folder: SafetensorsFolder, model: ModelSpec) -> None:
    """Raise ValueError, naming the tensors, unless the folder holds exactly the model's weights in their shapes.

    An output layer that a tied model has beside its embedding must be the same.
    """
    # Old Llama checkpoints carry the rotary frequencies, which every model computes for itself.
    names = {n for n in folder.file_of if not n.endswith("rotary_emb.inv_freq") and not model.is_predictor(n)}
    names = {name for name in names if not name.startswith(model.family.kept)}
    optional = model.list_optional_hf_names()
    required = model.list_hf_names() - optional
    missing, extra = sorted(required - names), sorted(names - required - optional)
    if missing or extra:
        raise ValueError(
            f"model: weights in {folder.folder!r} do not fit model_type {model.model_type!r}: "
            f"missing {missing[:5]} ({len(missing)} in all), unexpected {extra[:5]} ({len(extra)} in all)"
        )
    for name in sorted(required | (names & optional)):
        part = folder.headers[folder.file_of[name]].get_slice(name)
        shape, expected = tuple(part.get_shape()), model.find_hf_shape(name)
        if shape != expected:
            raise ValueError(
                f"model: {name} in {folder.file_of[name]} has shape {shape}, expected {expected} from config.json; "
                "correct the config or save the weights again"
            )
        if part.get_dtype() not in _FLOATS:
            raise ValueError(
                f"model: {name} in {folder.file_of[name]} has type {part.get_dtype()}, expected one of "
                f"{', '.join(_FLOATS)}: quantized weights cannot be trained"
            )
    if not model.tied:
        return
    (embedding,), (head,) = model.weights[EMBEDDING].tensors, optional
    if head in names and not _equal(folder, embedding, head, model.vocab):
        raise ValueError(
            f"model: config.json in {folder.folder!r} has tie_word_embeddings true, but {head} in "
            f"{folder.file_of[head]} differs from {embedding}, expected the same: transformers would keep them "
            f"apart, we tie them; set tie_word_embeddings to false in config.json, or drop {head}"
        )


def _equal(folder: SafetensorsFolder, name: str, other: str, rows: int) -> bool:
    """Tell whether two matrices of equal shape have equal values in float64, comparing some rows at a time."""
    import torch  # imported here: most folders do not need it, since their models have one of both tensors

    parts = [safe_open(folder.file_of[matrix], "pt").get_slice(matrix) for matrix in (name, other)]
    for start in range(0, rows, _ROWS_AT_ONCE):
        left, right = (part[start : start + _ROWS_AT_ONCE].to(torch.float64) for part in parts)
        if not torch.equal(left, right):
            return False
    return True


def save_hf_folder(weights: Iterable[tuple[str, Tensor]], model: ModelSpec, folder: str, shard_bytes: int) -> list[str]:
    """Write weights as the hub does: in files of at most ``shard_bytes`` (a larger tensor gets its own) with an index.

    A file is written once its tensors are there, so that about two files of them are in memory at a time. All have the
    permissions that the umask gives. The configuration and tokenizer are copied from the folder that the model was read
    from, but for the type of the weights, and so are the tensors that its family keeps; a critic is written without
    them, as a token classification with one label. The folder appears under its name once it is whole. A stream without
    weights (ranks that export nothing) writes nothing.

    Args:
        weights: ``(HF name, tensor)`` of every weight of the model, once each.

    Returns:
        the files that were written, by their paths from the folder.

    Raises:
        ValueError: the stream lacks a weight of the model, or has one that the model has not.
    """
    from safetensors.torch import save_file

    stream, kept = iter(weights), {}
    if (first := next(stream, None)) is None:
        return []
    target = Path(folder).with_name(f".{Path(folder).name}.partial")
    shutil.rmtree(target, ignore_errors=True)  # a killed save may have left it
    target.mkdir(parents=True)
    if model.head == "language" and model.family.kept:
        folder_of_model = SafetensorsFolder(model.folder)  # mapped, so that no data is copied
        kept = {name: folder_of_model[name] for name in folder_of_model.file_of if name.startswith(model.family.kept)}
    split = _split_into_files(model, first[1].element_size(), kept, shard_bytes)
    pending, total, dtypes = {name: {} for name in split.filename_to_tensors}, 0, set()
    for name, tensor in chain([first], stream, kept.items()):
        if (file := split.tensor_to_filename.pop(name, None)) is None:
            raise ValueError(f"model: {name!r} is exported twice, or is no weight of {model.model_type!r}")
        pending[file][name] = tensor.detach().cpu().clone().contiguous()
        total += tensor.nbytes
        dtypes |= set() if name in model.buffers or name in kept else {tensor.dtype}
        if len(pending[file]) == len(split.filename_to_tensors[file]):
            save_file(pending.pop(file), target / file, metadata={"format": "pt"})
            (target / file).chmod(target.stat().st_mode & 0o666)  # safetensors lets the owner alone read it
    if missing := sorted(split.tensor_to_filename):
        raise ValueError(f"model: the export lacks {missing[:5]} ({len(missing)} in all); {folder!r} was not written")
    if split.is_sharded:
        files = {name: file for file, names in split.filename_to_tensors.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _copy_settings(model, target, dtypes)
    os.replace(target, folder)
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def _split_into_files(model: ModelSpec, itemsize: int, kept: dict[str, Tensor], shard_bytes: int) -> StateDictSplit:
    """Plan the file of each tensor, with layers in order, for weights of one type and tensors that are kept."""

    def place(name: str) -> list[tuple[int, str]]:  # layer 2 before layer 10
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    sizes = {name: math.prod(model.find_hf_shape(name)) * itemsize for name in model.list_hf_names()}
    sizes |= {name: tensor.nbytes for name, tensor in kept.items()}
    return split_state_dict_into_shards_factory(
        {name: sizes[name] for name in sorted(sizes, key=place)},
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )


def _copy_settings(model: ModelSpec, target: Path, dtypes: set[torch.dtype]) -> None:
    """Copy configuration and tokenizer of the model's folder, with the type of the weights and the head trained."""
    for name in _list_settings(Path(model.folder)):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(model.folder, name), target / name)
    config = _set_dtype(read_object(target / "config.json"), dtypes)
    if model.family.has_predictors:
        config |= {name: 0 for name in _PREDICTORS if name in config}
    if model.head == "value":
        config |= {"architectures": [model.architecture], "classifier_dropout": 0.0}
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _list_settings(folder: Path) -> list[str]:
    """List the configuration and tokenizer files of a model, by their paths from its folder."""
    files = sorted(path for path in (*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")) if path.is_file())
    names = [str(path.relative_to(folder)) for path in files if path.suffix in SETTINGS]
    return [name for name in names if not name.endswith(".index.json")]


def list_model_files(folder: str) -> list[str]:
    """List the files that a model is read from, by their paths from its folder: configuration, tokenizer, weights.

    Raises:
        ValueError: it has no weights, or other files than its index names.
    """
    return _list_settings(Path(folder)) + [path.name for path in find_weight_files(Path(folder))]


def _set_dtype(config: dict, dtypes: set[torch.dtype]) -> dict:
    """Set the widest type of the weights as the type in a configuration: transformers loads all weights in it.

    The starting model's type may be narrower, which would round away small updates.
    """
    import torch

    dtype = str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
    parts = {key: config[key] for key in ("text_config", "vision_config") if isinstance(config.get(key), dict)}
    sections = {key: part | {name: dtype for name in _DTYPE_KEYS if name in part} for key, part in parts.items()}
    return config | sections | {name: dtype for name in _DTYPE_KEYS if name == "dtype" or name in config}
