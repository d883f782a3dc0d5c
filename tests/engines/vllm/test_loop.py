"""The loop that steps an engine, over one that only counts: who is answered, in which order, and how all ends."""

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from engines.vllm import update
from engines.vllm.loop import EngineLoop

SOON_S = 20.0
"""Seconds in which anything happens; a test that passes waits for no such time."""


@dataclass
class Ask:
    """A request: how many steps it takes, and the bytes of its images. Its settings are itself."""

    steps: int
    image_bytes: int = 0
    fault: str = ""
    count: int = 1
    goes_first: bool = False

    @property
    def sampling(self):
        return self


@dataclass
class CountingEngine:
    """Stands where vLLM does. ``gate`` lets steps through; ``behind`` outputs come one step late."""

    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(10**6))
    is_behind: bool = False
    config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(image_memory_mb=1))
    running: dict = field(default_factory=dict)
    begun: list = field(default_factory=list)
    most_bytes: int = 0
    late: list = field(default_factory=list)
    threads: set = field(default_factory=set)
    begun_steps: int = 0
    steps: int = 0
    broken: BaseException | None = None

    def count_image_bytes(self, request):
        return request.image_bytes

    def add_request(self, name, request):
        self.threads.add(threading.get_ident())
        if request.fault == "add":
            raise ValueError("too long")
        self.running[name] = [request, request.steps]
        self.begun.append(request)
        self.most_bytes = max(self.most_bytes, sum(one.image_bytes for one, _ in self.running.values()))

    def step(self):
        self.threads.add(threading.get_ident())
        self.begun_steps += 1
        assert self.gate.acquire(timeout=SOON_S)
        if self.broken:
            raise self.broken
        self.steps += 1
        for one in self.running.values():
            one[1] -= 1
        names = [name for name, one in self.running.items() if one[1] == 0]
        outputs = [SimpleNamespace(request_id=name, request=self.running.pop(name)[0]) for name in names]
        if self.is_behind:
            outputs, self.late = self.late, outputs
        return outputs

    def finish_batches(self):
        self.threads.add(threading.get_ident())
        outputs, self.late = self.late, []
        return outputs

    def read_output(self, request, output):
        if request.fault == "read":
            raise RuntimeError("other tokens")
        return f"after {request.steps}"

    def abort_requests(self, names):
        for name in names:
            self.running.pop(name, None)


def wait_until(holds) -> None:
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def take_all(loop, number: int) -> list:
    taken, end = [], time.monotonic() + SOON_S
    while len(taken) < number:
        taken += loop.take(SOON_S)
        assert time.monotonic() < end
    return taken


@pytest.fixture
def started():
    loops = []

    def start(engine):
        loops.append(EngineLoop(lambda: engine))
        return loops[-1]

    yield start
    for loop in loops:
        loop.close()


def test_each_is_answered_when_it_has_finished_on_one_thread(started):
    engine = CountingEngine()
    loop = started(engine)
    loop.submit([(key, Ask(steps)) for key, steps in (("a", 3), ("b", 1), ("c", 2), ("d", 1))])
    assert take_all(loop, 4) == [("b", "after 1"), ("d", "after 1"), ("c", "after 2"), ("a", "after 3")]
    loop.submit([("a", Ask(1))])
    assert take_all(loop, 1) == [("a", "after 1")], "a key is free again once it was taken"
    assert loop.call(threading.get_ident) in engine.threads and len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads
    began = time.monotonic()
    assert loop.take(0.05) == [] and time.monotonic() - began < 5, "nothing to take is no error"
    steps = engine.steps
    time.sleep(0.05)
    assert engine.steps == steps, "a loop without requests rests"


def test_requests_join_between_two_steps(started):
    engine = CountingEngine(threading.Semaphore(0))
    loop = started(engine)
    loop.submit([("long", Ask(5))])
    engine.gate.release()
    loop.submit([("short", Ask(2))])
    engine.gate.release(3)
    assert take_all(loop, 1) == [("short", "after 2")]
    engine.gate.release(10)
    assert take_all(loop, 1) == [("long", "after 5")]


