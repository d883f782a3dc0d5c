"""Checks that the engines can hold a model, from its folder alone, before anything heavy starts."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from engines.config import MegatronConfig, VllmConfig
from engines.images import list_margins
from engines.models.folders.hf_folder import check_tensors
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec
from hardware.attention.capabilities import find_backend
from hardware.attention.rollouts import (
    ROUTE_ARGUMENTS,
    check_needs,
    find_needed_arguments,
    find_rollout_backend,
    list_needs_warnings,
    list_parts,
)
from hardware.attention.rules import CAUSAL, Rule
from hardware.platform import Platform
from hardware.platforms import get_platform
from hardware.vllm_versions import TESTED, TILES_BY_IDS, check_architecture, find_version


def check_engines(
    folder: str, platform_name: str, actor: MegatronConfig, rollout: VllmConfig, is_whole: bool = True
) -> ModelSpec:
    """Read a model's config and the names and shapes of its weights, and check that both engines can hold it.

    Args:
        folder: the model's folder. platform_name: name of the platform. actor, rollout: settings of the engines.
        is_whole: whether the folder has more than config.json, which is checked as well.

    Raises:
        ValueError: an engine cannot hold the model.
    """
    model = ModelSpec.from_folder(folder)
    actor.check_spread(model)
    check_trainable(model, actor, platform_name, is_whole)
    check_rollout(model, platform_name, rollout)
    return model


def check_rollout(model: ModelSpec, platform_name: str, rollout: VllmConfig) -> None:
    """Raise ValueError if a rollout engine cannot hold the model."""
    rollout.check_model(model)
    if names := read_architectures(model.folder):
        check_architecture(names[0])
    platform = get_platform(platform_name)
    if model.head_dim not in platform.rollout_head_dims:
        raise ValueError(
            f"rollout: vLLM on platform {platform_name!r} has no attention for the model's head_dim "
            f"{model.head_dim}, expected one of {list(platform.rollout_head_dims)}"
        )
    if rollout.replay_routes and not (platform.records_routes or platform.returns_routes):
        raise ValueError(
            f"rollout: replay_routes has no recorder of experts on platform {platform_name!r} with vLLM "
            f"{find_version()}; leave --rollout.replay-routes out"
        )
    if model.vision and model.vision.tower.tiles and not TILES_BY_IDS.is_there:
        raise ValueError(
            f"rollout: {TILES_BY_IDS.explain()}, and the model cuts images into tiles; install vLLM {TESTED[-1]}"
        )
    check_rollout_rules(model, rollout, platform)
    backend = find_rollout_backend(platform.rollout_backends, model.rules, rollout.attention_override)
    check_needs(backend, model.rules, rollout.dtype, rollout.vllm)
    if rollout.replay_routes and platform.returns_routes:
        _check_returned_routes(find_needed_arguments(backend, model.rules) | rollout.vllm)
    platform.check_vllm_features(backend, rollout.spreads_experts)
    _check_cache(model, rollout, platform)


def _check_returned_routes(arguments: Mapping[str, object]) -> None:
    """Raise ValueError where vLLM would not record the experts of tokens under these arguments."""
    for name, needed in ROUTE_ARGUMENTS.items():
        if bool(arguments.get(name, needed)) != needed:
            raise ValueError(
                f"rollout: replay_routes takes vLLM's own records of experts, which need {name} {needed}, and here it "
                f"is {arguments[name]}; leave --rollout.replay-routes out, or what sets {name}"
            )


def list_model_warnings(model: ModelSpec, platform_name: str, rollout: VllmConfig) -> list[str]:
    """List warnings about a rollout of a model that ``check_rollout`` has passed."""
    platform = get_platform(platform_name)
    backend = find_rollout_backend(platform.rollout_backends, model.rules, rollout.attention_override)
    return list_needs_warnings(backend, model.rules)


def read_architectures(folder: str) -> list[str]:
    """Read the names of a model's classes from its folder; empty if it has none."""
    path = Path(folder, "config.json")
    return json.loads(path.read_text()).get("architectures") or [] if path.is_file() else []


