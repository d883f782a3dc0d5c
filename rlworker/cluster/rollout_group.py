"""The vLLM workers of a run: send requests to them and collect completions.

The module does not import torch at its top, so that the processes can start while the controller still imports it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
from ray.actor import ActorHandle
from ray.exceptions import RayError

from engines.batch.balance import balance_costs
from engines.batch.samples import make_seed
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from rlworker.base.errors import RunError
from rlworker.cluster.placement import DeviceSlot
from rlworker.cluster.process_state import UNREACHED, is_lost
from rlworker.cluster.watch import find_lost, unwatch_workers, wait_for, watch_workers
from rlworker.cluster.worker_pool import end_workers, start_workers
from rlworker.cluster.workers import RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engines.batch.samples import Completion, Request
    from engines.config.served import ServedModel
    from engines.vllm.tools import ToolCalls


P = ParamSpec("P")
R = TypeVar("R")


class Rollouts:
    """vLLM engines of a run. The constructor starts processes that import vLLM; ``start`` loads a model into them.

    Leaving it as a context manager ends the processes.

    Args:
        platform: name of the platform. engines: number of engines. devices: number of devices of each engine.
        list_ranks: returns the device slots of trainer ranks, with which the engines take turns on the same devices;
            None gives the engines devices of their own.

    Attributes:
        workers: Ray's handle of each engine.
        serving: handles of the engines that may sample; an engine that replaces a lost one is added once it has the
            weights.
        worker_class: class of the workers. title: name of an engine in messages, before its number.
        named: first arguments of a worker's constructor, after the platform.
    """

    worker_class: type[RolloutWorker] = RolloutWorker
    title = "rollout engine"
    named: tuple[str, ...] = ()

    def __init__(
        self,
        platform: str,
        engines: int,
        devices: int = 1,
        list_ranks: Callable[[], Sequence[DeviceSlot]] | None = None,
    ):
        self._platform, self._devices, self._list_ranks, self._engines = platform, devices, list_ranks, engines
        self._device_slots: dict[int, DeviceSlot] = {}
        self._note: Callable[[Mapping[str, str]], None] | None = None
        self._send_weights: Callable[[list[ActorHandle]], None] | None = None
        self.workers = self._start_processes(range(engines))
        self.serving = list(self.workers)

    def _start_processes(self, indices: Sequence[int]) -> list[ActorHandle]:
        arguments: list[tuple] = [(*self.named, index, self._devices) for index in indices]
        if self._list_ranks:
            device_slots = self._take_device_slots(indices, self._list_ranks())
            arguments = [(*each, device_slot) for each, device_slot in zip(arguments, device_slots, strict=True)]
            nodes = [device_slot.node for device_slot in device_slots]
            workers = start_workers(self.worker_class, self._platform, arguments, devices=0, nodes=nodes)
        else:
            workers = start_workers(self.worker_class, self._platform, arguments, self._devices)
        watch_workers({self._name(index): worker for index, worker in zip(indices, workers, strict=True)})
        for worker in workers:
            worker.prepare.remote()
        return workers

    def _take_device_slots(self, indices: Sequence[int], ranks: Sequence[DeviceSlot]) -> list[DeviceSlot]:
        """Take device slots of the ranks for engines of some indices; those that the engines had before are free."""
        from rlworker.cluster.device_slots import choose_device_slot, list_engine_slots

        device_slots = list_engine_slots(ranks, self._engines, self._devices)
        for index in indices:
            self._device_slots.pop(index, None)
        for index in indices:
            self._device_slots[index] = choose_device_slot(index, device_slots, self._device_slots.values())
        return [self._device_slots[index] for index in indices]

    def start(self, model: ModelSpec | ServedModel, config: VllmConfig) -> Rollouts:
        """Begin to load a model, of whichever kind the workers take; call ``wait`` for the end."""
        self._model = model, config
        self._started = [worker.start.remote(model, config) for worker in self.workers]
        return self

    def wait(self) -> Rollouts:
        wait_for(self._started)
        return self

    def replace_lost(
        self, note: Callable[[Mapping[str, str]], None], send_weights: Callable[[list[ActorHandle]], None]
    ) -> None:
        """Replace engines that die or hang, from now on, and repeat their calls on the new engines.

        Args:
            note: is called with ``{engine: how it was lost}`` before a new engine starts. It raises where the run may
                not go on.
            send_weights: sends the current weights to engines that have just loaded the model.
        """
        self._note, self._send_weights = note, send_weights

    def sample(
        self, requests: Sequence[Request], stream: tuple[int, ...], equal_shares: bool = False
    ) -> list[Completion]:
        """Sample the completions of all requests, and return them in the order of the requests, once the last is done.

        The same requests, weights and stream give the same numbers, bit for bit.

        Args:
            stream: seeds the random numbers, as ``Sampling.stream`` does; each engine has numbers of its own.
            equal_shares: whether each engine takes equally many consecutive requests; else they are balanced by cost.
        """
        parts = deal_requests(requests, len(self.workers))
        if equal_shares:
            parts = [share.tolist() for share in np.array_split(np.arange(len(requests)), len(self.workers))]
        questions = {
            index: ([requests[r] for r in part], make_seed((*stream, index)))
            for index, part in enumerate(parts)
            if part
        }
        counts = [request.sampling.count for request in requests]
        return restore_requests(self._ask(RolloutWorker.sample, questions), parts, counts)

    def parse_tools(self, texts: Sequence[str], parser: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCalls]:
        """Parse the tool calls of each text on the first engine, where vLLM is loaded.

        Args:
            parser: name of vLLM's tool-call parser. tools: JSON schemas of the tools.

        Raises:
            ValueError: vLLM has no parser of that name.
        """
        return self._ask(RolloutWorker.parse_tools, {0: (texts, parser, tools)})[0]

    def call(self, method: Callable[Concatenate[RolloutWorker, P], R], *args: P.args, **keywords: P.kwargs) -> list[R]:
        """Call a method of ``RolloutWorker`` on every engine; returns the results in order."""
        return self._ask(method, dict.fromkeys(range(len(self.workers)), args), keywords)

    def check_version(self, version: int) -> None:
        """Check that every engine has the weights ``version``; all may sample then, those among them that a failure
        kept from it as they replaced others.

        Raises:
            RunError: an engine has other weights.
        """
        if (versions := self.call(RolloutWorker.get_version)) != [version] * len(versions):
            raise RunError(f"sync: the rollout engines have {versions}, expected version {version} in all of them")
        self.serving[:] = self.workers

    def run(self, function: str, *args: Any) -> list:
        """Call ``function(engine, *args)`` on every engine; returns the results in order.

        Args:
            function: ``module:function``.
        """
        return self.call(RolloutWorker.run, function, *args)

    def call_alive(
        self, method: Callable[Concatenate[RolloutWorker, P], Any], *args: P.args, **keywords: P.kwargs
    ) -> None:
        """Call a method of ``RolloutWorker`` on every engine; a lost engine is ignored until its next use."""
        for call in [getattr(worker, method.__name__).remote(*args, **keywords) for worker in self.workers]:
            try:
                wait_for([call])
            except RayError as error:
                if not is_lost(error):
                    raise

    def _ask(
        self, method: Callable[..., R], questions: Mapping[int, tuple], keywords: Mapping[str, Any] | None = None
    ) -> list[R]:
        """Call a method with arguments of its own on each engine that has some; the results in order.

        An engine that is lost meanwhile is replaced, where ``replace_lost`` says how, and asked again.
        """
        answers: dict[int, Any] = {}
        while missing := questions.keys() - answers.keys():
            calls = {
                index: getattr(self.workers[index], method.__name__).remote(*questions[index], **(keywords or {}))
                for index in missing
            }
            lost: dict[int, RayError] = {}
            for index, call in calls.items():
                try:
                    (answers[index],) = wait_for([call])
                except RayError as error:
                    if not is_lost(error):
                        raise
                    lost[index] = error
            if lost:
                self.replace_or_raise(lost)
        return [answers[index] for index in sorted(questions)]

    def replace_or_raise(self, lost: Mapping[int, RayError]) -> None:
        """Replace lost engines, or raise the error of one of them if ``replace_lost`` was not called.

        Args:
            lost: index of an engine -> error that showed the loss.
        """
        if not self._note:
            raise next(iter(lost.values()))
        self.replace(list(lost))

    def replace(self, lost: Sequence[int]) -> None:
        """Start new engines in place of those with the indices ``lost``, and send them the current weights."""
        assert self._note and self._send_weights, "replace_lost comes first"
        old = {self._name(index): self.workers[index] for index in lost}
        self._note(dict.fromkeys(old, UNREACHED) | find_lost(old))
        unwatch_workers(list(old.values()))
        end_workers(list(old.values()), keep=False)
        new = self._start_processes(lost)
        for index, worker in zip(lost, new, strict=True):
            self.workers[index] = worker
        wait_for([worker.start.remote(*self._model) for worker in new])
        self._send_weights(new)
        for index, worker in zip(lost, new, strict=True):
            self.serving[index] = worker

    def name_workers(self) -> dict[str, ActorHandle]:
        """Return Ray's handle of every engine by the name that messages use."""
        return {self._name(index): worker for index, worker in enumerate(self.workers)}

    def _name(self, index: int) -> str:
        return f"{self.title} {index}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, *_) -> None:
        workers, self.workers = self.workers, []
        unwatch_workers(workers)
        end_workers(workers, keep=kind is None)