def test_images_wait_for_memory_in_their_order(started):
    """A dearer one goes alone, a cheap one that stands behind it does not overtake it, and text needs none."""
    third, engine = 2**20 // 3, CountingEngine()
    loop = started(engine)
    asked = [Ask(2, third), Ask(9, third), Ask(1, 3 * 2**20), Ask(1, third), Ask(1)]
    loop.submit(list(enumerate(asked)))
    assert [key for key, _ in take_all(loop, 5)] == [0, 1, 2, 3, 4]
    assert engine.begun == asked and engine.most_bytes == 3 * 2**20
    loop.submit([("x", Ask(2, third)), ("y", Ask(1))])
    assert [key for key, _ in take_all(loop, 2)] == ["y", "x"]


def test_what_goes_first_does_not_wait_for_the_memory_of_what_came_before(started):
    engine = CountingEngine(threading.Semaphore(0))
    loop = started(engine)
    loop.submit([("runs", Ask(2, 2**20)), ("waits", Ask(1, 2**20))])
    wait_until(lambda: engine.begun_steps)
    loop.submit([("later", Ask(1)), ("one", Ask(1, goes_first=True)), ("two", Ask(1, goes_first=True))])
    engine.gate.release(9)
    taken = [key for key, _ in take_all(loop, 5)]
    assert taken.index("waits") > max(taken.index("one"), taken.index("two"))
    assert [one.goes_first for one in engine.begun] == [False, True, True, False, False]


def test_what_cannot_be_sampled_is_an_answer(started):
    loop = started(CountingEngine())
    loop.submit([(0, Ask(1)), (1, Ask(1, fault="add")), (2, Ask(1, fault="read"))])
    answers = dict(take_all(loop, 3))
    assert answers[0] == "after 1"
    assert isinstance(answers[1], ValueError) and "cannot be sampled: too long" in str(answers[1])
    assert isinstance(answers[2], RuntimeError) and str(answers[2]) == "other tokens"


def test_a_key_is_of_one_open_request(started):
    engine = CountingEngine(threading.Semaphore(0))
    loop = started(engine)
    loop.submit([("a", Ask(1))])
    for again in ([("a", Ask(1))], [("b", Ask(1)), ("b", Ask(1))]):
        with pytest.raises(ValueError, match="have the same key"):
            loop.submit(again)
    engine.gate.release(5)
    assert take_all(loop, 1) == [("a", "after 1")]


def test_an_abort_reaches_requests_wherever_they_are(started):
    """Waiting for memory, running, or finished and not taken; and their memory is free for others."""
    engine = CountingEngine(threading.Semaphore(0))
    loop = started(engine)
    loop.submit([("done", Ask(1)), ("runs", Ask(10**6, 2**20)), ("waits", Ask(1, 2**20)), ("stays", Ask(1, 2**20))])
    engine.gate.release(2)
    wait_until(lambda: engine.steps >= 2)
    aborting = threading.Thread(target=loop.abort, args=(["done", "runs", "waits", "unknown"],))
    aborting.start()
    engine.gate.release(10)
    aborting.join(SOON_S)
    assert take_all(loop, 1) == [("stays", "after 1")]
    assert engine.running == {} and loop.take(0) == []
    assert [one.image_bytes for one in engine.begun] == [0, 2**20, 2**20], "what waited has never begun"


def test_a_pause_keeps_requests_and_leaves_no_step_under_way(started):
    engine = CountingEngine(is_behind=True)
    loop = started(engine)
    loop.submit([("a", Ask(2)), ("b", Ask(10**5))])
    wait_until(lambda: engine.steps >= 2)
    loop.pause()
    assert engine.late == [], "what vLLM had computed ahead came in before"
    steps = engine.steps
    loop.submit([("c", Ask(1))])
    assert loop.call(lambda: 7) == 7, "a paused loop is called all the same"
    time.sleep(0.05)
    assert engine.steps == steps and [key for key, _ in loop.take(0)] == ["a"]
    loop.resume()
    assert take_all(loop, 1) == [("c", "after 1")]


