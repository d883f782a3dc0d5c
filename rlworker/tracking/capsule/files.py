"""The files of a capsule: capsule.json, update_N.npz for each optimizer step, and the images."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
import torch

from engines.batch.batch import COLUMNS, TrainBatch
from engines.batch.places import count_up
from engines.batch.samples import Image
from engines.config import MegatronConfig
from engines.images.video import Video
from rlworker.tracking.step_lines import write_whole

CAPSULES = "capsules"
"""Folder of a run with its capsules: ``step_N`` is that of step N."""
SLOPE = "d_loss/d_"
"""Beginning of the name of a column with the derivatives of the loss by an output."""
MOST_BYTES = 32 * 2**20
"""Most bytes of the sketches of a step: of longer sequences several successive tokens have one sketch."""
_DESCRIPTION = "capsule.json"
_Settings = TypeVar("_Settings")


@dataclass(frozen=True)
class Update:
    """An optimizer step: its inputs, its schedule, and what was computed.

    Attributes:
        batch: the batch, with the weights of its tokens. denominator: the loss is divided by it.
        rows: ``[replica][micro-batch]``, numbers of the sequences. digest: digest of the schedule.
        metrics: name -> metric of the step.
        columns: name -> ``[N]`` float32: outputs, and derivatives of the loss by them, named by ``SLOPE``.
        values: ``[stages, P, k + 1]`` float32, sketches of states. bits: ``[stages, P]`` int64, hashes of their bits.
        rounding: stage -> how far rounding alone moves any of its places, where it was measured.
        span: number of successive tokens of a sequence that have one sketch; P = N where it is 1.
    """

    batch: TrainBatch
    denominator: float
    rows: list[list[list[int]]]
    digest: int
    metrics: dict[str, float]
    columns: dict[str, np.ndarray]
    values: np.ndarray
    bits: np.ndarray
    rounding: dict[str, float] = field(default_factory=dict)
    span: int = 1

    @property
    def stages(self) -> list[str]:
        """Names of the stages with states, in order."""
        return ["embeddings", *(f"layer {number}" for number in range(1, len(self.values) - 1)), "last norm"]

    @cached_property
    def places(self) -> np.ndarray:
        """Sequence and position of the first token of each sketch, ``[P, 2]``."""
        return list_places(self.batch.lengths, self.span)

    def choose_span(self, updates: int) -> int:
        """Choose the span at which the sketches of a step with so many optimizer steps like this one are small."""
        stages, tokens, width = self.values.shape
        span = 1
        while updates * stages * -(-tokens // span) * (4 * width + 8) > MOST_BYTES:
            span *= 2
        return span

    def pool(self, span: int) -> "Update":
        """Return the update with one sketch of each ``span`` successive tokens: their sum with fixed random signs,
        which is a projection of all their states."""
        if span == self.span:
            return self
        within = count_up(np.asarray(self.batch.lengths)) % span
        firsts = np.flatnonzero(within == 0)
        generator = np.random.default_rng(span)
        signs = (2 * generator.integers(0, 2, span) - 1)[within]
        factors = (2 * generator.integers(0, 2**62, span) + 1)[within]
        projected = np.add.reduceat(self.values[..., :-1] * signs[:, None], firsts, axis=1)
        norms = np.sqrt(np.add.reduceat(self.values[..., -1:] ** 2, firsts, axis=1))
        bits = np.add.reduceat(self.bits * factors, firsts, axis=1)
        values = np.concatenate([projected, norms], axis=2).astype(np.float32)
        return replace(self, values=values, bits=bits, span=span)


def list_places(lengths: Sequence[int], span: int = 1) -> np.ndarray:
    """List sequence and position of every ``span``-th token of each sequence, ``[P, 2]``."""
    positions = count_up(np.asarray(lengths))
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    return np.stack([sequences, positions], axis=1)[positions % span == 0]


@dataclass(frozen=True)
class Capsule:
    """A step of a run.

    Attributes:
        folder: the capsule's folder. step: number of the step.
        platform: name of the platform. config: settings of the training engine. temperature: divides its logits.
        seed: seed of the run. model: folder of the starting model.
        checkpoint: folder of the checkpoint before the step; empty where the step begins at the starting model.
        weights: HF name -> digest of the weights before the step.
        loss: the loss, by ``describe_function``.
        provenance: command, code, date and machine of the run.
        updates: the optimizer steps.
    """

    folder: Path
    step: int
    platform: str
    config: MegatronConfig
    temperature: float
    seed: int
    model: str
    checkpoint: str
    weights: dict[str, int]
    loss: dict[str, Any]
    provenance: dict[str, Any]
    updates: list[Update] = field(default_factory=list)


def write_capsule(capsule: Capsule) -> int:
    """Write a capsule into its folder, in place of an older one; returns the number of bytes.

    The folder appears once it is whole. Weights are no part of it.
    """
    final = capsule.folder
    folder = final.with_name(f".{final.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    described: dict[str, Any] = {
        each.name: getattr(capsule, each.name) for each in fields(capsule) if each.name not in ("folder", "updates")
    }
    described |= {"config": asdict(capsule.config), "updates": []}
    for number, update in enumerate(capsule.updates, 1):
        batch = {f"batch/{name}": column.cpu().numpy() for name, column in update.batch.columns().items()}
        arrays = {"values": update.values, "bits": update.bits} | {f"out/{k}": v for k, v in update.columns.items()}
        named: Any = batch | arrays
        np.savez(folder / f"update_{number}.npz", **named)
        told = {
            name: getattr(update, name) for name in ("denominator", "rows", "digest", "metrics", "rounding", "span")
        }
        described["updates"].append(
            told | {"lengths": update.batch.lengths, "images": _keep_images(folder, update.batch)}
        )
    write_whole(folder / _DESCRIPTION, json.dumps(described))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(folder, final)
    return sum(path.stat().st_size for path in final.rglob("*") if path.is_file())


def read_capsule(folder: str | Path) -> Capsule:
    """Read a capsule.

    Raises:
        ValueError: the folder holds none.
    """
    folder = Path(folder).absolute()
    try:
        described = json.loads((folder / _DESCRIPTION).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"capsule: {str(folder)!r} holds none: {error}; give a folder that --capsule-steps wrote, such as "
            "RUN/capsules/step_3"
        ) from None
    updates = []
    for number, told in enumerate(described.pop("updates"), 1):
        with np.load(folder / f"update_{number}.npz") as file:
            arrays = dict(file)
        lengths, shown = tuple(told.pop("lengths")), told.pop("images")
        columns = {name: torch.from_numpy(arrays[f"batch/{name}"]) for name in COLUMNS if f"batch/{name}" in arrays}
        images = shown and tuple(tuple(_read_image(folder, one) for one in own) for own in shown)
        batch = TrainBatch(lengths, **columns, images=images)
        outputs = {name.removeprefix("out/"): arrays[name] for name in arrays if name.startswith("out/")}
        updates.append(Update(batch, columns=outputs, values=arrays["values"], bits=arrays["bits"], **told))
    described["config"] = _build(MegatronConfig, described["config"])
    return Capsule(folder, updates=updates, **described)


def _build(kind: type[_Settings], stored: dict[str, Any]) -> _Settings:
    """Build settings from what ``dataclasses.asdict`` made of them; keys that there are no more are left out."""
    hints, values = get_type_hints(kind), {}
    for name in {each.name for each in fields(kind)} & stored.keys():  # pyright: ignore[reportArgumentType]  a dataclass
        value = stored[name]
        values[name] = _build(hints[name], value) if is_dataclass(hints[name]) else value
        values[name] = tuple(value) if isinstance(value, list) else values[name]
    return kind(**values)


def _keep_images(folder: Path, batch: TrainBatch) -> list[list[dict[str, Any]]] | None:
    """Copy the files of a batch's images, each once, and describe the images of each sequence."""
    if batch.images is None:
        return None
    for image in dict.fromkeys(image for own in batch.images for image in own):
        if not (target := folder / _name_file(image)).exists():
            target.parent.mkdir(exist_ok=True)
            (shutil.copytree if Path(image.path).is_dir() else shutil.copyfile)(image.path, target)
    return [[asdict(image) | {"path": _name_file(image)} for image in own] for own in batch.images]


def _name_file(image: Image) -> str:
    return f"images/{image.digest}{Path(image.path).suffix}"


def _read_image(folder: Path, told: dict[str, Any]) -> Image:
    kind: Any = Video if "frames" in told else Image
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    return kind(**(values | {"path": str(folder / told["path"])}))
