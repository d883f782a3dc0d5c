"""Episodes ahead of the trainer: each goes on as soon as its sample is there, and waits for no other."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from engines.batch.samples import Completions
from engines.vllm.tools import ToolCalls
from rlworker.episodes.courses import Asked, Course, Courses
from rlworker.episodes.record import LostWorker, Message, Reply
from rlworker.episodes.rounds import make_courses
from rlworker.rollouts.plays import EpisodeGroup, Player, group_by_parser, make_request, score_episodes
from rlworker.rollouts.stream.draw import Draw, Finished
from rlworker.rollouts.stream.feed import Feed

_LONGEST_S = 0.05
"""Seconds after which processes tell what their plays ask for, while others of these run on."""


class EpisodeDrawer:
    """Draws episodes."""

    def __init__(self, feed: Feed, player: Player):
        self._feed, self._player, self._pool = feed, player, player.pool
        self._next_number = 0
        self.forget()

    def begin(self, draw: Draw) -> None:
        count, total = draw.sampling.count, len(draw.rows) * draw.sampling.count
        slots, first = len(self._pool), self._next_number
        courses = make_courses(
            draw.rows, count, draw.sampling.stream, lambda place: place * slots // total, first=first
        )
        self._next_number += total
        self._courses.add(courses)
        for course in courses:
            self._draws[course.number] = draw, (course.number - first) // count
            self._new[course.slot].append(course)
        for place in range(len(draw.rows)):
            numbers = range(first + place * count, first + (place + 1) * count)
            self._left[draw.number, place] = set(numbers), numbers

    def take(self, draw: Draw, key: tuple, completions: Completions) -> None:
        number = key[1]
        if number in self._asked:  # else it has ended meanwhile
            self._sampled.append((self._asked.pop(number), completions))

    def advance(self) -> list[Finished]:
        finished = [one for slot, reply in self._pool.poll(0.0).items() for one in self._hear(slot, reply)]
        self._read_samples()
        for slot in sorted(self._free):
            if message := self._make_message(slot):
                self._free.discard(slot)
                self._pool.begin(slot, message)
        return finished

    @property
    def references(self) -> Sequence[Any]:
        return self._pool.references

    def forget(self) -> None:
        if self._next_number:
            self._pool.restart()
        slots = range(len(self._pool))
        self._courses = Courses(self._player.default, self._player.note_lost)
        self._free, self._run_on = set(slots), set[int]()
        self._new: list[list[Course]] = [[] for _ in slots]
        self._answered: list[list[int]] = [[] for _ in slots]
        self._draws: dict[int, tuple[Draw, int]] = {}
        self._left: dict[tuple[int, int], tuple[set[int], range]] = {}
        self._asked: dict[int, Asked] = {}
        self._sampled: list[tuple[Asked, Completions]] = []

    def close(self) -> None:
        pass  # the processes are the run's

    # -- processes

    def _hear(self, slot: int, reply: Reply | LostWorker) -> Iterator[Finished]:
        """Hear what a process tells, or that it was lost; yields the groups that have become whole."""
        self._free.add(slot)
        self._run_on.discard(slot)
        if isinstance(reply, LostWorker):
            ended = self._courses.judge(reply)
            self._new[slot] = self._courses.list_living(slot)
            yield from self._end([] if ended is None else [ended])
            return
        self._ask(list(self._courses.take(reply)))
        # Where it was begun anew, an answer may have come before it asked again.
        self._answered[slot] += reply.requests.numbers
        if reply.runs_on:
            self._run_on.add(slot)
        yield from self._end([ending.number for ending in reply.endings])

    def _make_message(self, slot: int) -> Message | None:
        """Make what a process is told next; None where it can only wait."""
        if new := self._new[slot]:
            self._new[slot] = []
            return self._courses.begin([course for course in new if course.ending is None], _LONGEST_S)
        answered, self._answered[slot] = dict.fromkeys(self._answered[slot]), []
        living = [number for number in answered if number in self._draws]
        if message := self._courses.address(living, _LONGEST_S).get(slot):
            return message
        return Message(longest_s=_LONGEST_S) if slot in self._run_on else None

    def _end(self, numbers: Sequence[int]) -> Iterator[Finished]:
        """Note that episodes have ended."""
        self._feed.abort([self._name(number) for number in numbers if self._asked.pop(number, None)])
        for number in numbers:
            draw, place = self._draws[number]
            left, group = self._left[draw.number, place]
            left.discard(number)
            if left:
                continue
            del self._left[draw.number, place]
            for one in group:
                del self._draws[one]
            whole = EpisodeGroup.collect(draw.rows[place], self._courses.collect(group))
            draw.scores.append(score_episodes([whole]))
            yield draw, place, whole

    # -- samples

    def _ask(self, asked: Sequence[Asked]) -> None:
        """Ask the engines for samples."""
        requests = []
        for one in asked:
            draw, _ = self._draws[one.number]
            self._asked[one.number] = one
            requests.append((self._name(one.number), make_request(one, draw.sampling, draw.goes_first)))
        self._feed.submit(requests)

    def _name(self, number: int) -> tuple[int, int]:
        return self._draws[number][0].number, number

    def _read_samples(self) -> None:
        """Hand samples on, those in which a parser looks for calls of tools once it has."""
        sampled, self._sampled = self._sampled, []
        for (parser, tools), places in group_by_parser([asked for asked, _ in sampled]).items():
            found = [sampled[place] for place in places]
            if parser:
                self._parse(found, parser, tools)
            else:
                self._answer(found, [None] * len(found))

    def _parse(self, found: list[tuple[Asked, Completions]], parser: str, tools: str) -> None:
        texts = self._player.decode_samples([completions.token_ids for _, completions in found])
        self._feed.call_any(
            "parse_tools",
            *(texts, parser, json.loads(tools)),
            then=lambda calls: self._answer(found, calls),
            otherwise=lambda: self._sampled.extend(found),
        )

    def _answer(self, found: Sequence[tuple[Asked, Completions]], calls: Sequence[ToolCalls | None]) -> None:
        for (asked, completions), found_calls in zip(found, calls, strict=True):
            number = asked.number
            if number in self._draws and self._courses[number].ending is None:
                self._courses.answer([number], completions, {number: found_calls} if found_calls else {})
                self._answered[self._courses[number].slot].append(number)
