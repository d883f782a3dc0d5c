"""Episodes in lock-step rounds: the samples that all plays wait for are drawn together, in the order of the episodes.

So a round depends on nothing but the plays, the weights and its random numbers: not on how long a tool took, nor in
which process a play ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from engines.batch.samples import Completions, Prompt
from engines.vllm.tools import ToolCalls
from rlworker.data.rows import Row
from rlworker.episodes.courses import Asked, Course, Courses, NoteFn
from rlworker.episodes.record import EpisodeRecord, LostWorker, Message, Reply

AskFn = Callable[[Sequence[Asked], int], tuple[Completions, Mapping[int, ToolCalls]]]
"""Draws the samples of a round, given its number: in order, and by episode the calls that a parser found."""


class Pool(Protocol):
    """Processes, or what stands for them, that play a round."""

    def __len__(self) -> int: ...
    def advance(self, messages: Mapping[int, Message]) -> Mapping[int, Reply | LostWorker]: ...


class Rounds:
    """Plays some rows, ``count`` episodes of each.

    Args:
        ask: draws the samples of a round. default: reward of an episode that failed. note_lost: as ``Courses`` has it.
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
        self._pool, self._ask, self._total = pool, ask, len(rows) * count
        self._courses = Courses(default, note_lost)
        self._courses.add(make_courses(rows, count, seed, lambda number: number * len(pool) // self._total))

    def play(self) -> list[EpisodeRecord]:
        """Play all episodes to their ends: ``[P * count]`` records, those of a row one after another.

        Raises:
            RunError: a process of plays is lost time and again.
        """
        slots = {self._courses[number].slot for number in range(self._total)}
        messages, round_number = {slot: self._courses.make_jobs(slot) for slot in slots}, 0
        while messages:
            replies = self._advance(messages)
            asked = sorted((one for reply in replies for one in self._courses.take(reply)), key=attrgetter("number"))
            messages = self._answer(asked, round_number) if asked else {}
            round_number += 1
        return self._courses.collect(range(self._total))

    def _advance(self, messages: Mapping[int, Message]) -> list[Reply]:
        """Let the processes play the round; the episodes of one that is lost begin anew in another."""
        replies, waiting = [], dict(messages)
        while waiting:
            results, waiting = self._pool.advance(waiting), {}
            for slot, reply in results.items():
                if isinstance(reply, LostWorker):
                    self._courses.judge(reply)
                    waiting[slot] = self._courses.make_jobs(slot)
                else:
                    replies.append(reply)
        return replies

    def _answer(self, asked: Sequence[Asked], number: int) -> dict[int, Message]:
        """Draw the samples of the round, and address them to the processes whose plays wait for them."""
        numbers = [one.number for one in asked]
        self._courses.answer(numbers, *self._ask(asked, number))
        return self._courses.address(numbers)


def make_courses(
    rows: Sequence[Row], count: int, seed: tuple[int, ...], find_slot: Callable[[int], int], first: int = 0
) -> list[Course]:
    """Make the courses of ``count`` episodes of each row, numbered from ``first`` on.

    Args:
        seed: of their random numbers, with the place of each among these. find_slot: finds the process of a place.
    """
    prompts = [Prompt(row.prompt_ids, row.images) for row in rows]
    places = [(place, place // count) for place in range(len(rows) * count)]
    return [Course(first + place, rows[row], prompts[row], (*seed, place), find_slot(place)) for place, row in places]
