"""``rlworker bisect``: name the first layer of trainer or rollout engine that differs from HuggingFace by more than
rounding.

HuggingFace computes each layer anew in float64 from the states that the engine itself had before the layer. So a layer
is judged by its own numbers: rounding does not add up, and a difference is named at each layer that makes one.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.samples import Request, Sampling
from engines.images import make_columns
from engines.models.hub import find_model
from engines.models.spec import ModelSpec
from rlworker.base.findings import Finding
from rlworker.checks.config import BisectConfig, CheckConfig
from rlworker.checks.context import CheckedEngines, start_engines
from rlworker.checks.reference.huggingface import (
    computing_in_double,
    iterate_logits,
    load_huggingface,
    open_images,
    score_tokens,
)
from rlworker.checks.trainer import CheckedTrainer
from rlworker.validation.program import find_weights

_FACTORS = {"float32": 4.0, "bfloat16": 1.5}
"""dtype -> most that a layer's root mean square difference from float64 may be, as a multiple of HuggingFace's in that
dtype."""
_LARGEST = 4.0
"""The same multiple for the largest difference of a token, of which HuggingFace computes two."""


@dataclass(frozen=True)
class States:
    """States and logprobs that an engine computed of a batch.

    Attributes:
        dtype: type of the engine's weights, by name. temperature: divides its logits.
        banned: ids that have no probability in its logprobs.
        stages: number -> ``[N, hidden]`` float32: 0 are the embeddings, n the output of layer n.
        logprobs: ``[N]``.
    """

    dtype: str
    temperature: float
    banned: tuple[int, ...]
    stages: Mapping[int, Tensor]
    logprobs: Tensor


@dataclass(frozen=True)
class Stage:
    """Differences of one stage from HuggingFace in float64, ``[N]``: relative to the norm of a token's state, or, of
    the output layer, in nats.

    Attributes:
        name: "the embeddings", "layer 3" or "the output layer". apart: the engine's.
        own: those of HuggingFace in the engine's type. nudged: the same, from states that are rounded otherwise.
        dtype: the engine's type, by name.
    """

    name: str
    apart: Tensor
    own: Tensor
    nudged: Tensor
    dtype: str

    @property
    def limits(self) -> tuple[float, float]:
        """Most that rounding makes of the root mean square difference, and of the largest."""
        least = torch.finfo(getattr(torch, self.dtype)).eps / 2  # one rounding: a table's row has none of its own
        usual, largest = measure_rms(self.own), float(torch.maximum(self.own, self.nudged).max())
        return _FACTORS[self.dtype] * max(usual, least), _LARGEST * max(largest, least)

    @property
    def share(self) -> float:
        """The larger of both differences, each as a share of its limit; NaN where a difference is."""
        usual, largest = self.limits
        return float(np.max([measure_rms(self.apart) / usual, float(self.apart.max()) / largest]))


def measure_rms(values: Tensor) -> float:
    """Return the root mean square of numbers."""
    return float(values.square().mean().sqrt())


def run_bisect(config: BisectConfig, tell: Callable[[str], None]) -> list[Finding]:
    """Start the engines, take the states of all layers, end the engines, and compare with HuggingFace.

    Args:
        tell: is called with a line of text at the start of each part.

    Raises:
        ValueError: no model was named, or a setting or a row does not fit it; nothing was started.
    """
    if not config.model:
        raise ValueError("bisect: expected a model's folder or hf:ORG/NAME, got none; name it after bisect")
    folder = find_model(find_weights(config.model))
    check = CheckConfig(
        folder,
        platform=config.platform,
        actor=config.actor,
        rollout=config.rollout,
        huggingface=False,
        ignore_versions=config.ignore_versions,
    )
    longest = config.rollout.max_model_len - 1  # vLLM samples a token after the ids that it scores
    batch = read_rows(config.rows, longest, check.check_model()) if config.rows else None
    with TemporaryDirectory(prefix="rlworker-bisect-") as images:  # HuggingFace reads them when the engines are gone
        with start_engines(check, tell, folder=images) as engines:
            batch = batch or engines.trainer.case.batch
            engines.actor.sync_weights(engines.rollouts.workers, 1)  # as a run has them
            trainer, temperature = engines.trainer, config.rollout.temperature
            found = {
                f"trainer, {kind}": take_trainer_states(trainer, kind, batch, temperature) for kind in trainer.kinds
            }
            found["rollout"] = take_rollout_states(engines, batch)
        judged = {where: judge(trainer.model, batch, states, tell) for where, states in found.items()}
        return [trainer.make_finding("layers", where, *result) for where, result in judged.items()]


def read_rows(path: str, longest: int, model: ModelSpec) -> TrainBatch:
    """Read sequences of a JSONL file: the field ``ids`` of each line.

    Args:
        longest: most ids of a sequence. model: the model that reads them.

    Raises:
        ValueError: the file is none or empty, or a sequence has images, another number of ids, or other ids.
    """
    sequences = []
    try:
        lines = [json.loads(line) for line in Path(path).open(encoding="utf-8")]
    except (OSError, ValueError) as error:
        raise ValueError(f"bisect: --rows {path!r} is no JSONL file: {error}") from None
    for number, line in enumerate(lines, 1):
        ids = line.get("ids") if isinstance(line, dict) else None
        if not (isinstance(ids, list) and 2 <= len(ids) <= longest and all(isinstance(one, int) for one in ids)):
            raise ValueError(
                f"bisect: {path}:{number}: expected 2 to {longest} ids under 'ids', fewer than "
                "rollout.max_model_len; leave the row out, or raise --rollout.max-model-len"
            )
        if not 0 <= min(ids) <= max(ids) < model.vocab:
            raise ValueError(
                f"bisect: {path}:{number}: has ids from {min(ids)} to {max(ids)}, expected 0 to {model.vocab - 1}; "
                "name the model that the rows are of"
            )
        if line.get("images"):
            raise ValueError(f"bisect: {path}:{number}: has images; leave out --rows to take the check's own")
        sequences.append(ids)
    if not sequences:
        raise ValueError(f"bisect: --rows {path!r} has no line; leave it out to take the check's own sequences")
    columns = make_columns(sequences, [()] * len(sequences), model.vision)
    return TrainBatch.from_ids(sequences, [1] * len(sequences), **columns)


def take_trainer_states(trainer: CheckedTrainer, kind: str, batch: TrainBatch, temperature: float = 1.0) -> States:
    """Take the states and logprobs of a batch from the training ranks, in layout ``kind``."""
    trainer.tell(f"trainer, {kind}: states")
    stages = {
        number: rows for part in trainer.call_ranks("hidden_states", kind, batch) for number, rows in part.items()
    }
    return States(
        trainer.settings.dtype,
        temperature,
        trainer.model.banned_tokens,
        stages,
        trainer.compute_outputs(kind, batch).logprobs,
    )


def take_rollout_states(engines: CheckedEngines, batch: TrainBatch) -> States:
    """Take the states and logprobs of a batch from the first rollout engine; others have the same weights."""
    engines.trainer.tell("rollout: states")
    sampling = Sampling(1, 1.0, 1, (0,), (), scores_prompt=True)
    sequences = [batch.select(row, row + 1) for row in range(len(batch)) if batch.lengths[row]]
    requests = [
        Request((*one.inputs.tolist(), int(one.targets[-1])), sampling, one.images[0] if one.images else ())
        for one in sequences
    ]
    answers = engines.rollouts.run("engines.probes.vllm:record_states", requests)[0]
    stages = {number: torch.cat([states[number][:-1] for states, _ in answers]) for number in answers[0][0]}
    logprobs = torch.cat([torch.from_numpy(scores.logprobs) for _, scores in answers])
    return States(engines.config.rollout.dtype, 1.0, (), stages, logprobs)  # scores are over all ids


def judge(
    model: ModelSpec, batch: TrainBatch, states: States, tell: Callable[[str], None] = lambda line: None
) -> tuple[bool, str]:
    """Compare the states of an engine with HuggingFace: whether rounding explains all stages, and a text."""
    stages = compare_stages(model, batch, states, tell)
    wrong = [stage for stage in stages if not stage.share <= 1]
    if not wrong:
        worst = max(stages, key=lambda stage: stage.share)
        return True, f"{len(stages)} stages; at most {worst.share:.2f} of the limit, in {worst.name}"
    first = wrong[0]
    place = int(first.apart.nan_to_num(torch.inf).argmax())
    if first is stages[-1]:  # the output layer, whose targets are those that count
        place = int(_find_counted(model, batch).nonzero()[place])
    ends = [*accumulate(batch.lengths)]
    sequence = next(number for number, end in enumerate(ends) if place < end)
    position = place - ends[sequence] + batch.lengths[sequence]
    text = (
        f"{first.name} is the first that differs: rms {measure_rms(first.apart):.1e}, limit {first.limits[0]:.1e}, "
        f"most {first.apart.max():.1e}, limit {first.limits[1]:.1e}, at sequence {sequence}, position {position} (id "
        f"{int(batch.inputs[place])})"
    )
    return False, text + (f"; {len(wrong) - 1} later stages too" if len(wrong) > 1 else "; no other does")


def compare_stages(
    model: ModelSpec, batch: TrainBatch, states: States, tell: Callable[[str], None] = lambda line: None
) -> list[Stage]:
    """Compare each stage of an engine with HuggingFace in float64, which has the engine's own states before it."""
    dtype, last = getattr(torch, states.dtype), max(states.stages)
    generator, step = torch.Generator().manual_seed(0), torch.finfo(dtype).eps / 2

    def nudge(rows: Tensor) -> Tensor:
        return rows * (1 + step * (2 * torch.randint(0, 2, rows.shape, generator=generator) - 1))

    nudged = replace(states, stages={number: nudge(rows) for number, rows in states.stages.items()})
    truth = compute_anew(model, batch, states, torch.float64, tell)
    each = states, *(compute_anew(model, batch, given, dtype, tell) for given in (states, nudged))
    stages = []
    for number, name in enumerate(["the embeddings", *(f"layer {n}" for n in range(1, last + 1))]):
        want = truth.stages[number]
        length = want.norm(dim=1)
        apart, own, other = ((one.stages[number].double() - want).norm(dim=1) / length for one in each)
        stages.append(Stage(name, apart, own, other, states.dtype))
    counted = _find_counted(model, batch)
    apart, own, other = ((one.logprobs.double() - truth.logprobs)[counted].abs() for one in each)
    return [*stages, Stage("the output layer", apart, own, other, states.dtype)]


