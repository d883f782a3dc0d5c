"""Plays in the test's own process: what stands for the engine answers from a script, and for Ray there is a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from support.episodes.chat import SAMPLED, GuardedTokenizer

from engines.batch.samples import Completion, Completions
from rlworker.data.rows import Row
from rlworker.episodes.codec import Codec
from rlworker.episodes.courses import Asked
from rlworker.episodes.model import Play, PlayLimits
from rlworker.episodes.processes.stage import Stage
from rlworker.episodes.processes.worker import watch_stage
from rlworker.episodes.record import EpisodeRecord, LostWorker, Message, Reply
from rlworker.episodes.rounds import Rounds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS, VOCAB = 2, 99
LIMITS = PlayLimits(turns=4, tokens=40, sample_tokens=8, time_limit_s=0.5, tool_limit_s=2.0)


@cache
def load_tokenizer() -> PreTrainedTokenizerFast:
    from recipes.common.addition import make_tokenizer

    return make_tokenizer()


def encode(text: str) -> list[int]:
    return load_tokenizer()(text, add_special_tokens=False)["input_ids"]


def make_rows(*prompts: str) -> list[Row]:
    return [Row(prompt, tuple(encode(prompt)), prompt[0], {}) for prompt in prompts]


def make_codec() -> Codec:
    """Make a codec whose tokenizer raises where it is asked to encode what was sampled."""
    return Codec(GuardedTokenizer(load_tokenizer()), (EOS,), vocab=VOCAB)


def make_sample(text: str, finished: bool = True, version: int = 0) -> Completion:
    """Make a sample whose text says that it was sampled; logprobs count down from its length."""
    ids = np.asarray([*encode(SAMPLED + text), *([EOS] if finished else [])], np.int32)
    return Completion(ids, -np.arange(len(ids), 0, -1, dtype=np.float32), finished, ((version, len(ids)),))


def say_length(prompt: Sequence[int], number: int) -> str:
    """Sample the length of the prompt: another in each turn, and another where the context is."""
    return str(len(prompt) % 10)


class LocalPool:
    """Stands for the processes of plays.

    Args:
        block_file: where the plays are watched, as ``watch_stage`` takes it.
        lose: rounds (from 0) after which each of them loses its first process, at no play or at an episode.
    """

    def __init__(
        self,
        play: Play,
        workers: int = 1,
        limits: PlayLimits = LIMITS,
        lose: Mapping[int, int] | None = None,
        block_file: str = "",
    ):
        self.make = lambda: Stage(play, make_codec(), limits)
        self.stages = [self.make() for _ in range(workers)]
        self.lose, self.messages, self.fate = lose or {}, [], "died"
        if block_file:
            watch_stage(self.stages[0], block_file)

    def __len__(self) -> int:
        return len(self.stages)

    def advance(self, messages: Mapping[int, Message]) -> dict[int, Reply | LostWorker]:
        number = len(self.messages)
        self.messages.append(messages)
        replies: dict[int, Reply | LostWorker] = {slot: self.stages[slot].advance(m) for slot, m in messages.items()}
        if number in self.lose and 0 in replies:
            self.stages[0].close()
            self.stages[0] = self.make()
            replies[0] = LostWorker("play worker 0", self.fate, self.lose[number], 1, "")
        return replies


def play_all(
    pool: LocalPool, rows: Sequence[Row], count: int = 1, say: Callable = say_length, **options
) -> list[EpisodeRecord]:
    """Play episodes with samples of ``say(prompt ids, number of the round)``."""

    def ask(asked: Sequence[Asked], number: int):
        assert [one.number for one in asked] == sorted(one.number for one in asked)
        return Completions.join([make_sample(say(one.prompt.token_ids, number)) for one in asked]), {}

    records = Rounds(pool, rows, count, ask, **options).play()
    for stage in pool.stages:
        stage.close()
    return records


def tell(record: EpisodeRecord) -> list[list[tuple[int, str]]]:
    """Tell who wrote what: turn and text of each piece, sequence by sequence."""
    return [[(piece.turn, load_tokenizer().decode(piece.token_ids)) for piece in pieces] for pieces in record.sequences]
