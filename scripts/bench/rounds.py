"""Measure what a round of requests costs beside the same completions by ``generate``.

    python scripts/bench/rounds.py [--rounds 9] [--tiny] [--json FILE]

One vLLM engine in its Ray process and a model of half a million parameters. Completions of one turn are sampled in
three ways, in turn: *generate*, by prompts; *sample*, a round of requests; *loop*, requests that are handed in, and
polled for as they finish. Medians; CPU-seconds are those of the driver and the engine. All three must sample as many
tokens, the first two the same ones.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import ray
from timing import make_parser, write_figures

from engines.batch.samples import Completions, Prompt, Request, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from hardware.platforms import DEFAULT_PLATFORM
from rlworker.checks.tiny_models import make_tiny_text
from rlworker.cluster.ray import running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.worker_pool import POLL
from rlworker.data.rows import Row

PARSER = make_parser(__doc__)
PARSER.add_argument("--rounds", type=int, default=9, help="of which medians are taken")
OPTIONS = PARSER.parse_args()
SIZES = ((4, 2, 4),) if OPTIONS.tiny else ((256, 8, 4), (2048, 1, 4), (256, 1, 16), (32, 8, 16))
"""Prompts, completions of each, tokens of each."""
PROMPT_TOKENS, VOCAB, STREAM = 20, 1024, (7,)


def poll(rollouts: Rollouts, requests: list[Request]) -> Completions:
    """Hand requests in and take them as they finish."""
    (worker,) = rollouts.workers
    ray.get(worker.submit.remote(list(enumerate(requests))))
    taken = {}
    while len(taken) < len(requests):
        taken |= dict(ray.get(worker.take.options(concurrency_group=POLL).remote(60.0)))
    return Completions.join([taken[key] for key in range(len(requests))])


def measure(calls: dict[str, Callable[[], Completions]], processes: list[psutil.Process]) -> dict[str, list]:
    """Call each in turn; seconds and CPU-seconds of each round by the call's name, without the first round."""
    found: dict[str, list] = {name: [] for name in calls}
    for _ in range(OPTIONS.rounds + 1):
        results = {}
        for name, call in calls.items():
            before, start = sum(sum(process.cpu_times()[:2]) for process in processes), time.perf_counter()
            results[name] = call()
            seconds = time.perf_counter() - start
            found[name].append((seconds, sum(sum(process.cpu_times()[:2]) for process in processes) - before))
        assert results["generate"] == results["sample"]
        assert len(results["loop"].token_ids) == len(results["sample"].token_ids)
    return {name: times[1:] for name, times in found.items()}


def main() -> None:
    rows_of_table = []
    with running_ray(1, DEFAULT_PLATFORM), tempfile.TemporaryDirectory() as folder:
        model = ModelSpec.from_folder(make_tiny_text(Path(folder), "qwen2", VOCAB))
        config = VllmConfig(max_new_tokens=16, max_model_len=64, kv_cache_mb=256)
        with Rollouts(DEFAULT_PLATFORM, 1) as rollouts:
            rollouts.start(model, config).wait()
            (worker,) = rollouts.workers
            engine = psutil.Process(ray.get(worker.__ray_call__.remote(lambda _: psutil.Process().pid)))
            for prompts, count, tokens in SIZES:
                ids = np.random.default_rng(0).integers(4, VOCAB, (prompts, PROMPT_TOKENS))
                data = [Row("", tuple(row), "", {}) for row in ids.tolist()]
                requests = [Request(Prompt(row.prompt_ids), 1.0, tokens, ()) for row in data for _ in range(count)]
                sampling = Sampling(count, 1.0, tokens, STREAM, ())
                calls = {
                    "generate": lambda data=data, sampling=sampling: rollouts.generate(data, sampling),
                    "sample": lambda requests=requests: rollouts.sample(requests, STREAM),
                    "loop": lambda requests=requests: poll(rollouts, requests),
                }
                found = measure(calls, [psutil.Process(), engine])
                medians = {name: [statistics.median(each) for each in zip(*found[name])] for name in calls}
                for name, (seconds, cpu) in medians.items():
                    row = {"prompts": prompts, "completions": count, "tokens": tokens, "way": name}
                    row |= {"s": seconds, "CPU s": cpu, "CPU s to generate's": cpu / medians["generate"][1]}
                    rows_of_table.append(row | {"s to generate's": seconds / medians["generate"][0]})
                    print("  ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in rows_of_table[-1].values()))
    write_figures(OPTIONS.json, rows_of_table)


if __name__ == "__main__":
    main()
