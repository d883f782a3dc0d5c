"""Measure what single requests cost beside the same completions of whole prompts, and turns beside a reward.

    python scripts/bench/rollout.py [--rounds 9] [--model FOLDER] [--tiny] [--json FILE]

One vLLM engine in its Ray process and a model of half a million parameters. Completions of one turn are sampled in
three ways, in turn: *prompts*, a round with a request for each prompt; *samples*, one with a request for each
completion; *loop*, those requests handed in, and polled for as they finish. Medians; CPU-seconds are those of the
driver and the engine. All three must sample as many tokens, the first two the same ones.

Then what a step draws before its update, with the same engine: *reward*, the one-turn environment of a function;
*written*, the same as an environment that a user writes. Here CPU-seconds are also those of the processes that run
them.

With ``--model`` it measures something else, on that model: *shared*, where the samples of a prompt share its keys and
values, and *alone*, where each computes its own (``--rollout.vllm enable_prefix_caching False``).

With ``--calls`` it measures turns of 16 tokens against an engine that answers at once, in episodes of 16 turns with a
history that grows, 64 at a time: *sampled* by ``policy.sample``, and *called* over HTTP by a client in another process.
CPU-seconds are those of the process that runs the episodes, and in the second way serves the calls.
"""

import asyncio
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from timing import make_parser, write_figures
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engines.batch.samples import Completion, Request, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from hardware.platforms import DEFAULT_PLATFORM
from recipes.common import addition
from rlworker.checks.tiny.models import make_tiny_text
from rlworker.cluster.ray import running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.worker_pool import POLL
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig
from rlworker.data.rows import Row
from rlworker.environments import Episode, one_turn
from rlworker.environments.codec import Codec
from rlworker.environments.policy import EpisodeLimits
from rlworker.environments.processes.pool import ProcessPool
from rlworker.environments.processes.runner import EnvRunner
from rlworker.environments.record import Answers, Job, Sample
from rlworker.rollouts.manager import RolloutManager
from rlworker.rollouts.running import running_loop, set_limits
from rlworker.rollouts.trajectory import batch_groups
from rlworker.tracking.log import StepClock