def _find_counted(model: ModelSpec, batch: TrainBatch) -> Tensor:
    """Find the targets that may be sampled, ``[N]`` bool: those of images have no probability."""
    return ~torch.isin(batch.targets, torch.tensor(model.banned_tokens, dtype=torch.long))


@torch.no_grad()
def compute_anew(
    model: ModelSpec, batch: TrainBatch, states: States, dtype: torch.dtype, tell: Callable[[str], None]
) -> States:
    """Compute each stage by HuggingFace's model in a type, from an engine's states before it."""
    tell(f"HuggingFace, {dtype}, from the engine's states".replace("torch.", ""))
    computed: dict[int, list[Tensor]] = {}
    scores = []
    images = open_images(model, batch, dtype)
    with computing_in_double() if dtype == torch.float64 else nullcontext():
        network = load_huggingface(model, dtype)
        language = network.model.language_model if model.vision else network.model
        for number, module in enumerate([*language.layers, language.norm]):

            def exchange(_, args, kwargs, number=number):
                hidden = args[0] if args else kwargs["hidden_states"]
                done = computed.setdefault(number, [])
                start = sum(len(part) for part in done)
                done.append(hidden[0])
                given = states.stages[number][start : start + hidden.shape[1]].to(hidden.dtype)[None]
                return ((given, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": given})

            module.register_forward_pre_hook(exchange, with_kwargs=True)
        for one, logits in iterate_logits(network, batch, images):
            scores.append(score_tokens(logits, one.targets, states.banned, states.temperature).logprobs)
    stages = {number: torch.cat(parts) for number, parts in computed.items()}
    return replace(states, stages=stages, logprobs=torch.cat(scores))
