"""Waits with a limit: a worker that dies or hangs is found, named and ended."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayError, RayTaskError

from rlworker.base.errors import MONITOR, RunError
from rlworker.base.terminal import LOGGER
from rlworker.cluster.process_state import (
    DRIVER_LOST,
    LOSSES,
    UNREACHED,
    ProcessPlace,
    explain,
    is_computing,
    is_lost,
)

LIVENESS = "liveness"
"""Concurrency group of every watched worker, in which it answers while another call runs."""
_STALL_TIMEOUT_S = 300.0
"""Seconds without an answer after which a worker counts as hanging, unless ``limiting_stalls`` sets another limit."""
_START_S = 600.0
"""Seconds that a new process may take to its first answer."""
_SLICE_S = 1.0
"""Seconds of a wait between two looks for answers."""
_ASK_EVERY_S = 4.0
"""Seconds between two questions to a worker."""
_MAX_REPRIEVES = 10
"""Number of stall timeouts in a row that a worker may be silent while it computes."""
_LESS_MEMORY = (
    "lower what processes hold there (`rlworker plan` says how much: --actor.micro-batch-tokens, "
    "--rollout.kv-cache-mb, more --actor.ranks on more machines), or the monitor's limit is raised by "
    "RAY_memory_usage_threshold where Ray starts"
)
_ANSWER_S, _LATE_ANSWER_S = 3.0, 7.0
"""Seconds that workers have to answer after one has failed; and further seconds that watched workers have."""
_VERDICT_S = 60.0
"""Seconds that Ray has to find that a node is dead. Ray's health check takes 5 failures, 3 s apart."""


@dataclass
class _Watched:
    """A worker that is asked whether it still answers.

    Attributes:
        name: by which messages call it. question: the open one. silent_s: seconds without an answer while this program
            was waiting. answered: when the last one was answered, None before the first.
        place: its process. reprieves: how often it was found computing when it had been silent for too long.
        fate: how the worker ended, where it was ended because it hung.
    """

    name: str
    question: Any = None
    silent_s: float = 0.0
    answered: float | None = None
    place: ProcessPlace | None = None
    reprieves: int = 0
    is_dead: bool = False
    fate: str = ""

    def listen(self, is_answered: bool) -> None:
        """Take note of the open question's end, where it has come to one."""
        if not is_answered:
            return
        try:
            self.place = ray.get(self.question)
            self.answered, self.silent_s, self.reprieves = time.monotonic(), 0.0, 0
        except RayError as error:
            # Whoever waits for a lost one hears so as well. One that cannot be reached at the moment is silent.
            self.is_dead = is_lost(error) and not isinstance(error, ActorUnavailableError)
        self.question = None

    def is_due(self) -> bool:
        """Tell whether it is time for another question."""
        if self.is_dead or self.question is not None:
            return False
        return self.answered is None or time.monotonic() - self.answered >= _ASK_EVERY_S

    def is_stalled(self, limit_s: float) -> bool:
        """Tell whether it has been silent for too long, and does not compute.

        An import, or a call that keeps the interpreter to itself, answers nobody. On a machine with much else to do
        seconds of work take minutes. So the process itself is looked at before it is ended.
        """
        if self.is_dead or self.silent_s <= limit_s:
            return False
        if self.reprieves < _MAX_REPRIEVES and self.is_computing():
            self.silent_s, self.reprieves = 0.0, self.reprieves + 1
            return False
        answered, _ = ray.wait([self.question], timeout=0)  # while it was looked at
        return not answered

    def is_computing(self) -> bool:
        return self.place is not None and is_computing(self.place)


@dataclass
class _Watch:
    timeout_s: float = _STALL_TIMEOUT_S
    workers: dict[ActorHandle, _Watched] = field(default_factory=dict)


_watch = _Watch()


@contextmanager
def limiting_stalls(timeout_s: float) -> Iterator[None]:
    """Set the stall timeout in this context: seconds of a wait without an answer until a worker counts as hung."""
    before, _watch.timeout_s = _watch.timeout_s, timeout_s
    try:
        yield
    finally:
        _watch.timeout_s = before


def watch_workers(workers: Mapping[str, ActorHandle]) -> None:
    """Ask workers, now and during every wait, whether they still answer. They must have the group ``LIVENESS``.

    Args:
        workers: name in messages -> Ray's handle.
    """
    for name, worker in workers.items():
        _watch.workers[worker] = watched = _Watched(name)
        watched.question = _ask(worker)


def unwatch_workers(workers: Sequence[ActorHandle]) -> None:
    """Stop asking these workers."""
    for worker in workers:
        _watch.workers.pop(worker, None)


def wait_for(references: Sequence[Any]) -> list:
    """Wait for calls of workers, and return their results in order. The driver must wait for its workers in no other
    way.

    A phase may take any time, as long as all processes answer. Meanwhile every watched worker is asked whether it is
    alive. A worker that does not answer for the stall timeout and does not compute is killed, which ends all calls that
    wait for it, here and in other workers. So a hang ends a wait as a death does.

    Raises:
        RayError: the first call that failed.
    """
    if not references:
        return []  # ray.wait would start a Ray where none runs
    results, pending = {}, list(references)

    def wait(slice_s: float) -> bool:
        nonlocal pending
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=slice_s)
        results.update(zip(done, ray.get(done), strict=True))
        return not pending

    wait_until(wait)
    return [results[reference] for reference in references]


