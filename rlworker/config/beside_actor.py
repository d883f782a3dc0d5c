"""Checks of the critic, the reference and teachers, which read the same sequences as the actor."""

from pathlib import Path
from typing import TYPE_CHECKING

from engines.config import MegatronConfig
from engines.images import import_modules
from engines.models.hub import FindModel
from engines.models.spec import ModelSpec
from rlworker.config.model_checks import check_trainable

if TYPE_CHECKING:
    from engines.images.processor import ImageProcessor


def check_beside_actor(
    role: str,
    name: str,
    find: FindModel,
    actor: ModelSpec,
    config: MegatronConfig,
    platform_name: str,
    longest: int,
    is_whole: bool = True,
) -> ModelSpec:
    """Read the model of a critic, the reference or a teacher, and check it against the actor's.

    Args:
        role: role of the model, as in ``RunConfig.models``. name: name of the model. find: returns the folder of a
            model, given its name.
        actor: the actor's model. config: settings of the engine. longest: tokens of the longest sequence.
        is_whole: whether the folders have more than config.json, which is checked as well.

    Raises:
        ValueError: the engine cannot hold the model, or the model processes images otherwise, has other tokens, or
            has fewer tokens or positions than the actor uses.
    """
    option = {"critic": "--critic.model", "reference": "--algorithm.reference"}.get(role, "--distill.teachers")
    try:
        model = ModelSpec.from_folder(find(name), head="value" if role == "critic" else "language")
        check_trainable(model, config, platform_name, is_whole)
        check_same_image_processing(model, actor, is_whole)
        check_same_tokens(model, actor)
    except ValueError as error:
        raise ValueError(f"{role} ({option}): {error}") from None
    requirements = (("tokens in its vocabulary", model.vocab, actor.vocab), ("positions", model.max_positions, longest))
    for what, have, need in requirements:
        if have < need:
            raise ValueError(
                f"{role} ({option}): the model in {name!r} has {have} {what}, expected at least {need}; take a model "
                "with the actor's tokenizer and at least its positions"
            )
    return model


def check_same_tokens(model: ModelSpec, actor: ModelSpec) -> None:
    """Raise ValueError if an id of the actor's tokenizer is another token in the tokenizer of a model."""
    if not all(Path(spec.folder, "tokenizer.json").is_file() for spec in (actor, model)):
        return  # a critic or a reference may have no tokenizer of its own
    if Path(model.folder).samefile(actor.folder):
        return
    from tokenizers import Tokenizer

    read = (Tokenizer.from_file(str(Path(spec.folder, "tokenizer.json"))) for spec in (actor, model))
    own, others = (tokenizer.get_vocab(with_added_tokens=True) for tokenizer in read)
    if differing := [(number, token) for token, number in own.items() if others.get(token) != number]:
        number, token = min(differing)
        raise ValueError(
            f"model: {model.folder!r} has another tokenizer than the actor's model {actor.folder!r}: {len(differing)} "
            f"of {len(own)} tokens differ, the first is {token!r}, id {number} of the actor and "
            f"{others.get(token, 'no token')} there; take a model with the actor's tokenizer"
        )


def check_same_image_processing(model: ModelSpec, actor: ModelSpec, is_whole: bool = True) -> None:
    """Raise ValueError if a model and the actor differ in tokens or pixels of images, or one has no vision.

    Args:
        is_whole: as of ``check_beside_actor``; without the folders' processors pixels are not compared.
    """
    seeing = [(spec.folder, spec.vision) for spec in (model, actor) if spec.vision]
    if not seeing:
        return
    if len(seeing) == 1:
        who, other = ("this model", "the actor") if model.vision is None else ("the actor", "this model")
        raise ValueError(f"model: {who} cannot see images and {other} can; take two models with vision, or two without")
    tokens = [(vision.banned_tokens, vision.image_token) for _, vision in seeing]
    cut = [(vision.patch, vision.merge, vision.temporal_patch) for _, vision in seeing]
    if tokens[0] != tokens[1] or cut[0] != cut[1]:
        raise ValueError(
            f"model: {model.folder!r} has image tokens {tokens[0]} and patches {cut[0]}, the actor {tokens[1]} and "
            f"{cut[1]}; take two models of the same family and size of patches"
        )
    if not is_whole:
        return
    make_processor = import_modules().processor.ImageProcessor
    settings, actor_settings = (_read_pixel_settings(make_processor(*one)) for one in seeing)
    if differing := sorted(key for key in settings | actor_settings if settings.get(key) != actor_settings.get(key)):
        raise ValueError(
            f"model: the image processors in {model.folder!r} and {actor.folder!r} differ in {', '.join(differing)}, "
            "so that the two models would see different pixels; copy preprocessor_config.json from one to the other"
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
