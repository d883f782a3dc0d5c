"""The engines of a model that a run serves beside the policy and never trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engines.config import VllmConfig
from engines.config.judge_form import JudgeForm
from engines.config.served import ServedModel, read_shape
from engines.models.folders.hf_folder import list_model_files
from engines.models.hub import FindModel
from engines.models.spec import ModelSpec
from rlworker.cluster.placement import DeviceSlot
from rlworker.cluster.rollout_group import Rollouts
from rlworker.config.model_checks import check_folder, check_rollout
from rlworker.config.run import RunConfig
from rlworker.data.rows import load_tokenizer
from rlworker.rollouts.scoring.worker import ScoringWorker


class ScoringGroup(Rollouts):
    """The engines of a served model: placed, watched and replaced as the policy's are, and never sent weights.

    Args:
        model: the model. config: the run's settings.
        list_ranks: as of ``Rollouts``.
    """

    worker_class = ScoringWorker

    def __init__(
        self,
        model: ServedModel,
        config: RunConfig,
        list_ranks: Callable[[], Sequence[DeviceSlot]] | None = None,
    ):
        self.model, self.config = model, make_engine_config(model, config)
        self.title, self.named = f"{model.name} engine", (model.name,)
        super().__init__(config.platform, model.config.engines, model.config.tp, list_ranks)

    def begin(self) -> ScoringGroup:
        """Begin to load the model; call ``wait`` for the end."""
        self.start(self.model, self.config)
        return self

    def replace_engines(self, note: Callable[[Mapping[str, str]], None]) -> None:
        """Replace engines that die or hang, from now on; a new one has loaded its folder and needs nothing else.

        Args:
            note: as of ``Rollouts.replace_lost``.
        """
        self.replace_lost(note, lambda engines: None)


def make_engine_config(model: ServedModel, config: RunConfig) -> VllmConfig:
    """Make the settings of a served model's engines from its own and from those of the rollouts."""
    own, rollout = model.config, config.rollout
    longest = min(own.max_model_len, model.spec.max_positions)
    answer = model.form.answer_tokens if model.form else 1
    sizes: dict[str, Any] = dict(engines=own.engines, tp=own.tp, max_model_len=longest, max_new_tokens=answer)
    shared: dict[str, Any] = {name: getattr(rollout, name) for name in ("max_num_seqs", "kv_cache_mb", "dtype")}
    return VllmConfig(**sizes, **shared)


def read_served(config: RunConfig, find: FindModel, is_whole: bool = True) -> dict[str, ServedModel]:
    """Read the served models of a run, by name, and check that their engines can hold them.

    Args:
        find: returns the folder of a model, given its name.
        is_whole: whether folders have more than config.json, which is checked as well.

    Raises:
        ValueError: a folder, a judge's file or a setting cannot be used; the message names the model.
    """
    served = {}
    for name, own in config.models.items():
        own.check(name)
        try:
            folder = find(own.model)
            spec = read_shape(folder, name, own)
            form = JudgeForm.read(own.template) if own.template else None
            if is_whole:
                arguments = form.chat_template_args if form else {}
                list_model_files(folder)
                load_tokenizer(folder, arguments, answers=own.kind == "judge", section=own.template)
            served[name] = ServedModel(name, own, spec, form)
            longest = min(own.max_model_len, spec.max_positions)
            if form and form.answer_tokens >= longest:
                raise ValueError(
                    f"max_tokens={form.max_tokens} of {own.template} leaves no room for a question in {longest} "
                    f"tokens; lower it, or raise --models.{name}.max-model-len"
                )
            if isinstance(spec, ModelSpec):
                if is_whole:
                    check_folder(spec)
                check_rollout(spec, config.platform, make_engine_config(served[name], config))
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith("models.") else f"models.{name}: {text}") from None
    return served
