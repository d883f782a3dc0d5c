"""Measure what a step costs the driver before and after its engines: completions to a batch, and a batch to shards.

    python scripts/bench/driver.py [--tiny] [--json FILE]

10 million tokens in 9,096 sequences, groups of 8, come from 16 engines as columns and become a batch; beside it, in the
same run, the same completions as lists of Python numbers. Then 131,072 short sequences go to 1,024 replicas as views of
one gathered copy; beside it a gather for each replica. CPU-seconds of this process, medians of nine.
"""

import os
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

os.environ.setdefault("OMP_NUM_THREADS", "1")  # CPU-seconds of one thread; torch counts threads when it is imported

import numpy as np
import torch
from timing import make_parser, measure_rounds, write_figures

from engines.batch.batch import TrainBatch
from engines.batch.places import find_tokens
from engines.batch.samples import Completions
from engines.batch.schedule import Schedule, plan_schedule
from engines.config import MegatronConfig
from rlworker.cluster.rollout_group import restore_prompts
from rlworker.data.rows import Row
from rlworker.rollouts.trajectory import to_batch

OPTIONS = make_parser(__doc__).parse_args()
ROUNDS, TOKENS, SHORT, REPLICAS = (1, 10**5, 1024, 16) if OPTIONS.tiny else (9, 10**7, 131_072, 1_024)
GROUP, ENGINES, PROMPT, VOCAB, HIDDEN = 8, 16, 256, 150_000, 4096


@dataclass
class ListCompletion:
    """A completion as Python numbers."""

    token_ids: list[int]
    logprobs: list[float]
    version: int


@dataclass(frozen=True)
class Answers:
    """What the engines answer, pickled as Ray does it: arrays beside the stream.

    Attributes:
        columns: of each engine, and their arrays. lists: of each engine.
    """

    columns: list[tuple[bytes, list[bytes]]]
    lists: list[bytes]


