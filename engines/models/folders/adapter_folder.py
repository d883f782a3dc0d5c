"""Folders of adapters as PEFT writes and reads them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engines.models.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engines.validation import read_object

if TYPE_CHECKING:  # a folder is checked before anything takes the time to import torch
    from torch import Tensor

_REFUSED = ("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern")
_REFUSED += ("layers_to_transform", "layer_replication", "trainable_token_indices")
_REFUSED += ("alora_invocation_tokens", "megatron_config")
"""Keys of features that the engine does not compute; they must be off."""
_BEGINNINGS = ("none", "true", "false", "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` with which PEFT leaves the model's own weights as they are, and trains both adapters.
With others, as pissa and lora_ga, it changes the weights, or it freezes an adapter (mica)."""
_FROM_FOLDER = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "scaling"}
"""Key of PEFT's config -> our setting of the same meaning."""


def check_adapter_folder(
    folder: str, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Check that a folder has the adapters that a model is to start from.

    Args:
        settings: values that PEFT's config must have for ``r``, ``lora_alpha`` and ``use_rslora``.
        shapes: PEFT's names of the tensors -> shape. where: section of the settings, for messages.

    Raises:
        ValueError: a file is missing or damaged, or the adapters are others.
    """
    path = Path(folder, ADAPTER_CONFIG)
    if not path.is_file() or not Path(folder, ADAPTER_WEIGHTS).is_file():
        raise ValueError(
            f"{where}: start={folder!r} has not both {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}; give a folder that PEFT "
            f"saved, or a checkpoint's adapter folder, in --{where}.start"
        )
    config = read_object(path)
    for key, value in settings.items():
        if (own := config.get(key, False)) != value:
            raise ValueError(
                f"{where}: {path} has {key} {own!r}, expected {value!r}; change --{where}.{_FROM_FOLDER[key]}"
            )
    others = {"peft_type": "LORA", "bias": "none"}
    wrong = [key for key, value in others.items() if config.get(key, value) != value]
    if str(config.get("init_lora_weights")).lower() not in _BEGINNINGS:
        wrong.append("init_lora_weights")
    if wrong := [*wrong, *(key for key in _REFUSED if config.get(key))]:
        raise ValueError(
            f"{where}: {path} has {wrong[0]} {config[wrong[0]]!r}, which the engine does not compute; merge the "
            f"adapters into their model by PEFT, and train that without --{where}.start"
        )
    try:
        stored = safe_open(Path(folder, ADAPTER_WEIGHTS), "np")
        found = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{where}: {ADAPTER_WEIGHTS} in {folder!r} is damaged: {error}; copy or save it again"
        ) from None
    if found != shapes:
        missing, extra = sorted(shapes.items() - found.items()), sorted(found.items() - shapes.items())
        raise ValueError(
            f"{where}: start={folder!r} has other adapters: missing {missing[:3]} ({len(missing)} in all), unexpected "
            f"{extra[:3]} ({len(extra)} in all); change --{where}.targets, or take the adapters of this model"
        )


def save_adapter_folder(
    adapters: Iterable[tuple[str, Tensor]],
    settings: Mapping[str, Any],
    base: str,
    folder: str,
    exact: bool = False,
    parameters: Sequence[str] = (),
) -> list[str]:
    """Write adapters as PEFT does. The folder appears under its name once it is whole.

    Args:
        adapters: ``(PEFT's name, tensor)`` of each. settings: PEFT's ``r``, ``lora_alpha`` and ``use_rslora``.
        base: the folder of the model that they are added to. exact: layers are named whole, since others that have no
            adapter end like these. parameters: PEFT's ``target_parameters``, whose modules are no layers.

    Returns:
        the names of the files.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in adapters}
    places = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    modules = {parameter.rpartition(".")[0] for parameter in parameters}
    places = {place for place in places if not place.removesuffix(".base_layer").endswith(tuple(modules) or ("\0",))}
    config = dict(settings) | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "target_modules": sorted(places if exact else {place.rpartition(".")[2] for place in places}),
        "target_parameters": [*parameters],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    target = Path(folder).with_name(f".{Path(folder).name}.partial")
    shutil.rmtree(target, ignore_errors=True)  # a killed save may have left it
    target.mkdir(parents=True)
    (target / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (target / ADAPTER_WEIGHTS).chmod(target.stat().st_mode & 0o666)  # safetensors lets the owner alone read it
    os.replace(target, folder)
    return [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