def check_trainable(model: ModelSpec, config: MegatronConfig, platform_name: str, is_whole: bool = True) -> None:
    """Raise ValueError if a training engine cannot hold the model, or the model's folder lacks its weights.

    Args:
        is_whole: as of ``check_engines``.
    """
    config.check_model(model)
    check_rules(model, config, get_platform(platform_name))
    if is_whole:
        check_folder(model)


def check_folder(model: ModelSpec) -> None:
    """Raise ValueError if a model's folder lacks its weights, or the settings of its image processor."""
    check_tensors(SafetensorsFolder(model.folder), model)
    if model.vision:
        _check_processor(model.folder)
        list_margins(model)


def _check_processor(folder: str) -> None:
    """Raise ValueError where a folder has no settings of its image processor."""
    if not any(Path(folder, name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise ValueError(
            f"model: {folder!r} has no preprocessor_config.json, which says how images are cut; copy it there from the "
            "model's source"
        )


def check_rules(model: ModelSpec, actor: MegatronConfig, platform: Platform) -> None:
    """Raise ValueError if the platform cannot compute an attention rule of the model for training, or if an
    ``attention_override`` in ``actor`` has no effect."""
    for name in actor.attention_override:
        if name.split("/")[0] not in platform.attention_backends:
            raise ValueError(
                f"actor: attention_override {name!r} names a backend that platform {platform.name!r} does not use, "
                f"expected one of {list(platform.attention_backends)}; leave it out of --actor.attention-override"
            )
    for rule in set(model.rules):
        find_backend(platform.attention_backends, actor.layout, actor.cp, rule, actor.attention_override)


def check_rollout_rules(model: ModelSpec, rollout: VllmConfig, platform: Platform) -> None:
    """Raise ValueError if vLLM on the platform cannot compute all attention rules of the model, or if an
    ``attention_override`` in ``rollout`` has no effect."""
    backend = find_rollout_backend(platform.rollout_backends, model.rules, rollout.attention_override)
    used = {f"{backend}/{part}" for part in list_parts(model.rules)}
    if idle := sorted(set(rollout.attention_override) - used):
        raise ValueError(
            f"rollout: attention_override {idle} does nothing for this model, which uses {sorted(used)} on platform "
            f"{platform.name!r}; leave it out of --rollout.attention-override"
        )


def _check_cache(model: ModelSpec, rollout: VllmConfig, platform: Platform) -> None:
    """Raise ValueError where the longest sequence does not fit into the rollout's memory for keys, values and
    states."""
    if rollout.vllm or not {*model.rules} <= {CAUSAL, Rule(state=True)}:
        return  # a pass-through or a window may change the memory of a token
    block, itemsize = platform.rollout_block_tokens, 4 if rollout.dtype == "float32" else 2
    token = 2 * model.count_kv_heads(rollout.tp) * model.head_dim * itemsize  # of a layer
    state_bytes = [mixer.count_state_bytes(itemsize) for mixer in model.mixers]
    states = sum(size > 0 for size in state_bytes)
    layers, attending = model.layers, model.layers - states
    if states:
        # A layer's block of tokens has room for a state. vLLM (0.32, v1/core/kv_cache_utils) puts layers of one kind
        # into groups of one size, as many as there are of the rarer kind, or all where both are about as many.
        block *= math.ceil(max(state_bytes) / rollout.tp / (block * token))
        fewest, most = sorted((states, attending))
        layers = most if most < 1.5 * fewest else fewest
    # A group with states keeps two blocks of a sequence, the others as many as it fills; vLLM keeps one for itself.
    blocks = math.ceil(attending / layers) * math.ceil(rollout.max_model_len / block)
    blocks += 2 * math.ceil(states / layers) + 1
    need, have = math.ceil(blocks * block * layers * token / 2**20), rollout.kv_cache_mb or platform.rollout_kv_cache_mb
    if need > have:
        raise ValueError(
            f"rollout: kv_cache_mb={rollout.kv_cache_mb} gives {have} MB to keys and values, expected at least "
            f"{need} for one sequence of max_model_len={rollout.max_model_len}; raise --rollout.kv-cache-mb"
        )