def draw_lengths() -> np.ndarray:
    """Draw log-normal lengths of completions, in whole groups, until there are ``TOKENS`` with their prompts."""
    draws = np.random.default_rng(0).lognormal(np.log(512), 1.0, TOKENS // PROMPT)
    lengths = draws.clip(1, 32_768).astype(np.int64)
    count = int(np.searchsorted(np.cumsum(lengths + PROMPT), TOKENS)) + 1
    return lengths[: -(-count // GROUP) * GROUP]


def make_answers(lengths: np.ndarray, parts: list[list[int]]) -> Answers:
    """Make what each engine sampled of its part of the prompts."""
    generator, answers = np.random.default_rng(1), Answers([], [])
    for part in parts:
        sizes = lengths.reshape(-1, GROUP)[part].reshape(-1)
        ids = generator.integers(0, VOCAB, int(sizes.sum())).astype(np.int32)
        logprobs, ones = generator.random(len(ids), np.float32), np.ones(len(sizes), np.int64)
        columns = Completions(ids, logprobs, sizes, ones > 0, ones, sizes, ones)
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(columns, 5, buffer_callback=buffers.append)
        answers.columns.append((stream, [buffer.raw().tobytes() for buffer in buffers]))
        lists = [ListCompletion(one.token_ids.tolist(), one.logprobs.tolist(), one.version) for one in columns]
        answers.lists.append(pickle.dumps(lists, 5))
    return answers


def batch_columns(answers: Answers, rows: list[Row], parts: list[list[int]]) -> TrainBatch:
    """Unpickle and batch, as the driver does."""
    received = [pickle.loads(stream, buffers=buffers) for stream, buffers in answers.columns]
    completions = restore_prompts(received, parts, GROUP)
    return to_batch(rows, completions, [0.0] * len(completions))


def batch_lists(answers: Answers, rows: list[Row], parts: list[list[int]]) -> TrainBatch:
    """Unpickle lists and batch them number by number."""
    received = chain.from_iterable(pickle.loads(stream) for stream in answers.lists)
    order = [prompt * GROUP + i for part in parts for prompt in part for i in range(GROUP)]
    samples = [sample for _, sample in sorted(zip(order, received, strict=True), key=lambda pair: pair[0])]
    sequences = [[*rows[i // GROUP].prompt_ids, *sample.token_ids] for i, sample in enumerate(samples)]
    batch = TrainBatch.from_ids(sequences, [PROMPT] * len(samples))
    logprobs = torch.zeros(batch.num_tokens)
    logprobs[batch.mask] = torch.tensor([x for sample in samples for x in sample.logprobs])
    return TrainBatch(lengths=batch.lengths, **batch.columns() | {"rollout_logprobs": logprobs})


def gather_shards(schedule: Schedule, batch: TrainBatch) -> list[TrainBatch]:
    """Gather each replica's sequences by themselves."""
    shards = []
    for replica in schedule.rows:
        rows = np.concatenate(replica)
        places, sequences = torch.from_numpy(find_tokens(batch.lengths, rows)), torch.from_numpy(rows)
        columns = {
            name: column.index_select(0, sequences if name == "group" else places)
            for name, column in batch.columns().items()
        }
        shards.append(TrainBatch(lengths=tuple(np.asarray(batch.lengths)[rows].tolist()), **columns))
    return shards


def compare(what: str, sizes: dict[str, int], ours: Callable[[], object], plain: Callable[[], object]) -> dict:
    """Measure both in CPU-seconds: a row of the table."""
    rounds = zip(*measure_rounds(ours, plain, rounds=ROUNDS, clock=time.process_time))
    ours_s, plain_s = ([ms / 1000 for ms in each] for each in zip(*rounds))
    median, plain_median = statistics.median(ours_s), statistics.median(plain_s)
    print(f"{what}: {median:.3f} CPU s, {min(ours_s):.3f} to {max(ours_s):.3f}; beside it {plain_median:.2f} CPU s")
    figures = {"CPU s": median, "slowest": max(ours_s), "beside it CPU s": plain_median}
    return {"what": what} | sizes | figures | {"ratio": median / plain_median}


def measure_batching() -> dict:
    """Measure completions to a batch."""
    lengths = draw_lengths()
    ids = np.random.default_rng(2).integers(0, VOCAB, (len(lengths) // GROUP, PROMPT)).tolist()
    rows = [Row("", tuple(prompt), "", {}) for prompt in ids]
    parts = [list(range(engine, len(rows), ENGINES)) for engine in range(ENGINES)]
    answers = make_answers(lengths, parts)
    ours, plain = batch_columns(answers, rows, parts), batch_lists(answers, rows, parts)
    assert all(torch.equal(getattr(ours, name), column) for name, column in plain.columns().items())
    sizes = {"tokens": ours.num_tokens, "sequences": len(lengths), "replicas": 1}
    del ours, plain  # their memory
    return compare(
        "completions to a batch",
        sizes,
        lambda: batch_columns(answers, rows, parts),
        lambda: batch_lists(answers, rows, parts),
    )


def measure_shards() -> dict:
    """Measure a batch to shards."""
    lengths = np.random.default_rng(0).integers(8, 120, SHORT)
    numbers = torch.arange(int(lengths.sum()))
    batch = TrainBatch(tuple(lengths.tolist()), numbers, numbers, numbers, numbers > 0, group=torch.arange(SHORT))
    schedule = plan_schedule(batch.lengths, MegatronConfig(ranks=REPLICAS, micro_batch_tokens=4096), HIDDEN, REPLICAS)
    for shard, want in zip(schedule.shards(batch), gather_shards(schedule, batch), strict=True):
        assert torch.equal(shard.batch.inputs, want.inputs) and shard.batch.lengths == want.lengths
    sizes = {"tokens": batch.num_tokens, "sequences": SHORT, "replicas": REPLICAS}
    return compare("a batch to shards", sizes, lambda: schedule.shards(batch), lambda: gather_shards(schedule, batch))


def main() -> None:
    torch.set_num_threads(1)
    write_figures(OPTIONS.json, [measure_batching(), measure_shards()])


if __name__ == "__main__":
    main()
