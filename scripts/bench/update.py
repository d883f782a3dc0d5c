"""Measure what an update costs where samples of a prompt share it, and where each computes its own.

    python scripts/bench/update.py [--ratios 6:16 256:64] [--prompts 4] [--samples 8] [--rounds 5] [--json FILE]
    python scripts/bench/update.py --model FOLDER --ratios 50:16 256:64 --prompts 1
    python scripts/bench/update.py --ways all-scored prompts tree --common 512 --ratios 544:32
    python scripts/bench/update.py --ways all-scored prompts tree --turns 4 --ratios 128:48
    python scripts/bench/update.py --images --ratios 40:64
    python scripts/bench/update.py --model FOLDER --lora 16 --ratios 256:64 --prompts 1
    python scripts/bench/update.py --platform cuda --dtype bfloat16 --model FOLDER --ratios 256:64

One engine, one rank, one thread, in this process. A ratio P:R is of prompts of P tokens and samples of R / 2 to
3 R / 2. An update is planned, computed forward and backward; the optimizer's step, which is the same in all ways, is
left out. The ways take turns in one process:

    all-scored   each sample computes its prompt, and the head takes every token
    alone        the same, and the head takes the tokens that count
    prompts      samples share their prompt (--actor.share prompts)
    tree         sequences share whatever they begin with (--actor.share tree)

CPU-seconds are medians; on an accelerator they are seconds of the clock. MB are the most that autograd holds for the
backward pass; logprobs are those of the tokens that count, against the first way.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image as PILImage
from timing import make_parser, write_figures

from engines.batch.batch import TrainBatch
from engines.batch.beginnings import find_beginnings
from engines.batch.schedule import Schedule, number_image_sets, plan_schedule
from engines.batch.shard import get_logprobs, join_outputs
from engines.config import LoraConfig, MegatronConfig
from engines.images.columns import make_image_columns
from engines.images.placeholders import make_placeholders
from engines.images.processor import ImageProcessor
from engines.models.spec import ModelSpec
from engines.probes.saved_bytes import SavedBytes, find_place
from hardware.platforms import DEFAULT_PLATFORM, PLATFORMS, get_platform
from rlworker.algorithms.losses import policy_loss
from rlworker.checks.device.report import Device
from rlworker.checks.tiny.models import make_bare_tokenizer, make_tiny_text, make_tiny_vlm

if TYPE_CHECKING:
    from engines.megatron.engine import MegatronEngine

WAYS = {"all-scored": "none", "alone": "none", "prompts": "prompts", "tree": "tree"}
"""Each way's ``--actor.share``."""


def parse_ratio(text: str) -> tuple[int, int]:
    """Parse ``P:R``, both whole numbers of at least 1."""
    prompt, _, sampled = text.partition(":")
    if not (prompt.isdecimal() and sampled.isdecimal() and int(prompt) and int(sampled)):
        raise argparse.ArgumentTypeError(f"{text!r} is not P:R, tokens of a prompt and of a sample; write 256:64")
    return int(prompt), int(sampled)


PARSER = make_parser(__doc__)
PARSER.add_argument("--model", type=Path, metavar="FOLDER", help="a HuggingFace folder; else one of 1.36 M parameters")
PARSER.add_argument("--platform", choices=PLATFORMS, default=DEFAULT_PLATFORM)
PARSER.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
PARSER.add_argument("--images", action="store_true", help="a tiny Qwen2.5-VL; each prompt ends with an image")
PARSER.add_argument("--ratios", type=parse_ratio, nargs="+", default=[(6, 16), (256, 64)], metavar="P:R")
PARSER.add_argument("--ways", choices=WAYS, nargs="+", default=["all-scored", "alone", "prompts"])
PARSER.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters in place of the weights")
PARSER.add_argument("--common", type=int, default=0, help="tokens that all prompts begin with")
PARSER.add_argument("--turns", type=int, default=1, help="sequences of an episode, each of which goes on from the last")
for _name, _default in (("prompts", 4), ("samples", 8), ("rounds", 5), ("micro-batch-tokens", 16384)):
    PARSER.add_argument(f"--{_name}", type=int, default=_default)
OPTIONS = PARSER.parse_args()
if OPTIONS.tiny:
    OPTIONS.ratios, OPTIONS.prompts, OPTIONS.samples, OPTIONS.rounds = [(4, 3)], 2, 2, 1
if (shortest := min(prompt for prompt, _ in OPTIONS.ratios)) < OPTIONS.common:
    PARSER.error(f"--common {OPTIONS.common} tokens do not fit into prompts of {shortest}; raise P of --ratios")
SIZES = dict(hidden_size=160, intermediate_size=480, num_hidden_layers=4, num_attention_heads=5, num_key_value_heads=5)
SIDE = 448
"""Pixels of an image's side: 256 tokens of Qwen2.5-VL."""
ANSWER = 32
"""Tokens that an environment answers a turn with."""


def make_model(folder: Path) -> ModelSpec:
    """Make the model that is asked for, or read it."""
    if OPTIONS.model:
        return ModelSpec.from_folder(OPTIONS.model)
    if OPTIONS.images:
        tokenizer, pixels = make_bare_tokenizer(89), (28 * 28, SIDE * SIDE)
        positions = {"max_position_embeddings": 1024}
        return ModelSpec.from_folder(
            make_tiny_vlm(folder, "qwen2_5_vl", tokenizer, 99, language=positions, pixels=pixels)
        )
    return ModelSpec.from_folder(make_tiny_text(folder, "qwen2", 128, max_position_embeddings=4096, **SIZES))


