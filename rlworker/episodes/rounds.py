"""Episodes in lock-step rounds: the samples that all plays wait for are drawn together, in the order of the episodes.

So a round depends on nothing but the plays, the weights and its random numbers: not on how long a tool took, nor in
which process a play ran. What the driver has recorded is given once more to plays that have to begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np

from engines.batch.samples import Completion, Completions, Image, Prompt
from engines.vllm.tools import ToolCalls
from rlworker.data.rows import Row
from rlworker.episodes.record import (
    CONTEXT,
    DIED,
    IDLE,
    Answer,
    Ending,
    EpisodeRecord,
    Job,
    LostWorker,
    Message,
    Piece,
    Reply,
    digest_ids,
)
from rlworker.errors import RunError
from rlworker.tracking.terminal import LOGGER

_BLAMES = 2
"""Processes that are lost at one episode when it is to blame, where lost ones are replaced."""
_LOSSES = 3
"""Processes that may be lost in a round while no play ran."""
_DIED = "its process died (it exited, crashed or had no memory left)"
_HELD = "it held its process, which had to be ended"
_UNSEEN = "in code that does not let Python look"


class Asked(NamedTuple):
    """A sample that an episode asks for.

    Attributes:
        number: of the episode. stop_token_ids: further ones than the run's. parser: name of a parser of tool calls, and
            the tools' schemas; None where none is wanted.
    """

    number: int
    prompt: Prompt
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    parser: tuple[str, tuple] | None


AskFn = Callable[[Sequence[Asked], int], tuple[Completions, Mapping[int, ToolCalls]]]
"""Draws the samples of a round, given its number: in order, and by episode the calls that a parser found."""


NoteFn = Callable[[Mapping[str, str]], None]
"""Hears which processes were lost, and what became of each."""


class Pool(Protocol):
    """Processes, or what stands for them, that play a round."""

    def __len__(self) -> int: ...
    def advance(self, messages: Mapping[int, Message]) -> Mapping[int, Reply | LostWorker]: ...


class _Course:
    """The course of an episode, as the driver has recorded it.

    Attributes:
        sequences: pieces so far. given: its answers, each after the context that came before it. tools: outcomes of
            its tools. losses: processes that were lost at it.
    """

    __slots__ = ("_prompt", "context", "ending", "given", "losses", "number", "row", "sequences", "tools")

    def __init__(self, number: int, row: Row, prompt: Prompt):
        self.number, self.row, self._prompt = number, row, prompt
        self.sequences = [[Piece(row.prompt_ids, CONTEXT, row.images)]]
        self.given: list[tuple[np.ndarray, Answer]] = []
        self.tools: dict[int, bytes] = {}
        self.losses, self.context = 0, np.zeros(0, np.int32)
        self.ending: Ending | None = None

    def add_context(self, ids: np.ndarray, images: tuple[Image, ...], is_fork: bool) -> None:
        """Record what stands before the sample that is asked for now."""
        self.context = ids
        if is_fork and not self.given:
            self.sequences.clear()  # a prompt of its own takes the place of the row's
        if is_fork:
            self.sequences.append([])
        if len(ids):
            self.sequences[-1].append(Piece(ids, CONTEXT, images))

    def add_answer(self, completion: Completion, calls: ToolCalls | None) -> None:
        """Record a sample."""
        self.sequences[-1].append(Piece(completion.token_ids, len(self.given), (), completion))
        self.given.append((self.context, Answer(completion.token_ids, completion.finished, calls)))

    def list_answers(self) -> list[tuple[int, Answer]]:
        """List its answers as a ``Job`` has them."""
        return [(digest_ids(context), answer) for context, answer in self.given]

    def make_prompt(self) -> Prompt:
        """Make the prompt of all that the last sequence has."""
        pieces = self.sequences[-1]
        if len(pieces) == 1 and pieces[0].token_ids is self.row.prompt_ids:
            return self._prompt  # one object for all episodes of a row, as it is sent
        images = tuple(image for piece in pieces for image in piece.images)
        ids = np.concatenate([np.asarray(piece.token_ids, np.int32) for piece in pieces])
        return Prompt(tuple(ids.tolist()), images)


class Rounds:
    """Plays some rows, ``count`` episodes of each.

    Args:
        ask: draws the samples of a round. default: reward of an episode that failed.
        note_lost: hears of processes that were lost and are no episode's fault. It raises where the run may not go on.
            Without it an episode at which a process is lost is to blame.
        seed: of the episodes' random numbers.
    """

    def __init__(
        self,
        pool: Pool,
        rows: Sequence[Row],
        count: int,
        ask: AskFn,
        *,
        default: float = 0.0,
        note_lost: NoteFn | None = None,
        seed: tuple[int, ...] = (),
    ):
        self._pool, self._ask, self._default, self._note_lost, self._seed = pool, ask, default, note_lost, seed
        self._rows, self._count = rows, count
        total, prompts = len(rows) * count, [Prompt(row.prompt_ids, row.images) for row in rows]
        places = [number // count for number in range(total)]
        self._courses = [_Course(number, rows[place], prompts[place]) for number, place in enumerate(places)]
        self._owners = np.arange(total) * len(pool) // total  # [P * count], the process of each
        self._suspected: dict[int, LostWorker] = {}
        self._losses = 0

    def play(self) -> list[EpisodeRecord]:
        """Play all episodes to their ends: ``[P * count]`` records, those of a row one after another.

        Raises:
            RunError: a process of plays is lost time and again.
        """
        messages = {slot: self._make_jobs(slot) for slot in set(self._owners.tolist())}
        round_number = 0
        while messages:
            replies = self._advance(messages)
            asked = sorted((one for reply in replies for one in self._take(reply)), key=attrgetter("number"))
            messages = self._answer(asked, *self._ask(asked, round_number)) if asked else {}
            round_number += 1
        for lost in self._suspected.values():
            self._tell_lost(lost)
        return [self._make_record(course) for course in self._courses]

    # -- a round

    def _make_jobs(self, slot: int) -> Message:
        """Have a process begin all its episodes that have not ended, or begin them anew."""
        courses = [self._courses[number] for number in np.flatnonzero(self._owners == slot).tolist()]
        jobs = [
            Job(one.number, one.number // self._count, (*self._seed, one.number), one.list_answers(), dict(one.tools))
            for one in courses
            if one.ending is None
        ]
        return Message({row: self._rows[row] for row in dict.fromkeys(job.row for job in jobs)}, jobs)

    def _advance(self, messages: Mapping[int, Message]) -> list[Reply]:
        """Let the processes play the round; the episodes of one that is lost begin anew in another."""
        replies, waiting = [], dict(messages)
        while waiting:
            results, waiting = self._pool.advance(waiting), {}
            for slot, reply in results.items():
                if isinstance(reply, LostWorker):
                    self._judge(reply)
                    waiting[slot] = self._make_jobs(slot)
                else:
                    replies.append(reply)
        self._losses = 0
        return replies

    def _take(self, reply: Reply) -> Iterator[Asked]:
        """Record what a process tells; yields the samples that it asks for."""
        for number, call, outcome in reply.tools:
            self._courses[number].tools[call] = outcome
        for ending in reply.endings:
            self._courses[ending.number].ending = ending
        requests = reply.requests
        contexts = np.split(requests.token_ids, np.cumsum(requests.lengths)[:-1]) if requests.numbers else []
        columns = zip(requests.numbers, requests.forks, contexts, requests.max_tokens, strict=True)
        for number, is_fork, ids, max_tokens in columns:
            course = self._courses[number]
            if course.ending:
                continue  # its play has ended without waiting for what a task of it had asked for
            course.add_context(ids, requests.images.get(number, ()), is_fork)
            yield Asked(
                number,
                course.make_prompt(),
                max_tokens,
                requests.stops.get(number, ()),
                requests.parsers.get(number),
            )

    def _answer(
        self, asked: Sequence[Asked], completions: Completions, calls: Mapping[int, ToolCalls]
    ) -> dict[int, Message]:
        """Record what was drawn, and address it to the processes whose plays wait for it."""
        numbers = np.asarray([one.number for one in asked])
        for number, completion in zip(numbers.tolist(), completions, strict=True):
            self._courses[number].add_answer(completion, calls.get(number))
        owners, messages = self._owners[numbers], {}
        for slot in sorted(set(owners.tolist())):
            places = np.flatnonzero(owners == slot)
            part, own = completions.gather(places), numbers[places].tolist()
            messages[slot] = Message(
                numbers=own,
                token_ids=part.token_ids,
                lengths=part.lengths.tolist(),
                finished=part.finished.tolist(),
                calls={number: calls[number] for number in own if number in calls},
            )
        return messages

    # -- processes that are lost

    def _judge(self, lost: LostWorker) -> None:
        """Decide whether an episode is to blame for the end of its process."""
        self._losses += 1
        if lost.number == IDLE:
            if self._losses >= _LOSSES:
                raise RunError(f"episodes: {lost.name} {lost.fate}, {_LOSSES} times in a row, while no play ran")
            return self._tell_lost(lost)
        course = self._courses[lost.number]
        course.losses += 1
        if self._note_lost and not lost.where and course.losses < _BLAMES:
            self._suspected[lost.number] = lost
            return
        self._suspected.pop(lost.number, None)
        kind, message = ("died", _DIED) if lost.fate == DIED else ("blocked", f"{_HELD}, {lost.where or _UNSEEN}")
        course.ending = Ending(lost.number, (), (kind, f"turn {lost.turn}: {message}"))

    def _tell_lost(self, lost: LostWorker) -> None:
        if self._note_lost:
            self._note_lost({lost.name: lost.fate})
        else:
            LOGGER.warning(f"episodes: {lost.name} {lost.fate}; its plays begin anew")

    def _make_record(self, course: _Course) -> EpisodeRecord:
        ending = course.ending
        assert ending, "a play that has not ended asks for a sample"
        rewards = ending.rewards
        if ending.failure and ending.failure[0] != "unsampled":
            rewards = ((len(course.given) - 1, self._default),)
        return EpisodeRecord(
            course.row,
            tuple(tuple(pieces) for pieces in course.sequences),
            rewards,
            ending.failure,
            ending.forks,
            ending.tool_calls,
            ending.tool_failures,
        )
