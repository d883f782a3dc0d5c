"""The courses of episodes, as the driver records them while processes play them.

What was recorded is given once more to plays that have to begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engines.batch.samples import Completion, Completions, Image, Prompt
from engines.vllm.tools import ToolCalls
from rlworker.data.rows import Row
from rlworker.episodes.record import (
    CONTEXT,
    HELD,
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
from rlworker.errors import MONITOR, RunError
from rlworker.tracking.terminal import LOGGER

_BLAMES = 2
"""Processes that are lost at one episode when it is to blame, where lost ones are replaced."""
_LOSSES = 3
"""Processes that may be lost one after another while no play ran."""
_DIED = "its process died (it exited, crashed or had no memory left)"
_HELD = "it held its process, which had to be ended"
_UNSEEN = "in code that does not let Python look"

NoteFn = Callable[[Mapping[str, str]], None]
"""Hears which processes were lost, and what became of each."""


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


class Course:
    """The course of an episode.

    Args:
        number: among all that are played together. seed: of its random numbers.
        prompt: of its row, one object for all episodes of that.

    Attributes:
        slot: the process that plays it. sequences: pieces so far. given: its answers, each after the context that came
            before it. told: answers of these that its process was told. tools: outcomes of its tools.
        losses: processes that were lost at it. is_asked: a sample is being drawn for it. waits: its process waits for
            an answer. ending: how it ended, once it has.
    """

    __slots__ = (
        *("_prompt", "context", "ending", "given", "is_asked", "losses", "number", "row", "seed", "sequences", "slot"),
        *("told", "tools", "waits"),
    )

    def __init__(self, number: int, row: Row, prompt: Prompt, seed: tuple[int, ...], slot: int):
        self.number, self.row, self._prompt, self.seed, self.slot = number, row, prompt, seed, slot
        self.sequences = [[Piece(row.prompt_ids, CONTEXT, row.images)]]
        self.given: list[tuple[np.ndarray, Answer]] = []
        self.tools: dict[int, bytes] = {}
        self.told = self.losses = 0
        self.context = np.zeros(0, np.int32)
        self.is_asked = self.waits = False
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
        self.is_asked = False

    def end(self, ending: Ending) -> None:
        """Record the end. What stands before a sample that was never drawn belongs to no turn."""
        self.ending = ending
        if self.is_asked and self.given and self.sequences[-1][-1].turn == CONTEXT:
            self.sequences[-1].pop()
            if not self.sequences[-1]:
                self.sequences.pop()

    def make_job(self, row: int) -> Job:
        """Make the job of playing it from its beginning, with all that is known of it.

        Args:
            row: key of its row in the message.
        """
        self.told, self.waits = len(self.given), False
        answers = [(digest_ids(context), answer) for context, answer in self.given]
        return Job(self.number, row, self.seed, answers, dict(self.tools))

    def make_prompt(self) -> Prompt:
        """Make the prompt of all that the last sequence has."""
        pieces = self.sequences[-1]
        if len(pieces) == 1 and pieces[0].token_ids is self.row.prompt_ids:
            return self._prompt  # one object for all episodes of a row, as it is sent
        images = tuple(image for piece in pieces for image in piece.images)
        ids = np.concatenate([np.asarray(piece.token_ids, np.int32) for piece in pieces])
        return Prompt(tuple(ids.tolist()), images)


class Courses:
    """The courses of all episodes that are being played.

    Args:
        default: reward of an episode that failed.
        note_lost: hears of processes that were lost and are no episode's fault. It raises where the run may not go on.
            Without it an episode at which a process is lost is to blame.
    """

    def __init__(self, default: float = 0.0, note_lost: NoteFn | None = None):
        self._default, self._note_lost = default, note_lost
        self._courses: dict[int, Course] = {}
        self._suspected: dict[int, LostWorker] = {}
        self._losses = 0

    def __getitem__(self, number: int) -> Course:
        return self._courses[number]

    def add(self, courses: Iterable[Course]) -> None:
        """Take up episodes, which no process knows of yet."""
        self._courses |= {course.number: course for course in courses}

    def make_jobs(self, slot: int) -> Message:
        """Have a process begin all its episodes that have not ended, or begin them anew."""
        return self.begin(self.list_living(slot))

    def list_living(self, slot: int) -> list[Course]:
        """List the episodes of a process that have not ended."""
        return [one for one in self._courses.values() if one.slot == slot and one.ending is None]

    def begin(self, courses: Sequence[Course], longest_s: float | None = None) -> Message:
        """Have a process begin episodes; ``longest_s`` is ``Message``'s."""
        rows = {id(course.row): course.row for course in courses}
        keys = {key: place for place, key in enumerate(rows)}
        jobs = [course.make_job(keys[id(course.row)]) for course in courses]
        return Message(dict(enumerate(rows.values())), jobs, longest_s=longest_s)

    def take(self, reply: Reply) -> Iterator[Asked]:
        """Record what a process tells; yields the samples that are to be drawn."""
        self._losses = 0
        for number, call, outcome in reply.tools:
            self._courses[number].tools[call] = outcome
        for ending in reply.endings:
            self._courses[ending.number].end(ending)
        requests = reply.requests
        contexts = np.split(requests.token_ids, np.cumsum(requests.lengths)[:-1]) if requests.numbers else []
        columns = zip(requests.numbers, requests.forks, contexts, requests.max_tokens, strict=True)
        for number, is_fork, ids, max_tokens in columns:
            course = self._courses[number]
            if course.ending:
                continue  # its play has ended without waiting for what a task of it had asked for
            course.waits = True
            if course.is_asked or course.told < len(course.given):
                continue  # it was begun anew: that sample is being drawn, or was meanwhile
            course.add_context(ids, requests.images.get(number, ()), is_fork)
            course.is_asked = True
            stops, parser = requests.stops.get(number, ()), requests.parsers.get(number)
            yield Asked(number, course.make_prompt(), max_tokens, stops, parser)

    def answer(self, numbers: Sequence[int], completions: Completions, calls: Mapping[int, ToolCalls]) -> None:
        """Record what was drawn for some episodes, in their order."""
        for number, completion in zip(numbers, completions, strict=True):
            self._courses[number].add_answer(completion, calls.get(number))

    def address(self, numbers: Iterable[int], longest_s: float | None = None) -> dict[int, Message]:
        """Address the answers of those episodes that wait for one to their processes; ``longest_s`` is
        ``Message``'s."""
        slots: dict[int, list[Course]] = {}
        for number in numbers:
            course = self._courses[number]
            if course.waits and course.told < len(course.given) and course.ending is None:
                slots.setdefault(course.slot, []).append(course)
        return {slot: _tell_answers(courses, longest_s) for slot, courses in slots.items()}

    def judge(self, lost: LostWorker) -> int | None:
        """Decide whether an episode is to blame for the end of its process; returns its number, as it has ended."""
        self._losses += 1
        course = self._courses.get(lost.number)
        if course is None or course.ending:  # it was at none, or at one that had ended
            if self._losses >= _LOSSES:
                raise RunError(f"episodes: {lost.name} {lost.fate}, {_LOSSES} times in a row, while no play ran")
            return self._tell_lost(lost)
        course.losses += 1
        is_monitors = lost.fate.startswith(MONITOR)  # which chooses by other things than what a process holds
        if (self._note_lost or is_monitors) and not lost.where and course.losses < _BLAMES:
            self._suspected[lost.number] = lost
            return None
        self._suspected.pop(lost.number, None)
        died = "died", f"its process {lost.fate}" if is_monitors else _DIED
        kind, message = ("blocked", f"{_HELD}, {lost.where or _UNSEEN}") if lost.fate == HELD else died
        course.end(Ending(lost.number, (), (kind, f"turn {lost.turn}: {message}")))
        return lost.number

    def _tell_lost(self, lost: LostWorker) -> None:
        if self._note_lost:
            self._note_lost({lost.name: lost.fate})
        else:
            LOGGER.warning(f"episodes: {lost.name} {lost.fate}; its plays begin anew")

    def collect(self, numbers: Iterable[int]) -> list[EpisodeRecord]:
        """Collect the records of episodes that have ended, which are forgotten here."""
        return [self._collect(number) for number in numbers]

    def _collect(self, number: int) -> EpisodeRecord:
        course = self._courses.pop(number)
        if lost := self._suspected.pop(number, None):
            self._tell_lost(lost)  # it came to its end in another process
        ending = course.ending
        assert ending, "a play that has not ended asks for a sample"
        rewards = ending.rewards
        if ending.failure and ending.failure[0] != "unsampled":
            rewards = ((len(course.given) - 1, self._default),)
        sequences = tuple(tuple(pieces) for pieces in course.sequences)
        counts = ending.forks, ending.tool_calls, ending.tool_failures
        return EpisodeRecord(course.row, sequences, rewards, ending.failure, *counts)


def _tell_answers(courses: Sequence[Course], longest_s: float | None) -> Message:
    """Tell a process the newest answers of its episodes."""
    answers = [course.given[-1][1] for course in courses]
    for course in courses:
        course.told, course.waits = len(course.given), False
    numbers = [course.number for course in courses]
    return Message(
        numbers=numbers,
        token_ids=np.concatenate([answer.token_ids for answer in answers]),
        lengths=[len(answer.token_ids) for answer in answers],
        finished=[answer.finished for answer in answers],
        calls={number: answer.calls for number, answer in zip(numbers, answers, strict=True) if answer.calls},
        longest_s=longest_s,
    )
