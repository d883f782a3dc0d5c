"""How far rounding moves HuggingFace's numbers of a tiny model on this machine, and the limits that follow.

The truth is computed in float64. Four draws compute the same in float32, each from weights that were moved by half a
last digit. What they are apart from the truth is what rounding does here, by this processor's kernels. An engine is
right where it is not much further from the truth than they are.

What draws are apart is kept on disk, by all that it depends on: the model, the computation, its sources, the versions
of libraries, and the processor with the settings that choose its kernels.
"""

import dataclasses
import hashlib
import inspect
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from filelock import FileLock
from torch import Tensor

from engines.batch.batch import TrainBatch
from rlworker.checks.reference.huggingface import computing_in_double, perturb_weights

FACTOR = 4.0
"""A limit is so many times the largest distance of the draws."""
SEEDS = (1, 2, 3, 4)
"""Of the draws."""
MOST_DIGITS = 512
"""Last digits of a kind's largest number by which draws are at most off. More is no rounding, but a near tie between
experts, or other inputs than the truth has."""
STEPPED = ("weights", "adapters")
"""Kinds that Adam has moved. It divides each gradient by its size, so that a few numbers of any tensor, whose gradients
are next to nothing, are off by much of a step: all tensors count as moved as far as the furthest."""
ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".pytest_cache" / "rounding"
SOURCES = (
    "engines/batch",
    "engines/images",
    "engines/models",
    "rlworker/algorithms",
    "rlworker/checks/reference/huggingface.py",
    "tests/support/huggingface.py",
    "tests/support/ranks/adapter_cases.py",
    "tests/support/ranks/engines_cases.py",
    "tests/support/ranks/shared_cases.py",
    "tests/support/ranks/vlm_cases.py",
    "tests/support/rounding.py",
)
"""What a computation runs beside its own file."""
LIBRARIES = ("torch", "transformers", "peft", "numpy", "pillow")
SETTINGS = ("ATEN_", "DNNL_", "MKL_", "OMP_", "ONEDNN_")
"""Beginnings of the environment variables that choose kernels."""

Tensors = dict[str, Tensor]
Kind = Tensor | Mapping[str, Tensor]
"""Numbers of one kind: a tensor, or several by their names."""
Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Draw:
    """One computation: the truth in float64, or one in float32 of weights moved by a seed.

    Attributes:
        seed: None is the truth's.
    """

    seed: int | None = None

    @property
    def is_truth(self) -> bool:
        return self.seed is None

    @property
    def at_once(self) -> bool:
        """Whether sequences may be padded and run at once: the truth runs them one after another."""
        return not self.is_truth

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.is_truth else torch.float32

    def computing(self) -> AbstractContextManager[None]:
        """Compute in the draw's type in this context. Random numbers are drawn outside: by type they are others."""
        return computing_in_double() if self.is_truth else nullcontext()

    def cast(self, batch: TrainBatch) -> TrainBatch:
        """Cast a batch's columns to the draw's type, for a loss that computes with them alone."""
        columns = {name: x.to(self.dtype) for name, x in batch.columns().items() if x.is_floating_point()}
        return dataclasses.replace(batch, **columns)

    def load(self, load_model: Callable[[torch.dtype], Model]) -> Model:
        """Load a model in the draw's type, and move its weights."""
        model = load_model(self.dtype)
        if self.seed is not None:
            perturb_weights(model, self.seed)
        return model

    def move(self, numbers: Mapping[str, Tensor]) -> Tensors:
        """Cast numbers to the draw's type and move them as weights are moved; they take gradients."""
        parameters = self.load(lambda dtype: torch.nn.ParameterList([tensor.to(dtype) for tensor in numbers.values()]))
        return dict(zip(numbers, parameters, strict=True))


Compute = Callable[..., Mapping[str, Kind]]
"""``compute(draw, *arguments)`` returns numbers by their kind; exact ones need not be among a draw's. It runs
within ``draw.computing()``, and loads its model by ``draw.load``."""