def wait_until(wait: Callable[[float], bool]) -> None:
    """Wait until ``wait(seconds)`` returns True, with the checks of ``wait_for``, for other than Ray calls."""
    looked = time.monotonic()
    _listen(0.0)  # to what was answered between two waits
    while not wait(_SLICE_S):
        looked, before = time.monotonic(), looked
        # A time in which this program itself stood still is no silence of the others'.
        _look_after_workers(min(looked - before, 2 * _SLICE_S))


def _look_after_workers(waited_s: float) -> None:
    """Ask every worker that is due, and end those that have been silent for too long."""
    _listen(waited_s)
    for worker, watched in list(_watch.workers.items()):
        limit_s = _watch.timeout_s if watched.answered else max(_START_S, _watch.timeout_s)
        if watched.is_due():
            watched.question = _ask(worker)
        elif watched.is_stalled(limit_s):
            watched.fate = f"stood still (no answer for {watched.silent_s:.0f} s) and was ended"
            LOGGER.warning(f"{watched.name} {watched.fate}")
            watched.question, watched.is_dead = None, True
            ray.kill(worker)  # its node ends a process that does not end itself within 5 s, as a stopped one does not


def _listen(waited_s: float) -> None:
    """Take note of the answers, and of another ``waited_s`` seconds of silence of the other workers."""
    asked = {watched.question: watched for watched in _watch.workers.values() if watched.question is not None}
    answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
    for question, watched in asked.items():
        watched.silent_s += waited_s
        watched.listen(question in answers)


def _ask(worker: ActorHandle) -> Any:
    """Ask a worker for its process, beside its running call where it has the group for that."""
    call: Any = worker.__ray_call__
    options = {"concurrency_group": LIVENESS} if worker in _watch.workers else {}
    return call.options(**options).remote(_answer)


def _answer(_worker: Any) -> ProcessPlace:
    return ProcessPlace(ray.get_runtime_context().get_node_id(), os.getpid())


class WorkerFailure(RunError):
    """A worker died, hung or raised an error; the message names the worker, the place in the run and the error.

    Attributes:
        where: step and phase.
        lost: name of a worker that is dead or does not answer -> how it was lost; empty if a worker raised an error
            that another process would raise as well.
    """

    def __init__(self, message: str, where: str, lost: Mapping[str, str]):
        super().__init__(message)
        self.where, self.lost = where, dict(lost)


@contextmanager
def naming_failures(
    where: str, name_workers: Callable[[], Mapping[str, ActorHandle]], advice: str = ""
) -> Iterator[None]:
    """Turn an error of Ray in this context into a ``WorkerFailure`` that names the worker.

    When one rank dies the others fail too, in the collective that it left, and may report first; so every worker is
    asked. Workers that hang in a collective answer beside it.

    Args:
        where: step and phase, for the message.
        name_workers: returns name in messages -> Ray's handle, of the workers at the time of the failure.
        advice: end of the message.
    """
    try:
        yield
    except RayError as error:
        # Where every worker answers, the error itself may tell of what was lost.
        kinds = {"an object in Ray's store": (ObjectLostError,), "a process of Ray's": LOSSES}
        unnamed = {name: explain(error) or "" for name, kind in kinds.items() if isinstance(error, kind)}
        lost = find_lost(name_workers()) or unnamed
        text = f"{where}: {describe_lost(lost) or explain(error) or error}{advice}"
        raise WorkerFailure(text, where, {} if DRIVER_LOST in lost.values() else lost) from error


def describe_lost(lost: Mapping[str, str]) -> str:
    """Describe lost workers in one line: the names that share a cause, the cause, and a setting to change.

    Args:
        lost: name of a worker -> how it was lost.
    """
    groups: dict[str, list[str]] = {}
    for name, fate in lost.items():
        groups.setdefault(fate, []).append(name)
    parts = [f"{', '.join(names)} {fate}" for fate, names in groups.items()]
    if any(fate.startswith(MONITOR) for fate in groups):
        parts.append(_LESS_MEMORY)
    return "; ".join(parts)


def find_lost(workers: Mapping[str, ActorHandle]) -> dict[str, str]:
    """Return name -> cause for workers that have ended, and for watched ones that neither answer nor compute.

    A worker that cannot be reached is asked again until it answers or Ray knows its end. Until then Ray would start a
    new process on a node that is dead.
    """
    lost = _ask_each(workers)
    end = time.monotonic() + _VERDICT_S
    while (unreached := {name for name, fate in lost.items() if fate == UNREACHED}) and time.monotonic() < end:
        time.sleep(_SLICE_S)
        lost = {name: fate for name, fate in lost.items() if name not in unreached}
        lost |= _ask_each({name: workers[name] for name in unreached})
    return dict(sorted(lost.items()))


def _ask_each(workers: Mapping[str, ActorHandle]) -> dict[str, str]:
    """Ask each worker once, and return what ``find_lost`` does."""
    questions: dict[Any, str] = {_ask(worker): name for name, worker in workers.items()}
    if not questions:
        return {}
    answered, silent = ray.wait(list(questions), num_returns=len(questions), timeout=_ANSWER_S)
    if silent := [reference for reference in silent if workers[questions[reference]] in _watch.workers]:
        late, silent = ray.wait(silent, num_returns=len(silent), timeout=_LATE_ANSWER_S)
        answered += late
    still = [reference for reference in silent if not _watch.workers[workers[questions[reference]]].is_computing()]
    lost = dict.fromkeys((questions[reference] for reference in still), "did not answer")
    for reference in answered:
        name = questions[reference]
        try:
            ray.get(reference)
        except RayTaskError:
            pass  # it answered
        except RayError as error:
            watched = _watch.workers.get(workers[name])
            lost[name] = (watched and watched.fate) or explain(error, workers[name]) or str(error)
    return lost
