"""The case that a check runs on: sequences of awkward lengths, with images for a model that sees them."""

from dataclasses import dataclass, replace
from itertools import chain, cycle
from pathlib import Path

import numpy as np
import torch

from engines.batch.batch import TrainBatch
from engines.batch.samples import Image
from engines.images.columns import make_image_columns
from engines.images.placeholders import list_margin_tokens, make_placeholders
from engines.images.processor import ImageProcessor
from engines.models.spec import ModelSpec
from engines.probes.case import ProbeCase
from engines.validation import read_object
from hardware.attention.rules import CHUNK
from rlworker.data.rows import Row

_LENGTHS = (9, 1, 14, 0, 6, 9, 21)
_IMAGES = {0: ((1, 3), (5, 8)), 2: ((4, 9), (9, 12)), 6: ((0, 2),)}
"""Number of a sequence -> begin and end of each of its images; two images are adjacent."""
_IMAGE_COUNTS = (0, 1, 2, 0, 1)
"""Number of images of successive rows, in turn."""
_VIDEO_FRAMES = 3
_PREFIXES = (3, 1, 5, 0, 2, 0, 4)
_GROUP_IMAGES = 2
"""Number of the sequence whose images are also at the end of the group's prompt."""
_ALL_COLUMNS, _FEW_COLUMNS = 200, 12
"""Most tokens of a stream for which the influence of each is probed; and number of tokens that are probed of a longer
stream."""
_LONG, _TOKENS = (97, 83, 101, 89), 512
"""Lengths of further sequences for comparisons of numbers, until there are so many tokens."""
_PROMPT, _GROUP = 40, (69, 40, 48, 55)
"""Number of ids of a prompt, and lengths of its samples with the prompt; one sample has a single id of its own."""
_SMALL_MODEL = 10**7
"""Most weights of a model that is probed at all columns."""


@dataclass(frozen=True)
class Case:
    """Sequences to check with.

    Attributes:
        probe: sequences for the probe of each layer's mask.
        window_probe: sequences that are longer than the model's windows, or than a chunk of states.
        token_probe: sequences for the probe of the whole model, with fewer columns for a large model.
        batch: batch whose logprobs and gradients are compared. Some sequences are samples of one prompt, which is
            computed once if prompts are shared.
        denominator: denominator of the batch's loss.
        rows: prompts for the rollout engine.
        others: image -> another image of the same size.
    """

    probe: ProbeCase
    window_probe: ProbeCase
    token_probe: ProbeCase
    batch: TrainBatch
    denominator: float
    rows: list[Row]
    others: dict[Image, Image]


