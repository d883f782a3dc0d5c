"""Settings of models that a run serves beside the policy and never trains: judges and classifiers."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from engines.config.judge_form import JudgeForm
from engines.models.hf_folder import list_model_files
from engines.models.hub import find_here
from engines.models.spec import ModelSpec
from engines.validation import FINITE, check_types, read_object

_TASKS = {"ForSequenceClassification": "classify", "ForTokenClassification": "token_classify"}
"""Ending of transformers' class of a classifier -> vLLM's pooling task."""


@dataclass(frozen=True)
class ServedModelConfig:
    """A model that environments ask by its name: a judge writes a verdict, a classifier gives a number."""

    model: str = ""
    """Folder of a saved HuggingFace model with its tokenizer, or hf:ORG/NAME, as for the policy."""
    kind: Literal["judge", "classifier"] = "judge"
    """A judge is a chat model. A classifier is a sequence classification, or a token classification that scores every
    token."""
    template: str = ""
    """File of a judge, in TOML: the prompt and the form of the verdict. docs/rewards.md explains its keys."""
    label: str = ""
    """Label of a classifier whose logit is the score; a classifier with one label needs none."""
    engines: Annotated[int, Ge(1)] = 1
    """Number of vLLM engines of this model; their dtype and KV cache are those of the rollouts."""
    tp: Annotated[int, Ge(1)] = 1
    """Tensor-parallel size: devices of each engine."""
    max_model_len: Annotated[int, Ge(1)] = 2048
    """Longest question, with a judge's answer, in tokens. A longer one has no verdict."""
    weight: Annotated[float, FINITE] = 1.0
    """Weight of its verdict in the reward of combine_parts."""

    def __post_init__(self):
        check_types("models.NAME", self)

    def check(self, name: str) -> None:
        """Raise ValueError where the settings of the model called ``name`` do not fit each other."""
        section = f"models.{name}"
        if not self.model:
            raise ValueError(f"{section}: no model was given; set --{section}.model to a folder or hf:ORG/NAME")
        if self.kind == "judge" and not self.template:
            raise ValueError(
                f"{section}: a judge needs a file with its prompt and the form of its verdict; set "
                f"--{section}.template, or --{section}.kind classifier"
            )
        if self.kind == "judge" and self.label:
            raise ValueError(f"{section}: label={self.label!r} is of classifiers, and kind is judge; leave it out")
        if self.kind == "classifier" and self.template:
            raise ValueError(
                f"{section}: template={self.template!r} is of judges, and kind is classifier, whose prompt comes from "
                "its own chat template; leave it out"
            )

    @property
    def devices(self) -> int:
        """Number of devices of all engines."""
        return self.engines * self.tp


@dataclass(frozen=True)
class ClassifierSpec:
    """A classifier's folder, read from its config.json.

    Attributes:
        folder: the HuggingFace folder. task: vLLM's pooling task.
        place: number of the label whose logit is the score.
        vocab: number of tokens. max_positions: most tokens of a sequence.
        layers, kv_heads, head_dim: sizes of the KV cache.
    """

    folder: str
    task: Literal["classify", "token_classify"]
    place: int
    vocab: int
    max_positions: int
    layers: int
    kv_heads: int
    head_dim: int

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
        task = next((task for ending, task in _TASKS.items() if architecture.endswith(ending)), None)
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
        heads = found["num_attention_heads"]
        for what, size in {"attention heads": heads, "ffn size": found["intermediate_size"]}.items():
            if size % config.tp:
                raise ValueError(
                    f"{section}: tp={config.tp} does not divide the model's {size} {what}; lower --{section}.tp"
                )
        list_model_files(str(path.parent))
        head_dim = found.get("head_dim") or found["hidden_size"] // heads
        sizes = found["vocab_size"], found["max_position_embeddings"], found["num_hidden_layers"]
        place = places[config.label] if config.label else 0
        return cls(str(path.parent), task, place, *sizes, found.get("num_key_value_heads") or heads, head_dim)

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
