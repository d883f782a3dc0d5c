"""Questions of episodes in a run that serves no model: each has an error in the place of its verdict."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from rlworker.environments.record import Question, Verdict

if TYPE_CHECKING:  # a run that serves no model starts no engines of one
    from ray.exceptions import RayError

    from rlworker.cluster.rollout_group import Rollouts
    from rlworker.rollouts.episode_state import EpisodeState


class Questions:
    """Takes questions, refuses those to a model that is not served, and returns the verdicts.

    Attributes:
        groups: name of a served model -> its engines.
        seconds: seconds in which questions were open.
    """

    def __init__(self) -> None:
        self.groups: Mapping[str, Rollouts] = {}
        self.seconds = 0.0
        self._done: list[tuple[EpisodeState, Question, Verdict]] = []

    def reset(self) -> None:
        """Forget all questions; answers that are on their way are ignored, and whoever goes back gives out devices."""
        self._done = []

    def open(self, stream: tuple[int, ...]) -> None:
        """Begin a batch: in turns, draw from random numbers of its ``stream`` from now on."""

    def keep(self, batches: Container[int]) -> None:
        """Forget the verdicts of all batches but those with these numbers."""

    def submit(self, state: EpisodeState, question: Question) -> None:
        """Take a question of an episode, to be asked unless an equal one of the batch was."""
        has = f"has {', '.join(self.groups)}" if self.groups else "has none"
        error = f"no model is called {question.model!r}, the run {has}; set --models.{question.model}.model"
        self._done.append((state, question, Verdict(error=error)))

    @property
    def is_open(self) -> bool:
        """Tell whether a question waits for its verdict."""
        return False

    @property
    def references(self) -> list[Any]:
        """Ray's references of the open calls, to wait for."""
        return []

    def collect(self, is_idle: bool) -> list[tuple[EpisodeState, Question, Verdict]]:
        """Ask what may be asked, and return the verdicts that have come, each with its episode and question.

        Args:
            is_idle: whether no episode runs.

        Raises:
            Exception: an engine reports an error of its own.
        """
        done, self._done = self._done, []
        return done

    def list_lost(self) -> dict[str, dict[int, RayError]]:
        """List the engines that are lost and not yet replaced: name of the model -> index -> error of the loss."""
        return {}

    def replace_lost(self) -> None:
        """Replace the lost engines, or raise the error of one of them where none may be replaced."""
        for model, lost in self.list_lost().items():
            self.groups[model].replace_or_raise(lost)
