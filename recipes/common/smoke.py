"""Recipes for real models take these settings, and ``--smoke`` makes a tiny run of them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, TypeVar, cast

from hardware.platforms import PlatformName, get_platform
from recipes.common import squares
from recipes.common.addition import make_expert_model, make_model, make_state_model, make_tokenizer, write_rows
from recipes.common.sizes import fit_to_model, fit_to_node
from rlworker import RunConfig, SftConfig, VllmConfig, parse_config
from rlworker.checks.tiny.models import IMAGE_TOKENS, VIDEO_FAMILIES, TinyVlm, make_tiny_vlm

_QUESTIONS = str(Path(__file__).parent / "questions.jsonl")
_DRAWN = ("temperature", "top_k", "top_p", "min_p", "stop", "ignore_eos")
"""Settings of the rollout that a smoke run keeps."""
_ROWS = {"train": 16, "heldout": 8}
_MAKERS = {"qwen3": make_model, "qwen3_moe": make_expert_model, "qwen3_5_text": make_state_model}
SmokeText = Literal["qwen3", "qwen3_moe", "qwen3_5_text"]
"""Kind of the tiny model of a recipe for text: of attention alone, with experts, or with states."""
_CHAT = (
    "{% for tool in tools or [] %}tool: {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)


@dataclass(frozen=True)
class RecipeConfig(RunConfig):
    """Settings of a recipe: a RunConfig that can be tried on any machine."""

    smoke: bool = False
    """Try the recipe: two steps on a CPU with tiny models and sixteen rows, made on the spot. Sizes of the engines and
    of the data are replaced; algorithm, rewards and rates stay. Files go to run_dir with _smoke added: --run-dir X has
    its run folder at X_smoke/run."""
    smoke_model: SmokeText = "qwen3"
    """Kind of the tiny model that smoke makes: all layers with attention, with experts, or some with a state."""

    def fit_to_model(self) -> Self:
        return fit_to_model(self)

    def move_to_platform(self, name: PlatformName) -> Self:
        return fit_to_node(super().move_to_platform(name), get_platform(name).node)


@dataclass(frozen=True)
class VlmRecipeConfig(RecipeConfig):
    """Settings of a recipe for vision-language models."""

    smoke_model: TinyVlm = "qwen2_5_vl"  # pyright: ignore[reportIncompatibleVariableOverride]  of other kinds
    """Kind of the tiny model that smoke makes."""


@dataclass(frozen=True)
class SftRecipeConfig(SftConfig):
    """Settings of a recipe of supervised training that can be tried on any machine."""

    smoke: bool = False
    """Try the recipe: two steps on a CPU with tiny models and sixteen rows, made on the spot. Sizes of the engines and
    of the data are replaced; losses and rates stay. Files go to run_dir with _smoke added: --run-dir X has its run
    folder at X_smoke/run."""
    smoke_model: SmokeText = "qwen3"
    """Kind of the tiny model that smoke makes: all layers with attention, with experts, or some with a state."""

    def fit_to_model(self) -> Self:
        return fit_to_model(self)

    def move_to_platform(self, name: PlatformName) -> Self:
        return fit_to_node(super().move_to_platform(name), get_platform(name).node)


@dataclass(frozen=True)
class SftVlmRecipeConfig(SftRecipeConfig):
    """Settings of a recipe of supervised training for vision-language models."""

    smoke_model: TinyVlm = "qwen2_5_vl"  # pyright: ignore[reportIncompatibleVariableOverride]  of other kinds
    """Kind of the tiny model that smoke makes."""


Recipe = TypeVar("Recipe", bound=RecipeConfig | SftRecipeConfig)


def parse_recipe_config(default: Recipe, description: str | None, own_rows: bool = False) -> Recipe:
    """Read a recipe's settings from the command line, shrunk where they say ``--smoke``.

    Args:
        default: settings of the recipe. description: text of its ``--help``.
        own_rows: whether a smoke run keeps the recipe's rows, in place of sixteen that are made on the spot.
    """
    config = parse_config(default, description)
    if not config.smoke:
        return config
    small = shrink_recipe(config) if isinstance(config, RecipeConfig) else shrink_supervised(config)
    if own_rows:
        small = replace(small, data=replace(config.data, max_prompt_tokens=small.data.max_prompt_tokens))
    return cast(Recipe, small)


def shrink_recipe(config: RecipeConfig) -> RecipeConfig:
    """Shrink a recipe to two CPU ranks, models of 132 thousand parameters (with experts 354, with states 149) and
    sixteen questions.

    Algorithm, critic, reward, layout and rates stay as the recipe has them; sizes do not.
    """
    algorithm = replace(config.algorithm, mini_batches=min(2, config.algorithm.mini_batches))
    if algorithm.reference:
        algorithm = replace(algorithm, reference=_make_tiny_model(config, "reference", seed=config.seed + 1))
    rollout = VllmConfig(max_new_tokens=16, max_model_len=256, max_num_seqs=32, kv_cache_mb=64)
    return replace(
        config,
        **_shrink_parts(config),
        rollout=replace(rollout, **{name: getattr(config.rollout, name) for name in _DRAWN}),
        algorithm=algorithm,
        critic=replace(config.critic, model="", warmup_steps=min(1, config.critic.warmup_steps)),
        environment=replace(
            config.environment, workers=1, tokens=min(config.environment.tokens, rollout.max_model_len)
        ),
        models={
            name: replace(each, model=_make_tiny_model(config, name, config.seed + 2), engines=1, tp=1)
            for name, each in config.models.items()
        },
        placement=replace(config.placement, dedicated_devices=()),
        prompts_per_step=8,
        samples_per_prompt=min(4, config.samples_per_prompt),
    )


def shrink_supervised(config: SftRecipeConfig) -> SftRecipeConfig:
    """Shrink a recipe of supervised training, as ``shrink_recipe`` does one with rollouts."""
    return replace(config, **_shrink_parts(config), rows_per_step=8, max_answer_tokens=64)


def _shrink_parts(config: RecipeConfig | SftRecipeConfig) -> dict:
    """Return the settings, by name, that shrunk recipes of both kinds share."""
    fields: dict = dict(prompt_field="question", answer_field="answer", max_prompt_tokens=192)
    fields |= dict(format="auto", heldout_sets={})
    train = heldout = _QUESTIONS
    if isinstance(config, VlmRecipeConfig | SftVlmRecipeConfig):
        rows = _make_rows(_find_folder(config) / "data", config.smoke_model)
        train, heldout = str(rows / "train.jsonl"), str(rows / "heldout.jsonl")
        fields |= dict(prompt_field="prompt", image_field="images", video_field="videos")
    sizes: dict = dict(ranks=2, tp=1, pp=1, cp=1, ep=min(2, config.actor.ep), etp=1)
    sizes |= dict(dtype="float32", recompute="none", micro_batch_tokens=4096)
    return dict(
        model=_make_tiny_model(config, "model", config.seed),
        run_dir=str(_find_folder(config) / "run"),
        data=replace(config.data, train=train, heldout=heldout, **fields),
        actor=replace(config.actor, **sizes),
        platform=get_platform(config.platform).stand_in,
        steps=2,
        eval_every=0,
        validation=replace(config.validation, metric="", patience=0),
        checkpoint=replace(config.checkpoint, save_every=0),
    )


def _make_rows(folder: Path, kind: TinyVlm) -> Path:
    """Write rows with images; every second one has a video instead, where the model is shown any."""
    if kind not in VIDEO_FAMILIES:
        return squares.make_data(folder, _ROWS)
    parts = {}
    for seed, (name, count) in enumerate(_ROWS.items()):
        images = squares.make_rows(folder, name, seed, count // 2)
        videos = squares.make_video_rows(folder, name, seed, count // 2)
        parts[name] = [row for pair in zip(images, videos, strict=True) for row in pair]
    return write_rows(folder, parts)


def _make_tiny_model(config: RecipeConfig | SftRecipeConfig, name: str, seed: int) -> str:
    folder = _find_folder(config) / name
    if not isinstance(config, VlmRecipeConfig | SftVlmRecipeConfig):
        return str(_MAKERS[config.smoke_model](folder, seed, chat_template=_CHAT))
    return make_tiny_vlm(folder, config.smoke_model, make_tokenizer(_CHAT, IMAGE_TOKENS), 128, seed=seed)


def _find_folder(config: RecipeConfig | SftRecipeConfig) -> Path:
    return Path(f"{config.run_dir}_smoke")
