"""Send the questions of episodes to served models, equal questions once, and collect the verdicts."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from engines.batch.balance import balance_costs
from engines.batch.samples import make_seed
from rlworker.cluster.process_state import is_lost
from rlworker.cluster.rollout_group import Rollouts
from rlworker.environments.record import Question, Verdict
from rlworker.rollouts.episode_state import EpisodeState
from rlworker.rollouts.questions import Questions

Key = tuple[int, str, str]
"""Equal questions of a rollout batch have one key: number of the batch, name of the model, and content as JSON."""
LendFn = Callable[[Rollouts], AbstractContextManager]
"""``lend(group)`` is the context in which the engines of a group have devices that they share with others."""


@dataclass(eq=False)
class _Part:
    """Questions that one engine of a model answers in one call.

    Attributes:
        worker: handle of the engine that was asked.
    """

    model: str
    engine: int
    keys: list[Key]
    contents: list[Any]
    seed: int
    worker: ActorHandle | None = None


class QuestionQueue(Questions):
    """Holds questions until they may be asked, asks each model for many at once, and collects the verdicts.

    In turns, all questions are asked once no episode runs, before anything else is sampled: what shares a call depends
    on the environments alone. Ahead of the trainer an engine is asked for all that has come while it was busy. The
    questions of a lost engine are asked again of the engine that replaces it.

    Only ``list_lost`` may be called from a second thread.

    Args:
        groups: name of a served model -> its engines.
        runs_ahead: whether rollouts run ahead of the trainer.
        lend: gives engines their turn on shared devices, one group after the other; None where each has its own.
    """

    def __init__(self, groups: Mapping[str, Rollouts], runs_ahead: bool = False, lend: LendFn | None = None):
        super().__init__()
        self.groups, self._runs_ahead, self._lend = groups, runs_ahead, lend
        self._lent = ExitStack()
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._lent.pop_all()
        self._held: dict[str, dict[Key, Any]] = {name: {} for name in self.groups}
        self._asked: dict[Key, list[tuple[EpisodeState, Question]]] = {}
        self._known: dict[Key, Verdict] = {}
        self._parts: dict[Any, _Part] = {}
        self._lost: list[_Part] = []
        self._losses: dict[tuple[str, int], tuple[ActorHandle | None, RayError]] = {}
        self._stream: tuple[int, ...] = ()
        self._calls, self._since = 0, 0.0

    def open(self, stream: tuple[int, ...]) -> None:
        if not self._runs_ahead or not self._stream:
            self._stream, self._calls = stream, 0

    def keep(self, batches: Container[int]) -> None:
        self._known = {key: verdict for key, verdict in self._known.items() if key[0] in batches}

    def submit(self, state: EpisodeState, question: Question) -> None:
        if question.model not in self.groups:
            return super().submit(state, question)
        try:  # a whole pickle, since the repr of a large array leaves most of it out
            text = json.dumps(question.content, sort_keys=True, default=lambda each: pickle.dumps(each).hex())
        except (TypeError, ValueError, RecursionError) as error:
            found = f"a question to {question.model!r} is compared as JSON: {error}; give texts, numbers and lists"
            return self._done.append((state, question, Verdict(error=found)))
        key = state.batch.number, question.model, text
        if key in self._known:
            return self._done.append((state, question, self._known[key]))
        if key not in self._asked:
            self._held[question.model][key] = question.content
        self._asked.setdefault(key, []).append((state, question))

    @property
    def is_open(self) -> bool:
        return bool(self._asked)

    @property
    def references(self) -> list[Any]:
        return list(self._parts)

    def collect(self, is_idle: bool) -> list[tuple[EpisodeState, Question, Verdict]]:
        self._take_answers()
        for part in [part for part in self._lost if self.groups[part.model].serving[part.engine] is not part.worker]:
            self._lost.remove(part)
            self._send(part)
        if is_idle or self._runs_ahead:
            self._ask()
        return super().collect(is_idle)

    def list_lost(self) -> dict[str, dict[int, RayError]]:
        lost: dict[str, dict[int, RayError]] = {}
        for (model, engine), (worker, error) in list(self._losses.items()):
            if self.groups[model].serving[engine] is worker:
                lost.setdefault(model, {})[engine] = error
        return lost

    def _ask(self) -> None:
        busy = {(part.model, part.engine) for part in (*self._parts.values(), *self._lost)}
        if busy and not self._runs_ahead:
            return
        for name, held in self._held.items():
            free = [index for index in range(len(self.groups[name].workers)) if (name, index) not in busy]
            if not (held and free):
                continue
            if self._lend:
                self._lent.enter_context(self._lend(self.groups[name]))
            # In the order of their episodes, whichever process has told of them first.
            keys = sorted(held, key=lambda key: min((asked.number, asked.call) for _, asked in self._asked[key]))
            lengths = np.asarray([len(repr(held[key])) for key in keys], np.int64)
            owners = balance_costs(lengths, len(free), equal_counts=False)
            for number, index in enumerate(free):
                if own := [key for key, owner in zip(keys, owners, strict=True) if owner == number]:
                    seed = make_seed((*self._stream, self._calls, index))
                    self._send(_Part(name, index, own, [held[key] for key in own], seed))
            self._held[name], self._calls = {}, self._calls + 1
            if self._lend:
                return  # the next model has its turn once this one has answered

    def _send(self, part: _Part) -> None:
        self._since = self._since or time.perf_counter()
        worker: Any = self.groups[part.model].serving[part.engine]
        part.worker = worker
        self._parts[worker.answer.remote(part.contents, part.seed)] = part

    def _take_answers(self) -> None:
        references = self.references
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0) if references else ([], [])
        for reference in ready:
            part = self._parts.pop(reference)
            try:
                verdicts = ray.get(reference)
            except RayError as error:
                if not is_lost(error):
                    raise
                self._losses[part.model, part.engine] = part.worker, error
                self._lost.append(part)
                continue
            for key, verdict in zip(part.keys, verdicts, strict=True):
                self._known[key] = verdict
                self._done += [(state, question, verdict) for state, question in self._asked.pop(key)]
        if self._since and not self._parts and not self._lost:
            self._lent.close()
            self.seconds += time.perf_counter() - self._since
            self._since = 0.0
