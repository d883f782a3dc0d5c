"""``rlworker bisect``: name the engine and the layer that compute a kept step otherwise than HuggingFace does."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from tyro.conf import Positional

from engines.batch.batch import TrainBatch
from engines.batch.shard import get_logprobs
from engines.config import MegatronConfig, VllmConfig
from engines.models.hub import find_model
from engines.models.spec import ModelSpec
from engines.validation import check_types
from hardware.platforms import DEFAULT_PLATFORM, PlatformName, get_platform
from rlworker.checks import huggingface
from rlworker.checks.huggingface import Reference, Rounding
from rlworker.checks.trainer import Finding, find_first_layer
from rlworker.cluster.ray import running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup, WorkerGroup
from rlworker.cluster.watch import naming_failures
from rlworker.cluster.workers import Role, RolloutWorker
from rlworker.config.model_checks import check_engines
from rlworker.tracking.capsule.files import Capsule, read_capsule

_TOKENS = 512
"""Number of tokens from which on no further sequence is compared."""
_FACTOR = 5.0
"""Most that logprobs may be from HuggingFace's, as a multiple of HuggingFace's own rounding."""


@dataclass(frozen=True)
class BisectConfig:
    """Settings of ``rlworker bisect``. Those that are left out are the capsule's."""

    capsule: Positional[str] = ""
    """Folder of the capsule, such as RUN/capsules/step_3."""
    model: str = ""
    """HuggingFace folder with the weights before the step; empty takes the run's: hf in a checkpoint, or the starting
    model."""
    platform: PlatformName = DEFAULT_PLATFORM
    """Kind of machine that the engines run on."""
    actor: MegatronConfig = field(default_factory=MegatronConfig)
    rollout: VllmConfig = field(default_factory=lambda: VllmConfig(max_new_tokens=1, max_num_seqs=8, kv_cache_mb=256))
    json: bool = False
    """Print JSON in place of the table."""

    def __post_init__(self):
        check_types("bisect", self)


@dataclass(frozen=True)
class States:
    """Hidden states and logprobs that an engine computes of a batch.

    Attributes:
        hidden: layer number -> ``[N, hidden]``, output of the layer. logprobs: ``[N]``, at temperature 1 and with no
            token banned.
    """

    hidden: dict[int, Tensor]
    logprobs: Tensor


