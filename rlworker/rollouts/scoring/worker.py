"""The worker of a served model: one vLLM engine of a judge or of a classifier."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from engines.config import VllmConfig
from engines.config.served import ClassifierSpec, ServedModel
from rlworker.cluster.placement import DeviceSlot
from rlworker.cluster.ray import pausing_collection
from rlworker.cluster.workers import RolloutWorker
from rlworker.rollouts.scoring.classifier import Classifier
from rlworker.rollouts.scoring.judge import Judge

if TYPE_CHECKING:
    from rlworker.environments.record import Verdict


class ScoringWorker(RolloutWorker):
    """One vLLM engine of a served model, which answers questions.

    Args:
        platform, index, devices, device_slot: as of ``RolloutWorker``. name: name of the model.
    """

    def __init__(self, platform: str, name: str, index: int, devices: int = 1, device_slot: DeviceSlot | None = None):
        super().__init__(platform, index, devices, device_slot)
        self.name = name

    def __repr__(self) -> str:
        return f"{self.name} engine {self.index}"

    def start(self, model: Any, config: VllmConfig) -> None:
        """Load a ``ServedModel``."""
        super().start(model.spec, config)
        with pausing_collection():
            self._scorer = self._make_scorer(model, config)

    def build_engine(self, model: Any, config: VllmConfig) -> Any:
        if not isinstance(model, ClassifierSpec):
            return super().build_engine(model, config)
        from engines.vllm.classifier import ClassifierEngine

        return ClassifierEngine(model, config, self.platform, self.takes_turns)

    def _make_scorer(self, served: ServedModel, config: VllmConfig) -> Any:
        spec, engine = served.spec.move_here(), self.loop.engine
        if isinstance(spec, ClassifierSpec):
            compute = partial(self.loop.call, engine.compute_logits)
            return Classifier(served.name, spec, config.max_model_len, compute)
        assert served.form, "checked with the settings"
        sizes = spec.folder, spec.vocab, served.form, config.max_model_len
        return Judge(served.name, *sizes, partial(self.loop.call, engine.sample))

    def answer(self, contents: list, seed: int) -> list[Verdict]:
        """Answer questions, in order, in one round of the engine."""
        self._note_work()
        return self._scorer.answer(contents, seed)