def restore_requests(
    answers: Sequence[Sequence[Completion]], parts: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[Completion]:
    """Put the answers of several engines into the order of the requests.

    Args:
        answers: completions of each engine that had requests.
        parts: numbers of the requests of each engine.
        counts: ``[R]``, number of completions of each of the R requests.
    """
    answered = iter([completion for answer in answers for completion in answer])
    of_request = {request: list(islice(answered, counts[request])) for part in parts for request in part}
    return [completion for request in range(len(counts)) for completion in of_request[request]]


def deal_requests(requests: Sequence[Request], engines: int) -> list[list[int]]:
    """Divide requests among engines so that their costs are balanced. Returns the numbers of the requests of each
    engine.

    The cost of a request is the tokens of its prompt and the expected tokens of its completions. The division depends
    on the requests alone, as a resumed run needs, since the requests of a call decide its samples. Consecutive single
    samples of one prompt stay together.
    """
    runs: list[list[int]] = []
    for place, request in enumerate(requests):
        last = requests[runs[-1][0]] if runs and request.sampling.count == 1 else None
        if last is None or (last.token_ids, last.images) != (request.token_ids, request.images):
            runs.append([])
        runs[-1].append(place)
    costs = []  # [runs]
    for run in runs:
        samplings = [requests[place].sampling for place in run]
        expected = round(sum(each.count * each.expected_tokens for each in samplings))
        costs.append(len(requests[run[0]].token_ids) + expected)
    owners = balance_costs(np.asarray(costs, np.int64), engines, equal_counts=False)
    parts = [np.flatnonzero(owners == engine) for engine in range(engines)]
    return [[place for run in part for place in runs[run]] for part in parts]
