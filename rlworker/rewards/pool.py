"""Rewards in processes of their own: whatever a reward function does, the run goes on.

A call that takes too long, raises, returns no number or ends its process is that text's outcome. The workers write
each number to a file that the driver has read along (``progress``), so that it knows at every moment which text a
worker is at: one that gets no further is ended there, one that died is known to have died there, and what came before
is not lost. Workers are spread over the nodes that Ray has; those of a node that is lost start anew on the others.
"""

import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.cloudpickle.cloudpickle_fast import dumps

from rlworker.cluster.watch import describe_lost
from rlworker.config.sections import RewardConfig
from rlworker.data.rows import Row
from rlworker.errors import MONITOR, RunError
from rlworker.rewards.functions import BatchRewardFn, RewardFn, is_batch
from rlworker.rewards.part import Part, end_worker, explain_death
from rlworker.rewards.processes import GRACE_S, POLL_S, START_S, STARTS, WorkerProcesses
from rlworker.rewards.progress import NodeLost
from rlworker.rewards.worker import Outcome, RewardWorker, find_call_bounds
from rlworker.tracking.terminal import LOGGER

REWARD_LOG = "rewards.log"
"""File of a run folder that has what the reward function prints and logs. Every node but the driver's has one of its
own, such as ``rewards.10.0.0.2.log``: a network's file system loses lines that two nodes add to one file."""

EXAMPLES = 3
"""Failures of each kind that are kept word for word."""

_OF_THE_MODEL = ("limit", "unsampled")
"""Failures of plays to which the model's own text may lead every one of them."""
_OVERDUE = "no end after {:g} s and no heed of the interrupt, so that its process was ended"
_DIED = "its process died (it exited, crashed or had no memory left)"


@dataclass(frozen=True)
class RewardFailure:
    """A text that got no reward, or an episode whose play failed; the text of that is empty.

    Attributes:
        message: what happened.
    """

    kind: str
    prompt: str
    text: str
    message: str


@dataclass(frozen=True)
class Scores:
    """Rewards of some texts.

    Attributes:
        values: one per text, in order; ``RewardConfig.default`` where its call failed.
        failures: kind -> texts that failed so; only the kinds that occurred.
        examples: the first few of each kind. unit: what has failed, for messages.
    """

    values: list[float]
    failures: dict[str, int]
    examples: list[RewardFailure]
    unit: str = "rewards"

    def count_failures(self, name: str) -> dict[str, int]:
        """Count failures as metrics ``{name}_failures`` and, of the kinds that occurred, ``{name}_{kind}``."""
        kinds = {f"{name}_{kind}": count for kind, count in self.failures.items()}
        return {f"{name}_failures": sum(self.failures.values())} | kinds

    @property
    def all_failed(self) -> bool:
        """Tell whether every one failed, of what is none of the model's doing."""
        failed = sum(count for kind, count in self.failures.items() if kind not in _OF_THE_MODEL)
        return failed == len(self.values) > 0

    def summarise(self) -> str:
        """Say in one line what failed."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.failures.items())
        text = f"{sum(self.failures.values())} of {len(self.values)} {self.unit} failed: {kinds}"
        if self.examples:
            first = self.examples[0]
            on = f"prompt {first.prompt[-80:]!r}" + (f", text {first.text[-80:]!r}" if first.text else "")
            text += f"; {first.kind} on {on}: {first.message}"
        return text


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Join the scores of one part or more, in this order."""
    failures: Counter = Counter()
    for part in parts:
        failures.update(part.failures)
    examples: dict[str, list[RewardFailure]] = {}
    for example in (example for part in parts for example in part.examples):
        examples.setdefault(example.kind, []).append(example)
    kept = [example for of_kind in examples.values() for example in of_kind[:EXAMPLES]]
    return Scores([value for part in parts for value in part.values], dict(failures), kept, parts[0].unit)