def draw_batch(model: ModelSpec, folder: Path, prompt: int, sampled: int) -> TrainBatch:
    """Draw a batch of prompts, samples of each, and turns of each sample."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(10, min(model.vocab, 40_000) - 15, (count,), generator=generator).tolist()

    def draw_sample() -> list[int]:
        return draw(max(1, sampled // 2 + int(torch.randint(0, sampled + 1, (1,), generator=generator))))

    sequences, counted, images, common = [], [], [], draw(OPTIONS.common)
    for number in range(OPTIONS.prompts):
        begin = common + draw(prompt - len(common))
        shown = [draw_image(model, folder, number)] if OPTIONS.images else []
        begin += make_placeholders(shown, model) if shown else []
        for _ in range(OPTIONS.samples):
            history = begin
            for _ in range(OPTIONS.turns):
                answer = draw_sample()
                sequences.append(history + answer)
                counted.append([False] * len(history) + [True] * len(answer))
                images.append(tuple(shown))
                history = sequences[-1] + draw(ANSWER)
    columns = make_image_columns(sequences, images, model.vision) if OPTIONS.images else {}
    batch = TrainBatch.from_ids(sequences, sampled=counted, **columns)
    return replace(batch, advantages=torch.randn(batch.num_tokens, generator=generator))


def draw_image(model: ModelSpec, folder: Path, number: int):
    """Draw an image of random pixels."""
    pixels, path = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8), folder / f"{number}"
    PILImage.fromarray(pixels).save(path, "PNG")
    return ImageProcessor(model.folder, model.vision).open(path, f"image {number}")


@contextmanager
def running_engine(folder: Path) -> Iterator["MegatronEngine"]:
    """Have an engine of one rank in this process."""
    platform = get_platform(OPTIONS.platform)
    os.environ.update(platform.get_train_env())
    device = platform.init_process(0)
    from engines.megatron.engine import MegatronEngine  # once the platform has made Megatron its own
    from engines.megatron.groups import init_distributed, leave_distributed

    config = MegatronConfig(
        dtype=OPTIONS.dtype, micro_batch_tokens=OPTIONS.micro_batch_tokens, lora=LoraConfig(rank=OPTIONS.lora)
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_distributed(platform, config, 0, f"127.0.0.1:{port}", seed=0)
    torch.set_num_threads(1)
    try:
        yield MegatronEngine(make_model(folder), config, platform, device)
    finally:
        leave_distributed()


def update(engine: "MegatronEngine", batch: TrainBatch, way: str) -> tuple[Schedule, torch.Tensor]:
    """Plan an update and compute it in a way: the schedule, and logprobs ``[N]`` in the batch's order."""
    config = replace(engine.config, share=WAYS[way])
    run = partial(engine.run, every=way == "all-scored")
    with patch.object(engine, "config", config), patch.object(engine, "run", run):
        whole_images = any(rule.images for rule in engine.model.rules)
        found = number_image_sets(batch), find_beginnings(batch, config, engine.platform, whole_images)
        most = engine.platform.max_pack_sequences
        schedule = plan_schedule(batch.lengths, config, engine.model.hidden, 1, most, *found)
        _, parts = engine.backward(schedule.shards(batch)[0], policy_loss, float(batch.mask.sum()))
    return schedule, get_logprobs(schedule.restore([join_outputs(parts)]))


def read_seconds(device: Device) -> float:
    """Read the seconds of this process, or those of the clock once an accelerator has done its work."""
    device.synchronize()
    return time.process_time() if device.is_host else time.perf_counter()


def measure(engine: "MegatronEngine", batch: TrainBatch) -> Iterator[dict[str, str | int | float]]:
    """Measure every way in turns; the first round warms up, and has what does not differ from round to round."""
    device = Device(engine.platform, engine.device)
    parameters = {find_place(parameter) for parameter in engine.module.parameters()}
    seconds, first = {way: [] for way in OPTIONS.ways}, {}
    for way in OPTIONS.ways:
        saved = SavedBytes(parameters)
        with saved.counting():
            schedule, logprobs = update(engine, batch, way)
        first[way] = schedule.count_computed(), saved.most / 2**20, logprobs[batch.mask]
    for _ in range(OPTIONS.rounds):
        for way in OPTIONS.ways:
            start = read_seconds(device)
            update(engine, batch, way)
            seconds[way].append(read_seconds(device) - start)
    before = OPTIONS.ways[0]
    for way, (computed, megabytes, logprobs) in first.items():
        median = statistics.median(seconds[way])
        yield {
            "way": way,
            "tokens": batch.num_tokens,
            "computed": computed,
            "CPU s" if device.is_host else "s": median,
        } | {
            "times cheaper": statistics.median(seconds[before]) / median,
            "MB": megabytes,
            "of the MB": megabytes / first[before][1],
            "logprobs apart": float((logprobs - first[before][2]).abs().max()),
        }


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name, running_engine(Path(name)) as engine:
        for prompt, sampled in OPTIONS.ratios:
            title = {"prompts": OPTIONS.prompts, "samples": OPTIONS.samples, "P:R": f"{prompt}:{sampled}"}
            for row in measure(engine, draw_batch(engine.model, Path(name), prompt, sampled)):
                numbers = {name: value for name, value in row.items() if name != "way"}
                shown = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
                print(f"{' x '.join(map(str, title.values()))}  {row['way']:10s}  {shown}", flush=True)
                rows.append(title | row)
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