def make_default_config(folder: str) -> BisectConfig:
    """Return the settings of a capsule, for engines of one device where its run had more."""
    capsule = read_capsule(folder)
    longest = max(max(update.batch.lengths) for update in capsule.updates) + 2
    rollout = replace(BisectConfig().rollout, dtype=capsule.config.dtype, max_model_len=-(-longest // 32) * 32)
    return BisectConfig(folder, "", capsule.platform, capsule.config, rollout)  # pyright: ignore[reportArgumentType]  a name


def run_bisect(config: BisectConfig, tell: Callable[[str], None]) -> list[Finding]:
    """Compute the first sequences of a capsule by HuggingFace, the trainer and vLLM, one after another.

    Args:
        tell: is called with a line of text at the start of each part.

    Raises:
        ValueError: the capsule or its weights are not there, an engine cannot hold the model, or memory is short for
            the reference; nothing was started.
    """
    capsule = read_capsule(config.capsule)
    model = check_engines(find_weights(config, capsule), config.platform, config.actor, config.rollout)
    batch = take_sequences(capsule, config.actor.dp)
    tell("HuggingFace")
    reference = compute_reference(model, batch, config.actor.dtype)
    find = Judge(reference, batch, get_platform(config.platform).evidence).judge
    ranks, roles = config.actor.ranks, (Role("actor", model, config.actor, trainable=False),)
    with running_ray(max(ranks, config.rollout.devices), config.platform):
        tell("the trainer")
        with (
            StartingGroup("actor", config.platform, roles, capsule.seed) as starting,
            naming_failures("bisect", starting.name_workers),
        ):
            findings = find("trainer", compute_trainer(starting.wait()["actor"], batch))
        tell("vLLM")
        eager = {"enforce_eager": True} | config.rollout.vllm  # a graph would pass over the hooks
        with (
            Rollouts(config.platform, 1, config.rollout.tp) as rollouts,
            naming_failures("bisect", rollouts.name_workers),
        ):
            rollouts.start(model, replace(config.rollout, vllm=eager)).wait()
            findings += find("vLLM", compute_rollouts(rollouts, batch))
    return findings


def find_weights(config: BisectConfig, capsule: Capsule) -> str:
    """Return the HuggingFace folder with the weights at which a capsule begins."""
    folder = capsule.folder.parents[1] / capsule.checkpoint / "hf" if capsule.checkpoint else capsule.model
    return find_model(config.model or str(folder))


def take_sequences(capsule: Capsule, least: int) -> TrainBatch:
    """Return the first sequences of a capsule that have ``_TOKENS`` tokens together, at least ``least`` of them."""
    batch = capsule.updates[0].batch
    enough = int(np.searchsorted(np.cumsum(batch.lengths), _TOKENS)) + 1
    first = batch.select(0, min(max(enough, least), len(batch)))
    columns = {name: getattr(first, name) for name in ("inputs", "positions", "targets", "image_block")}
    every = torch.ones(first.num_tokens, dtype=torch.bool)
    return TrainBatch(first.lengths, mask=every, images=first.images, **columns)


# -- the three


def compute_reference(model: ModelSpec, batch: TrainBatch, dtype: str) -> Reference:
    """Compute by HuggingFace's model, in float64 for float32 and in float32 for bfloat16, and its own rounding.

    Raises:
        ValueError: memory is too short.
    """
    exact = torch.float64 if dtype == "float32" else torch.float32
    need = model.count_weights() * exact.itemsize + max(batch.lengths) * model.vocab * 3 * exact.itemsize
    if need > (have := psutil.virtual_memory().available):
        raise ValueError(
            f"bisect: HuggingFace's model in {exact} needs {need / 2**30:.1f} GiB and {have / 2**30:.1f} are free; "
            "take a machine with more memory, or stop what runs beside it"
        )
    truth, own = (_compute_in(model, batch, each) for each in (exact, getattr(torch, dtype)))
    reference = Reference(truth.logprobs, torch.zeros(0), truth.hidden, {})
    hidden = {number: reference.compare_hidden(number, states) for number, states in own.hidden.items()}
    return replace(reference, rounding=Rounding(_compare_logprobs(own, truth.logprobs), hidden, 0.0))


@torch.no_grad()
def _compute_in(spec: ModelSpec, batch: TrainBatch, dtype: torch.dtype) -> States:
    with huggingface.computing_in_double() if dtype == torch.float64 else nullcontext():
        model = huggingface.load_huggingface(spec, dtype)
        language: Any = model.model
        states = huggingface.keep_hidden_states(language.language_model if spec.vision else language)
        pairs = huggingface.iterate_logits(model, batch, huggingface.make_image_arguments(spec))
        logprobs = [huggingface.score_tokens(logits, one.targets).logprobs for one, logits in pairs]
    return States({number: torch.cat(parts).float() for number, parts in states.items()}, torch.cat(logprobs))


def compute_trainer(group: WorkerGroup, batch: TrainBatch) -> States:
    """Compute by the training engine, in its own layout."""
    parts = group.run("engines.probes.megatron:hidden_states", group.role.config.layout, batch)
    hidden = {number: states for part in parts for number, states in part.items()}
    return States(hidden, get_logprobs(group.forward(batch, raw=True)))


def compute_rollouts(rollouts: Rollouts, batch: TrainBatch) -> States:
    """Compute by a rollout engine, one sequence at a time."""
    prompts = []
    for row in range(len(batch)):
        one = batch.select(row, row + 1)
        prompts.append(((*one.inputs.tolist(), int(one.targets[-1])), one.images[0] if one.images else ()))
    scored = rollouts.call(RolloutWorker.run, "engines.vllm.states:score_states", prompts)[0]
    hidden = {number: torch.cat([states[number] for states, _ in scored]) for number in scored[0][0]}
    return States(hidden, torch.cat([logprobs for _, logprobs in scored]))


# -- the verdict


def _compare_logprobs(states: States, want: Tensor) -> dict[str, float]:
    apart = (states.logprobs.double() - want.double()).abs()
    return {"mean": float(apart.mean()), "max": float(apart.max())}


@dataclass(frozen=True)
class Judge:
    """Judges an engine's states by HuggingFace's.

    Attributes:
        reference: HuggingFace's numbers, with its rounding. batch: the sequences. evidence: the platform's.
    """

    reference: Reference
    batch: TrainBatch
    evidence: str

    def judge(self, engine: str, states: States) -> list[Finding]:
        """Judge an engine's layers, and its logprobs."""
        reference, count = self.reference, len(self.reference.hidden)
        assert reference.rounding
        found = find_first_layer(states.hidden, reference, 0.0)
        largest = max(reference.compare_hidden(number, each) for number, each in states.hidden.items())
        text = f"all {count} layers agree, apart by {largest:.1e} at most"
        if found:
            number, apart, limit = found
            want = reference.hidden[number]
            over = (states.hidden[number] - want).norm(dim=1) / want.norm(dim=1) > limit
            place = int(over.nonzero()[0]) if over.any() else 0  # where a state is NaN, none is over
            starts = np.cumsum([0, *self.batch.lengths])
            row = int(np.searchsorted(starts, place, side="right")) - 1
            text = (
                f"layer {number} of {count} is the first to differ, by {apart:.1e} of a token's hidden state, limit "
                f"{limit:.1e}; first at sequence {row}, position {place - starts[row]}"
            )
        findings = [self._find("layers", engine, not found, text)]
        apart, own = _compare_logprobs(states, reference.logprobs), reference.rounding.outputs
        passed = all(apart[name] <= _FACTOR * own[name] for name in own)
        shown = ", ".join(f"{name} {apart[name]:.1e} (HuggingFace {own[name]:.1e})" for name in own)
        text = f"{shown}; at most {_FACTOR:g} times HuggingFace's rounding" + (
            "" if passed or found else "; all layers agree: what differs is the output layer or its targets"
        )
        return [*findings, self._find("logprobs", engine, passed, text)]

    def _find(self, check: str, where: str, passed: bool, text: str) -> Finding:
        return Finding(check, where, "ok" if passed else "FAILED", text, self.evidence)
