"""The loop that steps vLLM: requests join and leave between two steps, and each is answered when it has finished."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from engines.batch.samples import Completion, Request
    from engines.vllm.engine import VllmEngine


@dataclass(frozen=True, slots=True)
class _Open:
    """An open request. ``image_bytes`` is the memory of its decoded images."""

    key: Hashable
    request: Request
    image_bytes: int


class EngineLoop:
    """One thread that builds an engine, steps it while it has requests, and makes every other call of the engine.

    Methods may be called from any thread. A caller that stops waiting does not disturb the loop. When a step raises,
    the loop ends, and every waiting and later call raises RuntimeError with that cause.

    Args:
        build: makes the engine, on the loop's thread, since the current device and OpenMP's threads belong to a thread.

    Attributes:
        engine: the engine that ``build`` made. Other threads must use it through ``call``.
        idle_s: seconds without a request to sample.
    """

    def __init__(self, build: Callable[[], VllmEngine]):
        self._changed = threading.Condition()
        self._calls: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._keys: set[Hashable] = set()  # of submitted requests that are not taken yet
        self._waiting: deque[_Open] = deque()
        self._running: dict[str, _Open] = {}  # by vLLM's name of each
        self._names = count()
        self._image_bytes = 0  # of running requests
        self._finished: list[tuple[Hashable, list[Completion] | Exception]] = []
        self._paused = self._closed = False
        self._fault: BaseException | None = None
        self.idle_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine loop", daemon=True)
        self._thread.start()
        try:
            self.engine = self.call(build)
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable, *args: Any) -> Any:
        """Call ``function(*args)`` on the loop's thread, between two steps; returns its result or raises its error."""
        future: Future = Future()
        with self._changed:
            self._check_alive()
            self._calls.append((future, partial(function, *args)))
            self._changed.notify_all()
        return future.result()

    def submit(self, requests: Sequence[tuple[Hashable, Request]]) -> None:
        """Submit requests, each with a key of the caller. They begin in order; those that go first overtake all that
        wait.

        Raises:
            ValueError: a key belongs to a request that was neither taken nor aborted.
        """
        opened = [_Open(key, request, self.engine.count_image_bytes(request)) for key, request in requests]
        keys = {one.key for one in opened}
        with self._changed:
            self._check_alive()
            if len(keys) < len(opened) or keys & self._keys:
                raise ValueError("rollout: two open requests have the same key; give each its own")
            self._keys |= keys
            self._waiting.extendleft(reversed([one for one in opened if one.request.goes_first]))
            self._waiting.extend(one for one in opened if not one.request.goes_first)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[tuple[Hashable, list[Completion] | Exception]]:
        """Return the requests that finished since the last call, in order; waits up to ``timeout_s`` seconds for one.

        Returns:
            the key of each request with its completions, or with the error that prevents sampling: the prompt is too
                long for the engine, or an image cannot be read.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._fault, timeout_s)
            if not self._finished:
                self._check_alive()
            finished, self._finished = self._finished, []
            self._keys.difference_update(key for key, _ in finished)
        return finished

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Abort requests by their keys, finished or not; unknown keys are ignored."""
        self.call(self._abort, frozenset(keys))

    def pause(self) -> None:
        """Stop stepping after the current step. Requests are kept, and may still be submitted."""

        def pause_between_steps() -> None:
            self._paused = True
            self._collect(self.engine.finish_batches())

        self.call(pause_between_steps)

    def resume(self) -> None:
        """Resume stepping after a pause."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def count_open(self) -> int:
        """Count the requested completions that have not finished."""
        return self.call(lambda: self.engine.count_running() + sum(one.request.sampling.count for one in self._waiting))

    def close(self) -> None:
        """End the loop after the current step; open requests stay unanswered, and the engine stays."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _check_alive(self) -> None:
        if self._fault:
            raise _tell_end(self._fault) from self._fault

    # -- on the loop's thread

    def _run(self) -> None:
        try:
            while self._take_turn():
                pass
            fault: BaseException = RuntimeError("it was closed")
        except BaseException as error:  # of any kind: callers that wait for this thread get it
            fault = error
        with self._changed:
            self._fault = fault
            for future, _ in self._calls:
                future.set_exception(_tell_end(fault))
            self._calls.clear()
            self._changed.notify_all()

    def _may_step(self) -> bool:
        return bool(not self._paused and (self._waiting or self._running))

    def _take_turn(self) -> bool:
        """Answer the calls that wait, then take a step; returns False when the loop was closed."""
        with self._changed:
            began, is_idle = time.monotonic(), not self._paused
            self._changed.wait_for(lambda: self._closed or self._calls or self._may_step())
            self.idle_s += (time.monotonic() - began) * is_idle
            if self._closed:
                return False
            calls = len(self._calls)  # those that come meanwhile wait for a step: a stream of calls holds up nothing
        for _ in range(calls):
            _answer(*self._calls.popleft())
        if self._may_step():
            self._admit()
            self._collect(self.engine.step())
        return True

    def _admit(self) -> None:
        """Begin requests in their order, as far as there is memory for their decoded images; one that is dearer than
        all of it goes alone."""
        limit = self.engine.config.image_memory_mb * 2**20
        while True:
            with self._changed:
                if not self._waiting:
                    return
                first = self._waiting[0]
                if first.image_bytes and self._image_bytes and self._image_bytes + first.image_bytes > limit:
                    return
                self._waiting.popleft()
            name = str(next(self._names))
            try:
                self.engine.add_request(name, first.request)
            except Exception as error:  # vLLM's own kinds are not there where the answer is read
                self._finish([(first.key, ValueError(f"rollout: a request cannot be sampled: {error}"))])
            else:
                self._running[name] = first
                self._image_bytes += first.image_bytes

    def _collect(self, outputs: Iterable[RequestOutput]) -> None:
        """Store finished outputs of vLLM until they are taken."""
        finished = []
        for output in outputs:
            one = self._running.pop(output.request_id)
            self._image_bytes -= one.image_bytes
            try:
                result = self.engine.read_output(one.request, output)
            except RuntimeError as error:
                result = error
            finished.append((one.key, result))
        if finished:
            self._finish(finished)

    def _finish(self, finished: Sequence[tuple[Hashable, list[Completion] | Exception]]) -> None:
        with self._changed:
            self._finished += finished
            self._changed.notify_all()

    def _abort(self, keys: Collection[Hashable]) -> None:
        with self._changed:
            self._keys -= set(keys)
            self._waiting = deque(one for one in self._waiting if one.key not in keys)
            self._finished = [(key, result) for key, result in self._finished if key not in keys]
        names = [name for name, one in self._running.items() if one.key in keys]
        self.engine.abort_requests(names)
        for name in names:
            self._image_bytes -= self._running.pop(name).image_bytes


def _answer(future: Future, function: Callable[[], Any]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        future.set_result(result)


def _tell_end(fault: BaseException) -> RuntimeError:
    return RuntimeError(
        f"rollout: the engine's loop has ended: {type(fault).__name__}: {fault}; its requests are lost, and a new "
        "engine must take them"
    )
