"""Samples of a run for its pages: a few samples of a few steps, with a limit on their bytes."""

import base64
import io
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from engines.images import import_modules
from rlworker.tracking.log import name_samples

_MOST_BYTES = 500_000
"""Most bytes of all samples on a page."""
_MOST_CHARACTERS = 4000
"""Most characters of a text; the middle of a longer text is left out."""
_ROW_BYTES = 300
"""Most bytes of a row of the page without its texts."""
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{2,20}\])\1{3,}")
"""A token such as ``<|image_pad|>``, which stands once for each part of an image, four times or more."""
_THUMBNAIL = 160
"""Pixels of a shown image's longer side."""


def read_samples(folder: Path, last: int, most: int = _MOST_BYTES) -> list[dict]:
    """Read stored samples of the first and last steps up to step ``last``.

    A run that has gone back to a checkpoint may have files of later steps, which it has not reached again. The first
    sample of every step is taken before any second one, until the samples take ``most`` bytes.

    Returns:
        for each step its ``number``, ``completions`` (samples of one turn), ``episodes`` (samples with turns) and
            ``left_out``, the number of samples that are not shown.
    """
    numbers = [number for number in list_sampled_steps(folder) if number <= last]
    numbers = numbers if len(numbers) <= 6 else [*numbers[:2], *numbers[-4:]]
    files = {number: name_samples(folder, number) for number in numbers}
    queues = {number: file.read_text("utf-8").split("\n")[:-1] for number, file in files.items()}
    taken: dict[int, list[dict]] = {number: [] for number in numbers}
    for place in range(max(map(len, queues.values()), default=0)):
        for number in (number for number, queue in queues.items() if place < len(queue)):
            sample = show_sample(json.loads(queues[number][place]))
            if (most := most - _count_bytes(sample)) > 0:
                taken[number].append(sample)
    return [
        {
            "number": number,
            "completions": [sample for sample in samples if not sample["turns"]],
            "episodes": [sample for sample in samples if sample["turns"]],
            "left_out": len(queues[number]) - len(samples),
        }
        for number, samples in taken.items()
    ]


def list_sampled_steps(folder: Path) -> list[int]:
    """Return the numbers of the steps of which a run folder has samples."""
    return sorted(int(file.stem.removeprefix("step_")) for file in (folder / "rollouts").glob("step_*.jsonl"))


def show_sample(sample: dict) -> dict:
    """Return a copy of a line of ``rollouts`` to show: long texts cut, and ``thumbnails`` added for its images and for
    those of each of its turns."""
    turns = [turn | {"thumbnails": make_thumbnails(turn.get("images", ()))} for turn in sample.get("turns", ())]
    turns = [turn | {"text": cut_text(turn["text"])} for turn in turns]
    images = () if turns else sample.get("images", ())  # an episode shows them in the turns that they came in
    texts: dict = {name: cut_text(sample[name]) for name in ("prompt", "completion", "answer") if name in sample}
    texts["verdicts"] = [verdict | {"text": cut_text(verdict["text"])} for verdict in sample.get("verdicts", ())]
    return sample | texts | {"thumbnails": make_thumbnails(images), "turns": turns}


def cut_text(text: str) -> str:
    """Fold repeated tokens, leave out the middle of a text that is long nevertheless, and say how much it was."""
    text = _REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])}", text)
    if len(text) <= _MOST_CHARACTERS:
        return text
    head, tail = 3 * _MOST_CHARACTERS // 4, _MOST_CHARACTERS // 4
    return f"{text[:head]} [... {len(text) - head - tail} characters are left out ...] {text[-tail:]}"


def _count_bytes(sample: dict) -> int:
    """Count the bytes that a sample takes in the page."""
    rows = sample["turns"] or [{"text": sample.get("prompt", "") + sample.get("completion", "")} | sample]
    texts = sum(len(escape(row["text"]).encode("utf-8", "xmlcharrefreplace")) for row in [*rows, *sample["verdicts"]])
    images = sum(len(data) + 2 * len(path) for row in rows for path, data in row["thumbnails"])
    rows_shown = len(rows) + len(sample["verdicts"]) + 1
    return texts + images + _ROW_BYTES * rows_shown + len(sample.get("answer", ""))


def make_thumbnails(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return for each path the path and its image as a data URI, which is empty if the file cannot be read."""
    if not paths:
        return []
    from PIL import Image as PILImage  # runs without images load neither

    decoding = import_modules().decoding

    thumbnails = []
    for path in paths:
        try:
            with PILImage.open(path) as image:
                small = decoding.convert_to_rgb(image)
                small.thumbnail((_THUMBNAIL, _THUMBNAIL))
                encoded = {kind: _encode(small, kind) for kind in ("png", "jpeg")}
            kind = min(encoded, key=lambda kind: len(encoded[kind]))  # of drawings PNG is smaller, of photographs JPEG
            thumbnails.append((path, f"data:image/{kind};base64,{base64.b64encode(encoded[kind]).decode()}"))
        except decoding.DECODING_ERRORS:
            thumbnails.append((path, ""))
    return thumbnails


def _encode(image, kind: str) -> bytes:
    data = io.BytesIO()
    image.save(data, kind.upper())
    return data.getvalue()