@dataclass(frozen=True)
class Distance:
    """How far numbers of one kind are apart.

    Attributes:
        value: the largest absolute difference.
        share: the largest share of a tensor's limit that is used up; NaN where a number is NaN.
        name: the tensor with that share.
    """

    value: float
    share: float
    name: str


@dataclass(frozen=True)
class Rounding:
    """The truth of a computation, and how far rounding moves it.

    Attributes:
        truth: kind -> name -> float64 numbers. A kind that is one tensor has the name "".
        spread: kind -> name -> the largest absolute distance from the truth over all draws.
    """

    truth: dict[str, Tensors]
    spread: dict[str, dict[str, float]]

    def find_limit(self, kind: str, name: str = "") -> float:
        """Find the largest absolute difference that a tensor may have: ``FACTOR`` times that of the draws.

        Four draws may move a tensor of few numbers by little, or not at all. So a tensor counts as moved by no fewer
        last digits than the middle one of its kind, and by no less than half a digit, by which each number is off
        however exactly it is computed. The digits are those of the tensor's largest number.
        """
        moved = max(self.spread[kind].values()) if kind in STEPPED else self.spread[kind][name]
        least_digits = max(self._middle_digits[kind], 0.5)
        return FACTOR * max(moved, least_digits * find_last_digit(self.truth[kind][name]))

    @cached_property
    def _middle_digits(self) -> dict[str, float]:
        """The median over the tensors of each kind of how many last digits the draws are off."""
        middle = {}
        for kind, values in self.spread.items():
            digits = {name: find_last_digit(self.truth[kind][name]) for name in values}
            middle[kind] = median([value / digits[name] for name, value in values.items() if digits[name]] or [0.0])
        return middle

    def compare(self, kind: str, found: Kind, base: Kind | None = None) -> Distance:
        """Compare numbers with the truth, or with those of ``base``, whose rounding is as large."""
        found_by_name = name_tensors(found)
        base_by_name = self.truth[kind] if base is None else name_tensors(base)
        assert set(found_by_name) == set(base_by_name), set(found_by_name) ^ set(base_by_name)
        differences = {name: find_largest(tensor, base_by_name[name]) for name, tensor in found_by_name.items()}
        shares = {name: value / self.find_limit(kind, name) for name, value in differences.items() if value}
        # NaN is larger than any number here, so that it is found.
        worst = max(shares, key=lambda name: (shares[name] != shares[name], shares[name]), default="")
        return Distance(max(differences.values(), default=0.0), shares.get(worst, 0.0), worst)


def check_distances(distances: Mapping[str, Distance], measured, label: str) -> None:
    """Note distances by their kind, and raise AssertionError where one is above its limit."""
    measured(
        {kind: distance.value for kind, distance in distances.items()},
        {kind: distance.share for kind, distance in distances.items()},
    )
    above = {kind: distance for kind, distance in distances.items() if not distance.share <= 1}
    assert not above, f"{label}: above what rounding does here: {above}"


def measure_rounding(compute: Compute, *arguments: Any, folder: Path | None = CACHE) -> Rounding:
    """Compute the truth of ``compute(draw, *arguments)``, and its draws or read what an earlier run kept of them.

    Args:
        arguments: a string that names a file or a folder counts as what it holds.
        folder: of what is kept; processes that need the same wait for the first of them. None keeps nothing.
    """
    truth = _copy(compute(Draw(), *arguments))
    narrow = {kind for kind, tensors in truth.items() for x in tensors.values() if x.dtype != torch.float64}
    assert not narrow, f"the truth must be in float64, {sorted(narrow)} is not"
    if folder is None:
        return Rounding(truth, measure_spread(compute, arguments, truth))
    path = folder / f"{compute.__name__}-{find_key(compute, arguments)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            spread = json.loads(path.read_text(encoding="utf-8"))
        else:
            spread = measure_spread(compute, arguments, truth)
            path.write_text(json.dumps(spread, indent=1), encoding="utf-8")
    return Rounding(truth, spread)