def make_case(model: ModelSpec, replicas: int, folder: str) -> Case:
    """Make sequences for a model: longer than its windows, shorter than its positions, some for each replica.

    Args:
        replicas: number of data-parallel replicas. folder: folder for images.

    Raises:
        ValueError: the model has too few positions.
    """
    lengths = _LENGTHS
    if max(lengths) >= model.max_positions:
        raise ValueError(f"check: the model has {model.max_positions} positions, expected more than {max(lengths)}")
    windows = [rule.window for rule in model.rules if rule.window is not None]
    windows += [CHUNK for rule in model.rules if rule.state]
    if windows:
        lengths = (*_LENGTHS, min(max(windows) + 6, model.max_positions - 1))
    generator = torch.Generator().manual_seed(1)
    config = read_object(Path(model.folder, "config.json"))
    # Padding stands in no text: transformers gives its embedding no gradient.
    padding = {part.get("pad_token_id") for part in (config, config.get("text_config") or {})}
    special = {*model.banned_tokens, *list_margin_tokens(model), *padding}
    text = torch.tensor(sorted(set(range(model.vocab)) - special))
    most, rows = model.max_positions - 1, len(lengths) * replicas
    every, group = [*lengths * replicas, *(min(n, most) for n in _GROUP)], range(rows, rows + len(_GROUP))
    for n in cycle(_LONG):
        if sum(every) >= _TOKENS:
            break
        every.append(min(n, most))
    ids = [text[torch.randint(len(text), (n + 1,), generator=generator)].tolist() for n in every]
    prompts = [1 + min(i % 3, len(s) - 1) for i, s in enumerate(ids)]
    for row in group:
        prompts[row] = min(_PROMPT, most // 2)
        ids[row][: prompts[row]] = ids[group[0]][: prompts[row]]
    prompt_rows = [Row("", tuple(s[:4]), "", {}) for s in ids[: len(lengths)] if len(s) > 4]
    images, others, columns = [()] * len(ids), {}, {}
    if model.vision:
        processor = ImageProcessor(model.folder, model.vision)
        pairs = [_make_images(processor, Path(folder), row) for row in range(len(lengths))] * replicas
        others = dict(chain(*pairs))
        images = [tuple(image for image, _ in own) for own in pairs]
        images += [images[_GROUP_IMAGES]] * len(group) + [()] * (len(ids) - group.stop)
        ids = [s[:n] + make_placeholders(own, model) + s[n:] for s, n, own in zip(ids, prompts, images, strict=True)]
        prompts = [len(s) - was + n for s, n, was in zip(ids, prompts, (n + 1 for n in every))]
        of_images = [(s[: n + 1], own) for s, n, own in zip(ids, prompts, images) if len(s) > n + 1]
        prompt_rows = [Row("", tuple(s), "", {}, own) for s, own in of_images[: len(lengths)]]
        columns = make_image_columns(ids, images, model.vision)
    batch = TrainBatch.from_ids(ids, prompts, **columns)
    batch = replace(batch, advantages=torch.randn(batch.num_tokens, generator=generator))
    probe = window_probe = make_probe_case(lengths)
    if sum(lengths) > _ALL_COLUMNS:  # bshd makes every sequence as wide as the longest
        probe, window_probe = make_probe_case(), make_probe_case((*_LENGTHS[:2], lengths[-1]))
    thin = min(1 + model.count_weights() // _SMALL_MODEL, len(probe.columns) // _FEW_COLUMNS)
    token_probe = replace(probe, columns=probe.columns[::thin])
    return Case(probe, window_probe, token_probe, batch, float(batch.mask.sum()), prompt_rows, others)


def _make_images(processor: ImageProcessor, folder: Path, row: int) -> list[tuple[Image, Image]]:
    """Make no image, one, two or none again for a row, each of another size, and for each another of its size. Of two
    the second is a video, where the model is shown any."""
    cell, pairs = processor.vision.patch * processor.vision.merge, []
    for number in range(_IMAGE_COUNTS[row % len(_IMAGE_COUNTS)]):
        frames = _VIDEO_FRAMES if number and not processor.vision.tower.no_videos else 1
        pair = []
        for which in range(2):
            generator = np.random.default_rng([row, number, which])
            sides = (frames, (1 + row % 3) * cell, (2 + number) * cell, 3)
            path, pixels = folder / f"{row}-{number}-{which}", generator.integers(0, 256, sides, dtype=np.uint8)
            pair.append(_save_image(processor, path, pixels, f"check: image {number} of sequence {row}"))
        pairs.append(tuple(pair))
    return pairs


def _save_image(processor: ImageProcessor, path: Path, pixels: np.ndarray, place: str) -> Image:
    """Save pixels ``[frames, height, width, 3]`` as an image, or where there are several frames as a video."""
    from PIL import Image as PILImage

    frames = [PILImage.fromarray(frame) for frame in pixels]
    if len(frames) == 1:
        frames[0].save(path, "PNG")
        return processor.open(path, place)
    path.mkdir()
    for number, frame in enumerate(frames):
        frame.save(path / f"{number}.png")
    return processor.videos.open(path, place, fps=2.0, frames=range(len(frames)))


def make_probe_case(lengths: tuple[int, ...] = _LENGTHS) -> ProbeCase:
    """Make the sequences for mask probes: their lengths, images, prefixes, and the tokens to change."""
    blocks = []
    for i, n in enumerate(lengths):
        block = [-1] * n
        for number, (start, stop) in enumerate(_IMAGES.get(i, ())):
            block[start:stop] = [number] * (stop - start)
        blocks += block
    tokens = sum(lengths)
    columns = range(tokens)
    if tokens > _ALL_COLUMNS:  # the ends of sequences and of the window of the last token
        ends = [sum(lengths[:i]) for i in range(1, len(lengths))]
        edges = {tokens - 1, tokens - 6, tokens - 7, tokens - lengths[-1] + 5, tokens - lengths[-1] + 6, *ends[-4:]}
        columns = sorted(edges | {end - 1 for end in ends[-4:] if end})[:_FEW_COLUMNS]
    prefixes = (*_PREFIXES, *(0 for _ in lengths))[: len(lengths)]
    return ProbeCase(lengths, tuple(columns), tuple(blocks), prefixes)