PARSER = make_parser(__doc__)
PARSER.add_argument("--rounds", type=int, default=9, help="of which medians are taken")
PARSER.add_argument("--calls", type=int, metavar="N", help="measure N calls of the endpoint, here")
PARSER.add_argument("--model", type=Path, metavar="FOLDER", help="measure how samples of a prompt share it, here")
OPTIONS = PARSER.parse_args()
SIZES = ((4, 2, 4),) if OPTIONS.tiny else ((256, 8, 4), (2048, 1, 4), (256, 1, 16), (32, 8, 16))
"""Prompts, completions of each, tokens of each."""
STEPS = ((4, 2, 4),) if OPTIONS.tiny else ((256, 8, 4), (256, 8, 16))
"""As ``SIZES``, of steps whose samples are rewarded."""
PROMPT_TOKENS, VOCAB, STREAM = 20, 1024, (7,)
CALL_TURNS, CALL_TOKENS, CALL_EPISODES = 16, 16, 64
ASK, ASK_AGAIN = ({"role": "user", "content": text} for text in ("What is 47*6+85, and why?", "Are you sure?"))
"""Messages of a call: the question, and what follows each answer."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def poll(rollouts: Rollouts, requests: list[Request]) -> list[Completion]:
    """Hand requests in and take them as they finish."""
    (worker,) = rollouts.workers
    ray.get(worker.submit.remote(list(enumerate(requests))))
    taken = {}
    while len(taken) < len(requests):
        taken |= dict(ray.get(worker.take.options(concurrency_group=POLL).remote(60.0)))
    return [completion for key in range(len(requests)) for completion in taken[key]]


def count_tokens(completions: list[Completion]) -> int:
    return sum(len(completion.token_ids) for completion in completions)


def measure_sharing(folder: Path) -> list[dict]:
    """Measure completions of prompts of 50 tokens, by an engine that shares prompts and one that does not."""
    model, size = ModelSpec.from_folder(folder), (8, 8, 16)
    prompts, count, tokens = size
    ids = np.random.default_rng(0).integers(4, model.vocab, (prompts, 50))
    sampling = Sampling(count, 1.0, tokens, STREAM, ())
    requests = [Request(tuple(row), sampling) for row in ids.tolist()]
    shared = VllmConfig(max_new_tokens=tokens, max_model_len=128, kv_cache_mb=256)
    alone = replace(shared, vllm={"enable_prefix_caching": False})
    with Rollouts(DEFAULT_PLATFORM, 1) as first, Rollouts(DEFAULT_PLATFORM, 1) as second:
        engines = {"shared": first.start(model, shared).wait(), "alone": second.start(model, alone).wait()}
        calls = {name: partial(rollouts.sample, requests, STREAM) for name, rollouts in engines.items()}
        lengths = prompts * count * tokens
        medians = measure(
            calls,
            [*first.workers, *second.workers],
            lambda results: {count_tokens(found) for found in results.values()} == {lengths},
        )
        return list_rows(size, medians)


def measure(calls: Mapping[str, Callable[[], Any]], workers: list, check: Callable[[dict[str, Any]], bool]) -> dict:
    """Call each in turn; median seconds and CPU-seconds, of this process and those of ``workers``, by the call's name.

    A first round does not count. ``check`` is given the results of each, and says whether they are right.
    """
    pids = ray.get([worker.__ray_call__.remote(lambda _: psutil.Process().pid) for worker in workers])
    processes, found = [psutil.Process(), *map(psutil.Process, pids)], {name: [] for name in calls}
    for _ in range(OPTIONS.rounds + 1):
        results = {}
        for name, call in calls.items():
            before, start = sum(sum(process.cpu_times()[:2]) for process in processes), time.perf_counter()
            results[name] = call()
            seconds = time.perf_counter() - start
            found[name].append((seconds, sum(sum(process.cpu_times()[:2]) for process in processes) - before))
        assert check(results)
    return {name: [statistics.median(each) for each in zip(*times[1:])] for name, times in found.items()}


def list_rows(size: tuple[int, int, int], medians: dict[str, list[float]]) -> list[dict]:
    """List rows of the table, one for each way, compared with the first; and print them."""
    first, table = next(iter(medians.values())), []
    for name, (seconds, cpu) in medians.items():
        row = dict(zip(("prompts", "completions", "tokens"), size)) | {"way": name, "s": seconds, "CPU s": cpu}
        table.append(row | {"CPU s to the first's": cpu / first[1], "s to the first's": seconds / first[0]})
        print("  ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in table[-1].values()))
    return table


def draw_prompts(count: int) -> list[Row]:
    """Draw rows of random prompts."""
    ids = np.random.default_rng(0).integers(4, VOCAB, (count, PROMPT_TOKENS))
    return [Row("", tuple(row), "", {}) for row in ids.tolist()]


def measure_rounds(rollouts: Rollouts, size: tuple[int, int, int]) -> list[dict]:
    """Measure completions in three ways."""
    prompts, count, tokens = size
    data, sampling = draw_prompts(prompts), Sampling(count, 1.0, tokens, STREAM, ())
    whole = [Request(row.prompt_ids, sampling) for row in data]
    single = [replace(one, sampling=replace(sampling, count=1)) for one in whole for _ in range(count)]
    calls = {
        "prompts": lambda: rollouts.sample(whole, STREAM),
        "samples": lambda: rollouts.sample(single, STREAM),
        "loop": lambda: poll(rollouts, single),
    }

    def are_alike(results: dict[str, list[Completion]]) -> bool:
        same = results["prompts"] == results["samples"]
        return same and count_tokens(results["loop"]) == count_tokens(results["samples"])

    return list_rows(size, measure(calls, rollouts.workers, are_alike))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer that knows each id of the model as a word of its own."""
    words = {"<eos>": 0} | {f"word {i}, ": i for i in range(1, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def reward(text: str, row: Row) -> float:
    return float(len(set(text)))


async def write(policy, row: Row) -> Episode:
    """Sample once and reward it, as ``one_turn`` of ``reward`` does."""
    episode = Episode(row)
    episode.reward(reward((await policy.sample(episode)).text, row))
    return episode


def measure_steps(rollouts: Rollouts, config: VllmConfig, size: tuple[int, int, int]) -> list[dict]:
    """Measure what a step draws, by a reward and by an environment that is written out."""
    prompts, count, tokens = size
    rows, codec = draw_prompts(prompts), Codec(make_tokenizer())
    data, rollout = DataConfig(max_prompt_tokens=PROMPT_TOKENS), replace(config, max_new_tokens=tokens)
    run = RunConfig(data=data, rollout=rollout, prompts_per_step=prompts, samples_per_prompt=count)
    with ExitStack() as running:
        calls, workers = {}, [*rollouts.workers]
        for name, environment in {"reward": one_turn(reward), "written": write}.items():
            pool = running.enter_context(ProcessPool(environment, codec, set_limits(run)))
            loop = running.enter_context(running_loop(run, environment, pool, rollouts, codec))
            manager = RolloutManager(run, codec, rows, rollouts, loop, lambda *_: nullcontext(), print)
            calls[name] = partial(draw, manager)
            workers += pool.workers
        want = prompts * count * (PROMPT_TOKENS + tokens - 1)
        return list_rows(size, measure(calls, workers, lambda sizes: {*sizes.values()} == {want}))


def draw(manager: RolloutManager) -> int:
    """Draw a step's batch: its tokens."""
    return batch_groups(manager.sample(StepClock(), 0)[0]).num_tokens


async def sample_turns(policy, row: Row) -> Episode:
    episode = Episode(row)
    for turn in range(CALL_TURNS):
        if turn:
            episode.observe([ASK_AGAIN])
        await policy.sample(episode, max_tokens=CALL_TOKENS)
    return episode


async def call_turns(url: str) -> None:
    """Play an episode over one connection, as a client does that costs little."""
    host, _, path = url.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    messages = [ASK]
    for _ in range(CALL_TURNS):
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": CALL_TOKENS}).encode()
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        length = re.search(rb"content-length: (\d+)", await reader.readuntil(b"\r\n\r\n"))
        assert length
        reply = json.loads(await reader.readexactly(int(length[1])))
        messages += [reply["choices"][0]["message"], ASK_AGAIN]
    writer.close()


def run_clients(urls: list[str]) -> None:
    async def call_all() -> None:
        await asyncio.gather(*map(call_turns, urls))

    asyncio.run(call_all())


def play_episodes(runner: EnvRunner, rows: list[Row], first: int, begin: Callable[[], None]) -> int:
    """Run episodes whose samples come at once; ``begin`` is called before each round. The number of samples."""
    numbers = range(first, first + len(rows))
    jobs = [
        Job(number, row, seed=(number - first,), sample=None, group=number, group_size=1)
        for number, row in zip(numbers, rows, strict=True)
    ]
    answers: dict[int, Answers] = {}
    ids = np.arange(20, 20 + CALL_TOKENS, dtype=np.int32)
    ended = drawn = 0
    while ended < len(rows):
        reply = runner.advance(jobs, answers, longest_s=0.01)
        jobs = []
        answers = {ask.number: {ask.call: Sample("", ids, False)} for ask in reply.asks}
        ended += len(reply.results)
        drawn += len(answers)
        begin()
    return drawn


def measure_calls(count: int) -> list[dict]:
    """Measure turns that an environment samples, and turns that a client of another process calls for."""
    tokenizer = addition.make_tokenizer(TEMPLATE)
    text = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
    row = Row(text, tuple(tokenizer(text)["input_ids"]), "", {}, (), (ASK,))
    limits, urls, table = EpisodeLimits(CALL_TURNS, 10**6, CALL_TOKENS, 600.0, 600.0), [], []

    async def serve(policy, row: Row) -> Episode:
        endpoint = policy.endpoint(row)
        urls.append(endpoint.base_url)
        while endpoint.episode.turns < CALL_TURNS:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)  # until the last is answered
        return endpoint.episode

    def begin() -> None:
        if len(urls) == CALL_EPISODES:
            clients.submit(run_clients, [*urls])
            urls.clear()

    with ProcessPoolExecutor(1, get_context("spawn")) as clients:
        for way, environment in {"sampled": sample_turns, "called": serve}.items():
            runner, drawn = EnvRunner(environment, Codec(tokenizer, (tokenizer.eos_token_id,)), limits), 0
            while drawn < count + CALL_EPISODES * CALL_TURNS:
                if drawn == CALL_EPISODES * CALL_TURNS:  # what comes first loads modules
                    start, cpu = time.perf_counter(), time.process_time()
                drawn += play_episodes(runner, [row] * CALL_EPISODES, drawn, begin)
            turns = drawn - CALL_EPISODES * CALL_TURNS
            cost = {"CPU ms a turn": 1e3 * (time.process_time() - cpu) / turns}
            table.append({"way": way, "turns": turns} | cost | {"turns a s": turns / (time.perf_counter() - start)})
            print("  ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in table[-1].values()))
            runner.close()
    return table


def main() -> None:
    if OPTIONS.calls:
        return write_figures(OPTIONS.json, measure_calls(OPTIONS.calls))
    if OPTIONS.model:
        with running_ray(2, DEFAULT_PLATFORM):
            return write_figures(OPTIONS.json, measure_sharing(OPTIONS.model))
    with running_ray(1, DEFAULT_PLATFORM), tempfile.TemporaryDirectory() as folder:
        model = ModelSpec.from_folder(make_tiny_text(Path(folder), "qwen2", VOCAB))
        config = VllmConfig(max_new_tokens=16, max_model_len=64, kv_cache_mb=256)
        with Rollouts(DEFAULT_PLATFORM, 1) as rollouts:
            rollouts.start(model, config).wait()
            table = [row for size in SIZES for row in measure_rounds(rollouts, size)]
            table += [row for size in STEPS for row in measure_steps(rollouts, config, size)]
    write_figures(OPTIONS.json, table)


if __name__ == "__main__":
    main()
