"""Models that a run serves beside the policy and never trains, read from their folders: judges and classifiers."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engines.config.judge_form import JudgeForm
from engines.config.rollout import ServedModelConfig
from engines.models.hub import find_here
from engines.models.spec import ModelSpec
from engines.validation import read_object

Task = Literal["classify", "token_classify"]
_TASKS: dict[str, Task] = {"ForSequenceClassification": "classify", "ForTokenClassification": "token_classify"}
"""Ending of transformers' class of a classifier -> vLLM's pooling task."""


@dataclass(frozen=True)
class ClassifierSpec:
    """A classifier's folder, read from its config.json.

    Attributes:
        folder: the HuggingFace folder. task: vLLM's pooling task.
        place: number of the label whose logit is the score.
        max_positions: most tokens of a sequence.
    """

    folder: str
    task: Task
    place: int
    max_positions: int

    @classmethod
    def from_folder(cls, folder: str, name: str, config: ServedModelConfig) -> "ClassifierSpec":
        """Read the folder of the classifier called ``name``.

        Raises:
            ValueError: it is no classifier, has not the label, or cannot be cut over the devices of an engine.
        """
        path, section = Path(folder).absolute() / "config.json", f"models.{name}"
        if not path.is_file():
            raise ValueError(
                f"{section}: {folder!r} has no config.json; give the path of a saved HuggingFace model, or hf:ORG/NAME"
            )
        found = read_object(path)
        architecture = str(next(iter(found.get("architectures") or ()), ""))
        task: Task | None = next((task for ending, task in _TASKS.items() if architecture.endswith(ending)), None)
        if not task:
            raise ValueError(
                f"{section}: {str(path)!r} has the architecture {architecture!r}, expected one that ends in "
                f"{' or '.join(_TASKS)}; take a classifier, or set --{section}.kind judge for a chat model"
            )
        labels = found.get("id2label") or {str(number): f"LABEL_{number}" for number in range(2)}
        if not config.label and len(labels) > 1:
            raise ValueError(
                f"{section}: the classifier has {len(labels)} labels, {', '.join(labels.values())}; set "
                f"--{section}.label to the one whose logit is the score"
            )
        places = {label: int(number) for number, label in labels.items()}
        if config.label and config.label not in places:
            raise ValueError(
                f"{section}: label={config.label!r} is none of the classifier's labels, {', '.join(places)}; change "
                f"--{section}.label"
            )
        sizes = {"attention heads": "num_attention_heads", "ffn size": "intermediate_size"}
        for what, size in {what: found[key] for what, key in sizes.items() if key in found}.items():
            if size % config.tp:
                raise ValueError(
                    f"{section}: tp={config.tp} does not divide the model's {size} {what}; lower --{section}.tp"
                )
        place = places[config.label] if config.label else 0
        inner = found | (found.get("text_config") or {})
        if not (positions := inner.get("max_position_embeddings") or inner.get("n_positions")):
            raise ValueError(
                f"{section}: {str(path)!r} has no max_position_embeddings; add the longest sequence's tokens"
            )
        return cls(str(path.parent), task, place, positions)

    def count_weights(self) -> int:
        """Count the numbers of its weights: by its config.json where its family is known, else by the bytes of its
        files as float32."""
        with suppress(ValueError):
            return ModelSpec.from_folder(self.folder).count_weights()
        return sum(path.stat().st_size for path in Path(self.folder).glob("*.safetensors")) // 4

    def move_here(self) -> "ClassifierSpec":
        """Return the same classifier in the folder that has it on this machine, as ``ModelSpec.move_here``."""
        return replace(self, folder=find_here(self.folder))


@dataclass(frozen=True)
class ServedModel:
    """A model that a run serves, read from its folder.

    Attributes:
        name: name by which environments ask it. config: its settings.
        spec: the model. form: prompt and form of the verdict of a judge; None of a classifier.
    """

    name: str
    config: ServedModelConfig
    spec: ModelSpec | ClassifierSpec
    form: JudgeForm | None = None


def read_shape(folder: str, name: str, config: ServedModelConfig) -> ModelSpec | ClassifierSpec:
    """Read the shape of the served model called ``name`` from its folder's config.json.

    Raises:
        ValueError: as of ``ModelSpec.from_folder`` for a judge, or of ``ClassifierSpec.from_folder``.
    """
    if config.kind == "classifier":
        return ClassifierSpec.from_folder(folder, name, config)
    return ModelSpec.from_folder(folder)
