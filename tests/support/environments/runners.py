"""Environments in the test's own process: engines answer from a script, and a runner stands for processes of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from support.environments.chat import SAMPLED, GuardedTokenizer

from engines.batch.samples import Completion, Request, Sampling
from recipes.common.addition import make_tokenizer
from rlworker.data.rows import Row
from rlworker.environments.codec import Codec
from rlworker.environments.policy import EpisodeLimits
from rlworker.environments.processes.runner import EnvRunner
from rlworker.environments.processes.worker import watch_runner
from rlworker.environments.record import Answers, Job, LostWorker, Reply, Trajectory
from rlworker.environments.reward import Environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlworker.rollouts.loop import RolloutLoop

EOS, VOCAB = 2, 99
LIMITS = EpisodeLimits(turns=4, tokens=40, sample_tokens=8, time_limit_s=0.5, tool_limit_s=2.0)


@cache
def load_tokenizer() -> PreTrainedTokenizerFast:
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
    """Stands for the processes of environments, which reply at once.

    Args:
        block_file: where environments are watched, as ``watch_runner`` takes it.
        codec: of the environments; else one of plain text.
        lose: rounds (from 0), each until its episodes wait or have ended, after which each of them loses its first
            process, at no episode or at one.
    """

    references = ()

    def __init__(
        self,
        environment: Environment,
        workers: int = 1,
        limits: EpisodeLimits = LIMITS,
        lose: Mapping[int, int] | None = None,
        block_file: str = "",
        codec: Codec | None = None,
    ):
        self.environment, self.codec = environment, codec or make_codec()
        self.make = lambda: EnvRunner(environment, codec or make_codec(), limits)
        self.runners = [self.make() for _ in range(workers)]
        self.lose, self.messages, self.fate = lose or {}, [], "died"
        self.replies, self.held, self.restarts, self.rounds = {}, set(), 0, 0
        if block_file:
            watch_runner(self.runners[0], block_file)

    def __len__(self) -> int:
        return len(self.runners)

    def limit_stalls(self, timeout_s: float) -> None:
        pass

    def restart(self) -> None:
        self.restarts += 1
        self.replies.clear()
        self.runners = [self.make() for _ in self.runners]

    def begin(self, slot: int, jobs: Sequence[Job], answers: Mapping[int, Answers], longest_s: float | None) -> None:
        self.messages.append((jobs, answers))
        self.replies[slot] = self.runners[slot].advance(jobs, answers, longest_s)

    def poll(self) -> dict[int, Reply | LostWorker]:
        ready = {slot: reply for slot, reply in self.replies.items() if slot not in self.held}
        for slot in ready:
            del self.replies[slot]
        if isinstance(first := ready.get(0), Reply) and not first.runs_on:
            number, self.rounds = self.rounds, self.rounds + 1
            if number in self.lose:
                self.lose_first()
                ready[0] = LostWorker("environment worker 0", self.fate, self.lose[number])
        return ready

    def lose_first(self) -> None:
        self.runners[0].close()
        self.runners[0] = self.make()


class Engines:
    """Stands for the rollout engines in turns: samples are ``say(prompt ids, number of the turn)``."""

    def __init__(self, say: Callable = say_length):
        self.say, self.streams, self.requests = say, [], []

    def sample(self, requests: Sequence[Request], stream: tuple[int, ...]) -> list[Completion]:
        self.streams.append(stream)
        self.requests.append(list(requests))
        number = len(self.streams) - 1
        return [make_sample(self.say(one.token_ids, number)) for one in requests for _ in range(one.sampling.count)]


def make_loop(
    pool: LocalPool, engines: Any, default: float = 0.0, served: Mapping[str, Any] = MappingProxyType({})
) -> RolloutLoop:
    from rlworker.rollouts.loop import RolloutLoop
    from rlworker.rollouts.scoring.questions import QuestionQueue
    from rlworker.rollouts.turn_queue import TurnQueue

    codec = getattr(pool, "codec", None) or make_codec()
    parts = TurnQueue(engines), codec, default, QuestionQueue(served)
    return RolloutLoop(pool.environment, cast(Any, pool), engines, *parts)


def run_episodes(
    pool: LocalPool,
    rows: Sequence[Row],
    count: int = 1,
    say: Callable = say_length,
    *,
    default: float = 0.0,
    note_lost: Callable | None = None,
    seed: tuple[int, ...] = (),
    served: Mapping[str, Any] = MappingProxyType({}),
) -> list[Trajectory]:
    """Run ``count`` episodes of each row in turns: their trajectories."""
    loop = make_loop(pool, Engines(say), default, served)
    if note_lost:
        loop.note_lost(note_lost, 60.0)
    groups = loop.wait(loop.begin(rows, Sampling(count, 1.0, 8, seed, (EOS,))))
    for runner in pool.runners:
        runner.close()
    return [trajectory for group in groups for trajectory in group]


def tell(record: Trajectory) -> list[list[tuple[int, str]]]:
    """Tell who wrote what: turn and text of each segment, sequence by sequence."""
    return [
        [(segment.turn, load_tokenizer().decode(segment.token_ids)) for segment in segments]
        for segments in record.sequences
    ]