def test_an_error_of_a_call_is_its_callers_alone(started):
    loop = started(CountingEngine())

    def fail():
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        loop.call(fail)
    loop.submit([("a", Ask(1))])
    assert take_all(loop, 1) == [("a", "after 1")]


@pytest.mark.parametrize("fault", [RuntimeError("device lost"), SystemExit(3)], ids=["error", "exit"])
def test_the_end_of_the_loop_is_told_to_all(started, fault):
    """To sixty-four who wait in calls, to one who waits for answers, and to all who come later; within a second."""
    engine = CountingEngine(threading.Semaphore(0))
    loop, heard = started(engine), []
    loop.submit([(key, Ask(9)) for key in range(64)])
    wait_until(lambda: engine.begun_steps)

    def hear(wait, *args):
        try:
            wait(*args)
        except RuntimeError as error:
            heard.append((time.monotonic(), str(error)))

    waits = [(loop.call, print)] * 64 + [(loop.take, SOON_S), (loop.abort, [1]), (loop.pause,)]
    waiting = [threading.Thread(target=hear, args=wait) for wait in waits]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(loop._calls) == 66)
    engine.broken, began = fault, time.monotonic()
    engine.gate.release()
    for thread in waiting:
        thread.join(SOON_S)
    assert len(heard) == len(waits) and max(when for when, _ in heard) - began < 1.0
    for wait in [(loop.submit, [("a", Ask(1))]), (loop.call, print), (loop.take, 0), (loop.pause,)]:
        hear(*wait)
    assert len(heard) == len(waits) + 4
    assert all(f"{type(fault).__name__}" in words and str(fault) in words for _, words in heard)


def test_who_goes_away_leaves_the_loop(started):
    """A thread that waited for an answer and gave up, and one whose call is answered when nobody listens."""
    engine = CountingEngine(threading.Semaphore(0))
    loop = started(engine)
    loop.submit([("a", Ask(3))])
    assert loop.take(0.01) == []
    threading.Thread(target=loop.call, args=(time.sleep, 0), daemon=True).start()
    engine.gate.release(10)
    assert take_all(loop, 1) == [("a", "after 3")]


def test_a_loop_that_is_closed_says_so_and_one_that_cannot_begin_raises():
    loop = EngineLoop(CountingEngine)
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="has ended: RuntimeError: it was closed"):
        loop.take(0)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        EngineLoop(lambda: 1 / 0)
    assert threading.active_count() == before


def test_a_loop_counts_what_is_open_and_the_time_with_nothing_to_do(started):
    engine = CountingEngine(threading.Semaphore(0))
    engine.count_running = lambda: len(engine.running)
    loop = started(engine)
    time.sleep(0.1)
    loop.submit([("a", Ask(1, 2**20)), ("b", Ask(1, 2**20)), ("c", Ask(1))])
    wait_until(lambda: engine.begun_steps)
    idle, counting = loop.idle_s, []
    thread = threading.Thread(target=lambda: counting.append(loop.count_open()))
    thread.start()
    engine.gate.release()
    thread.join(SOON_S)
    assert 0.1 <= idle < SOON_S and counting == [2], "one has finished, and two wait for memory"
    engine.gate.release(9)
    take_all(loop, 3)
    loop.pause()
    idle = loop.idle_s
    time.sleep(0.5)
    loop.resume()
    loop.submit([("d", Ask(1))])
    take_all(loop, 1)
    assert loop.idle_s - idle < 0.25, "a pause is no want of work"


def test_a_process_whose_update_stays_half_done_ends_itself(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(update.os, "_exit", lambda code: ended.set())
    limit = update.UpdateLimit(0.3)
    for version, is_last in ((1, False), (1, False), (1, True)):
        limit.note_bucket(version, is_last)
        time.sleep(0.1)
    time.sleep(0.4)
    assert not ended.is_set(), "the update came whole"
    limit.note_bucket(2, False)
    assert ended.wait(SOON_S)
