"""Checks that the engines can hold a model, from its folder alone, before anything heavy starts."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from engines.config import MegatronConfig, VllmConfig
from engines.models.hf_folder import SafetensorsFolder
from engines.models.hub import FindModel
from engines.models.spec import ModelSpec
from hardware.attention.capabilities import find_backend
from hardware.attention.rollouts import find_rollout_backend, list_parts
from hardware.attention.rules import CAUSAL
from hardware.platform import Platform
from hardware.platforms import get_platform

if TYPE_CHECKING:
    from engines.images.processor import ImageProcessor


def check_engines(folder: str, platform_name: str, actor: MegatronConfig, rollout: VllmConfig) -> ModelSpec:
    """Read the model's config and the names and shapes of its weights, and check that both engines can hold it.

    Raises:
        ValueError: they cannot.
    """
    model = ModelSpec.from_folder(folder)
    check_trainable(model, actor, platform_name)
    rollout.check_model(model)
    platform = get_platform(platform_name)
    if model.head_dim not in platform.rollout_head_dims:
        raise ValueError(
            f"rollout: vLLM on platform {platform_name!r} has no attention for the model's head_dim "
            f"{model.head_dim}, expected one of {list(platform.rollout_head_dims)}"
        )
    check_rollout_rules(model, rollout, platform)
    _check_cache(model, rollout, platform)
    return model


def check_trainable(model: ModelSpec, config: MegatronConfig, platform_name: str) -> None:
    """Raise ValueError where a training engine cannot hold the model, or its folder does not hold its weights."""
    config.check_model(model)
    check_rules(model, config, get_platform(platform_name))
    SafetensorsFolder(model.folder).check(model)
    if model.vision:
        from engines.images.placeholders import list_margin_tokens

        _check_processor(model.folder)
        list_margin_tokens(model)


def check_beside_actor(
    role: str,
    name: str,
    find: FindModel,
    actor: ModelSpec,
    config: MegatronConfig,
    platform_name: str,
    longest: int,
) -> ModelSpec:
    """Read the critic or the reference, checked against the actor beside which it runs.

    Args:
        name: of the model. find: finds its folder. longest: tokens of the longest sequence.

    Raises:
        ValueError: it cannot be held, sees other images, or knows fewer tokens or positions than the actor uses.
    """
    option = {"critic": "--critic.model", "reference": "--algorithm.reference"}[role]
    try:
        model = ModelSpec.from_folder(find(name), head="value" if role == "critic" else "language")
        check_trainable(model, config, platform_name)
        check_same_image_processing(model, actor)
    except ValueError as error:
        raise ValueError(f"{role} ({option}): {error}") from None
    requirements = (("tokens in its vocabulary", model.vocab, actor.vocab), ("positions", model.max_positions, longest))
    for what, have, need in requirements:
        if have < need:
            raise ValueError(
                f"{role} ({option}): the model in {name!r} has {have} {what}, expected at least {need}; take one of "
                "the actor's tokenizer and length"
            )
    return model


def check_same_image_processing(model: ModelSpec, actor: ModelSpec) -> None:
    """Raise ValueError where a model is given other tokens or pixels for an image than the actor, or none."""
    seeing = [(spec.folder, spec.vision) for spec in (model, actor) if spec.vision]
    if not seeing:
        return
    if len(seeing) == 1:
        who = "this model" if model.vision is None else "the actor"
        raise ValueError(f"model: {who} cannot see images and the other can; take two of a kind")
    tokens = [(vision.banned_tokens, vision.image_token) for _, vision in seeing]
    cut = [(vision.patch, vision.merge, vision.temporal_patch) for _, vision in seeing]
    if tokens[0] != tokens[1] or cut[0] != cut[1]:
        raise ValueError(
            f"model: {model.folder!r} has image tokens {tokens[0]} and patches {cut[0]}, the actor {tokens[1]} and "
            f"{cut[1]}; take two that agree"
        )
    from engines.images.processor import ImageProcessor

    settings, actor_settings = (_read_pixel_settings(ImageProcessor(*one)) for one in seeing)
    if differing := sorted(key for key in settings | actor_settings if settings.get(key) != actor_settings.get(key)):
        raise ValueError(
            f"model: the image processors in {model.folder!r} and {actor.folder!r} differ in {', '.join(differing)}, "
            "so that both would see other pixels; make them alike"
        )


def _read_pixel_settings(processor: "ImageProcessor") -> dict:
    """Read all settings that decide about pixels of images, and of videos where the folder has a processor of them."""
    if not processor.vision.tower.video_processor:
        return processor.settings
    try:
        videos = processor.videos.settings
    except ValueError:  # which says so by itself once a row has a video
        return processor.settings
    return processor.settings | {f"{key} of videos": value for key, value in videos.items()}


def _check_processor(folder: str) -> None:
    """Raise ValueError where a folder has no settings of its image processor."""
    if not any(Path(folder, name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise ValueError(
            f"model: {folder!r} has no preprocessor_config.json, which says how images are cut; save it there"
        )


def check_rules(model: ModelSpec, actor: MegatronConfig, platform: Platform) -> None:
    """Raise ValueError where the platform honours none of a rule's forms, or an override does nothing."""
    for name in actor.attention_override:
        if name.split("/")[0] not in platform.attention_backends:
            raise ValueError(
                f"actor: attention_override {name!r} is of a backend that platform {platform.name!r} does not use; it "
                f"uses {list(platform.attention_backends)}"
            )
    for rule in set(model.rules):
        find_backend(platform.attention_backends, actor.layout, actor.cp, rule, actor.attention_override)


def check_rollout_rules(model: ModelSpec, rollout: VllmConfig, platform: Platform) -> None:
    """Raise ValueError where vLLM on the machine that rolls out honours not all of the rules, or an override does
    nothing."""
    backend = find_rollout_backend(platform.rollout_backends, model.rules, rollout.attention_override)
    used = {f"{backend}/{part}" for part in list_parts(model.rules)}
    if idle := sorted(set(rollout.attention_override) - used):
        raise ValueError(
            f"rollout: attention_override {idle} does nothing for this model, which rolls out by {backend} on platform "
            f"{platform.name!r} and needs {sorted(used)}; leave it out"
        )


def _check_cache(model: ModelSpec, rollout: VllmConfig, platform: Platform) -> None:
    """Raise ValueError where the longest sequence does not fit into the rollout's memory for keys and values."""
    if rollout.vllm or model.rules != (CAUSAL,):
        return  # a pass-through or a window may change the memory of a token
    block = platform.rollout_block_tokens
    heads = model.kv_heads // rollout.tp
    token = 2 * model.layers * heads * model.head_dim * (4 if rollout.dtype == "float32" else 2)
    blocks = math.ceil(rollout.max_model_len / block) + 1  # vLLM keeps one for itself
    need, have = math.ceil(blocks * block * token / 2**20), rollout.kv_cache_mb or platform.rollout_kv_cache_mb
    if need > have:
        raise ValueError(
            f"rollout: kv_cache_mb={rollout.kv_cache_mb} gives {have} MB to keys and values, expected at least "
            f"{need} for one sequence of max_model_len={rollout.max_model_len}; raise --rollout.kv-cache-mb"
        )