def measure_spread(compute: Compute, arguments: tuple, truth: dict[str, Tensors]) -> dict[str, dict[str, float]]:
    """Measure the largest absolute distance of the draws from the truth, of each tensor."""
    spread: dict[str, dict[str, float]] = {}
    for seed in SEEDS:
        for kind, tensors in _copy(compute(Draw(seed), *arguments)).items():
            largest = spread.setdefault(kind, {})
            for name, tensor in tensors.items():
                distance = find_largest(tensor, truth[kind][name])
                assert math.isfinite(distance), f"{kind} {name} of a draw is no number"
                largest[name] = max(largest.get(name, 0.0), distance)
    for kind, largest in spread.items():
        last_digit = max(map(find_last_digit, truth[kind].values()), default=0.0)
        digits = max(largest.values(), default=0.0) / (last_digit or 1.0)
        assert digits <= MOST_DIGITS, f"{kind} of draws are {digits:.0f} last digits off; take another seed of weights"
    return spread


def _copy(numbers: Mapping[str, Kind]) -> dict[str, Tensors]:
    """Copy numbers, whose tensors a model may own."""
    return {
        kind: {name: tensor.detach().clone() for name, tensor in name_tensors(value).items()}
        for kind, value in numbers.items()
    }


def name_tensors(numbers: Kind) -> Tensors:
    return {"": numbers} if isinstance(numbers, Tensor) else dict(numbers)


def find_last_digit(numbers: Tensor) -> float:
    """Find what a last digit of float32 is worth at the largest number: ``eps`` times that number."""
    return torch.finfo(torch.float32).eps * float(numbers.abs().max())


def find_largest(found: Tensor, want: Tensor) -> float:
    """Find the largest absolute difference; NaN where there is one in either."""
    assert found.shape == want.shape, f"{tuple(found.shape)} is not {tuple(want.shape)}"
    return float((found.double() - want.double()).abs().max())


# -- the key of a result


def find_key(compute: Compute, arguments: tuple) -> str:
    """Find the key of a computation's result on this machine: all that it depends on, as 32 digits."""
    digest = hashlib.sha256(describe_machine().encode())
    digest.update(digest_sources(inspect.getfile(compute)))
    for part in (compute.__qualname__, *map(describe, arguments)):
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()[:32]


def describe(value: Any) -> str:
    """Describe an argument by what it holds: files and tensors by their bytes, the rest as Python writes it."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__} {describe(fields)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {describe(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, partial):
        return f"{describe(value.func)} of {describe(value.args)}, {describe(value.keywords)}"
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, str | Path) and os.sep in str(value) and Path(value).exists():
        return ", ".join(f"{name} {digest}" for name, digest in _digest_files(Path(value)))
    return repr(value)


def _digest_files(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name below ``path`` and the digest of each file, of a file or of those in a folder."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    for file in files:
        if "__pycache__" not in file.parts:
            yield str(file.relative_to(path)), hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def digest_sources(file: str) -> bytes:
    """Digest a computation's file and ``SOURCES``."""
    paths = [Path(file), *(ROOT / name for name in SOURCES)]
    missing = [str(path) for path in paths if not path.exists()]
    assert not missing, f"SOURCES of tests/support/rounding.py name what is not there: {missing}"
    return hashlib.sha256("".join(describe(path) for path in paths).encode()).digest()


def describe_machine() -> str:
    """Describe what chooses kernels: libraries, processor, threads and settings."""
    lines = [f"{name} {version(name)}" for name in LIBRARIES]
    lines += [torch.__config__.show(), f"{torch.get_num_threads()} threads", describe_processor()]
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)]
    return "\n".join(lines)


@cache
def describe_processor() -> str:
    """Describe the processor by its name and instructions, as Linux tells them."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    # Of one core: all have the same.
    found = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    names = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), platform.processor(), *(found[name] for name in names if name in found)])