def pickle_reward(reward: Callable, what: str = "reward") -> bytes:
    """Turn the reward function, or another such as a play, into bytes.

    Raises:
        ValueError: it holds something that cannot be sent to another process.
    """
    try:
        return dumps(reward)
    except Exception as error:  # whatever an object of the user's raises when it is pickled
        raise ValueError(
            f"{what}: {getattr(reward, '__qualname__', reward)!r} cannot be sent to another process "
            f"({type(error).__name__}: {error}); open files, locks and connections inside the function"
        ) from error


class RewardPool(WorkerProcesses):
    """Processes that score texts.

    Args:
        reward: ``reward(text, row) -> float``, or marked with ``batch_reward``.
        output: as ``WorkerProcesses``.

    Raises:
        ValueError: the reward function cannot be sent to another process.
    """

    def __init__(self, reward: RewardFn | BatchRewardFn, config: RewardConfig, output: Path | None = None):
        self.config, self.batch = config, is_batch(reward)
        self._sent = self._failed_starts = 0
        self._note: Callable[[Mapping[str, str]], None] | None = None
        self._idle_s = START_S
        self._proven: set[ActorHandle] = set()
        arguments = pickle_reward(reward), self.batch, config.time_limit_s
        super().__init__("reward", RewardWorker, arguments, config.workers, output)

    def repeat_lost(self, note: Callable[[Mapping[str, str]], None], stall_timeout_s: float) -> None:
        """Make a call once more that a worker died in or did not come back from, from now on.

        The text is to blame only where that befalls the next worker too; else it was the worker that was lost.

        Args:
            note: hears which worker was lost and what became of it. It raises where the run may not go on.
            stall_timeout_s: seconds after which a worker that has scored before and does not begin stands still.
        """
        self._note, self._idle_s = note, min(START_S, stall_timeout_s)

    def score(self, texts: Sequence[str], rows: Sequence[Row]) -> Scores:
        """Find the rewards of ``texts [N]``, each an answer to its row of ``rows [N]``.

        A batch reward is called with runs of texts that have one and the same row.

        Raises:
            RunError: the workers do not start.
        """
        places: dict[int, int] = {}
        index = [places.setdefault(id(row), len(places)) for row in rows]
        bounds = find_call_bounds(index, self.batch)
        outcomes: list[Outcome] = [0.0] * len(texts)
        self._suspected: dict[int, tuple[int, str]] = {}  # text -> slot and fate of the worker that it may have ended
        waiting, running = deque(self._split_work(bounds)), {}
        while waiting or running:
            busy = {part.slot for part in running.values()}
            for slot in set(range(len(self.workers))) - busy:
                if waiting:
                    part = self._send(slot, *waiting.popleft(), texts, index, rows)
                    running[part.reference] = part
            ready, _ = ray.wait(list(running), timeout=POLL_S)
            self._watch([part for part in running.values() if part.reference not in ready])
            for reference, part in list(running.items()):
                stalled = reference not in ready and part.is_stalled(self.config.time_limit_s + GRACE_S)
                if reference in ready or stalled:
                    del running[reference]
                    waiting.extendleft(self._finish(part, stalled, bounds, outcomes))
        return self._collect_scores(outcomes, texts, rows)

    def _split_work(self, bounds: list[int]) -> list[tuple[int, int]]:
        """Start and end of what a worker gets at a time; several each, so that none waits long for a slow one."""
        calls, count = len(bounds) - 1, 1 if len(self.workers) == 1 else 4 * len(self.workers)
        cuts = [bounds[calls * i // count] for i in range(count + 1)]
        return [(a, b) for a, b in pairwise(cuts) if b > a]

    def _send(self, slot: int, start: int, end: int, texts, index: list[int], rows) -> Part:
        """Give a worker its texts, with every row only once."""
        self._sent += 1
        part_rows = dict(zip(index[start:end], rows[start:end], strict=True))
        # Pickled here, because Ray's own way with a list of small objects takes three times as long.
        job = dumps((texts[start:end], index[start:end], part_rows))
        worker, node = self.workers[slot], self.places[slot]
        begin_s = self._idle_s if worker in self._proven else START_S
        return Part(self._sent, slot, node, worker, start, end, worker.score.remote(job, self._sent), begin_s)

    def _watch(self, parts: list[Part]) -> None:
        """Note how far workers are, each node being asked once, unless all of them were asked a moment ago."""
        due = [part for part in parts if time.monotonic() - part.asked >= POLL_S]
        for node in {part.node: None for part in due}:
            here = [part for part in due if part.node is node]
            try:
                counts = node.ask("count_scored", [part.number for part in here])
            except NodeLost:
                continue  # its parts come to a stop, and are finished so
            for part, count in zip(here, counts, strict=True):
                part.note(count)

    def _finish(self, part: Part, stalled: bool, bounds: list[int], outcomes) -> list[tuple[int, int]]:
        """Take what a worker wrote. One that died or got no further is replaced.

        Returns:
            what is left to be done: start and end, or nothing.
        """
        fate = "got no further and was ended" if stalled else explain_death(part.reference)
        if fate:
            end_worker(part)
        try:
            scored = self._collect(part, outcomes)
        except NodeLost as error:
            for slot in self._leave_node(part.node, error):
                ray.kill(self.workers[slot])  # where no more than the way to the node is lost
                self.workers[slot] = self._start_worker(slot)
            return [(part.start, part.end)]
        at = part.start + (scored or 0)
        self._failed_starts = self._failed_starts + 1 if scored is None else 0
        self._clear_texts(part.start, at)
        if not fate:
            self._proven.add(part.worker)
            return []
        if scored is None and part.worker in self._proven:
            self._note_lost(part.slot, fate)
        if self._failed_starts == STARTS:
            raise RunError(f"reward: its process does not start, {STARTS} times in a row: the last {fate}")
        self.workers[part.slot] = self._start_worker(part.slot)
        next_call = at
        # The call it was at is to blame, unless it never came to one, or came to another after it had seemed to hang.
        if scored is not None and at < part.end and not (stalled and scored > part.progress):
            is_monitors = fate.startswith(MONITOR)  # which chooses by other things than what a process holds
            if (self._note or is_monitors) and at not in self._suspected:
                self._suspected[at] = part.slot, fate
                return [(at, part.end)]
            next_call = bounds[bisect_right(bounds, at)]
            limit = self.config.time_limit_s
            died = "died", f"its process {fate}" if is_monitors else _DIED
            outcomes[at:next_call] = [("timeout", _OVERDUE.format(limit)) if stalled else died] * (next_call - at)
        return [(next_call, part.end)] if next_call < part.end else []

    def _clear_texts(self, start: int, end: int) -> None:
        """Take texts of ``start`` to ``end`` that were scored after all off the list of suspects."""
        for text in [text for text in self._suspected if start <= text < end]:
            self._note_lost(*self._suspected.pop(text))

    def _note_lost(self, slot: int, fate: str) -> None:
        lost = {self.name_worker(slot): fate}
        if self._note:
            self._note(lost)
        elif fate.startswith(MONITOR):
            LOGGER.warning(f"reward: {describe_lost(lost)}; its texts are scored anew")

    def _collect(self, part: Part, outcomes: list[Outcome]) -> int | None:
        """Copy what was scored of a part to its place among all ``outcomes``: how much; None where it had not begun."""
        rewards, failures = part.node.ask("collect", part.number)
        if rewards is None:
            return None
        outcomes[part.start : part.start + len(rewards)] = rewards
        for place, kind, message in failures:
            outcomes[part.start + place] = (kind, message)
        return len(rewards)

    def _collect_scores(self, outcomes: list[Outcome], texts: Sequence[str], rows: Sequence[Row]) -> Scores:
        failures, examples = Counter(), []
        for outcome, text, row in zip(outcomes, texts, rows, strict=True):
            if isinstance(outcome, tuple):
                kind, message = outcome
                failures[kind] += 1
                if failures[kind] <= EXAMPLES:
                    examples.append(RewardFailure(kind, row.prompt, text, message))
        values = [self.config.default if isinstance(x, tuple) else x for x in outcomes]
        return Scores(values, dict(failures), examples)
