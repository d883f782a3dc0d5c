"""Measure what it saves that the samples of a prompt share one pass of the vision tower.

    python scripts/bench/vision.py [--tiny] [--json FILE]

An update over 8 prompts x 8 samples, one rank, one thread: images that all samples of a prompt have in common, and
for comparison as many sequences of the same lengths whose images all differ, so that each is decoded and seen by
itself. Both in the same run, medians.
"""

import os
import socket
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image as PILImage
from timing import make_parser, measure_ms, write_figures

from engines.batch.batch import TrainBatch
from engines.batch.schedule import number_image_sets, plan_schedule
from engines.config import MegatronConfig
from engines.images.columns import make_image_columns
from engines.images.processor import ImageProcessor
from engines.models.spec import ModelSpec
from hardware.platforms import DEFAULT_PLATFORM, get_platform
from recipes.common.squares import make_tokenizer
from rlworker.checks.tiny.models import make_tiny_vlm

OPTIONS = make_parser(__doc__).parse_args()
PROMPTS, SAMPLES, ROUNDS = (2, 2, 1) if OPTIONS.tiny else (8, 8, 7)
SIDES = (56,) if OPTIONS.tiny else (56, 112, 224)


def make_model(folder: Path) -> ModelSpec:
    """Make the model of recipes.common.squares, for images of any of the sizes."""
    language = dict(intermediate_size=384, num_hidden_layers=3, max_position_embeddings=256)
    vision = dict(hidden_size=128, intermediate_size=192, num_heads=4)
    pixels = (min(SIDES) ** 2, max(SIDES) ** 2)
    sizes = dict(language=language, vision=vision, pixels=pixels)
    return ModelSpec.from_folder(make_tiny_vlm(folder, "qwen2_5_vl", make_tokenizer(), 64, **sizes))


def make_batch(model: ModelSpec, folder: Path, side: int, image_count: int) -> TrainBatch:
    """Make sequences of one image each, of ``image_count`` different ones, and three tokens after it that count."""
    processor, vision, images = ImageProcessor(model.folder, model.vision), model.vision, []
    for number in range(image_count):
        path = folder / f"{side}-{number}.png"
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        PILImage.fromarray(pixels).save(path)
        images.append(processor.open(path, f"image {number}"))
    row_images = [images[i * image_count // (PROMPTS * SAMPLES)] for i in range(PROMPTS * SAMPLES)]
    prompt = [vision.start_token, *[vision.image_token] * row_images[0].tokens(vision.merge), vision.end_token]
    sequences = [[*prompt, 9, 10, 11] for _ in row_images]
    columns = make_image_columns(sequences, [(image,) for image in row_images], vision)
    return TrainBatch.from_ids(sequences, [len(prompt)] * len(row_images), **columns)


def main() -> None:
    platform = get_platform(DEFAULT_PLATFORM)
    os.environ.update(platform.get_train_env())
    device = platform.init_process(0)
    from engines.megatron.engine import MegatronEngine  # once the platform has made Megatron its own
    from engines.megatron.groups import init_distributed

    config = MegatronConfig(micro_batch_tokens=16384)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_distributed(platform, config, 0, f"127.0.0.1:{port}", seed=0)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        engine = MegatronEngine(model, config, platform, device)

        def update(batch: TrainBatch) -> None:
            lengths, hidden = batch.lengths, model.hidden
            schedule = plan_schedule(lengths, config, hidden, 1, platform.max_pack_sequences, number_image_sets(batch))
            loss = lambda outputs, part: (-(outputs.logprobs * part.mask).sum(), {})  # noqa: E731
            engine.train_step(schedule.shards(batch)[0], loss, float(batch.mask.sum()))

        rows = []
        for side in SIDES:
            shared, distinct = (make_batch(model, Path(folder), side, n) for n in (PROMPTS, PROMPTS * SAMPLES))
            shared_ms, distinct_ms = measure_ms(partial(update, shared), partial(update, distinct), rounds=ROUNDS)
            tokens = shared.images[0][0].tokens(model.vision.merge)
            ratio = shared_ms / distinct_ms
            times = f"{shared_ms:.0f} ms, all differ {distinct_ms:.0f} ms, {ratio:.2f}"
            print(f"{side} pixels a side, {tokens} tokens: {times}")
            row = {"pixels a side": side, "image tokens": tokens, "shared ms": shared_ms, "all differ ms": distinct_ms}
            rows.append(row | {"ratio": ratio})
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
