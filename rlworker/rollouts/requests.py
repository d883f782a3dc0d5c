"""Send each sample request to an engine as soon as it comes, while the trainer works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from engines.batch.samples import Completion, Request, Sampling, make_seed
from rlworker.cluster.process_state import is_lost
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.worker_pool import POLL
from rlworker.rollouts.trajectory import Key

_TAKE_S = 5.0
"""Seconds that a call for finished samples waits at an engine."""


@dataclass(eq=False)
class _Engine:
    """An engine with its open requests.

    Attributes:
        load: tokens that these are expected to take. loss: how it was found to be lost. is_polled: it is being asked
            for what has finished.
    """

    worker: ActorHandle
    open: dict[Key, Request] = field(default_factory=dict)
    load: float = 0.0
    loss: RayError | None = None
    is_polled: bool = False

    def add(self, key: Key, request: Request) -> None:
        self.open[key] = request
        self.load += _estimate_tokens(request)

    def drop(self, key: Key) -> bool:
        """Drop a request, where it has it."""
        request = self.open.pop(key, None)
        self.load -= _estimate_tokens(request) if request else 0.0
        return request is not None


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of an engine, what to do with its result, and what to do where the engine is lost before."""

    engine: _Engine
    then: Callable[[Any], None]
    otherwise: Callable[[], None]


def _ignore(*_: Any) -> None:
    pass


class RequestQueue:
    """Sends sample requests to the engines as they come, and collects the samples: the queue of rollouts that run
    ahead.

    Only ``list_lost`` may be called from a second thread. The requests of a lost engine are kept, and sent again from
    the beginning to the engine that replaces it.

    Args:
        rollouts: the vLLM engines.
        stream: seeds the engines' random numbers, together with a number that differs for each engine.
    """

    runs_ahead, sampling_seconds = True, 0.0
    longest_s = 0.05
    """Seconds after which a process reports the samples that its episodes need, while others still run."""

    def __init__(self, rollouts: Rollouts, stream: tuple[int, ...]):
        self._rollouts, self._stream, self._seeds = rollouts, stream, 0
        self._calls: dict[Any, _Call] = {}
        self._finished: list[tuple[Key, list[Completion]]] = []
        self._engines = [_Engine(worker) for worker in rollouts.serving]
        self.reset(stream)

    def reset(self, stream: tuple[int, ...]) -> None:
        """Abort all requests, and draw from the random numbers of ``stream`` from now on."""
        self.abort([key for engine in self._engines for key in engine.open])
        self._stream, self._seeds = stream, 0
        for engine in self._engines:
            self._seed(engine)

    def open(self, sampling: Sampling, starts_rows: bool) -> None:
        pass  # every request has its settings, and random numbers go on

    def submit(self, requests: Iterable[tuple[Key, Request]]) -> None:
        """Send each request, with its key, to the engine whose open requests need the fewest tokens."""
        parts: dict[int, list[tuple[Key, Request]]] = {}
        for key, request in requests:
            place = min(range(len(self._engines)), key=lambda number: self._engines[number].load)
            self._engines[place].add(key, request)
            parts.setdefault(place, []).append((key, request))
        for place, part in parts.items():
            self._ask(self._engines[place], part)

    def submit_to_each(self, requests: Sequence[tuple[Key, Request]]) -> None:
        """Send requests to the engines in order, equally many to each."""
        for place, (key, request) in enumerate(requests):
            engine = self._engines[place * len(self._engines) // len(requests)]
            engine.add(key, request)
            self._ask(engine, [(key, request)])

    def collect(self, is_idle: bool) -> list[tuple[Key, list[Completion]]]:
        """Return the samples that have come since the last call, with their keys, without waiting for more.

        Raises:
            Exception: an engine reports that a request cannot be sampled, or that its loop has ended.
        """
        self._take_up_new_engines()
        references = self.references
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0) if references else ([], [])
        for reference in ready:
            call = self._calls.pop(reference)
            try:
                result = ray.get(reference)
            except RayError as error:
                if not is_lost(error):
                    raise
                call.engine.loss, call.engine.is_polled = error, False
                call.otherwise()
                continue
            call.then(result)
        finished, self._finished = self._finished, []
        return finished

    def abort(self, keys: Iterable[Key]) -> None:
        """Abort requests by their keys; samples of them that have come are dropped."""
        gone = set(keys)
        self._finished = [one for one in self._finished if one[0] not in gone]
        for engine in self._engines:
            if found := [key for key in gone if engine.drop(key)]:
                self._call(engine, "abort", found)

    def parse_tools(
        self, texts: Sequence[str], parser: str, tools: list, then: Callable[[Any], None], otherwise: Callable[[], None]
    ) -> None:
        """Have an engine parse the tool calls of each text, without waiting.

        Args:
            parser: name of vLLM's tool-call parser. tools: schemas of the tools.
            then: is called with the tool calls of each text.
            otherwise: is called where the engine is lost before it answers.
        """
        engine = next((engine for engine in self._engines if not engine.loss), self._engines[0])
        self._call(engine, "parse_tools", texts, parser, tools, then=then, otherwise=otherwise)

    def _call(
        self,
        engine: _Engine,
        method: str,
        *args: Any,
        then: Callable[[Any], None] = _ignore,
        otherwise: Callable[[], None] = _ignore,
    ) -> None:
        reference = getattr(engine.worker, method).remote(*args)
        self._calls[reference] = _Call(engine, then, otherwise)

    @property
    def references(self) -> list[Any]:
        """Ray's references of the open calls to engines, to wait for."""
        return list(self._calls)

    def list_lost(self) -> dict[int, RayError]:
        """List the engines that are lost and not yet replaced: ``{index: error that showed the loss}``."""
        serving = self._rollouts.serving
        numbered = enumerate(self._engines)
        return {place: one.loss for place, one in numbered if one.loss and serving[place] is one.worker}

    def _ask(self, engine: _Engine, requests: Sequence[tuple[Key, Request]]) -> None:
        """Ask an engine for requests that are noted as its own."""
        if engine.loss:
            return  # whoever takes its place is asked
        self._call(engine, "submit", requests)
        self._poll(engine)

    def _poll(self, engine: _Engine) -> None:
        if engine.open and not engine.is_polled:
            engine.is_polled = True
            reference = engine.worker.take.options(concurrency_group=POLL).remote(_TAKE_S)
            self._calls[reference] = _Call(engine, partial(self._note_taken, engine), _ignore)

    def _note_taken(self, engine: _Engine, taken: list[tuple[Key, list[Completion] | Exception]]) -> None:
        engine.is_polled = False
        for key, answer in taken:
            if not engine.drop(key):
                continue  # given up
            if isinstance(answer, Exception):
                raise answer
            self._finished.append((key, answer))
        self._poll(engine)

    def _take_up_new_engines(self) -> None:
        """Ask engines that have taken the place of others what these had not answered."""
        for engine, worker in zip(self._engines, self._rollouts.serving, strict=True):
            if engine.worker is worker:
                continue
            for reference, call in list(self._calls.items()):
                if call.engine is engine:
                    del self._calls[reference]
                    call.otherwise()
            engine.worker, engine.loss, engine.is_polled = worker, None, False
            self._seed(engine)
            if engine.open:
                self._ask(engine, list(engine.open.items()))

    def _seed(self, engine: _Engine) -> None:
        self._call(engine, "seed", make_seed((*self._stream, self._seeds)))
        self._seeds += 1


def _estimate_tokens(request: Request) -> float:
    return len(request.token_ids) + request.sampling.count * max(request.sampling.expected_tokens, 1.0)
